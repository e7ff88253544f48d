"""The HTTP server of `batchrun serve`: OpenAI's Files and Batches API."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import ValidationError
from yarl import URL

from batchrunner.core.console import show
from batchrunner.core.errors import BatchrunError, EngineAwayError, JobError, StorageError
from batchrunner.core.files import is_uri
from batchrunner.core.processes import SignalWatch
from batchrunner.job.call import job_of_batch
from batchrunner.job.spec import Job
from batchrunner.job.tasks import TASK_OF_ENDPOINT, TaskName
from batchrunner.output.files import make_directory, using_run
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import hold_task
from batchrunner.runner.control import SIGNALS, Control
from batchrunner.runner.shared_engine import SharedEngine, open_engine_of
from batchrunner.serve.api_errors import ApiError, parameter_error
from batchrunner.serve.batches import RETRY_S, Batches
from batchrunner.serve.batches_api import BatchesApi
from batchrunner.serve.files_api import FilesApi
from batchrunner.serve.metrics_api import MetricsApi
from batchrunner.serve.owners import ONLY_OWNER, Owner, Owners, seconds_left_of_day
from batchrunner.serve.page_api import PageApi
from batchrunner.serve.records import OWNER_OF_CALL, Records
from batchrunner.serve.state import State

log = logging.getLogger(__name__)
http_log = logging.getLogger(f"{__name__}.http")
"""Log of aiohttp's server."""

API_KEY_VARIABLE = "BATCHRUN_API_KEY"
"""Environment variable with the API key that clients must send."""
LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}
"""Addresses at which the server needs no API key."""
OPEN_PATHS = {"/", "/health", "/ready"}
"""Paths that need no API key: the page, which has no data itself, and the two for health checks of load
balancers and orchestrators, which have no key."""
STORAGE_PROBLEM = "The server cannot use its disk, which may be full: repeat the call later."
"""Error message of a call that fails because of the disk. The server's log has the path and the cause."""
USAGE = "usage.json"
"""File in the server's directory with the tokens that each owner has used on this day."""
SWEEP_S = 60.0
"""Maximum interval, in seconds, at which expired files are deleted and used tokens are saved."""


