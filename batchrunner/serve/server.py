"""The HTTP API of `batchrun serve`, as OpenAI's clients speak it, and the server from start to end."""

import asyncio
import contextlib
import hmac
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from yarl import URL

from batchrunner.core.console import show
from batchrunner.core.errors import BatchrunError, EngineAwayError, JobError
from batchrunner.core.files import is_uri
from batchrunner.core.processes import SignalWatch
from batchrunner.core.types import BATCH_PATHS, EMBEDDINGS_PATH
from batchrunner.job.call import job_of_batch
from batchrunner.job.fields import Duration
from batchrunner.job.spec import Job
from batchrunner.job.tasks import EMBED, TaskName
from batchrunner.output.files import make_directory, using_run, whole_file
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import hold_task
from batchrunner.runner.control import SIGNALS, Control
from batchrunner.runner.shared_engine import SharedEngine, open_engine_of
from batchrunner.serve.batches import RETRY_S, Batches, counts_of
from batchrunner.serve.state import BATCHES, FILES, Record, State, new_id, now

log = logging.getLogger(__name__)

KEY = "BATCHRUN_API_KEY"
"""Name of the environment variable with the key that clients have to send."""
LOCAL = {"localhost", "127.0.0.1", "::1"}
"""Addresses at which the server needs no key."""
BLOCK_BYTES, MOST_FIELDS = 1 << 20, 5
"""Bytes of an upload that are in memory, and most fields of its form, each of 1 MiB at most."""
BROKEN_FORM = (ValueError, LookupError, RuntimeError, AssertionError, ConnectionError, TypeError)
"""What is raised where an upload is no form, or ends too early."""
FREE_SHARE, FREE_BYTES = 0.05, 10_000_000_000
"""Share of the disk, or bytes where that is less, that uploads leave free: results need room too."""
MODELS = "models"
SHOWN, MOST_SHOWN = {BATCHES: 20}, 10_000
"""Records in a list, by kind, where a call does not say how many; and the most of any."""
UNKNOWN = (
    "errors", "output_file_id", "error_file_id", "usage", "in_progress_at", "finalizing_at", "completed_at",
    "failed_at", "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip
"""What is null in a new batch."""
SWEEP_S = 60.0
"""Pause between two looks for files that have expired."""
_WRONG = {
    "missing": ("Missing required parameter: '{}'.", "missing_required_parameter"),
    "extra_forbidden": ("Unknown parameter: '{}'.", "unknown_parameter"),
}
"""What is said of a parameter, and its code, by the kind of pydantic's error."""


class ApiError(web.HTTPException):
    """A call that is refused, in the words of OpenAI's API."""

    def __init__(self, status: int, told: str, param: str | None = None, code: str | None = None) -> None:
        """Say what is wrong, and with which parameter."""
        self.status_code = status
        kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        error = {"message": told, "type": kind, "param": param, "code": code}
        super().__init__(text=json.dumps({"error": error}), content_type="application/json")


def invalid(name: str, told: str) -> ApiError:
    """Return the error of a call with a wrong parameter."""
    return ApiError(400, f"Invalid '{name}': {told}.", name, "invalid_value")


class _Call(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ExpiresAfter(_Call):
    """When a file is deleted by itself."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86400)]


class NewFile(_Call):
    """The form of an upload; `file` is the name that the client gives."""

    file: str
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class NewBatch(_Call):
    """The body of a call that creates a batch."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[Duration, Field(ge=1, le=366 * 86400)]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class Page(BaseModel):
    """What a call for a list asks for."""

    limit: int = Field(ge=1, le=MOST_SHOWN)
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class Api:
    """Answers the calls of clients; a dict that a method returns is the JSON of the answer."""

    def __init__(
        self, state: State, batches: Batches, endpoints: Sequence[str], most_bytes: int, most_files: int
    ) -> None:
        """Take batches for some endpoints, those of the engine's model, and so many files of such a size."""
        self._state, self._batches, self._endpoints = state, batches, endpoints
        self._most_bytes, self._most_files = most_bytes, most_files
        self._key, model = os.environ.get(KEY), batches.info.model
        made = {"id": model, "object": "model", "created": now(), "owned_by": "batchrunner"}
        self._records = {**state.records, MODELS: {model: made}}

    def application(self) -> web.Application:
        """Return the application with all its paths."""
        app = web.Application(middlewares=[self._answer])
        known = "/v1/{kind:files|batches|models}"
        handlers: list[tuple[str, str, Any]] = [
            ("GET", "/health", self._health), ("GET", "/metrics", self._metrics),
            ("POST", "/v1/files", self._upload), ("DELETE", "/v1/{kind:files}/{id}", self._delete),
            ("GET", "/v1/{kind:files}/{id}/content", self._content), ("POST", "/v1/batches", self._create),
            ("POST", "/v1/{kind:batches}/{id}/cancel", self._cancel),
            ("GET", known, self._list), ("GET", known + "/{id:.+}", self._one),
        ]  # fmt: skip
        for handler in handlers:
            app.router.add_route(*handler)
        return app

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Let a call in or not, and tell what is wrong as OpenAI's API does."""
        try:
            if request.path != "/health":
                self._let_in(request)
            made = await handler(request)
            return made if isinstance(made, web.StreamResponse) else web.json_response(made)
        except ApiError:
            raise
        except ValidationError as failure:
            wrong = failure.errors()[0]
            name = ".".join(map(str, wrong["loc"])) or "body"
            told, code = _WRONG.get(wrong["type"], ("Invalid '{}': {}.", "invalid_value"))
            told = told.format(name, wrong["msg"].removeprefix("Value error, "))
            raise ApiError(400, told, name, code) from None
        except (HttpProcessingError, web.RequestPayloadError):
            raise ApiError(400, "The body cannot be read: see its Content-Encoding.") from None
        except web.HTTPException as failure:
            told = f"{failure.reason}: {request.method} {request.path}"
            raise ApiError(failure.status, told) from None
        except Exception as failure:
            unknown = not isinstance(failure, (OSError, BatchrunError))
            log.warning("%s %s failed: %s", request.method, request.path, failure, exc_info=unknown)
            raise ApiError(500, "The server could not do this: its log says why.") from None

    def _let_in(self, request: web.Request) -> None:
        """Refuse who has no key, and without one pages of browsers, which may reach localhost."""
        if not self._key:
            host = (request.url.host or "").lower()
            if host not in LOCAL or "Origin" in request.headers:
                raise ApiError(403, f"Only programs on this machine may call. Set {KEY} for others.")
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self._key.encode()):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")

    async def _health(self, _: web.Request) -> Record:
        return {"status": "ok"}

    async def _metrics(self, _: web.Request) -> web.Response:
        """Return figures for Prometheus."""
        batches = self._records[BATCHES].values()
        figures: Counter[str] = Counter(f'batches{{status="{batch["status"]}"}}' for batch in batches)
        figures["files"] = len(self._records[FILES])
        for batch in batches:
            for name, count in batch["request_counts"].items():
                figures[f'lines{{state="{name}"}}'] += count
        return web.Response(text="".join(f"batchrunner_{name} {value}\n" for name, value in figures.items()))

    async def _list(self, request: web.Request) -> Record:
        """Return a page of the records of a kind, the newest first unless the call says otherwise."""
        kind = request.match_info["kind"]
        records = self._records[kind]
        wanted = Page.model_validate({"limit": SHOWN.get(kind, MOST_SHOWN), **request.query})
        left = iter(records.values() if wanted.order == "asc" else reversed(records.values()))
        if wanted.after and records.get(wanted.after, {}) not in left:
            raise invalid("after", "it names nothing")
        found = [record for record in left if wanted.purpose in {None, record.get("purpose")}]
        shown = found[: wanted.limit]
        ids = [record["id"] for record in shown] or [None]
        return {
            "object": "list", "data": shown, "first_id": ids[0], "last_id": ids[-1],
            "has_more": len(shown) < len(found),
        }  # fmt: skip

    async def _one(self, request: web.Request) -> Record:
        """Return the record that a call names; raises ApiError."""
        kind, name = request.match_info["kind"], request.match_info["id"]
        if name not in self._records[kind]:
            raise ApiError(404, f"No such id in {kind}: '{name}'.", "id")
        return self._records[kind][name]

    def _refuse_more(self) -> None:
        """Refuse a file or a batch, which becomes two files, where there are too many."""
        count = len(self._state.records[FILES]) + 2 * len(self._state.under_way())
        if count >= self._most_files:
            raise ApiError(400, f"There are {count} files: delete some.", code="too_many_files")

    async def _upload(self, request: web.Request) -> Record:
        """Take a file; it is on the disk when the answer goes."""
        self._refuse_more()
        name = new_id("file-")
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(whole_file(self._state.place_of(FILES, name)))
            try:
                fields = await self._take_form(request, temporary)
            except BROKEN_FORM:
                raise ApiError(400, "The upload is no form (multipart/form-data) with an end.") from None
            wanted = NewFile.model_validate(fields)
            await asyncio.to_thread(stack.pop_all().close)
        return await self._state.add_file(name, **wanted.model_dump())

    async def _take_form(self, request: web.Request, target: Path) -> Record:
        """Return the fields of an upload; the file's is its name, and its content is in `target`."""
        fields: Record = {}
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader) or len(fields) == MOST_FIELDS:
                raise ValueError
            if part.name == "file":
                with target.open("wb") as content:
                    while block := await part.read_chunk(BLOCK_BYTES):
                        await asyncio.to_thread(self._write, content, block)
                fields["file"] = (part.filename or "upload").encode(errors="replace").decode()
            else:
                fields[str(part.name)] = await part.text()
        for name in [*fields]:
            outer, bracket, inner = name.partition("[")  # expires_after[seconds]
            if bracket:
                fields.setdefault(outer, {})[inner.removesuffix("]")] = fields.pop(name)
        return fields

    def _write(self, content: IO[bytes], block: bytes) -> None:
        """Write a part of an upload, unless it is too large or the disk is nearly full."""
        if content.tell() + len(block) > self._most_bytes:
            raise ApiError(413, f"'file' is larger than {self._most_bytes} bytes.", "file", "too_large")
        disk = shutil.disk_usage(content.name)
        if disk.free < min(FREE_SHARE * disk.total, FREE_BYTES):
            raise ApiError(413, "The disk is nearly full: delete files.", "file", "disk_full")
        content.write(block)

    async def _content(self, request: web.Request) -> web.FileResponse:
        place = self._state.place_of(FILES, (await self._one(request))["id"])
        return web.FileResponse(place, headers={"Content-Type": "application/octet-stream"})

    async def _delete(self, request: web.Request) -> Record:
        name = (await self._one(request))["id"]
        if any(batch["input_file_id"] == name for batch in self._state.under_way()):
            raise ApiError(409, "A batch reads this file: cancel the batch first.", "id", "file_in_use")
        self._state.delete_file(name)
        return {"id": name, "object": "file", "deleted": True}

    async def _create(self, request: web.Request) -> Record:
        """Take a batch; it is on the disk when the answer goes."""
        body = await request.read()
        wanted = NewBatch.model_validate_json(body)
        if wanted.endpoint not in self._endpoints:
            raise invalid("endpoint", f"supported are {', '.join(self._endpoints)}")
        file = self._records[FILES].get(wanted.input_file_id)
        if file is None or file["purpose"] != "batch":
            raise invalid("input_file_id", "it names no file with the purpose 'batch'")
        self._refuse_more()
        batch = await self._state.save(BATCHES, {
            "id": new_id("batch_"), "object": "batch", "status": "validating",
            "model": self._batches.info.model, "created_at": now(),
            "expires_at": now() + math.ceil(wanted.completion_window), "request_counts": counts_of(0),
            **dict.fromkeys(UNKNOWN), **wanted.model_dump(),
            "completion_window": json.loads(body)["completion_window"],
        })  # fmt: skip
        self._batches.start(batch)
        return batch

    async def _cancel(self, request: web.Request) -> Record:
        batch = await self._one(request)
        if batch["status"] in {"validating", "in_progress"}:
            await self._batches.cancel(batch)
        elif batch["status"] != "cancelling":
            raise ApiError(409, f"Cannot cancel a batch with status '{batch['status']}'.")
        return batch


