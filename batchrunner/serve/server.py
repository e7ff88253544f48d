"""The HTTP API of `batchrun serve`, as OpenAI's clients speak it, and the server from start to end."""

import asyncio
import contextlib
import functools
import hmac
import logging
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import IO, Annotated, Any

import orjson
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from batchrunner.core.console import show
from batchrunner.core.errors import JobError
from batchrunner.core.processes import SignalWatch
from batchrunner.core.types import BATCH_PATHS, EMBEDDINGS_PATH
from batchrunner.job.call import job_of_batch
from batchrunner.job.fields import Duration
from batchrunner.job.tasks import EMBED, TaskName
from batchrunner.output.files import make_directory, using_run, whole_file
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import hold_task
from batchrunner.runner.control import SIGNALS, Control
from batchrunner.runner.run import open_engine_of
from batchrunner.serve.batches import Batches, now
from batchrunner.serve.state import Record, State, new_id

log = logging.getLogger(__name__)

KEY = "BATCHRUN_API_KEY"
"""Name of the environment variable with the key that clients have to send."""
LOCAL = {"localhost", "127.0.0.1", "::1"}
"""Addresses at which the server needs no key."""
BLOCK_BYTES, MOST_FIELD_BYTES = 1 << 20, 1 << 16
"""Bytes of an upload that are in memory, and most bytes of one of its fields."""
FREE_SHARE, FREE_BYTES = 0.05, 10_000_000_000
"""Share of the disk, or bytes where that is less, that uploads leave free: results need room too."""
JOBS = (".yaml", ".yml", ".json")
"""Endings of a job file, whose engine is meant."""
STAGES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
"""States of a batch that have their times in it."""
_WINDOW = TypeAdapter(Annotated[Duration, Field(ge=1, le=366 * 86400)])


class ApiError(Exception):
    """A call that is refused, in the words of OpenAI's API."""

    def __init__(self, status: int, told: str, param: str | None = None, code: str | None = None) -> None:
        """Say what is wrong, and with which parameter."""
        super().__init__(told)
        self.status, self.param, self.code = status, param, code