class Api:
    """The HTTP calls of the server. A dict that a handler returns is sent as JSON."""

    def __init__(
        self,
        *,
        state: State,
        batches: Batches,
        owners: Owners,
        endpoints: Sequence[str],
        most_bytes: int,
        most_files: int,
    ) -> None:
        """Accept batches for `endpoints`, and `most_files` files of at most `most_bytes` bytes."""
        self._owners = owners
        self._records = Records(state, owners, batches.info.model)
        self._metrics = MetricsApi(state=state, batches=batches, owners=owners)
        self._page = PageApi(state=state, batches=batches, owners=owners, endpoints=endpoints)
        self._files = FilesApi(
            state=state, owners=owners, records=self._records, most_bytes=most_bytes, most_files=most_files
        )
        self._batches = BatchesApi(
            state=state,
            batches=batches,
            owners=owners,
            records=self._records,
            files=self._files,
            endpoints=endpoints,
        )

    def application(self) -> web.Application:
        """Return the application with all its routes."""
        app = web.Application(middlewares=[self._reply])
        app.on_response_prepare.append(self._metrics.count_response)
        records = "/v1/{kind:files|batches|models}"
        handlers: list[tuple[str, str, Any]] = [
            ("GET", "/", self._page.page),
            ("GET", "/health", self._metrics.health),
            ("GET", "/ready", self._metrics.ready),
            ("GET", "/metrics", self._metrics.metrics),
            ("POST", "/v1/files", self._files.upload),
            ("DELETE", "/v1/{kind:files}/{id}", self._files.delete),
            ("GET", "/v1/{kind:files}/{id}/content", self._files.content),
            ("POST", "/v1/batches", self._batches.create),
            ("POST", "/v1/{kind:batches}/{id}/cancel", self._batches.cancel),
            ("GET", "/v1/activity", self._page.activity),
            ("GET", records, self._records.page),
            ("GET", records + "/{id:.+}", self._records.get),
        ]
        for method, path, handler in handlers:
            app.router.add_route(method, path, handler)
            if method == "GET":
                # Some monitors check health by HEAD.
                app.router.add_route("HEAD", path, handler)
        return app

    @web.middleware
    async def _reply(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Authorize a call, handle it, and turn each error into an error object of OpenAI's API."""
        try:
            if request.path not in OPEN_PATHS:
                owner = request[OWNER_OF_CALL] = self._owner_of(request)
                self._owners.count_call(owner)
            result = await handler(request)
        except ApiError:
            raise
        except ValidationError as failure:
            raise parameter_error(failure) from None
        except (HttpProcessingError, web.RequestPayloadError):
            raise ApiError(400, "The body cannot be decoded: check its Content-Encoding.") from None
        except web.HTTPException as failure:
            raise ApiError(failure.status, f"{failure.reason}: {request.method} {request.path}") from None
        except (OSError, StorageError) as failure:
            log.warning("%s %s failed: %s", request.method, request.path, failure)
            raise ApiError(507, STORAGE_PROBLEM, code="storage_error") from None
        except Exception as failure:
            is_unforeseen = not isinstance(failure, BatchrunError)
            log.warning("%s %s failed: %s", request.method, request.path, failure, exc_info=is_unforeseen)
            raise ApiError(500, "The call failed: see the log of the server.") from None
        return result if isinstance(result, web.StreamResponse) else web.json_response(result)

    def _owner_of(self, request: web.Request) -> Owner:
        """Return the owner of the API key of a call; raises ApiError for a call without a valid key.

        A server without keys serves only programs on this machine and its own page. Other web pages are
        refused, because any website could send calls to localhost.
        """
        if not self._owners.need_key:
            try:
                host, own_origin = (request.url.host or "").lower(), str(request.url.origin())
            except ValueError:
                # The header Host is malformed, for example with a port beyond 65535.
                host = own_origin = ""
            if host not in LOCAL_HOSTS or request.headers.get("Origin", own_origin) != own_origin:
                raise ApiError(403, f"Only programs on this machine may call. Set {API_KEY_VARIABLE}.")
            return ONLY_OWNER
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        # In HTTP, the case of a scheme does not matter.
        owner = self._owners.owner_of(key.strip()) if scheme.lower() == "bearer" else None
        if owner is None:
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return owner


async def open_engine_patiently(
    job: Job,
    task: TaskName,
    *,
    log_directory: Path,
    control: Control,
    stack: contextlib.AsyncExitStack,
) -> SharedEngine:
    """Open the engine; try again while servers cannot be reached. `stack` closes the engine."""
    while True:
        try:
            async with contextlib.AsyncExitStack() as opening:
                engine = await open_engine_of(
                    job, task, log_directory=log_directory, control=control, stack=opening
                )
                # `opening` closes an engine that fails to open. From here on, `stack` closes it.
                stack.push_async_callback(opening.pop_all().aclose)
                return engine
        except EngineAwayError as failure:
            log.warning("%s; the next try is in %g s", failure, RETRY_S)
        await control.wait_for(asyncio.sleep(RETRY_S), "while the engine was away")


def _check_options(directory: Path, *, host: str, key: str, keys: Path | None) -> None:
    """Raise JobError if the directory is a URI, or if keys are missing or given twice."""
    if key and keys is not None:
        raise JobError(f"--keys {keys}: {API_KEY_VARIABLE} is set, too", hint="give one of them")
    if host not in LOCAL_HOSTS and not key and keys is None:
        raise JobError(
            f"--host {host}: anybody who reaches it could send batches",
            hint=f"set {API_KEY_VARIABLE} to a key, or give --keys",
        )
    if is_uri(str(directory)):
        raise JobError(f"--dir {directory}: is a URI", hint="give a directory")


def _is_no_bad_request(record: logging.LogRecord) -> bool:
    """Tell whether a record of `http_log` is about anything but a request that is no valid HTTP.

    The client gets the error of such a request. The error quotes the request, perhaps with an API key, so it
    must not be logged.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _sweep_until(stop_event: asyncio.Event, state: State, owners: Owners) -> None:
    """Delete expired files and save the used tokens, once a minute and at midnight, until the event is set.

    At midnight (UTC), this resets the used tokens of the day, so that paused batches resume.
    """
    while not stop_event.is_set():
        try:
            await state.delete_expired()
            await owners.save_usage()
        except StorageError as failure:
            log.warning("%s; the next try is in %g s", failure, SWEEP_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop_event.wait(), min(SWEEP_S, seconds_left_of_day()))


async def serve(
    engine: Sequence[str],
    directory: Path,
    *,
    host: str,
    port: int,
    keys: Path | None,
    task: TaskName,
    overrides: Sequence[str],
    most_bytes: int,
    most_files: int,
) -> None:
    """Serve batches until a signal comes, and print the address; raises BatchrunError.

    `engine` is a model, addresses of servers, or a job file, whose engine, limits and order are used. `keys`
    is a file with the API keys of several owners; None for one owner, whose key is in API_KEY_VARIABLE. The
    server accepts `most_files` files of at most `most_bytes` bytes.
    """
    # A key from a file often has a line break at its end.
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    _check_options(directory, host=host, key=key, keys=keys)
    # A batch has an expiry instead of a deadline. Like OpenAI's, it goes on however many lines fail.
    limits = ("limits.deadline=null", "limits.abort_failed_share=1")
    options: dict[str, Any] = {"engine": engine, "overrides": [*overrides, *limits]}
    job = job_of_batch("requests", str(directory), **options)
    control, stop_event, loop = Control(), asyncio.Event(), asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(control.listening(stop_event.set))
        with using_run(f"--dir {directory}"):
            make_directory(directory)
            stack.enter_context(hold_task(RunDir(directory), directory=directory))
            state = State(directory)
        owners = Owners(keys, key, usage=directory / USAGE)
        stack.push_async_callback(owners.save_usage)

        def handle(number: signal.Signals) -> None:
            # With a file of keys, SIGHUP makes the server read it again. Any other signal ends the server.
            if number == signal.SIGHUP and keys is not None:
                loop.call_soon_threadsafe(owners.read_again)
            else:
                loop.call_soon_threadsafe(control.drain, "interrupted")

        # `nohup` makes a command ignore SIGHUP, but here SIGHUP only reloads the keys.
        requests = () if keys is None else (signal.SIGHUP,)
        stack.enter_context(SignalWatch(handle, SIGNALS, requests=requests))
        address = f"--port {port}, --host {host}"
        # Bind the address once, so that an address in use is reported before the model loads.
        with using_run(address):
            (await loop.create_server(asyncio.Protocol, host, port)).close()
        shared = await open_engine_patiently(job, task, log_directory=directory, control=control, stack=stack)
        batches = Batches(state=state, engine=shared, options=options, server=control, owners=owners)
        stack.push_async_callback(batches.drain)
        endpoints = [*TASK_OF_ENDPOINT]
        if not shared.info.simulated:
            # A real engine answers only requests of its own task. The simulated engine answers all requests.
            endpoints = [path for path in endpoints if TASK_OF_ENDPOINT[path] == task]
        endpoints = [path for path in endpoints if path not in shared.info.unsupported]
        api = Api(
            state=state,
            batches=batches,
            owners=owners,
            endpoints=endpoints,
            most_bytes=most_bytes,
            most_files=most_files,
        )
        http_log.addFilter(_is_no_bad_request)
        runner = web.AppRunner(api.application(), access_log=None, logger=http_log, shutdown_timeout=1)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        with using_run(address):
            await web.TCPSite(runner, host, port).start()
        for batch in state.unfinished_batches():
            # An earlier start of the server did not finish these batches.
            batches.start(batch)
        show([str(URL.build(scheme="http", host=host, port=runner.addresses[0][1], path="/v1"))])
        await _sweep_until(stop_event, state, owners)
    # The server ended because its engine was lost, not by a signal.
    if batches.lost is not None:
        raise batches.lost
