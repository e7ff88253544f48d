"""The HTTP API of `batchrun serve`, as OpenAI's clients speak it, and the server from start to end."""

import asyncio
import contextlib
import hmac
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, Annotated, Any

import orjson
import uvloop
from aiohttp import BodyPartReader, web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from batchrunner.core.console import show
from batchrunner.core.errors import JobError
from batchrunner.core.processes import SignalWatch
from batchrunner.core.types import BATCH_PATHS, EMBEDDINGS_PATH
from batchrunner.job.call import job_of_batch
from batchrunner.job.fields import Duration
from batchrunner.job.tasks import EMBED, TaskName
from batchrunner.output.files import using_run, whole_file
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
MOST_USED = 0.9
"""Share of the disk above which no file is taken: results need room too."""
MOST_UNDER_WAY = 1000
"""Batches that have not ended above which no other is taken."""
JOBS = (".yaml", ".yml", ".json")
"""Endings of a job file, whose engine is meant."""
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


class NewBatch(BaseModel):
    """The body of a call that creates a batch."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None


def missing(name: str) -> ApiError:
    """Return the error of a call without a parameter."""
    return ApiError(400, f"Missing required parameter: '{name}'.", name, "missing_required_parameter")


def parsed(body: bytes) -> NewBatch:
    """Return what a call asks for; raises ApiError."""
    try:
        return NewBatch.model_validate(orjson.loads(body or b"{}"))
    except ValidationError as failure:
        found = failure.errors()[0]
        name = ".".join(map(str, found["loc"]))
        if found["type"] == "missing":
            raise missing(name) from None
        if found["type"] == "extra_forbidden":
            raise ApiError(400, f"Unknown parameter: '{name}'.", name, "unknown_parameter") from None
        raise ApiError(400, f"Invalid '{name}': {found['msg']}.", name, "invalid_value") from None
    except ValueError:
        raise ApiError(400, "The body of the request is not valid JSON.") from None


def page(records: Iterable[Record], query: Mapping[str, str], *, default: int, most: int) -> Record:
    """Return a page of a list, the newest first unless the call says otherwise; raises ApiError."""
    found = sorted(records, key=lambda record: (record["created_at"], record["id"]))
    order, limit, after = query.get("order", "desc"), query.get("limit", str(default)), query.get("after")
    if order not in {"asc", "desc"}:
        raise ApiError(400, f"Invalid value: '{order}'. Take 'asc' or 'desc'.", "order", "invalid_value")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
        raise ApiError(400, f"Invalid 'limit': take an integer from 1 to {most}.", "limit", "invalid_value")
    if order == "desc":
        found.reverse()
    if after is not None:
        names = [record["id"] for record in found]
        if after not in names:
            raise ApiError(400, f"Invalid 'after': there is no '{after}'.", "after", "invalid_value")
        found = found[names.index(after) + 1 :]
    data = found[: int(limit)]
    ends = (
        {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        if data
        else dict.fromkeys(("first_id", "last_id"))
    )
    return {"object": "list", "data": data, **ends, "has_more": len(data) < len(found)}


async def blocks_of(part: BodyPartReader, most: int) -> AsyncIterator[bytes]:
    """Yield the content of a part of an upload; raises ApiError where it is too large."""
    size = 0
    while block := await part.read_chunk(BLOCK_BYTES):
        size += len(block)
        if size > most:
            raise ApiError(413, f"'{part.name}' is larger than {most} bytes.", part.name, "too_large")
        yield block


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a server keeps."""

    file_bytes: int
    """Largest file."""
    files: int
    """Most files, results among them."""