def _refusal(status: int, told: str, param: str | None = None, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    error = {"message": told, "type": kind, "param": param, "code": code}
    return web.json_response({"error": error}, status=status)


def _window(text: str) -> str:
    """Return a completion window as it is; raises ValueError, or ValidationError, where it is none."""
    _WINDOW.validate_python(text)
    return text


class NewBatch(BaseModel):
    """The body of a call that creates a batch."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, AfterValidator(_window)]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None


def invalid(name: str, told: str) -> ApiError:
    """Return the error of a call with a wrong parameter."""
    return ApiError(400, f"Invalid '{name}': {told}.", name, "invalid_value")


def missing(name: str) -> ApiError:
    """Return the error of a call without a parameter."""
    return ApiError(400, f"Missing required parameter: '{name}'.", name, "missing_required_parameter")


def unknown(name: str) -> ApiError:
    """Return the error of a call with a parameter that there is not."""
    return ApiError(400, f"Unknown parameter: '{name}'.", name, "unknown_parameter")


def parsed(body: bytes) -> NewBatch:
    """Return what a call asks for; raises ApiError."""
    try:
        return NewBatch.model_validate(orjson.loads(body))
    except ValidationError as failure:
        found = failure.errors()[0]
        name = ".".join(map(str, found["loc"])) or "body"
        refusals = {"missing": missing, "extra_forbidden": unknown}
        refusal = refusals.get(found["type"], functools.partial(invalid, told=found["msg"]))
        raise refusal(name) from None
    except ValueError:
        raise ApiError(400, "The body of the request is not valid JSON.") from None


def page(records: Mapping[str, Record], query: Mapping[str, str], most: int, default: int) -> Record:
    """Return a page of a list, the newest first unless the call says otherwise; raises ApiError."""
    names = sorted(records, reverse=query.get("order") != "asc")
    limit, after = query.get("limit", str(default)), query.get("after")
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= most:
        raise invalid("limit", f"take an integer from 1 to {most}")
    if after is not None and after not in records:
        raise invalid("after", "it names nothing")
    left = names[names.index(after) + 1 :] if after else names
    shown = left[: int(limit)]
    ends = {"first_id": shown[0], "last_id": shown[-1]} if shown else {"first_id": None, "last_id": None}
    data = [records[name] for name in shown]
    return {"object": "list", "data": data, **ends, "has_more": len(shown) < len(left)}


async def blocks_of(part: BodyPartReader, most: int) -> AsyncIterator[bytes]:
    """Yield the content of a part of an upload; raises ApiError where it is too large."""
    size = 0
    while block := await part.read_chunk(BLOCK_BYTES):
        size += len(block)
        if size > most:
            raise ApiError(413, f"'{part.name}' is larger than {most} bytes.", part.name, "too_large")
        yield block


class Api:
    """Answers the calls of clients; a dict that a method returns is the JSON of the answer."""

    def __init__(
        self, state: State, batches: Batches, endpoints: Sequence[str], most_bytes: int, most_files: int
    ) -> None:
        """Take batches for some endpoints, those of the engine's model, and so many files of such a size."""
        self._state, self._batches, self._endpoints = state, batches, endpoints
        self._most_bytes, self._most_files = most_bytes, most_files
        self._began, self._key = now(), os.environ.get(KEY)

    def application(self) -> web.Application:
        """Return the application with all its paths."""
        app = web.Application(middlewares=[self._answer])
        handlers: list[tuple[str, str, Any]] = [
            ("GET", "/health", self._health), ("GET", "/metrics", self._metrics),
            ("GET", "/v1/models", self._models), ("GET", "/v1/models/{id:.+}", self._model),
            ("POST", "/v1/files", self._upload), ("GET", "/v1/files", self._files),
            ("GET", "/v1/files/{id}", self._file), ("DELETE", "/v1/files/{id}", self._delete),
            ("GET", "/v1/files/{id}/content", self._content),
            ("POST", "/v1/batches", self._create), ("GET", "/v1/batches", self._list),
            ("GET", "/v1/batches/{id}", self._batch), ("POST", "/v1/batches/{id}/cancel", self._cancel),
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
        except ApiError as refused:
            return _refusal(refused.status, str(refused), refused.param, refused.code)
        except web.HTTPException as wrong:
            return _refusal(wrong.status, f"{wrong.reason}: {request.method} {request.path}")
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return _refusal(500, "The server could not do this: its log says why.")

    def _let_in(self, request: web.Request) -> None:
        """Refuse who has no key, and without one pages of browsers, which may reach localhost."""
        if self._key is None:
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
        samples = [counts.sample for counts in self._batches.counts.values() if counts.sample]
        states = Counter(batch["status"] for batch in self._state.batches.values())
        figures = {f'batches{{status="{state}"}}': count for state, count in states.items()}
        figures["files"] = len(self._state.files)
        for name in ("rows_total", "rows_done", "rows_failed", "in_flight", "rows_per_s"):
            figures[name] = sum(sample[name] for sample in samples)
        return web.Response(text="".join(f"batchrunner_{name} {value}\n" for name, value in figures.items()))

    async def _models(self, _: web.Request) -> Record:
        model = self._batches.info.model
        found = {"id": model, "object": "model", "created": self._began, "owned_by": "batchrunner"}
        return {"object": "list", "data": [found]}

    async def _model(self, request: web.Request) -> Record:
        (model,) = (await self._models(request))["data"]
        return self._known({model["id"]: model}, request, "model")

    def _known(self, records: Mapping[str, Record], request: web.Request, what: str) -> Record:
        """Return the record that a call names; raises ApiError."""
        name = request.match_info["id"]
        if name not in records:
            raise ApiError(404, f"No {what} found with id '{name}'.", "id")
        return records[name]

    def _refuse_more(self) -> None:
        """Refuse a file or a batch, which becomes two files, where there are too many."""
        count = len(self._state.files) + 2 * len(self._state.under_way())
        if count >= self._most_files:
            raise ApiError(400, f"There are {count} files: delete some.", code="too_many_files")

    async def _upload(self, request: web.Request) -> Record:
        """Take a file; it is on the disk when the answer goes."""
        if request.content_type != "multipart/form-data":
            raise ApiError(400, "Send the file as multipart/form-data.")
        self._refuse_more()
        file = new_id("file-")
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(whole_file(self._state.content_of(file)))
            try:
                fields = await self._take_form(request, temporary)
            except (ValueError, ConnectionError, HttpProcessingError):
                raise ApiError(400, "The form of the upload cannot be read to its end.") from None
            for name in ("file", "purpose"):
                if name not in fields:
                    raise missing(name)
            if fields["purpose"] != "batch":
                raise invalid("purpose", f"'{fields['purpose']:.60}' is not one of ['batch']")
            await asyncio.to_thread(stack.pop_all().close)
        return await self._state.add_file(file, fields["file"], "batch")

    async def _take_form(self, request: web.Request, target: Path) -> dict[str, str]:
        """Return the fields of an upload; the file's is its name, and its content is in `target`."""
        fields: dict[str, str] = {}
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader) or part.name in fields:
                raise ApiError(400, "Each field of an upload stands once.")
            if part.name == "file":
                with target.open("wb") as content:
                    async for block in blocks_of(part, self._most_bytes):
                        await asyncio.to_thread(self._write, content, block)
                fields["file"] = (part.filename or "upload").encode(errors="replace").decode()
            elif part.name == "purpose":
                value = b"".join([block async for block in blocks_of(part, MOST_FIELD_BYTES)])
                fields["purpose"] = value.decode(errors="replace")
            else:
                raise unknown(str(part.name))
        return fields

    def _write(self, content: IO[bytes], block: bytes) -> None:
        """Write a part of an upload, unless the disk is nearly full."""
        disk = shutil.disk_usage(content.name)
        if disk.free < min(FREE_SHARE * disk.total, FREE_BYTES):
            raise ApiError(413, "The disk is nearly full: delete files.", "file", "disk_full")
        content.write(block)

    async def _files(self, request: web.Request) -> Record:
        purpose, files = request.query.get("purpose"), self._state.files
        found = {name: file for name, file in files.items() if purpose in {None, file["purpose"]}}
        return page(found, request.query, 10_000, 10_000)

    async def _file(self, request: web.Request) -> Record:
        return self._known(self._state.files, request, "file")

    async def _content(self, request: web.Request) -> web.FileResponse:
        file = await self._file(request)
        binary = {"Content-Type": "application/octet-stream"}
        return web.FileResponse(self._state.content_of(file["id"]), headers=binary)

    async def _delete(self, request: web.Request) -> Record:
        file = (await self._file(request))["id"]
        if any(batch["input_file_id"] == file for batch in self._state.under_way()):
            raise ApiError(409, "A batch reads this file: cancel the batch first.", "id", "file_in_use")
        self._state.delete_file(file)
        return {"id": file, "object": "file", "deleted": True}

    async def _create(self, request: web.Request) -> Record:
        """Take a batch; it is on the disk when the answer goes."""
        wanted = parsed(await request.read())
        if wanted.endpoint not in self._endpoints:
            raise invalid("endpoint", f"supported are {', '.join(self._endpoints)}")
        file = self._state.files.get(wanted.input_file_id)
        if file is None or file["purpose"] != "batch":
            raise invalid("input_file_id", "it names no file with the purpose 'batch'")
        self._refuse_more()
        batch = {
            "id": new_id("batch_"), "object": "batch", **wanted.model_dump(), "status": "validating",
            "model": self._batches.info.model, "errors": None, "output_file_id": None, "error_file_id": None,
            "created_at": now(), "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "expires_at": now() + math.ceil(_WINDOW.validate_python(wanted.completion_window)),
            **dict.fromkeys(f"{state}_at" for state in STAGES),
        }  # fmt: skip
        await self._state.save(batch)
        self._batches.start(batch)
        return batch

    async def _list(self, request: web.Request) -> Record:
        return page(self._state.batches, request.query, 100, 20)

    async def _batch(self, request: web.Request) -> Record:
        return self._known(self._state.batches, request, "batch")

    async def _cancel(self, request: web.Request) -> Record:
        batch = await self._batch(request)
        if batch["status"] in {"validating", "in_progress"}:
            await self._batches.cancel(batch)
        elif batch["status"] != "cancelling":
            raise ApiError(409, f"Cannot cancel a batch with status '{batch['status']}'.")
        return batch


async def serve(
    engine: Sequence[str], directory: Path, *, host: str, port: int, task: TaskName, overrides: Sequence[str],
    most_bytes: int, most_files: int,
) -> None:  # fmt: skip
    """Serve batches until a signal comes, and print the address; raises BatchrunError.

    `engine` is a model, addresses of servers, or a job file whose engine, limits and order hold.
    """
    if host not in LOCAL and not os.environ.get(KEY):
        raise JobError(f"--host {host}: whoever reaches it may send batches", hint=f"set {KEY} to a key")
    kind = "urls" if len(engine) > 1 else "base" if engine[0].endswith(JOBS) else "model"
    overrides = [*overrides, "limits.deadline=null", "limits.abort_failed_share=1"]
    options: dict[str, Any] = {"model": None, "urls": (), "base": None, "overrides": overrides}
    options[kind] = engine if kind == "urls" else engine[0]
    job = job_of_batch("requests", str(directory), **options)
    control, loop = Control(), asyncio.get_running_loop()

    def came(_: object) -> None:
        loop.call_soon_threadsafe(control.drain, "interrupted")

    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(SignalWatch(came, SIGNALS))
        with using_run(f"--dir {directory}"):
            make_directory(directory)
            stack.enter_context(hold_task(RunDir(directory), directory=directory))
            state = State(directory)
        opened, info = await open_engine_of(job, task, directory, control, stack)
        batches = Batches(state, opened, info, options, control)
        stack.push_async_callback(batches.end)
        embeds = task == EMBED
        served = [path for path in BATCH_PATHS if info.simulated or (path == EMBEDDINGS_PATH) == embeds]
        api = Api(state, batches, served, most_bytes, most_files)
        runner = web.AppRunner(api.application(), access_log=None, shutdown_timeout=1)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as failure:
            told = f"--port {port}: cannot listen at {host}: {failure.strerror or failure}"
            raise JobError(told, hint="take another port, or 0 for any free one") from None
        for batch in state.under_way():
            batches.start(batch)
        show([f"http://{host}:{runner.addresses[0][1]}/v1"])
        ended = asyncio.Event()
        control.listen(ended.set)
        await ended.wait()
    if batches.lost is not None:
        raise batches.lost
