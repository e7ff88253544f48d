"""The HTTP server of `batchrun serve`: OpenAI's Files and Batches API."""

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
from batchrunner.core.errors import BatchrunError, EngineAwayError, JobError, StorageError
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
from batchrunner.serve.batches import RETRY_S, Batches, request_counts
from batchrunner.serve.state import BATCHES, FILES, Record, State, new_id, now

log = logging.getLogger(__name__)

API_KEY_VARIABLE = "BATCHRUN_API_KEY"
"""Environment variable with the API key that clients must send."""
LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}
"""Addresses at which the server needs no API key."""
BLOCK_BYTES = 1 << 20
"""Size in bytes of the blocks in which an upload is read and written."""
MOST_FIELDS = 5
"""Maximum number of fields in the form of an upload. Each field may have 1 MiB."""
FORM_ERRORS = (ValueError, LookupError, RuntimeError, AssertionError, ConnectionError, TypeError)
"""Errors that aiohttp raises for an upload that is not a form or ends too early."""
RESERVED_SHARE, RESERVED_BYTES = 0.05, 10_000_000_000
"""Disk space that uploads must leave free for results: this share of the disk, or this number of bytes if
that is less."""
MODELS = "models"
LARGEST_PAGE = 10_000
"""Maximum number of records in a page. It is also the default for the kinds that DEFAULT_PAGE lacks."""
DEFAULT_PAGE = {BATCHES: 20}
"""Number of records in a page if the call sets no `limit`, by kind of record."""
NULL_FIELDS = (
    "errors", "output_file_id", "error_file_id", "usage", "in_progress_at", "finalizing_at", "completed_at",
    "failed_at", "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip
"""Fields of a new batch that are null."""
SWEEP_S = 60.0
"""Seconds between two deletions of expired files."""
_PARAMETER_ERRORS = {
    "missing": ("Missing required parameter: '{}'.", "missing_required_parameter"),
    "extra_forbidden": ("Unknown parameter: '{}'.", "unknown_parameter"),
}
"""Message and code of a wrong parameter, by the type of pydantic's error."""


class ApiError(web.HTTPException):
    """A refused call, with the error object of OpenAI's API."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """Take the HTTP status, the message, the wrong parameter and OpenAI's code."""
        self.status_code = status
        kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        error = {"message": message, "type": kind, "param": param, "code": code}
        super().__init__(text=json.dumps({"error": error}), content_type="application/json")


def invalid(name: str, problem: str) -> ApiError:
    """Return the error of a call whose parameter `name` has a wrong value."""
    return ApiError(400, f"Invalid '{name}': {problem}.", name, "invalid_value")


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ExpiresAfter(_Parameters):
    """Lifetime of a file."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86400)]


class NewFile(_Parameters):
    """Form fields of a file upload; `file` is the file name that the client sent."""

    file: str
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class NewBatch(_Parameters):
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
    """Query parameters of a list."""

    limit: int = Field(ge=1, le=LARGEST_PAGE)
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class Api:
    """Handlers of the HTTP calls. If a handler returns a dict, the reply is that dict as JSON."""

    def __init__(
        self,
        *,
        state: State,
        batches: Batches,
        endpoints: Sequence[str],
        most_bytes: int,
        most_files: int,
    ) -> None:
        """Accept batches for `endpoints`, and `most_files` files of at most `most_bytes` bytes."""
        self._state = state
        self._batches = batches
        self._endpoints = endpoints
        self._most_bytes = most_bytes
        self._most_files = most_files
        self._key = os.environ.get(API_KEY_VARIABLE)
        model = batches.info.model
        model_record = {"id": model, "object": "model", "created": now(), "owned_by": "batchrunner"}
        self._records = {**state.records, MODELS: {model: model_record}}

    def application(self) -> web.Application:
        """Return the application with all its routes."""
        app = web.Application(middlewares=[self._reply])
        records = "/v1/{kind:files|batches|models}"
        handlers: list[tuple[str, str, Any]] = [
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
            ("POST", "/v1/files", self._upload),
            ("DELETE", "/v1/{kind:files}/{id}", self._delete),
            ("GET", "/v1/{kind:files}/{id}/content", self._content),
            ("POST", "/v1/batches", self._create),
            ("POST", "/v1/{kind:batches}/{id}/cancel", self._cancel),
            ("GET", records, self._list),
            ("GET", records + "/{id:.+}", self._one),
        ]
        for method, path, handler in handlers:
            app.router.add_route(method, path, handler)
        return app

    @web.middleware
    async def _reply(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Authorize a call, handle it, and turn each error into one of OpenAI's API."""
        try:
            if request.path != "/health":
                self._authorize(request)
            result = await handler(request)
        except ApiError:
            raise
        except ValidationError as failure:
            raise _parameter_error(failure) from None
        except (HttpProcessingError, web.RequestPayloadError):
            raise ApiError(400, "The body cannot be decoded: check its Content-Encoding.") from None
        except web.HTTPException as failure:
            raise ApiError(failure.status, f"{failure.reason}: {request.method} {request.path}") from None
        except Exception as failure:
            is_unforeseen = not isinstance(failure, (OSError, BatchrunError))
            log.warning("%s %s failed: %s", request.method, request.path, failure, exc_info=is_unforeseen)
            raise ApiError(500, "The call failed: see the log of the server.") from None
        return result if isinstance(result, web.StreamResponse) else web.json_response(result)

    def _authorize(self, request: web.Request) -> None:
        """Raise ApiError for a call without the API key.

        A server without a key serves only programs on this machine. It refuses web pages, because the page of
        any website could send calls to localhost.
        """
        if not self._key:
            try:
                host = (request.url.host or "").lower()
            except ValueError:  # the header Host has a port beyond 65535, for example
                host = ""
            if host not in LOCAL_HOSTS or "Origin" in request.headers:
                raise ApiError(403, f"Only programs on this machine may call. Set {API_KEY_VARIABLE}.")
            return
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(errors="replace"), self._key.encode()):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")

    async def _health(self, _: web.Request) -> Record:
        return {"status": "ok"}

    async def _metrics(self, _: web.Request) -> web.Response:
        """Return counts of files, batches and lines in the format of Prometheus."""
        batches = self._records[BATCHES].values()
        figures: Counter[str] = Counter(f'batches{{status="{batch["status"]}"}}' for batch in batches)
        figures["files"] = len(self._records[FILES])
        for batch in batches:
            for name, count in batch["request_counts"].items():
                figures[f'lines{{state="{name}"}}'] += count
        return web.Response(text="".join(f"batchrunner_{name} {value}\n" for name, value in figures.items()))

    async def _list(self, request: web.Request) -> Record:
        """Return a page of the records of a kind, by default the newest first."""
        kind = request.match_info["kind"]
        records = self._records[kind]
        page = Page.model_validate({"limit": DEFAULT_PAGE.get(kind, LARGEST_PAGE), **request.query})
        remaining = iter(records.values() if page.order == "asc" else reversed(records.values()))
        # The search for `after` consumes the iterator up to that record, so `remaining` then begins behind
        # it.
        if page.after and records.get(page.after, {}) not in remaining:
            raise invalid("after", "no such ID")
        matching = [record for record in remaining if page.purpose in {None, record.get("purpose")}]
        data = matching[: page.limit]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(data) < len(matching),
        }

    async def _one(self, request: web.Request) -> Record:
        """Return the record that a call names; raises ApiError for an unknown ID."""
        kind, name = request.match_info["kind"], request.match_info["id"]
        if name not in self._records[kind]:
            raise ApiError(404, f"No such id in {kind}: '{name}'.", "id")
        return self._records[kind][name]

    def _check_file_count(self) -> None:
        """Raise ApiError if there are too many files. An unfinished batch counts as its two future files."""
        count = len(self._state.records[FILES]) + 2 * len(self._state.unfinished_batches())
        if count >= self._most_files:
            raise ApiError(400, f"There are {count} files: delete some.", code="too_many_files")

    async def _upload(self, request: web.Request) -> Record:
        """Store a file; it is durable when the client gets the reply."""
        self._check_file_count()
        name = new_id("file-")
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(whole_file(self._state.path_of(FILES, name)))
            try:
                fields = await self._read_form(request, temporary)
            except FORM_ERRORS:
                raise ApiError(400, "The upload is not a complete multipart/form-data form.") from None
            new_file = NewFile.model_validate(fields).model_dump()
            await asyncio.to_thread(stack.pop_all().close)
        return await self._state.add_file(name, filename=new_file.pop("file"), **new_file)

    async def _read_form(self, request: web.Request, target: Path) -> Record:
        """Write the file of an upload to `target`; return the form's fields (`file`: the file's name)."""
        fields: Record = {}
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader) or len(fields) == MOST_FIELDS:
                raise ValueError
            if part.name == "file":
                with target.open("wb") as content:
                    while block := await part.read_chunk(BLOCK_BYTES):
                        await asyncio.to_thread(self._write, content, block)
                # File names may have lone surrogates, which no JSON can hold.
                fields["file"] = (part.filename or "upload").encode(errors="replace").decode()
            else:
                fields[str(part.name)] = await part.text()
        for name in [*fields]:  # such as expires_after[seconds]
            outer, bracket, inner = name.partition("[")
            if bracket:
                fields.setdefault(outer, {})[inner.removesuffix("]")] = fields.pop(name)
        return fields

    def _write(self, content: IO[bytes], block: bytes) -> None:
        """Write a block of an upload; raises ApiError if the file is too large or the disk nearly full."""
        if content.tell() + len(block) > self._most_bytes:
            raise ApiError(413, f"'file' is larger than {self._most_bytes} bytes.", "file", "too_large")
        disk = shutil.disk_usage(content.name)
        if disk.free < min(RESERVED_SHARE * disk.total, RESERVED_BYTES):
            raise ApiError(413, "The disk is nearly full: delete files.", "file", "disk_full")
        content.write(block)

    async def _content(self, request: web.Request) -> web.FileResponse:
        path = self._state.path_of(FILES, (await self._one(request))["id"])
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    async def _delete(self, request: web.Request) -> Record:
        name = (await self._one(request))["id"]
        if not await self._state.delete_file(name):
            raise ApiError(409, "A batch reads this file: cancel the batch first.", "id", "file_in_use")
        return {"id": name, "object": "file", "deleted": True}

    async def _create(self, request: web.Request) -> Record:
        """Start a batch; it is durable when the client gets the reply."""
        body = await request.read()
        new_batch = NewBatch.model_validate_json(body)
        if new_batch.endpoint not in self._endpoints:
            raise invalid("endpoint", f"supported are {', '.join(self._endpoints)}")
        file = self._records[FILES].get(new_batch.input_file_id, {})
        no_input = invalid("input_file_id", "no such file with the purpose 'batch'")
        if file.get("purpose") != "batch":
            raise no_input
        self._check_file_count()
        batch: Record = {
            **dict.fromkeys(NULL_FIELDS),
            **new_batch.model_dump(),
            "id": new_id("batch_"),
            "object": "batch",
            "status": "validating",
            "model": self._batches.info.model,
            "created_at": now(),
            "expires_at": now() + math.ceil(new_batch.completion_window),
            "completion_window": json.loads(body)["completion_window"],
            "request_counts": request_counts(total=0),
        }
        if not await self._state.add_batch(batch):
            raise no_input
        self._batches.start(batch)
        return batch

    async def _cancel(self, request: web.Request) -> Record:
        batch = await self._one(request)
        if batch["status"] in {"validating", "in_progress"}:
            await self._batches.cancel(batch)
        if batch["status"] != "cancelling":
            raise ApiError(409, f"Cannot cancel a batch with status '{batch['status']}'.")
        return batch