async def opened_engine(
    job: Job, task: TaskName, directory: Path, control: Control, stack: contextlib.AsyncExitStack
) -> SharedEngine:
    """Open the engine, which `stack` closes; where servers of others are away, they are waited for."""
    while True:
        try:
            async with contextlib.AsyncExitStack() as opening:
                opened = await open_engine_of(
                    job, task, log_directory=directory, control=control, stack=opening
                )
                stack.push_async_callback(opening.pop_all().aclose)
                return opened
        except EngineAwayError as failure:
            log.warning("%s: tried again in %g s", failure, RETRY_S)
        await control.wait_for(asyncio.sleep(RETRY_S), "while the engine was away")


async def serve(
    engine: Sequence[str], directory: Path, *, host: str, port: int, task: TaskName, overrides: Sequence[str],
    most_bytes: int, most_files: int,
) -> None:  # fmt: skip
    """Serve batches until a signal comes, and print the address; raises BatchrunError.

    `engine` is a model, addresses of servers, or a job file whose engine, limits and order hold.
    """
    if host not in LOCAL and not os.environ.get(KEY):
        raise JobError(f"--host {host}: whoever reaches it may send batches", hint=f"set {KEY} to a key")
    if is_uri(str(directory)):
        raise JobError(f"--dir {directory}: is a URI", hint="give a directory")
    more = ("limits.deadline=null", "limits.abort_failed_share=1")
    options: dict[str, Any] = {"engine": engine, "overrides": [*overrides, *more]}
    job = job_of_batch("requests", str(directory), **options)
    control, ended, loop = Control(), asyncio.Event(), asyncio.get_running_loop()

    def came(_: object) -> None:
        loop.call_soon_threadsafe(control.drain, "interrupted")

    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(control.listening(ended.set))
        stack.enter_context(SignalWatch(came, SIGNALS))
        with using_run(f"--dir {directory}"):
            make_directory(directory)
            stack.enter_context(hold_task(RunDir(directory), directory=directory))
            state = State(directory)
        named = f"--port {port}, --host {host}"
        with using_run(named):  # before a model is loaded
            (await loop.create_server(asyncio.Protocol, host, port)).close()
        shared = await opened_engine(job, task, directory, control, stack)
        batches = Batches(state, shared, options, control)
        stack.push_async_callback(batches.end)
        embeds = task == EMBED
        served = [
            path for path in BATCH_PATHS if shared.info.simulated or (path == EMBEDDINGS_PATH) == embeds
        ]
        api = Api(state, batches, served, most_bytes, most_files)
        runner = web.AppRunner(api.application(), access_log=None, shutdown_timeout=1)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        with using_run(named):
            await web.TCPSite(runner, host, port).start()
        for batch in state.under_way():
            batches.start(batch)
        show([str(URL.build(scheme="http", host=host, port=runner.addresses[0][1], path="/v1"))])
        while not ended.is_set():
            state.delete_expired()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), SWEEP_S)
    if batches.lost is not None:
        raise batches.lost