class Api:
    """Answers the calls of clients."""

    def __init__(self, state: State, batches: Batches, endpoints: Sequence[str], limits: Limits) -> None:
        """Take batches for some endpoints, those of the engine's model."""
        self._state, self._batches, self._endpoints, self._limits = state, batches, endpoints, limits
        self._began, self._key = now(), os.environ.get(KEY)

    def application(self) -> web.Application:
        """Return the application with all its paths."""
        app = web.Application(middlewares=[self._answer])
        app.add_routes([
            web.get("/health", self._health), web.get("/metrics", self._metrics),
            web.get("/v1/models", self._models), web.get("/v1/models/{id:.+}", self._model),
            web.post("/v1/files", self._upload), web.get("/v1/files", self._files),
            web.get("/v1/files/{id}", self._file), web.delete("/v1/files/{id}", self._delete),
            web.get("/v1/files/{id}/content", self._content),
            web.post("/v1/batches", self._create), web.get("/v1/batches", self._list),
            web.get("/v1/batches/{id}", self._batch), web.post("/v1/batches/{id}/cancel", self._cancel),
        ])  # fmt: skip
        return app

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let a call in or not, and tell what is wrong as OpenAI's API does."""
        try:
            if request.path != "/health":
                self._let_in(request)
            return await handler(request)
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

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, _: web.Request) -> web.Response:
        """Return figures for Prometheus."""
        samples = [counts.sample for counts in self._batches.counts.values() if counts.sample]
        states = Counter(batch["status"] for batch in self._state.batches.values())
        figures = {f'batches{{status="{state}"}}': count for state, count in states.items()}
        figures["files"] = len(self._state.files)
        for name in ("rows_total", "rows_done", "rows_failed", "in_flight", "rows_per_s"):
            figures[name] = sum(sample[name] for sample in samples)
        for load in samples[-1]["signals"] if samples else ():
            for name in ("running", "queue", "token_usage"):
                figures[f'scheduler_{name}{{scheduler="{load["scheduler"]}"}}'] = load[name]
        return web.Response(text="".join(f"batchrunner_{name} {value}\n" for name, value in figures.items()))

    def _model_record(self) -> Record:
        return {
            "id": self._batches.info.model, "object": "model", "created": self._began,
            "owned_by": "batchrunner",
        }  # fmt: skip

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_record()]})

    async def _model(self, request: web.Request) -> web.Response:
        model = self._model_record()
        if (name := request.match_info["id"]) != model["id"]:
            raise ApiError(404, f"The model '{name}' does not exist.", "model", "model_not_found")
        return web.json_response(model)

    def _known_file(self, request: web.Request) -> Record:
        name = request.match_info["id"]
        if name not in self._state.files:
            raise ApiError(404, f"No such File object: {name}", "id")
        return self._state.files[name]

    def _known_batch(self, request: web.Request) -> Record:
        name = request.match_info["id"]
        if name not in self._state.batches:
            raise ApiError(404, f"No batch found with id '{name}'.")
        return self._state.batches[name]

    async def _upload(self, request: web.Request) -> web.Response:
        """Take a file; it is on the disk when the answer goes."""
        if request.content_type != "multipart/form-data":
            raise ApiError(400, "Send the file as multipart/form-data.")
        if len(self._state.files) >= self._limits.files:
            raise ApiError(400, f"There are {self._limits.files} files: delete some.", code="too_many_files")
        file = new_id("file-")
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(whole_file(self._state.content_of(file)))
            try:
                fields = await self._take_form(request, temporary)
            except ValueError as failure:
                raise ApiError(400, f"The form cannot be read: {failure}") from None
            for name in ("file", "purpose"):
                if name not in fields:
                    raise missing(name)
            if fields["purpose"] != "batch":
                told = f"'{fields['purpose']:.60}' is not one of ['batch'] - 'purpose'"
                raise ApiError(400, told, "purpose", "invalid_value")
            await asyncio.to_thread(stack.pop_all().close)
        return web.json_response(await self._state.add_file(file, fields["file"], "batch"))

    async def _take_form(self, request: web.Request, target: Path) -> dict[str, str]:
        """Return the fields of an upload; the file's is its name, and its content is in `target`."""
        fields: dict[str, str] = {}
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader) or part.name in fields:
                raise ApiError(400, "Each field of an upload stands once.")
            if part.name == "file":
                with target.open("wb") as content:
                    async for block in blocks_of(part, self._limits.file_bytes):
                        await asyncio.to_thread(self._write, content, block)
                fields["file"] = (part.filename or "upload").encode(errors="replace").decode()
            elif part.name == "purpose":
                value = b"".join([block async for block in blocks_of(part, MOST_FIELD_BYTES)])
                fields["purpose"] = value.decode(errors="replace")
            else:
                raise ApiError(400, f"Unknown parameter: '{part.name}'.", part.name, "unknown_parameter")
        return fields

    def _write(self, content: IO[bytes], block: bytes) -> None:
        """Write a part of an upload, unless the disk is nearly full."""
        disk = shutil.disk_usage(content.name)
        if disk.free < (1 - MOST_USED) * disk.total:
            raise ApiError(413, f"The disk is {MOST_USED:.0%} full: delete files.", "file", "disk_full")
        content.write(block)

    async def _files(self, request: web.Request) -> web.Response:
        purpose = request.query.get("purpose")
        found = [each for each in self._state.files.values() if purpose in {None, each["purpose"]}]
        return web.json_response(page(found, request.query, default=10_000, most=10_000))

    async def _file(self, request: web.Request) -> web.Response:
        return web.json_response(self._known_file(request))

    async def _content(self, request: web.Request) -> web.FileResponse:
        path = self._state.content_of(self._known_file(request)["id"])
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    async def _delete(self, request: web.Request) -> web.Response:
        file = self._known_file(request)["id"]
        if reader := next((b for b in self._state.under_way() if b["input_file_id"] == file), None):
            raise ApiError(409, f"{reader['id']} reads this file: cancel it first.", "id", "file_in_use")
        self._state.delete_file(file)
        return web.json_response({"id": file, "object": "file", "deleted": True})

    async def _create(self, request: web.Request) -> web.Response:
        """Take a batch; it is on the disk when the answer goes."""
        wanted = parsed(await request.read())
        if wanted.endpoint not in self._endpoints:
            values = ", ".join(f"'{endpoint}'" for endpoint in self._endpoints)
            told = f"Invalid value: '{wanted.endpoint:.60}'. Supported values are: {values}."
            raise ApiError(400, told, "endpoint", "invalid_value")
        try:
            window_s = _WINDOW.validate_python(wanted.completion_window)
        except ValidationError:
            told = "Invalid 'completion_window': take a time such as '24h', of 366 days at most."
            raise ApiError(400, told, "completion_window", "invalid_value") from None
        file = self._state.files.get(wanted.input_file_id)
        if file is None or file["purpose"] != "batch":
            told = f"No file with purpose 'batch' has the id '{wanted.input_file_id:.60}'."
            raise ApiError(400, told, "input_file_id", "invalid_value")
        if len(self._state.under_way()) >= MOST_UNDER_WAY:
            raise ApiError(429, f"{MOST_UNDER_WAY} batches have not ended.", code="rate_limit_exceeded")
        created_at = now()
        stages = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        batch = {
            "id": new_id("batch_"), "object": "batch", "status": "validating", "created_at": created_at,
            **wanted.model_dump(), "model": self._batches.info.model, "errors": None,
            "expires_at": created_at + math.ceil(window_s), "output_file_id": None, "error_file_id": None,
            **dict.fromkeys(f"{stage}_at" for stage in stages),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }  # fmt: skip
        answer = web.json_response(batch)
        await self._state.save(batch)
        self._batches.start(batch)
        return answer

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response(page(self._state.batches.values(), request.query, default=20, most=100))

    async def _batch(self, request: web.Request) -> web.Response:
        return web.json_response(self._known_batch(request))

    async def _cancel(self, request: web.Request) -> web.Response:
        batch = self._known_batch(request)
        if batch["status"] in {"validating", "in_progress"}:
            await self._batches.cancel(batch)
        elif batch["status"] != "cancelling":
            raise ApiError(409, f"Cannot cancel a batch with status '{batch['status']}'.")
        return web.json_response(batch)