def _parameter_error(failure: ValidationError) -> ApiError:
    """Return the error of OpenAI's API for the first parameter that pydantic refuses."""
    error = failure.errors()[0]
    name = ".".join(map(str, error["loc"])) or "body"
    template, code = _PARAMETER_ERRORS.get(error["type"], ("Invalid '{}': {}.", "invalid_value"))
    message = template.format(name, error["msg"].removeprefix("Value error, "))
    return ApiError(400, message, name, code)


async def open_engine_patiently(
    job: Job,
    task: TaskName,
    *,
    log_directory: Path,
    control: Control,
    stack: contextlib.AsyncExitStack,
) -> SharedEngine:
    """Open the engine, and wait for attached servers that are away. `stack` closes the engine."""
    while True:
        try:
            async with contextlib.AsyncExitStack() as opening:
                engine = await open_engine_of(
                    job, task, log_directory=log_directory, control=control, stack=opening
                )
                stack.push_async_callback(opening.pop_all().aclose)
                return engine
        except EngineAwayError as failure:
            log.warning("%s; the next try is in %g s", failure, RETRY_S)
        await control.wait_for(asyncio.sleep(RETRY_S), "while the engine was away")


async def serve(
    engine: Sequence[str],
    directory: Path,
    *,
    host: str,
    port: int,
    task: TaskName,
    overrides: Sequence[str],
    most_bytes: int,
    most_files: int,
) -> None:
    """Serve batches until a signal comes, and print the address; raises BatchrunError.

    `engine` is a model, addresses of servers, or a job file, whose engine, limits and order are used.
    """
    if host not in LOCAL_HOSTS and not os.environ.get(API_KEY_VARIABLE):
        raise JobError(
            f"--host {host}: anybody who reaches it could send batches",
            hint=f"set {API_KEY_VARIABLE} to a key",
        )
    if is_uri(str(directory)):
        raise JobError(f"--dir {directory}: is a URI", hint="give a directory")
    # A batch has its expiry in place of a deadline. Like OpenAI's, it continues however many lines fail.
    limits = ("limits.deadline=null", "limits.abort_failed_share=1")
    options: dict[str, Any] = {"engine": engine, "overrides": [*overrides, *limits]}
    job = job_of_batch("requests", str(directory), **options)
    control, stop_event, loop = Control(), asyncio.Event(), asyncio.get_running_loop()

    def drain(_: object) -> None:
        loop.call_soon_threadsafe(control.drain, "interrupted")

    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(control.listening(stop_event.set))
        stack.enter_context(SignalWatch(drain, SIGNALS))
        with using_run(f"--dir {directory}"):
            make_directory(directory)
            stack.enter_context(hold_task(RunDir(directory), directory=directory))
            state = State(directory)
        address = f"--port {port}, --host {host}"
        with using_run(address):  # Report an address in use before the model loads.
            (await loop.create_server(asyncio.Protocol, host, port)).close()
        shared = await open_engine_patiently(job, task, log_directory=directory, control=control, stack=stack)
        batches = Batches(state=state, engine=shared, options=options, server=control)
        stack.push_async_callback(batches.drain)
        is_embedder = task == EMBED
        endpoints = [*BATCH_PATHS]
        if not shared.info.simulated:
            endpoints = [path for path in BATCH_PATHS if (path == EMBEDDINGS_PATH) == is_embedder]
        api = Api(
            state=state,
            batches=batches,
            endpoints=endpoints,
            most_bytes=most_bytes,
            most_files=most_files,
        )
        runner = web.AppRunner(api.application(), access_log=None, shutdown_timeout=1)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        with using_run(address):
            await web.TCPSite(runner, host, port).start()
        for batch in state.unfinished_batches():
            batches.start(batch)
        show([str(URL.build(scheme="http", host=host, port=runner.addresses[0][1], path="/v1"))])
        while not stop_event.is_set():
            try:
                await state.delete_expired()
            except StorageError as failure:
                log.warning("%s; the next try is in %g s", failure, SWEEP_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop_event.wait(), SWEEP_S)
    if batches.lost is not None:
        raise batches.lost
