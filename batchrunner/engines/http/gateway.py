"""Sends rows through SGLang's Model Gateway (`smg`), and decides whether they have to go through it.

A gateway sends all requests with the same routing key to one worker if its policy is `consistent_hashing` or
`manual`, or if it has `--routing-key-override`. With such a gateway each worker is a route, and the rows of
the route have a key that leads to the worker. So concurrency limits, prefix groups and retries work as for a
server that is reached directly. Any other gateway is a single route with several schedulers, and the gateway
chooses the worker of each request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
import orjson
from yarl import URL

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import (
    AttemptFailedError,
    EngineAwayError,
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    EngineStartError,
    RequestError,
    RowRefusedError,
    UnreachedError,
)
from batchrunner.core.server_replies import error_of
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Request, RequestBody
from batchrunner.engines.hang_detector import HangDetector
from batchrunner.engines.http import replies, wire
from batchrunner.engines.http.client import HttpEngine
from batchrunner.engines.http.connections import open_connections
from batchrunner.engines.http.gateway_workers import (
    GatewayQuestions,
    GatewayWorker,
    LoadEstimate,
    WorkerWatch,
    report_of_halves,
    urls_in_use,
    workers_of,
)
from batchrunner.engines.http.guard import common_model, refuse_another
from batchrunner.engines.http.server import Endpoint, SentRequest
from batchrunner.engines.http.server_info import (
    NOT_REACHED,
    ServerStatus,
    check_task,
    describe,
)
from batchrunner.engines.http.wire import PostedAnswer, PostSender
from batchrunner.input.request_bodies import fields_of
from batchrunner.job.engine import GatewayEngine
from batchrunner.job.output import OF_TOKENS
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import EMBED, GENERATE, TaskName
from batchrunner.sglang.model_files import vocabulary_of

log = logging.getLogger(__name__)

DROPS_INTERVAL = "the gateway drops stream_interval"
"""Reason why an answer that the gateway forwards as events has an event for each token."""
ROUTED_TO = "x-smg-routed-worker-id"
"""Name of the answer header that has the URL of the worker that answered."""
TRIES_PER_WORKER = 16
"""Maximum number of routing keys that are tried per worker. Among N workers, 16·N keys all miss a given
worker with a probability of about e⁻¹⁶."""
UNANSWERED_PER_WORKER = 4
"""The search for routing keys ends after this many unanswered keys per worker, because each key that leads to
a dead host takes 2 s."""
CONFIRMATIONS = 4
"""Number of times that a key must lead to the same worker again before it is used."""
LEAST_SEARCH_PAUSE_S = 10.0
"""Minimum seconds between two searches for routing keys, if the reason is only that wrong workers answered.
The gateway decides which workers are overloaded at each load report, by default every 10 s."""
MODEL_INFO = "/get_model_info"
"""Path under which the gateway returns the `/model_info` of its first HTTP worker."""
SERVER_INFO = "/get_server_info"
"""Path under which the gateway returns the `/server_info` of its first HTTP worker."""
TASKS_PASSED = frozenset({GENERATE, EMBED})
"""Tasks whose requests a gateway passes on. It has no `/encode`, and takes no lists of logprob options."""
CIRCUIT_OPEN_CODE = "no_available_workers"
"""Error code of a request while all workers are unhealthy, or their circuit breakers are open."""
NO_WORKER_CODES = frozenset({CIRCUIT_OPEN_CODE, "no_healthy_workers", "no_workers", "model_not_found"})
"""Error codes of a request for which the gateway has no worker now."""
UNCONNECTED_CODE = "call_upstream_connection_failed"
"""Error code of a request for which the gateway could not connect to the worker."""
HALF_AWAY_CODE = "PD disaggregation request failed"
"""Error code of a request whose connection to its prefill or decode worker failed. The worker may have died
with the request, or it was down before: the gateway uses a worker until three health checks have failed."""
CUT_CODES = ("call_upstream_", "read_response", "upstream_error", "worker_stream_failed")
"""Prefixes of the error codes of a request whose connection from the gateway to the worker broke before the
answer."""
LIMIT_CODES = (
    *("admission_queue_", "scheduler_queue_", "scheduler_preempted", "prefill_queue_"),
    *("tenant_rate_limit", "rate_limit", "worker_overload_protection_shed", "selection_queue_timeout"),
)
"""Prefixes of the error codes of a request that the gateway refuses because of its own limits, such as its
queue or the quota of a tenant."""
CIRCUIT_OPEN = (
    "the gateway %s lists %d healthy workers, but sends them no rows (%s). Failed rows have opened its "
    "circuit breaker: rows wait until the gateway tries a worker again. Start the gateway with "
    "--disable-circuit-breaker --disable-retries"
)
"""Warning that a gateway refuses rows although it lists healthy workers."""
ASTRAY = (
    "rows with the routing key of %s were answered by %s: the gateway has reassigned the key, or its "
    "overload protection avoids a worker with waiting requests (start the gateway with "
    "--disable-worker-overload-protection)"
)
"""Warning that a row was answered by another worker than the worker of its routing key."""
_NO_TEXTS = "the gateway's workers speak gRPC, for which the gateway returns tokens without their texts"
GRPC_UNSUPPORTED: Mapping[str, str] = {
    "sampling.lora_path": "the gateway's workers speak gRPC, for which the gateway drops the adapter's name",
    **dict.fromkeys(OF_TOKENS, _NO_TEXTS),
}
"""Parts of a job that gRPC workers cannot do, and why."""
ONE_COMPLETION = (
    "with prefill and decode apart, SGLang does not answer a request for several completions (0.5.23)"
)
"""Reason why the gateway gets no requests with `n` above 1. All completions would use one transfer of the KV
cache, and wait for it forever (https://github.com/sgl-project/sglang/pull/30723)."""
HALVES_UNSUPPORTED: Mapping[str, str] = {"sampling.n": ONE_COMPLETION}
"""Parts of a job that prefill and decode workers cannot do, and why."""


class _GatewayError(msgspec.Struct):
    """Field `error` of a refusal by the gateway itself. A worker's refusal has a number as `code`."""

    code: str | None = None


class _GatewayRefusal(msgspec.Struct):
    """Body of a refusal by the gateway."""

    error: _GatewayError


_read_refusal = msgspec.json.Decoder(_GatewayRefusal)


def code_of(content: bytes) -> str | None:
    """Return the error code in a refusal by the gateway itself; None for a refusal by a worker."""
    try:
        return _read_refusal.decode(content).error.code
    except (msgspec.MsgspecError, ValueError):
        return None


def refusal_of(answer: replies.WholeAnswer) -> RequestError | None:
    """Return the error of a row that the gateway itself refused; None if the row may be at fault.

    No row is to blame if the gateway reached no worker, or refused the request because of a limit of its own.
    After a timeout, the attempt counts against the row. If a connection broke before the answer, the row may
    have killed the worker.
    """
    code = code_of(answer.content)
    if code is None:
        return None
    error = error_of(answer.status, answer.content, answer.retry_after)
    message = f"the gateway: {error}"
    if code in NO_WORKER_CODES or code in {UNCONNECTED_CODE, HALF_AWAY_CODE}:
        return UnreachedError(message)
    if code.startswith(LIMIT_CODES):
        return EngineBusyError(message, getattr(error, "retry_after_s", None))
    if "timeout" in code or answer.status in {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.GATEWAY_TIMEOUT}:
        return AttemptFailedError(message)
    return EngineDiedError(message) if code.startswith(CUT_CODES) else None


async def reason_to_go_through(spec: GatewayEngine, key_header: Mapping[str, str]) -> str | None:
    """Return why rows must go through a gateway; None if all its workers can be reached directly.

    `key_header` has the API key. Raises EngineAwayError if there is no gateway, or if it has no workers,
    EngineStartError if it has no workers of the job's model.
    """
    async with aiohttp.ClientSession(headers={**key_header, **spec.headers}) as session:
        listed = await _workers_at_start(GatewayQuestions(session, spec.url), spec.url)
    workers = workers_of(spec.model, listed, spec.url)
    # A worker that is down now gets rows once it answers, whichever way they go.
    in_use = urls_in_use(workers)
    workers = [worker for worker in workers if worker.url in in_use] or workers
    for worker in workers:
        if worker.peculiarity is not None:
            return f"{worker.url} {worker.peculiarity}"
    # The job's headers are for the gateway, so the workers do not get them.
    async with aiohttp.ClientSession(headers=key_header) as session:
        by_address = {worker.address: worker for worker in workers}
        reasons = await asyncio.gather(*(_unreachable(session, worker) for worker in by_address.values()))
    return next(filter(None, reasons), None)


async def _workers_at_start(gateway: GatewayQuestions, url: str) -> list[GatewayWorker]:
    """Return the workers that the gateway is not removing.

    Raises EngineAwayError if there are none, or if no gateway answers.
    """
    try:
        workers = await gateway.workers()
    except EngineDownError as failure:
        raise EngineAwayError(str(failure)) from None
    staying = [worker for worker in workers if not worker.is_leaving]
    if not staying:
        raise EngineAwayError(f"{url}: the gateway has no workers")
    return staying


async def _unreachable(session: aiohttp.ClientSession, worker: GatewayWorker) -> str | None:
    """Return why a worker cannot get rows directly.

    Return None if the worker answers at its own address, with the model that the gateway lists.
    """
    try:
        status, reply = await ServerStatus(session, worker.address).mapping(
            "/model_info", TIMING.status_timeout
        )
    except NOT_REACHED:
        return f"{worker.address} cannot be reached from here"
    if not reply.get("model_path"):
        return f"{worker.address} does not describe its model here (status {status})"
    listed_path = worker.model.get("model_path")
    if listed_path is not None and listed_path != str(reply["model_path"]):
        return f"{worker.address} serves {reply['model_path']}, but the gateway lists it with {listed_path}"
    return None


@dataclass(slots=True)
class WorkerState:
    """State of one worker: its load, its model and its routing key."""

    watch: WorkerWatch
    unlisted_at: float = -math.inf
    """Time of the worker's first answer, if the gateway had not listed the worker by then; else minus
    infinity."""
    load: LoadEstimate = field(default_factory=LoadEstimate)
    key: str | None = None
    """Routing key that leads to the worker; None if there is none, or if it was not found yet."""


@dataclass(slots=True)
class WorkerStates:
    """States of a gateway's workers. They decide whether an answer certainly came from the run's model."""

    of: dict[str, WorkerState] = field(default_factory=dict)
    """States by the URLs of the workers."""
    listed_at: float = -math.inf
    """Time at which the last answered request for the list of workers was sent."""
    gateway_lost_at: float = -math.inf
    """Time at which a row's connection to the gateway last failed."""

    def see(self, url: str, unlisted_at: float = -math.inf) -> WorkerState:
        """Return the state of a worker; create it if the worker is new."""
        state = self.of.get(url)
        if state is None:
            state = self.of[url] = WorkerState(WorkerWatch(url), unlisted_at)
        return state

    @property
    def is_gateway_in_doubt(self) -> bool:
        """Whether the gateway may have been restarted since its list was read, with other workers."""
        return self.gateway_lost_at >= self.listed_at

    def is_in_doubt(self, url: str) -> bool:
        """Tell whether a worker may serve another model: it is new, or another server took its address."""
        state = self.see(url, unlisted_at=time.monotonic())
        return state.unlisted_at >= self.listed_at or state.watch.in_doubt


class GatewaySender(PostSender):
    """Posts rows to a gateway, and refuses the answers of workers that may serve another model."""

    def __init__(
        self, session: aiohttp.ClientSession, url: URL, headers: Mapping[str, str], workers: WorkerStates
    ) -> None:
        """Send `headers` with each request. `workers` is shared with the engine, which updates it."""
        super().__init__(session, url, headers=headers)
        self._workers = workers
        self.answered_by: str | None = None
        """URL of the worker that answered last; None before the first answer."""

    async def post(self, body: bytes) -> PostedAnswer:
        """Send a body; see `PostSender.post`.

        Raises EngineDownError while the gateway is in doubt, and for an answer of a worker in doubt.
        """
        if self._workers.is_gateway_in_doubt:
            gateway = self._url.origin()
            raise EngineDownError(f"the gateway {gateway} was away, and has not listed its workers since")
        answer = await super().post(body)
        url = answer.headers.get(ROUTED_TO)
        if url is None:
            return answer
        self.answered_by = url
        if answer.status == HTTPStatus.OK and self._workers.is_in_doubt(url):
            answer.release()
            raise EngineDownError(f"{url} was away or is new: its answers count once its model is known")
        return answer


class ThroughGateway(HttpEngine):
    """A Model Gateway that gets all rows and passes them on to its workers.

    If the gateway routes by keys, each worker is a route, and its URL is the name of the route. Otherwise the
    gateway's URL is the only route.
    """

    def __init__(
        self,
        spec: GatewayEngine,
        *,
        why: str,
        api_key: str | None,
        limits: LimitsSpec,
        task: TaskName = GENERATE,
    ) -> None:
        """`why` is the reason why rows go through the gateway that `spec` describes."""
        super().__init__(api_key=api_key, limits=limits, task=task)
        self._headers |= spec.headers
        self._why_unwatched = DROPS_INTERVAL
        self.url = spec.url
        self._why = why
        self._key_header = spec.routing_key_header
        self._model_of_job = spec.model
        """Model name that the job gives as `engine.model`; None if the gateway serves one model only."""
        self._gateway: GatewayQuestions | None = None
        """Asks the gateway for its workers; None before `open`."""
        self._model_id = ""
        """Model name by which the gateway finds the workers."""
        self._workers = WorkerStates()
        self._has_keys = False
        """Whether rows are sent with routing keys, so that each worker is a route."""
        self._keys_are_proven = False
        """Whether different keys have led to different workers. With a single worker, every key leads to it,
        whatever the gateway's policy is."""
        self._shared_route = spec.url
        """Route of all rows if the gateway chooses their workers."""
        self._key_numbers = itertools.count()
        """Counter from which the routing keys to try are made."""
        self._in_use: frozenset[str] = frozenset()
        """URLs of the workers to which the gateway sends requests now."""
        self._key_search: asyncio.Task[None] | None = None
        """Search for new keys, after a change of the workers."""
        self._next_search_at = 0.0
        """If the gateway sent a row to a wrong worker, routing keys are searched again, but not before this
        time (seconds of the monotonic clock)."""
        self._has_halves = False
        """Whether prefill and decode are apart."""
        self._halves_load = LoadEstimate()
        """Load of all prefill and decode workers together."""
        self._has_warned_of_circuit = False
        """Whether the log has a warning that the gateway's circuit breaker is open."""
        self._is_away = False
        """Whether the gateway did not answer when it was last asked."""

    async def open(self) -> EngineInfo:
        """Read the list of workers, and find out whether the gateway routes by keys.

        Raises EngineAwayError if no worker answers, EngineStartError if the workers cannot do the task.
        """
        self._timeout_loop = asyncio.create_task(self._end_late_requests())
        connections, limited_by = open_connections(1)
        self._open_sessions()
        assert self._question_session is not None
        self._gateway = GatewayQuestions(self._question_session, self.url)
        if self._task not in TASKS_PASSED:
            raise EngineStartError(
                f"task: {self._task} needs requests that the gateway {self.url} does not pass on",
                hint="set engine.route: workers, or list the workers as engine.urls",
            )
        listed = await _workers_at_start(self._gateway, self.url)
        workers = workers_of(self._model_of_job, listed, self.url)
        self._observe(workers)
        self._workers.listed_at = time.monotonic()
        # The gateway would describe its first worker, whatever its model is. By the URL of a DP rank it
        # reaches no server.
        has_other_models = len(workers) < len(listed)
        has_ranks = any(worker.dp_base_url for worker in workers)
        model, server = await self._describe(workers, by_labels=has_other_models or has_ranks)
        # The gateway finds workers by the model's name, so every request must have the name.
        name_in_list = next((worker.model_id for worker in workers if worker.model_id), None)
        self._model_id = self._model_of_job or name_in_list or str(model["served_model_name"])
        self.model_to_send = self._model_id
        self._model_names = frozenset({self._model_id, str(model["model_path"])})
        # The labels in the gateway's list describe a worker's model. Without labels, there are no fields to
        # compare.
        self.guard.model = common_model([worker.model for worker in workers if worker.labels] or [{}])
        self._vocabulary = vocabulary_of(str(model["model_path"]))
        check_task(self._task, model, subject=f"{self.url}: serves {model['model_path']}")
        self._in_use = urls_in_use(workers)
        # If any worker is no regular HTTP server, the gateway must choose the worker of each request, so no
        # routing keys are searched.
        peculiarity = next((f"{w.url} {w.peculiarity}" for w in workers if w.peculiarity), None)
        keys = {} if peculiarity else await self._keys_of(self._in_use) or {}
        self._has_keys = bool(keys)
        self._keys_are_proven = len(keys) > 1
        self._has_halves = any(worker.worker_type == "decode" for worker in workers)
        for url, key in keys.items():
            self._workers.see(url).key = key
        # Without routing keys, the gateway is the only route.
        for url in keys or (self.url,):
            endpoint = self.endpoints[url] = self._new_endpoint(url)
            endpoint.arguments = server
        self.serving = [*self.endpoints.values()]
        self._reports_load = True
        loads = self._loads_now(workers, time.monotonic())
        info = describe(model_infos=[model], server_infos=[server], loads=loads)
        self._no_thinking_budget = info.no_thinking_budget
        return replace(
            info,
            kind="gateway",
            weights=self.guard.model.get("weight_version"),
            routes=tuple(self.endpoints),
            connections=connections,
            connections_by=limited_by,
            one_by_one=peculiarity or info.one_by_one,
            only_short_share=f"{DROPS_INTERVAL}, and a bundle has an event for each token",
            prefix_rows_alone=not self._has_keys,
            unsupported=self._unsupported(workers),
            notes=(self._note(workers), f"connections limited by {limited_by}", *info.notes),
        )

    def _unsupported(self, workers: Sequence[GatewayWorker]) -> dict[str, str]:
        """Return the parts of a job that the workers cannot do, and why."""
        unsupported = dict[str, str]()
        if any(worker.is_grpc for worker in workers):
            unsupported |= GRPC_UNSUPPORTED
        if self._has_halves:
            unsupported |= HALVES_UNSUPPORTED
        return unsupported

    def _note(self, workers: Sequence[GatewayWorker]) -> str:
        """Return a note for the user: why rows go through the gateway, and who chooses their worker."""
        if len(self._in_use) == 1:
            choice = ""
        elif self._has_keys:
            choice = ": each worker gets its rows by a routing key"
        elif any(worker.peculiarity for worker in workers):
            choice = ": the gateway chooses the worker of each row"
        else:
            choice = (
                ": the gateway chooses the worker of each row (with --policy consistent_hashing and "
                "--disable-worker-overload-protection, rows with a common prefix would stay on one worker)"
            )
        names = ", ".join(worker.url for worker in workers)
        return f"rows go through the gateway {self.url} ({self._why}) to {names}{choice}"

    async def _describe(
        self, workers: Sequence[GatewayWorker], *, by_labels: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the description of the workers' model, and the server arguments.

        If all workers speak HTTP, the gateway asks one of them for both, unless `by_labels` is true. Other
        workers are described only by their labels in the gateway's list, which have some of the fields.
        """
        assert self._question_session is not None
        status = ServerStatus(self._question_session, self.url)
        model, server = dict[str, Any](), dict[str, Any]()
        if not (by_labels or any(worker.is_grpc for worker in workers)):
            try:
                code, model = await status.mapping(MODEL_INFO, TIMING.server_open)
                _, server = await status.mapping(SERVER_INFO, TIMING.server_open)
            except NOT_REACHED as failure:
                raise EngineAwayError(f"{self.url}: no answer to {MODEL_INFO} ({failure!r})") from None
            if code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                names = ", ".join(worker.url for worker in workers)
                raise EngineAwayError(
                    f"{self.url}: no worker of the gateway answers ({code}): {names}",
                    hint="start the workers, or remove them from the gateway's list",
                )
        labels = next((worker.labels for worker in workers if worker.labels), {})
        labelled = {name: _value_of(value) for name, value in labels.items()}
        # The replies take precedence, because the labels date from the registration of the worker.
        model = {"served_model_name": workers[0].model_id, **labelled, **model}
        if not model.get("model_path"):
            raise EngineAwayError(f"{self.url}: the gateway does not say which model its workers serve")
        return model, {**labelled, **server}

    # Sending

    def _new_endpoint(self, url: str) -> Endpoint:
        return Endpoint(url, HangDetector(self._limits.hang), address=self.url)

    def _new_sender(self, endpoint: Endpoint, path: str) -> PostSender:
        assert self._row_session is not None
        key = self._workers.see(endpoint.url).key if self._has_keys else None
        headers = {} if key is None else {self._key_header: key}
        return GatewaySender(self._row_session, URL(endpoint.address + path), headers, self._workers)

    def _refuse_unsendable(self, request: Request) -> None:
        """Raise RowRefusedError for a row of a batch file that would get no answer; see `ONE_COMPLETION`."""
        super()._refuse_unsendable(request)
        if self._has_halves and request.kind == "body":
            field_n = fields_of(request.prompt.content).get("n")
            count = None if field_n is None else msgspec.json.decode(field_n)
            if isinstance(count, int) and count > 1:
                raise RowRefusedError(f"n: {ONE_COMPLETION}")

    async def tokens_of(self, request: Request, *, special: bool = True) -> list[int] | None:  # noqa: ARG002
        """Return None, because a gateway does not pass on `/v1/tokenize` to its workers."""
        return None

    async def _name_to_send(self, endpoint: Endpoint, body: RequestBody) -> str | None:  # noqa: ARG002
        """Return the model name that the gateway knows; warn once for each unknown name in the rows."""
        name = body.model
        if name is not None and name not in self._model_names and name not in self._names_to_send:
            log.warning("requests for the model %r are answered by %s", name, self._model_id)
            self._names_to_send[name] = self._model_id
        return self._model_id

    def _refusal(self, endpoint: Endpoint, answer: replies.WholeAnswer) -> RequestError:
        """Return the error of a refused row; mark a worker as in doubt if the gateway could not reach it."""
        error = refusal_of(answer)
        is_circuit_open = self._in_use and code_of(answer.content) == CIRCUIT_OPEN_CODE
        if is_circuit_open and not self._has_warned_of_circuit:
            self._has_warned_of_circuit = True
            log.warning(CIRCUIT_OPEN, self.url, len(self._in_use), error)
        if isinstance(error, (EngineDownError, EngineDiedError)):
            for url, state in self._workers.of.items():
                # The gateway's message may name the worker, even if the route is the whole gateway.
                if url == endpoint.url or url.encode() in answer.content:
                    was_alive = state.watch.record_failure()
                    if was_alive and code_of(answer.content) == HALF_AWAY_CODE:
                        error = EngineDiedError(str(error))
        return error or super()._refusal(endpoint, answer)

    async def _transport_error(
        self, endpoint: Endpoint, failure: Exception, request: SentRequest
    ) -> Exception:
        """Return the error of the rows of a request that failed on its way to the gateway."""
        self._workers.gateway_lost_at = time.monotonic()
        return await super()._transport_error(endpoint, failure, request)

    async def _abort(self, endpoint: Endpoint, rids: Sequence[str]) -> bool:  # noqa: ARG002 - not needed
        """Do nothing, because the gateway has no `/abort_request`.

        The client has closed its connection. So the gateway closes its own, and SGLang aborts the rows.
        """
        return True

    async def excuses(self, url: str, sent_at: float) -> bool:  # noqa: ARG002 - the same for all rows
        """Return True: the connection to the gateway was lost, not to a worker, so no row is to blame."""
        return True

    # Workers and their load

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load of each worker; empty while the gateway is away.

        Raises AnotherModelError for a worker that serves another model under the run's name.
        """
        if self._gateway is None or not self._reports_load:
            return []
        asked_at = time.monotonic()
        try:
            workers = await self._gateway.workers(TIMING.status_timeout)
        except (EngineDownError, *NOT_REACHED) as failure:
            self._log_absence(str(failure))
            return []
        self._log_absence(None)
        workers = [worker for worker in workers if worker.model_id in {None, self._model_id}]
        for worker in workers:
            if worker.labels:
                refuse_another(worker.url, self.guard.model, worker.model)
        self._observe(workers)
        self._workers.listed_at = asked_at
        self._follow(workers)
        loads = self._loads_now(workers, time.monotonic())
        # Without routing keys, nobody knows which worker has a row, so no worker can be blamed for a hang.
        if self._has_keys:
            self._pause_hanging_servers([load for load in loads if load.used_tokens is not None])
        return loads

    def _log_absence(self, why: str | None) -> None:
        """Log when the gateway goes away (`why` is the reason), and when it is back (`why` is None)."""
        is_away = why is not None
        if is_away == self._is_away:
            return
        self._is_away = is_away
        if is_away:
            log.warning("the gateway %s is away (%s): rows wait for it", self.url, why)
        else:
            log.warning("the gateway %s is back", self.url)
            self._incidents.append(Incident("back", self.url))
            # A restarted gateway may have forgotten the routing keys. With this list empty, a new search
            # begins.
            self._in_use = frozenset()

    def _observe(self, workers: Sequence[GatewayWorker]) -> None:
        """Process the load reports of all workers; raises AnotherModelError for other weights."""
        for worker in workers:
            state = self._workers.see(worker.url)
            state.watch.observe(worker)
            state.load.observe(worker.report, self._in_flight_at(worker))

    def _loads_now(self, workers: Sequence[GatewayWorker], now: float) -> list[SchedulerLoad]:
        """Return the load of each worker that gets rows."""
        in_use = urls_in_use(workers)
        used_workers = [worker for worker in workers if worker.url in in_use]
        # Each row needs a prefill and a decode worker, so all workers together have one load.
        if any(worker.worker_type == "decode" for worker in used_workers):
            return [self._load_of_halves(used_workers, now)]
        # If the gateway routes by keys, only the workers in `endpoints` get rows: those for which a key was
        # found.
        if self._has_keys:
            used_workers = [worker for worker in used_workers if worker.url in self.endpoints]
        return [self._load_of(worker, now) for worker in used_workers]

    def _load_of(self, worker: GatewayWorker, now: float) -> SchedulerLoad:
        """Return a worker's load.

        If rows cannot be sent to this worker itself, the load belongs to the gateway, which chooses the
        worker of each row.
        """
        if self._has_keys:
            scheduler, route = worker.url, worker.url
        else:
            scheduler, route = f"{self.url}#{worker.url}", self._shared_route
        load_estimate = self._workers.see(worker.url).load
        return load_estimate.now(self._in_flight_at(worker), scheduler=scheduler, route=route, now=now)

    def _in_flight_at(self, worker: GatewayWorker) -> int:
        endpoint = self.endpoints.get(worker.url)
        if self._has_keys and endpoint is not None:
            # The worker is a route, so our own requests at it are known.
            requests_of_others = 0 if worker.load is None else max(0, worker.load - len(endpoint.requests))
            return _rows_of(endpoint) + requests_of_others
        if worker.load is None:
            return worker.report.num_running_reqs + worker.report.num_waiting_reqs
        # The gateway chooses the worker of each request, and each of its requests may be a bundle of several
        # rows of this run.
        return round(worker.load * self._rows_per_request())

    def _load_of_halves(self, workers: Sequence[GatewayWorker], now: float) -> SchedulerLoad:
        """Return one load for all prefill and decode workers; see `report_of_halves`."""
        decoding = [worker for worker in workers if worker.worker_type == "decode"]
        # Other clients may use the gateway too, so its own count of requests may exceed the run's rows.
        counts = [worker.load for worker in decoding if worker.load is not None]
        rows_of_run = sum(map(_rows_of, self.serving))
        # If the count of a worker is missing, the sum is unknown, and only the run's own rows count.
        requests_at_gateway = sum(counts) if len(counts) == len(decoding) else 0
        in_flight = max(requests_at_gateway, rows_of_run)
        self._halves_load.observe(report_of_halves(workers), in_flight)
        return self._halves_load.now(in_flight, scheduler=self.url, route=self.url, now=now)

    def _rows_per_request(self) -> float:
        """Return the mean number of rows per request in flight; a bundle has several rows."""
        requests = sum(len(endpoint.requests) for endpoint in self.serving)
        return sum(map(_rows_of, self.serving)) / requests if requests else 1.0

    def _follow(self, workers: Sequence[GatewayWorker]) -> None:
        """Send rows to the workers in use now; search for routing keys if workers or keys have changed."""
        in_use = urls_in_use(workers)
        # After a start of the gateway every worker would count as new, so none is logged.
        if self._in_use:
            for url in sorted(in_use - self._in_use):
                log.info("%s gets rows from now on, because the gateway uses it", url)
        for url in sorted(self._in_use - in_use):
            log.info("%s gets no more rows, because the gateway does not use it now", url)
        is_changed, self._in_use = in_use != self._in_use, in_use
        if not self._has_keys:
            # The gateway chooses the worker of each request, so routing keys are of no use.
            return
        if is_changed:
            for endpoint in self.serving:
                endpoint.set_listed(is_listed=endpoint.url in in_use)
        lack_keys = any(self._workers.see(url).key is None for url in in_use)
        is_searching = self._key_search is not None and not self._key_search.done()
        if (is_changed or lack_keys or self._leads_astray(time.monotonic())) and not is_searching:
            self._key_search = asyncio.create_task(self._renew_keys())

    # Routing keys

    def _leads_astray(self, now: float) -> bool:
        """Tell whether to search for routing keys again, because a key led to the wrong worker.

        Either the gateway has assigned the key to another worker, or its overload protection avoids the right
        worker for a while. A new search does not help against overload protection, so there is a pause
        between searches.
        """
        if now < self._next_search_at:
            return False
        # A worker that has left is not checked, because another worker now gets the rows with its key.
        for endpoint in filter(lambda endpoint: endpoint.is_listed, self.serving):
            for sender in endpoint.senders.values():
                assert isinstance(sender, GatewaySender)
                if sender.answered_by not in {None, endpoint.url}:
                    # The warning is logged once. Later searches are routine.
                    if not self._next_search_at:
                        log.warning(ASTRAY, endpoint.url, sender.answered_by)
                    sender.answered_by = None
                    self._next_search_at = now + LEAST_SEARCH_PAUSE_S
                    return True
        return False

    async def _renew_keys(self) -> None:
        """Search for the workers' routing keys; search again if the list of workers has changed."""
        is_current = False
        while not is_current:
            urls = self._in_use
            keys = await self._keys_of(urls)
            if keys is None and not self._keys_are_proven:
                self._share_one_route()
                return
            keys = keys or {}
            self._keys_are_proven |= len(keys) > 1
            if not keys.keys() >= urls:
                # A worker or the gateway is down. The worker keeps its old key until it answers again. This
                # pause limits how often the search is repeated meanwhile.
                await asyncio.sleep(TIMING.model_check)
            is_current = urls == self._in_use
            for url, key in keys.items():
                self._workers.see(url).key = key
                endpoint = self.endpoints.get(url)
                if endpoint is None:
                    endpoint = self.endpoints[url] = self._new_endpoint(url)
                    self.serving.append(endpoint)
                endpoint.set_listed(is_listed=True)
                # New senders are created when needed, with the new routing key.
                endpoint.senders.clear()

    def _share_one_route(self) -> None:
        """Send all rows without routing keys from now on, because the gateway does not route by keys.

        The run began with a single worker, so its route is now that of all workers.
        """
        endpoint = self.serving[-1]
        log.warning(
            "the gateway %s does not keep the rows of a routing key on one worker: from now on the gateway "
            "chooses the worker of each row, and the route %s stands for all workers",
            self.url, endpoint.url,
        )  # fmt: skip
        self._has_keys = False
        self._shared_route = endpoint.url
        endpoint.set_listed(is_listed=True)
        # New senders are created when needed, without a routing key.
        endpoint.senders.clear()

    async def _keys_of(self, urls: frozenset[str]) -> dict[str, str] | None:
        """Try routing keys until one leads to each worker; return the keys by the workers' URLs.

        A worker that is down gets no key. The result is None if the gateway does not route by keys: a key has
        led to different workers, or some worker got no key though all requests were answered.

        Requests are sent one after the other. A gateway may pin a key to a worker at the first request with
        the key, and the second request must not arrive before that.
        """
        keys = dict[str, str]()
        unanswered = 0
        for _ in range(TRIES_PER_WORKER * len(urls)):
            if keys.keys() >= urls or unanswered >= UNANSWERED_PER_WORKER * len(urls):
                break
            key = f"{self._rid_prefix}-{next(self._key_numbers)}"
            url = await self._worker_of(key)
            if url is None:
                unanswered += 1
            elif url in urls and url not in keys:
                keys[url] = key
                answered_by = await self._worker_of(key)
                if answered_by != url:
                    # A second request with the key led elsewhere, so the gateway does not route by keys. If
                    # there was no answer, nothing is known.
                    return None if answered_by else {}
        # If every request was answered, a gateway that routes by keys would have reached all workers.
        if not (keys.keys() >= urls or unanswered):
            return None
        # A gateway that ignores keys may still have chosen the same worker twice by chance.
        for _ in range(CONFIRMATIONS - 1):
            for url, key in keys.items():
                answered_by = await self._worker_of(key)
                if answered_by != url:
                    return None if answered_by else {}
        return keys

    async def _worker_of(self, key: str) -> str | None:
        """Return the URL of the worker to which a key leads; None if no worker answers.

        The request has an invalid temperature, so the worker refuses it at once.
        """
        assert self._question_session is not None
        body = {"model": self._model_id, "input_ids": [1], "sampling_params": {"temperature": -1}}
        url = URL(self.url + wire.GENERATE_PATH)
        sender = PostSender(self._question_session, url, headers={self._key_header: key})
        try:
            async with asyncio.timeout(TIMING.status_timeout):
                answer = await sender.post(wire.bytes_of(body))
        except (EngineDownError, *NOT_REACHED):
            return None
        answer.release()
        return answer.headers.get(ROUTED_TO)

    async def close(self) -> None:
        """End a search for routing keys, and close all connections."""
        if self._key_search is not None:
            self._key_search.cancel()
            await asyncio.gather(self._key_search, return_exceptions=True)
        await super().close()


def _rows_of(endpoint: Endpoint) -> int:
    """Return the number of this run's rows in flight at an endpoint; a bundle has several rows."""
    return sum(max(1, len(request.rids)) for request in endpoint.requests.values())


def _value_of(label: Any) -> Any:
    """Return the value of a label: decoded if it is JSON, such as true or 4096, otherwise the text."""
    try:
        return orjson.loads(label)
    except (orjson.JSONDecodeError, TypeError):
        return label
