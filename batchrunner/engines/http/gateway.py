"""Sends rows through SGLang's Model Gateway (`smg`), and decides whether they have to go through it.

A gateway sends all requests with the same routing key to one worker if its policy is `consistent_hashing` or
`manual`, or if it has `--routing-key-override`. With such a gateway each worker is a route, and the rows of
the route have a key that leads to the worker. So concurrency limits, prefix groups and retries work as for a
server that is reached directly. Any other gateway is a single route with several schedulers, and the gateway
chooses the worker of each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, NamedTuple

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
from batchrunner.core.media import KIND_OF_FIELD
from batchrunner.core.server_replies import error_of
from batchrunner.core.timing import TIMING
from batchrunner.core.types import CHAT_PATH, COMPLETIONS_PATH, SCORE_PATH, Request, RequestBody
from batchrunner.engines.hang_detector import HangDetector
from batchrunner.engines.http import replies, wire
from batchrunner.engines.http.client import HttpEngine
from batchrunner.engines.http.connections import open_connections
from batchrunner.engines.http.gateway_workers import (
    GatewayQuestions,
    GatewayWorker,
    LoadEstimate,
    WorkerWatch,
    disaggregated_report,
    urls_in_use,
    workers_of_model,
)
from batchrunner.engines.http.guard import common_model, refuse_another
from batchrunner.engines.http.server import Endpoint, SentRequest
from batchrunner.engines.http.server_info import (
    MODEL_INFO,
    NOT_REACHED,
    ServerStatus,
    check_task,
    describe,
)
from batchrunner.engines.http.wire import PostedAnswer, PostSender
from batchrunner.input.request_bodies import fields_of
from batchrunner.job.engine import GatewayEngine
from batchrunner.job.output import OF_TOKENS
from batchrunner.job.sampling import THINKING
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
GATEWAY_MODEL_INFO = "/get_model_info"
"""Path under which the gateway returns the `/model_info` of its first HTTP worker."""
GATEWAY_SERVER_INFO = "/get_server_info"
"""Path under which the gateway returns the `/server_info` of its first HTTP worker."""
TASKS_PASSED = frozenset({GENERATE, EMBED})
"""Tasks whose requests a gateway passes on. It has no `/encode`, and takes no lists of logprob options."""
CIRCUIT_OPEN_CODE = "no_available_workers"
"""Error code of a request while all workers are unhealthy, or their circuit breakers are open."""
NO_WORKER_CODES = frozenset({CIRCUIT_OPEN_CODE, "no_healthy_workers", "no_workers", "model_not_found"})
"""Error codes of a request for which the gateway has no worker now."""
UNCONNECTED_CODE = "call_upstream_connection_failed"
"""Error code of a request for which the gateway could not connect to the worker."""
DISAGGREGATION_FAILED_CODE = "PD disaggregation request failed"
"""Error code of a request whose connection to its prefill or decode worker failed. The worker may have died
with the request, or it was down before: the gateway uses a worker until three health checks have failed."""
BROKEN_CONNECTION_CODES = ("call_upstream_", "read_response", "upstream_error", "worker_stream_failed")
"""Prefixes of the error codes of a request whose connection from the gateway to the worker broke before the
answer."""
LIMIT_CODES = (
    "admission_queue_",
    "scheduler_queue_",
    "scheduler_preempted",
    "prefill_queue_",
    "tenant_rate_limit",
    "rate_limit",
    "worker_overload_protection_shed",
    "selection_queue_timeout",
)
"""Prefixes of the error codes of a request that the gateway refuses because of its own limits, such as its
queue or the quota of a tenant."""
_GRPC = "the gateway's workers speak gRPC, for which the gateway "
_NO_TEXTS = f"{_GRPC}returns tokens without their texts"
_DROPS_ADAPTER = f"{_GRPC}drops the adapter's name"
GRPC_UNSUPPORTED: Mapping[str, str] = {
    "sampling.lora_path": _DROPS_ADAPTER,
    **dict.fromkeys(OF_TOKENS, _NO_TEXTS),
}
"""Parts of a job that gRPC workers cannot do, and why."""
GRPC_UNSUPPORTED_IN_CHATS: Mapping[str, str] = {"output_ids": f"{_GRPC}returns no token ids of chats"}
"""Parts of a job that gRPC workers cannot do in chats, and why."""
GRPC_UNSUPPORTED_ELSEWHERE: Mapping[str, str] = {
    f"prompt.{field}": f"{_GRPC}drops the files of a prompt that is no chat" for field in KIND_OF_FIELD
}
"""Parts of a job that gRPC workers cannot do in prompts that are no chats, and why."""
ONE_COMPLETION = (
    "with prefill and decode apart, SGLang does not answer a request for several completions (0.5.23)"
)
"""Reason why the gateway gets no requests with `n` above 1. All completions would use one transfer of the KV
cache, and wait for it forever (https://github.com/sgl-project/sglang/pull/30723)."""
DISAGGREGATION_UNSUPPORTED: Mapping[str, str] = {"sampling.n": ONE_COMPLETION}
"""Parts of a job that prefill and decode workers cannot do, and why."""


class LostParameters(NamedTuple):
    """Sampling parameters that do not reach the workers, and why; by the name of the parameter."""

    in_chats: Mapping[str, str]
    elsewhere: Mapping[str, str]


_READS = (
    "the gateway reads requests to choose a worker, and {} (to change that, start it with --policy "
    "consistent_hashing and without prefill and decode workers, or set engine.route: workers)"
)
NOTHING_LOST = LostParameters({}, {})
"""Lost parameters of a gateway that passes requests on without reading them."""
LOST_BY_READING = LostParameters(
    in_chats={"structural_tag": _READS.format("refuses structural tags")},
    elsewhere=dict.fromkeys(
        ("logit_bias", "spaces_between_special_tokens", "stop_regex", "structural_tag"),
        _READS.format("drops this parameter of a prompt that is no chat"),
    ),
)
"""Lost parameters of a gateway that reads requests, such as for prefix caches, and writes them anew
(smg 1.13)."""
_LOST_BY_GRPC = dict.fromkeys(
    (*LOST_BY_READING.elsewhere, "custom_params", THINKING), f"{_GRPC}drops this parameter"
)
LOST_BY_GRPC = LostParameters(
    in_chats=_LOST_BY_GRPC | {"min_new_tokens": f"{_GRPC}drops this parameter of a chat"},
    elsewhere=_LOST_BY_GRPC,
)
"""Lost parameters of gRPC workers (smg 1.13, smg-grpc-proto 0.4). A seed is dropped too, which SGLang would
ignore unless its server is deterministic."""
LOST_FIELDS = frozenset({"custom_params", "logit_bias", "lora_path", "min_tokens", "stop_regex"})
"""Fields of requests in batch files that the gateway drops for gRPC workers."""
CHAT_LIMITS: Mapping[str, int] = {"sampling.n": 10, "sampling.stop": 4, "output.top_logprobs": 20}
"""Largest values in chats that a gateway accepts if it reads requests (smg 1.13)."""
NO_SCORES = f"a gateway does not pass on {SCORE_PATH}: set engine.route: workers, or give the workers' URLs"
"""Reason why a gateway gets no requests for scores, which a batch file may have."""
TAKE_ADAPTERS = frozenset({CHAT_PATH, COMPLETIONS_PATH})
"""Endpoints of batch files at which SGLang reads a LoRA adapter in the field `lora_path`."""


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
    """Return the error of a row that the gateway itself refused.

    Return None for a refusal by a worker, and for a refusal for which the row may be to blame: the status
    then decides, as without a gateway. No row is to blame if the gateway reached no worker, or refused the
    request because of a limit of its own. After a timeout, the attempt counts against the row. If a
    connection broke before the answer, the row may have killed the worker.
    """
    code = code_of(answer.content)
    if code is None:
        return None
    error = error_of(answer.status, answer.content, answer.retry_after)
    message = f"the gateway: {error}"
    if code in NO_WORKER_CODES or code in {UNCONNECTED_CODE, DISAGGREGATION_FAILED_CODE}:
        return UnreachedError(message)
    if code.startswith(LIMIT_CODES):
        pause_s = error.retry_after_s if isinstance(error, EngineBusyError) else None
        return EngineBusyError(message, pause_s)
    if "timeout" in code or answer.status in {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.GATEWAY_TIMEOUT}:
        return AttemptFailedError(message)
    if code.startswith(BROKEN_CONNECTION_CODES):
        return EngineDiedError(message)
    return None


async def reason_to_go_through(spec: GatewayEngine, api_key_header: Mapping[str, str]) -> str | None:
    """Return why rows must go through a gateway; None if all its workers can be reached directly.

    `api_key_header` is empty without an API key. Raises EngineAwayError if there is no gateway, or if it has
    no workers, EngineStartError if it has no workers of the job's model.
    """
    async with aiohttp.ClientSession(headers={**api_key_header, **spec.headers}) as session:
        listed = await _workers_at_start(GatewayQuestions(session, spec.url))
    workers = workers_of_model(listed, model=spec.model, gateway_url=spec.url)
    # The workers that are up decide. A worker that is down gets rows once it answers, whichever way they go.
    in_use = urls_in_use(workers)
    workers = [worker for worker in workers if worker.url in in_use] or workers
    for worker in workers:
        if worker.why_gateway_only is not None:
            return f"{worker.url} {worker.why_gateway_only}"
    # DP ranks of one server have the same address, which is tried once.
    by_address = {worker.address: worker for worker in workers}
    # The job's headers are for the gateway, so the workers do not get them.
    async with aiohttp.ClientSession(headers=api_key_header) as session:
        reasons = await asyncio.gather(*(_why_unreachable(session, worker) for worker in by_address.values()))
    return next(filter(None, reasons), None)


async def _workers_at_start(gateway: GatewayQuestions) -> list[GatewayWorker]:
    """Return the workers that the gateway is not removing.

    Raises EngineAwayError if there are none, or if no gateway answers.
    """
    try:
        workers = await gateway.workers()
    except EngineDownError as failure:
        raise EngineAwayError(str(failure)) from None
    staying = [worker for worker in workers if not worker.is_leaving]
    if not staying:
        raise EngineAwayError(f"{gateway.url}: the gateway has no workers")
    return staying


async def _why_unreachable(session: aiohttp.ClientSession, worker: GatewayWorker) -> str | None:
    """Return why a worker cannot get rows directly.

    Return None if the worker answers at its own address, with the model that the gateway lists.
    """
    try:
        status, reply = await ServerStatus(session, worker.address).mapping(MODEL_INFO, TIMING.status_timeout)
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

    by_url: dict[str, WorkerState] = field(default_factory=dict)
    """States by the URLs of the workers."""
    listed_at: float = -math.inf
    """Time at which the last answered request for the list of workers was sent."""
    gateway_lost_at: float = -math.inf
    """Time at which a row's connection to the gateway last failed."""

    def state_of(self, url: str, *, unlisted_at: float = -math.inf) -> WorkerState:
        """Return the state of a worker. If the worker is new, create its state with `unlisted_at`."""
        state = self.by_url.get(url)
        if state is None:
            state = self.by_url[url] = WorkerState(WorkerWatch(url), unlisted_at)
        return state

    @property
    def is_gateway_in_doubt(self) -> bool:
        """Whether the gateway may have been restarted since its list was read, with other workers."""
        return self.gateway_lost_at >= self.listed_at

    def is_in_doubt(self, url: str) -> bool:
        """Tell whether a worker that has answered may serve another model.

        It may if it is new, or if another server may have taken its address.
        """
        state = self.state_of(url, unlisted_at=time.monotonic())
        # Only a list that was requested after the worker's first answer is sure to show the worker's model.
        is_new = state.unlisted_at >= self.listed_at
        return is_new or state.watch.in_doubt


class GatewaySender(PostSender):
    """Posts rows to a gateway, and refuses the answers of workers that may serve another model."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: URL,
        *,
        headers: Mapping[str, str],
        worker_states: WorkerStates,
    ) -> None:
        """Send `headers` with each request. `worker_states` is shared with the engine, which updates it."""
        super().__init__(session, url, headers=headers)
        self._worker_states = worker_states
        self.answered_by: str | None = None
        """URL of the worker that answered last; None before the first answer."""

    async def post(self, body: bytes) -> PostedAnswer:
        """Send a body; see `PostSender.post`.

        Raises EngineDownError while the gateway is in doubt, and for an answer of a worker in doubt.
        """
        if self._worker_states.is_gateway_in_doubt:
            gateway = self._url.origin()
            raise EngineDownError(f"the gateway {gateway} was away, and has not listed its workers since")
        answer = await super().post(body)
        worker_url = answer.headers.get(ROUTED_TO)
        if worker_url is None:
            return answer
        self.answered_by = worker_url
        if answer.status == HTTPStatus.OK and self._worker_states.is_in_doubt(worker_url):
            answer.release()
            raise EngineDownError(
                f"{worker_url} was away or is new: its answers count once its model is known"
            )
        return answer


class _KeysIgnoredError(Exception):
    """The gateway ignores routing keys: two requests with the same key went to different workers."""


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
        """`why` is the reason, for a note, why rows go through the gateway instead of to the workers.

        `spec` describes the gateway.
        """
        super().__init__(api_key=api_key, limits=limits, task=task)
        self._headers |= spec.headers
        # Answers are watched for repetition through events every few tokens, which need `stream_interval`.
        self._why_unwatched = DROPS_INTERVAL
        self.url = spec.url
        self._why = why
        self._routing_key_header = spec.routing_key_header
        self._model_of_job = spec.model
        """Model name that the job gives as `engine.model`; None if the gateway serves one model only."""
        self._gateway_questions: GatewayQuestions | None = None
        """Asks the gateway for its workers; None before `open`."""
        self._model_id = ""
        """Model name by which the gateway finds the workers."""
        self._worker_states = WorkerStates()
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
        """Search for new keys, after a change of the workers or of their keys."""
        self._next_search_at = 0.0
        """If the gateway sent a row to a wrong worker, routing keys are searched again, but not before this
        time (seconds of the monotonic clock)."""
        self._has_warned_of_misrouting = False
        """Whether the log has a warning that the gateway sent a row to a wrong worker."""
        self._is_disaggregated = False
        """Whether prefill and decode run on different workers (PD disaggregation)."""
        self._speaks_grpc = False
        """Whether any worker speaks gRPC."""
        self._lost = NOTHING_LOST
        """Sampling parameters that do not reach the workers."""
        self._disaggregated_load = LoadEstimate()
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
        self._gateway_questions = GatewayQuestions(self._question_session, self.url)
        if self._task not in TASKS_PASSED:
            raise EngineStartError(
                f"task: {self._task} needs requests that the gateway {self.url} does not pass on",
                hint="set engine.route: workers, or list the workers as engine.urls",
            )
        # The time before the request, because a worker may change while the list is on its way.
        asked_at = time.monotonic()
        listed = await _workers_at_start(self._gateway_questions)
        workers = workers_of_model(listed, model=self._model_of_job, gateway_url=self.url)
        self._observe(workers)
        self._worker_states.listed_at = asked_at
        # The gateway answers questions about the model for its first worker, which may serve another model.
        # Behind a DP rank's URL, which ends with `@` and the rank, the gateway reaches no server.
        has_other_models = len(workers) < len(listed)
        has_ranks = any(worker.dp_base_url for worker in workers)
        model_info, server_info = await self._describe_workers(
            workers, by_labels=has_other_models or has_ranks
        )
        # The gateway finds workers by the model's name, so every request must have the name.
        name_in_list = next((worker.model_id for worker in workers if worker.model_id), None)
        self._model_id = self._model_of_job or name_in_list or str(model_info["served_model_name"])
        self.model_to_send = self._model_id
        self._model_names = frozenset({self._model_id, str(model_info["model_path"])})
        # The labels in the gateway's list describe a worker's model. Without labels, there are no fields to
        # compare.
        self.guard.model = common_model([worker.model for worker in workers if worker.labels] or [{}])
        self._vocabulary = vocabulary_of(str(model_info["model_path"]))
        check_task(self._task, model_info, subject=f"{self.url}: serves {model_info['model_path']}")
        self._is_disaggregated = any(worker.is_decode for worker in workers)
        self._speaks_grpc = any(worker.is_grpc for worker in workers)
        await self._open_routes(workers, server_info)
        # A gateway that translates requests to gRPC, or reads them to choose a worker, loses some sampling
        # parameters. With prefill and decode workers it always reads them.
        if self._speaks_grpc:
            self._lost = LOST_BY_GRPC
        elif self._is_disaggregated or not await self._passes_on_unread():
            self._lost = LOST_BY_READING
        # Such workers take only one row in a request.
        why_one_by_one = next(
            (f"{worker.url} {worker.why_gateway_only}" for worker in workers if worker.why_gateway_only), None
        )
        self._reports_load = True
        loads = self._loads_now(workers, time.monotonic())
        info = describe(model_infos=[model_info], server_infos=[server_info], loads=loads)
        self._no_thinking_budget = info.no_thinking_budget
        return replace(
            info,
            kind="gateway",
            weights=self.guard.model.get("weight_version"),
            routes=tuple(self.endpoints),
            connections=connections,
            connections_by=limited_by,
            one_by_one=why_one_by_one or info.one_by_one,
            only_short_share=f"{DROPS_INTERVAL}, and a bundle has an event for each token",
            prefix_rows_alone=not self._has_keys,
            unsupported=self._unsupported(),
            unsupported_in_chats=self._unsupported_in_chats(),
            unsupported_elsewhere=self._unsupported_elsewhere(),
            chat_limits={} if self._lost is NOTHING_LOST else CHAT_LIMITS,
            notes=(self._note(workers), f"connections limited by {limited_by}", *info.notes),
        )

    async def _open_routes(self, workers: Sequence[GatewayWorker], server_info: Mapping[str, Any]) -> None:
        """Create an endpoint for each worker that has a routing key; without keys, one for the gateway."""
        self._in_use = urls_in_use(workers)
        keys: dict[str, str] = {}
        # If any worker is no regular HTTP server, the gateway must choose the worker of each request, so no
        # routing keys are searched.
        if not any(worker.why_gateway_only for worker in workers):
            with contextlib.suppress(_KeysIgnoredError):
                keys = await self._find_keys(self._in_use)
        self._has_keys = bool(keys)
        # A single worker proves nothing: every key leads to it, whatever the gateway's policy is.
        self._keys_are_proven = len(keys) > 1
        for url, key in keys.items():
            self._worker_states.state_of(url).key = key
        for url in keys or (self.url,):
            endpoint = self.endpoints[url] = self._new_endpoint(url)
            endpoint.arguments = server_info
        self.serving = [*self.endpoints.values()]

    def _unsupported(self) -> dict[str, str]:
        """Return the parts of a job that the gateway or its workers cannot do, and why."""
        unsupported = {SCORE_PATH: NO_SCORES}
        if self._speaks_grpc:
            unsupported |= GRPC_UNSUPPORTED
        if self._is_disaggregated:
            unsupported |= DISAGGREGATION_UNSUPPORTED
        return unsupported

    def _unsupported_in_chats(self) -> dict[str, str]:
        """Return the parts of a job that do not work in chats, and why."""
        lost = _as_parts(self._lost.in_chats)
        return {**lost, **GRPC_UNSUPPORTED_IN_CHATS} if self._speaks_grpc else lost

    def _unsupported_elsewhere(self) -> dict[str, str]:
        """Return the parts of a job that do not work in prompts that are no chats, and why."""
        lost = _as_parts(self._lost.elsewhere)
        return {**lost, **GRPC_UNSUPPORTED_ELSEWHERE} if self._speaks_grpc else lost

    def _note(self, workers: Sequence[GatewayWorker]) -> str:
        """Return a note for the user: why rows go through the gateway, and who chooses their worker."""
        if len(self._in_use) == 1:
            choice = ""
        elif self._has_keys:
            choice = ": each worker gets its rows by a routing key"
        elif any(worker.why_gateway_only for worker in workers):
            choice = ": the gateway chooses the worker of each row"
        else:
            choice = (
                ": the gateway chooses the worker of each row (with --policy consistent_hashing and "
                "--disable-worker-overload-protection, rows with a common prefix would stay on one worker)"
            )
        names = ", ".join(worker.url for worker in workers)
        return f"rows go through the gateway {self.url} ({self._why}) to {names}{choice}"

    async def _describe_workers(
        self, workers: Sequence[GatewayWorker], *, by_labels: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return one reply to `/model_info` and one to `/server_info`, which stand for all workers.

        If all workers speak HTTP, the gateway asks one of them for both, unless `by_labels` is true. Other
        workers are described only by their labels in the gateway's list, which have some of the fields.
        """
        model_info, server_info = dict[str, Any](), dict[str, Any]()
        if not (by_labels or any(worker.is_grpc for worker in workers)):
            gateway = self.status_of(self.url)
            try:
                status, model_info = await gateway.mapping(GATEWAY_MODEL_INFO, TIMING.server_open)
                _, server_info = await gateway.mapping(GATEWAY_SERVER_INFO, TIMING.server_open)
            except NOT_REACHED as failure:
                raise EngineAwayError(
                    f"{self.url}: no answer to {GATEWAY_MODEL_INFO} ({failure!r})"
                ) from None
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                names = ", ".join(worker.url for worker in workers)
                raise EngineAwayError(
                    f"{self.url}: no worker of the gateway answers ({status}): {names}",
                    hint="start the workers, or remove them from the gateway's list",
                )
        first_labels = next((worker.labels for worker in workers if worker.labels), {})
        labels = {name: _value_of(value) for name, value in first_labels.items()}
        # The replies take precedence, because the labels date from the registration of the worker.
        model_info = {"served_model_name": workers[0].model_id, **labels, **model_info}
        if not model_info.get("model_path"):
            raise EngineAwayError(f"{self.url}: the gateway does not say which model its workers serve")
        return model_info, {**labels, **server_info}

    # Sending

    def _new_endpoint(self, url: str) -> Endpoint:
        return Endpoint(url, HangDetector(self._limits.hang), address=self.url)

    def _new_sender(self, endpoint: Endpoint, path: str) -> PostSender:
        assert self._row_session is not None
        key = self._worker_states.state_of(endpoint.url).key if self._has_keys else None
        return GatewaySender(
            self._row_session,
            URL(endpoint.address + path),
            headers={} if key is None else {self._routing_key_header: key},
            worker_states=self._worker_states,
        )

    def _refuse_unsendable(self, request: Request) -> None:
        """Raise RowRefusedError for a row that would get no answer, or the answer to another request.

        What the job itself sets is refused earlier; see `_unsupported`.
        """
        super()._refuse_unsendable(request)
        if request.kind == "body":
            self._refuse_body(request.prompt)
            return
        # A function of the job may make prompts of several kinds, and set parameters that the job lacks.
        lost = self._lost.in_chats if request.kind == "messages" else self._lost.elsewhere
        for name in lost.keys() & request.sampling.keys():
            raise RowRefusedError(f"sampling.{name}: {lost[name]}")

    def _refuse_body(self, body: RequestBody) -> None:
        """Raise RowRefusedError for a request of a batch file; see `_refuse_unsendable`."""
        if body.path == SCORE_PATH:
            raise RowRefusedError(NO_SCORES)
        if self._adapter_in(body):
            if self._speaks_grpc:
                raise RowRefusedError(f"model {body.model!r}: {_DROPS_ADAPTER}")
            if body.path not in TAKE_ADAPTERS:
                raise RowRefusedError(
                    f"model {body.model!r}: {body.path} takes no LoRA adapter through a gateway: "
                    f"use {CHAT_PATH}"
                )
        if not (self._is_disaggregated or self._speaks_grpc):
            return
        fields = {name: value for name, value in fields_of(body.content).items() if bytes(value) != b"null"}
        completions = msgspec.json.decode(fields.get("n", b"1"))
        if self._is_disaggregated and isinstance(completions, int) and completions > 1:
            raise RowRefusedError(f"n: {ONE_COMPLETION}")
        for name in sorted(LOST_FIELDS & fields.keys()) if self._speaks_grpc else ():
            raise RowRefusedError(f"{name}: {_GRPC}drops this field")

    def _adapter_in(self, body: RequestBody) -> str | None:
        """Return the LoRA adapter in a row's model name, which is `model:adapter`; None without one."""
        name = body.model
        return None if name is None or name in self._model_names else name.partition(":")[2] or None

    async def tokens_of(self, request: Request, *, special: bool = True) -> list[int] | None:  # noqa: ARG002
        """Return None, because a gateway does not pass on `/v1/tokenize` to its workers."""
        return None

    async def _reply_to(self, endpoint: Endpoint, request: Request) -> bytes | list[bytes]:
        """Send one request; see `HttpEngine`.

        A gateway finds workers by the whole name of a model, so an adapter in the name becomes a field.
        """
        if request.kind == "body" and (adapter := self._adapter_in(request.prompt)):
            content = wire.with_fields(request.prompt.content, {"lora_path": adapter})
            request = request._replace(prompt=request.prompt._replace(content=content))
        return await super()._reply_to(endpoint, request)

    async def _name_to_send(self, endpoint: Endpoint, body: RequestBody) -> str | None:  # noqa: ARG002
        """Return the model name that the gateway knows; warn once for each unknown name in the rows."""
        name = body.model
        if name is None or self._adapter_in(body):
            return self._model_id
        if name not in self._model_names and name not in self._names_to_send:
            log.warning("requests for the model %r are answered by %s", name, self._model_id)
            self._names_to_send[name] = self._model_id
        return self._model_id

    def _refusal(self, endpoint: Endpoint, answer: replies.WholeAnswer) -> RequestError:
        """Return the error of a refused row; mark a worker as in doubt if the gateway could not reach it."""
        error = refusal_of(answer)
        if error is None:
            return super()._refusal(endpoint, answer)
        code = code_of(answer.content)
        if code == CIRCUIT_OPEN_CODE and self._in_use:
            self._warn_of_circuit(error)
        # The gateway did not reach a worker, or lost it. Another server may take the worker's address.
        if isinstance(error, EngineDownError):
            for url, state in self._worker_states.by_url.items():
                # The gateway's message may name the worker, even if the route is the whole gateway.
                if url == endpoint.url or url.encode() in answer.content:
                    was_up = state.watch.record_failure()
                    # A worker that was up until now may have been killed by the row.
                    if was_up and code == DISAGGREGATION_FAILED_CODE:
                        error = EngineDiedError(str(error))
        return error

    def _warn_of_circuit(self, refusal: RequestError) -> None:
        """Warn once that the gateway refuses rows although it lists healthy workers."""
        if self._has_warned_of_circuit:
            return
        self._has_warned_of_circuit = True
        log.warning(
            "the gateway %s lists %d healthy workers, but sends them no rows (%s). Failed rows have opened "
            "its circuit breaker: rows wait until the gateway tries a worker again. Start the gateway with "
            "--disable-circuit-breaker --disable-retries",
            self.url, len(self._in_use), refusal,
        )  # fmt: skip

    async def _transport_error(
        self, endpoint: Endpoint, failure: Exception, request: SentRequest
    ) -> Exception:
        """Return the error of the rows of a request that failed on its way to the gateway."""
        self._worker_states.gateway_lost_at = time.monotonic()
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
        if self._gateway_questions is None or not self._reports_load:
            return []
        asked_at = time.monotonic()
        try:
            workers = await self._gateway_questions.workers(TIMING.status_timeout)
        except EngineDownError as failure:
            self._record_absence(str(failure))
            return []
        if self._is_away:
            self._record_return()
        workers = [worker for worker in workers if worker.serves(self._model_id)]
        for worker in workers:
            if worker.labels:
                refuse_another(worker.url, self.guard.model, worker.model)
        self._observe(workers)
        self._worker_states.listed_at = asked_at
        self._update_routes(workers)
        loads = self._loads_now(workers, time.monotonic())
        # Without routing keys, nobody knows which worker has a row, so no worker can be blamed for a hang.
        if self._has_keys:
            # The used tokens are a worker's only sign of progress (`hang_detector.progress_of`).
            self._pause_hanging_servers([load for load in loads if load.used_tokens is not None])
        return loads

    def _record_absence(self, why: str) -> None:
        """Log that the gateway does not answer, unless the log says so already."""
        if not self._is_away:
            self._is_away = True
            log.warning("the gateway %s is away (%s): rows wait for it", self.url, why)

    def _record_return(self) -> None:
        """Report that the gateway answers again, and let the routing keys be searched again."""
        self._is_away = False
        log.warning("the gateway %s is back", self.url)
        self._incidents.append(Incident("back", self.url))
        # A restarted gateway may have forgotten the keys. Because no worker counts as used, the next list of
        # workers is a change, and a new search begins.
        self._in_use = frozenset()

    def _observe(self, workers: Sequence[GatewayWorker]) -> None:
        """Process the load reports of all workers; raises AnotherModelError for other weights."""
        for worker in workers:
            state = self._worker_states.state_of(worker.url)
            state.watch.observe(worker)
            state.load.observe(worker.report, self._in_flight_at(worker))

    def _loads_now(self, workers: Sequence[GatewayWorker], now: float) -> list[SchedulerLoad]:
        """Return the load of each worker that gets rows."""
        in_use = urls_in_use(workers)
        used_workers = [worker for worker in workers if worker.url in in_use]
        # Each row needs a prefill and a decode worker, so all workers together have one load.
        if any(worker.is_decode for worker in used_workers):
            return [self._load_of_all(used_workers, now)]
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
        load_estimate = self._worker_states.state_of(worker.url).load
        return load_estimate.load_at(
            now, in_flight=self._in_flight_at(worker), scheduler=scheduler, route=route
        )

    def _in_flight_at(self, worker: GatewayWorker) -> int:
        """Return the number of requests at a worker, of this run and of others.

        Each row of a bundle counts as one request. If the gateway does not report how many requests it has at
        the worker, the requests of others are unknown. They are then left out if the worker is a route;
        otherwise, the number is that of the worker's last load report.
        """
        endpoint = self.endpoints.get(worker.url)
        if self._has_keys and endpoint is not None:
            # The worker is a route, so our own requests at it are known.
            requests_of_others = 0
            if worker.requests is not None:
                requests_of_others = max(0, worker.requests - len(endpoint.requests))
            return _rows_of(endpoint) + requests_of_others
        if worker.requests is None:
            return worker.report.num_running_reqs + worker.report.num_waiting_reqs
        # The gateway chooses the worker of each request, and each of its requests may be a bundle of several
        # rows of this run.
        return round(worker.requests * self._rows_per_request())

    def _load_of_all(self, workers: Sequence[GatewayWorker], now: float) -> SchedulerLoad:
        """Return one load for all prefill and decode workers; see `disaggregated_report`."""
        in_flight = sum(map(_rows_of, self.serving))
        counts = [worker.requests for worker in workers if worker.is_decode]
        # Other clients may use the gateway too, so its own count of requests may exceed the run's rows. If
        # the count of a worker is missing, the sum is unknown, and only the run's own rows count.
        if None not in counts:
            in_flight = max(in_flight, sum(count or 0 for count in counts))
        self._disaggregated_load.observe(disaggregated_report(workers), in_flight)
        return self._disaggregated_load.load_at(now, in_flight=in_flight, scheduler=self.url, route=self.url)

    def _rows_per_request(self) -> float:
        """Return the mean number of rows per request in flight; a bundle has several rows."""
        requests = sum(len(endpoint.requests) for endpoint in self.serving)
        return sum(map(_rows_of, self.serving)) / requests if requests else 1.0

    def _update_routes(self, workers: Sequence[GatewayWorker]) -> None:
        """Send rows to the workers in use now; search for routing keys if workers or keys have changed."""
        in_use_before, self._in_use = self._in_use, urls_in_use(workers)
        # `in_use_before` is empty after the gateway was away (`_record_return`). Its workers are not new, so
        # none is logged.
        if in_use_before:
            for url in sorted(self._in_use - in_use_before):
                log.info("%s gets rows from now on, because the gateway uses it", url)
        for url in sorted(in_use_before - self._in_use):
            log.info("%s gets no more rows, because the gateway does not use it now", url)
        if not self._has_keys:
            # The gateway chooses the worker of each request, so routing keys are of no use.
            return
        is_changed = self._in_use != in_use_before
        if is_changed:
            for endpoint in self.serving:
                endpoint.set_listed(is_listed=endpoint.url in self._in_use)
        if self._key_search is not None and not self._key_search.done():
            # If the workers have changed, the running search repeats itself for the new ones (`_renew_keys`).
            return
        # A worker lacks a key if the last search found none, for example because the worker was down.
        # Keys are also searched again if one has led to a wrong worker (`_record_misrouting`).
        lack_keys = any(self._worker_states.state_of(url).key is None for url in self._in_use)
        if is_changed or lack_keys or self._record_misrouting(time.monotonic()):
            self._key_search = asyncio.create_task(self._renew_keys())

    # Routing keys

    def _record_misrouting(self, now: float) -> bool:
        """Tell whether a key has led to a wrong worker, so that keys must be searched again.

        Either the gateway has assigned the key to another worker, or its overload protection avoids the right
        worker for a while. A new search does not help against overload protection, so there is a pause
        between searches: if this method returns True at the time `now`, it returns False for the next
        LEAST_SEARCH_PAUSE_S seconds.
        """
        if now < self._next_search_at:
            return False
        for endpoint in self.serving:
            if not endpoint.is_listed:
                # The gateway no longer uses this worker, so it is right that another worker answers the rows
                # with its routing key.
                continue
            for sender in endpoint.senders.values():
                assert isinstance(sender, GatewaySender)
                if sender.answered_by in {None, endpoint.url}:
                    continue
                self._warn_of_misrouting(endpoint.url, sender.answered_by)
                sender.answered_by = None
                self._next_search_at = now + LEAST_SEARCH_PAUSE_S
                return True
        return False

    def _warn_of_misrouting(self, url: str, answered_by: str | None) -> None:
        """Warn once that a row was answered by another worker than the one of its routing key."""
        if self._has_warned_of_misrouting:
            return
        self._has_warned_of_misrouting = True
        log.warning(
            "rows with the routing key of %s were answered by %s: the gateway has reassigned the key, or its "
            "overload protection avoids a worker with waiting requests (start the gateway with "
            "--disable-worker-overload-protection)",
            url, answered_by,
        )  # fmt: skip

    async def _renew_keys(self) -> None:
        """Search for the workers' routing keys; search again if the list of workers has changed."""
        is_current = False
        while not is_current:
            urls = self._in_use
            try:
                keys = await self._find_keys(urls)
            except _KeysIgnoredError:
                if not self._keys_are_proven:
                    self._share_one_route()
                    return
                # The gateway does route by keys, but workers have changed during the search, or its overload
                # protection avoids one of them now.
                keys = {}
            self._keys_are_proven |= len(keys) > 1
            if urls - keys.keys():
                # A worker or the gateway is down. The worker keeps its old key until it answers again. This
                # pause limits how often the search is repeated meanwhile.
                await asyncio.sleep(TIMING.model_check)
            is_current = urls == self._in_use
            self._use_keys(keys)

    def _use_keys(self, keys: Mapping[str, str]) -> None:
        """Send rows with new routing keys, given by the workers' URLs; a new worker becomes a route."""
        for url, key in keys.items():
            self._worker_states.state_of(url).key = key
            endpoint = self.endpoints.get(url)
            if endpoint is None:
                endpoint = self.endpoints[url] = self._new_endpoint(url)
                self.serving.append(endpoint)
            # The gateway may have stopped using the worker during the search.
            endpoint.set_listed(is_listed=url in self._in_use)
            # New senders are created when needed, with the new routing key.
            endpoint.senders.clear()

    def _share_one_route(self) -> None:
        """Send all rows without routing keys from now on, because the gateway does not route by keys.

        Until now, at most one worker at a time had a key. The newest worker's route becomes the shared route
        of all workers.
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

    async def _find_keys(self, urls: frozenset[str]) -> dict[str, str]:
        """Try routing keys until one leads to each worker; return the keys by the workers' URLs.

        A worker that is down gets no key. If a worker stops answering during the search, the result is empty,
        because its key is not confirmed. Raises _KeysIgnoredError if the gateway does not route by keys: a
        key has led to different workers, or some worker got no key though all requests were answered.

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
                # A gateway that ignores keys usually fails this check, so no further keys are tried.
                if not await self._is_confirmed(key, url):
                    return {}
        # If every request was answered, a gateway that routes by keys would have reached all workers.
        if urls - keys.keys() and not unanswered:
            raise _KeysIgnoredError
        # A gateway that ignores keys may still have chosen the same worker twice by chance. The first
        # confirmation was above.
        for _ in range(CONFIRMATIONS - 1):
            for url, key in keys.items():
                if not await self._is_confirmed(key, url):
                    return {}
        return keys

    async def _is_confirmed(self, key: str, url: str) -> bool:
        """Tell whether a key leads to the worker at `url` again; False if no worker answers.

        Raises _KeysIgnoredError if another worker answers.
        """
        answered_by = await self._worker_of(key)
        if answered_by is not None and answered_by != url:
            raise _KeysIgnoredError
        return answered_by is not None

    async def _passes_on_unread(self) -> bool:
        """Tell whether a worker gets requests as they are, which depends on the gateway's policy.

        To find out, send a request with a negative seed. A gateway that reads requests refuses it itself. If
        the gateway or a worker is down, the gateway counts as one that passes requests on.
        """
        answer = await self._probe("any", sampling_seed=-1)
        if answer is None or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return True
        return ROUTED_TO in answer.headers

    async def _worker_of(self, key: str) -> str | None:
        """Return the URL of the worker to which a key leads; None if no worker answers."""
        answer = await self._probe(key)
        return None if answer is None else answer.headers.get(ROUTED_TO)

    async def _probe(self, key: str, **sampling: int) -> PostedAnswer | None:
        """Send a request that a worker refuses at once; return the answer, or None if there is none.

        The request has an invalid temperature, and the sampling parameters in `sampling`. Only status and
        headers of the answer can be read.
        """
        assert self._question_session is not None
        parameters = {"temperature": -1, **sampling}
        body = {"model": self._model_id, "input_ids": [1], "sampling_params": parameters}
        url = URL(self.url + wire.GENERATE_PATH)
        sender = PostSender(self._question_session, url, headers={self._routing_key_header: key})
        try:
            async with asyncio.timeout(TIMING.status_timeout):
                answer = await sender.post(wire.bytes_of(body))
        except (EngineDownError, *NOT_REACHED):
            return None
        answer.release()
        return answer

    async def close(self) -> None:
        """End a search for routing keys, and close all connections."""
        if self._key_search is not None:
            self._key_search.cancel()
            await asyncio.gather(self._key_search, return_exceptions=True)
        await super().close()


def _as_parts(lost: Mapping[str, str]) -> dict[str, str]:
    """Return lost sampling parameters by the part of the job, such as `sampling.stop_regex`."""
    return {f"sampling.{name}": why for name, why in lost.items()}


def _rows_of(endpoint: Endpoint) -> int:
    """Return the number of this run's rows in flight at an endpoint; a bundle has several rows."""
    return sum(max(1, len(request.rids)) for request in endpoint.requests.values())


def _value_of(label: Any) -> Any:
    """Return the value of a label: decoded if it is JSON, such as true or 4096, otherwise the text."""
    try:
        return orjson.loads(label)
    except (orjson.JSONDecodeError, TypeError):
        return label