def serve(
    engine: Sequence[str], directory: Path, *, host: str, port: int, task: TaskName, limits: Limits,
    overrides: Sequence[str],
) -> None:  # fmt: skip
    """Serve batches until a signal comes; raises BatchrunError.

    `engine` is a model, addresses of servers, or a job file whose engine, limits and order hold.
    """
    if host not in LOCAL and not os.environ.get(KEY):
        raise JobError(f"--host {host}: whoever reaches it may send batches", hint=f"set {KEY} to a key")
    kind = "urls" if len(engine) > 1 else "base" if engine[0].endswith(JOBS) else "model"
    options = {"model": None, "urls": (), "base": None, "overrides": overrides}
    options[kind] = engine if kind == "urls" else engine[0]
    uvloop.run(_serve(options, directory, host, port, task, limits))


async def _serve(
    options: dict[str, Any], directory: Path, host: str, port: int, task: TaskName, limits: Limits
) -> None:
    job = job_of_batch("requests", str(directory), **options)
    control, loop = Control(), asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:

        def came(_: object) -> None:
            loop.call_soon_threadsafe(control.drain, "interrupted")

        stack.enter_context(SignalWatch(came, SIGNALS))
        with using_run(f"--dir {directory}"):
            stack.enter_context(hold_task(RunDir(directory), directory=directory))
            state = State(directory)
        engine, info = await open_engine_of(job, task, directory, control, stack)
        batches = Batches(state, engine, info, options, control)
        stack.push_async_callback(batches.end)
        embeds = task == EMBED
        served = [path for path in BATCH_PATHS if info.simulated or (path == EMBEDDINGS_PATH) == embeds]
        runner = web.AppRunner(
            Api(state, batches, served, limits).application(), access_log=None, shutdown_timeout=1
        )
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
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
