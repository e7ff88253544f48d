"""Reads a Model Gateway's list of workers (smg 1.13): their addresses, models and loads.

`/workers` has two figures on the load of each worker: the number of requests that the gateway has at the
worker now, and the worker's last load report. The gateway fetches these reports every
`--load-monitor-interval` (10 s by default). `LoadEstimate` combines both figures.

An API key that may send rows may lack the right to read `/workers`. Then the reports come from `/loads`,
which lacks the number of requests.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgspec
import orjson

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.errors import EngineDownError, EngineStartError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.guard import another_model, model_in
from batchrunner.engines.http.proxies import by_proxy
from batchrunner.engines.http.server_info import (
    GATEWAY_LOADS,
    GATEWAY_WORKERS,
    KEY_REFUSED,
    NOT_REACHED,
    Requests,
    ServerStatus,
    in_words,
)
from batchrunner.engines.http.wire import GENERATE_PATH

REMEDY = "start the gateway, or correct engine.url"
"""Advice to a user whose gateway does not answer."""
_LEAVING = "draining"
"""Status of a worker that finishes its requests and gets no new ones."""

Reply = TypeVar("Reply")


class _Memory(msgspec.Struct):
    weight_gb: float | None = None


class _QueueLengths(msgspec.Struct):
    waiting: Requests = 0
    """Number of requests that wait for a place in a batch. In a decode worker, their KV cache has arrived."""


class WorkerLoad(msgspec.Struct, kw_only=True):
    """Load report of one scheduler, or the sum over the schedulers of a worker."""

    num_running_reqs: Requests = 0
    num_waiting_reqs: Requests = 0
    token_usage: float = 0.0
    num_used_tokens: int | None = None
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    memory: _Memory | None = None
    queues: _QueueLengths | None = None
    reported_at: Any = None
    """Time of the report by the worker's clock, as text; None if the gateway does not return it. A sum of
    reports has the list of their times. Times are only compared, to notice a new report."""


class _EngineLoad(msgspec.Struct):
    """Load report of a worker, with one entry for each of its schedulers."""

    loads: list[WorkerLoad] = []
    timestamp: Any = None
    """Time of the report by the worker's clock, as text."""


class _ListedLoad(WorkerLoad, kw_only=True):
    """Entry of `/loads`: the load of one scheduler, and the worker to which the scheduler belongs."""

    worker: str = ""
    worker_type: str = "regular"


class _GatewayLoads(msgspec.Struct):
    """Reply to `/loads`."""

    loads: list[_ListedLoad]


class GatewayWorker(msgspec.Struct):
    """Entry of a gateway's list of workers."""

    url: str
    model_id: str | None = None
    """Model name by which the gateway finds the worker for a request."""
    worker_type: str = "regular"
    """`regular`, `prefill` or `decode`."""
    connection_mode: str = "http"
    """`http` or `grpc`."""
    status: str = "ready"
    is_healthy: bool = True
    labels: Mapping[str, Any] = {}
    """Properties of the worker's model and server arguments when the worker was registered. Values are
    texts."""
    dp_base_url: str | None = None
    """URL of the server, if the gateway lists each DP rank of the server as a worker (`--dp-aware`). The
    worker's own URL then ends with `@` and the rank."""
    requests: int | None = msgspec.field(name="load", default=None)
    """Number of requests that the gateway has at the worker now; None if the gateway does not report it."""
    engine_load: _EngineLoad | None = None
    """Last load report; None before the first."""

    @property
    def is_grpc(self) -> bool:
        """Whether the gateway speaks gRPC with the worker, and not HTTP."""
        return self.connection_mode == "grpc" or self.url.startswith("grpc")

    @property
    def is_decode(self) -> bool:
        """Whether the worker only decodes, and prefill workers compute the prompts (PD disaggregation)."""
        return self.worker_type == "decode"

    @property
    def why_gateway_only(self) -> str | None:
        """Reason why only the gateway can send rows to the worker, such as "speaks gRPC".

        None for a regular HTTP server. Any other worker takes only one row in each request.
        """
        if self.is_grpc:
            return "speaks gRPC"
        if self.worker_type != "regular":
            return f"is a {self.worker_type} worker, and only the gateway joins prefill and decode"
        return None

    @property
    def address(self) -> str:
        """URL of the worker's server. DP ranks of one server have the same address."""
        return (self.dp_base_url or self.url).rstrip("/")

    @property
    def is_leaving(self) -> bool:
        """Whether the gateway is removing the worker and sends it no new requests."""
        return self.status == _LEAVING

    def serves(self, model: str) -> bool:
        """Tell whether the worker serves a model. A worker without a model name may serve any model."""
        return self.model_id in {None, model}

    @property
    def model(self) -> dict[str, str]:
        """Description of the worker's model: the MODEL_FIELDS (guard.py) that the gateway lists."""
        return model_in({**self.labels, "served_model_name": self.model_id})

    @property
    def report(self) -> WorkerLoad:
        """Last load report, summed over the worker's schedulers; before the first, it has only limits."""
        if self.engine_load is not None and self.engine_load.loads:
            load = sum_of(self.engine_load.loads)
            load.reported_at = self.engine_load.timestamp
            return load
        return WorkerLoad(
            max_total_num_tokens=self._number("max_total_tokens"),
            max_running_requests=self._number("max_running_requests"),
        )

    @property
    def weights_gb(self) -> float | None:
        """Memory of the model's weights on one GPU, in GB; None if no load report has it."""
        loads = self._scheduler_loads
        return next((load.memory.weight_gb for load in loads if load.memory is not None), None)

    @property
    def waiting_for_batch(self) -> int:
        """Number of requests in the last load report that wait for nothing but a place in a batch."""
        return sum(load.queues.waiting for load in self._scheduler_loads if load.queues is not None)

    @property
    def _scheduler_loads(self) -> Sequence[WorkerLoad]:
        """Last load report of each scheduler; empty before the first."""
        return self.engine_load.loads if self.engine_load is not None else []

    def _number(self, label: str) -> int | None:
        """Return the value of a label as a number; None if the label is missing or not a number."""
        text = str(self.labels.get(label))
        return int(text) if text.isdecimal() else None


def urls_in_use(workers: Iterable[GatewayWorker]) -> frozenset[str]:
    """Return the URLs of the workers to which the gateway sends requests now."""
    return frozenset(worker.url for worker in workers if worker.is_healthy and not worker.is_leaving)


def workers_of_model(
    workers: Sequence[GatewayWorker], *, model: str | None, gateway_url: str
) -> list[GatewayWorker]:
    """Return those of a gateway's workers that serve `model`, the job's `engine.model`.

    Without `model`, return all workers. Raises EngineStartError if no worker has the model, or if the gateway
    serves several models and the job names none.
    """
    names = sorted({worker.model_id for worker in workers if worker.model_id})
    if model is None:
        if len(names) > 1:
            raise EngineStartError(
                f"{gateway_url}: the gateway serves several models ({', '.join(names)})",
                hint="set engine.model to one of them",
            )
        return list(workers)
    if names and model not in names:
        raise EngineStartError(f"engine.model: {model}: the gateway {gateway_url} serves {', '.join(names)}")
    return [worker for worker in workers if worker.serves(model)]


_read_loads = msgspec.json.Decoder(_GatewayLoads)
_read_worker = msgspec.json.Decoder(GatewayWorker)


def _sum_if_all_known(limits: Sequence[int | None]) -> int | None:
    """Return the sum of limits; None if one of them is None or 0 (not reported)."""
    return sum(limit or 0 for limit in limits) if all(limits) else None


def sum_of(loads: Sequence[WorkerLoad]) -> WorkerLoad:
    """Add up the load reports of several schedulers or workers.

    The token usage is the highest one. A limit is None if any report lacks it. Used tokens are the sum over
    the reports that have them.
    """
    running_limits = [load.max_running_requests for load in loads]
    token_limits = [load.max_total_num_tokens for load in loads]
    used_tokens = [load.num_used_tokens for load in loads if load.num_used_tokens is not None]
    return WorkerLoad(
        num_running_reqs=sum(load.num_running_reqs for load in loads),
        num_waiting_reqs=sum(load.num_waiting_reqs for load in loads),
        token_usage=max(load.token_usage for load in loads),
        num_used_tokens=sum(used_tokens) if used_tokens else None,
        max_total_num_tokens=_sum_if_all_known(token_limits),
        max_running_requests=_sum_if_all_known(running_limits),
        reported_at=[load.reported_at for load in loads],
    )


def disaggregated_report(workers: Sequence[GatewayWorker]) -> WorkerLoad:
    """Return one load report for all prefill and decode workers, because each row needs one of each type.

    Running requests, token usage and limits are those of the decode workers. SGLang has every request at a
    prefill and at a decode worker from the beginning, and counts it as waiting at both. So the waiting
    requests are those of the prefill workers, and those that only wait for a place in a decode batch.
    `num_waiting_reqs` of the decode workers is not used: it also counts requests that still wait for their
    prefill, and requests whose prefill or transfer is under way.
    """
    decode_workers = [worker for worker in workers if worker.is_decode]
    prefill_workers = [worker for worker in workers if not worker.is_decode]
    report = sum_of([worker.report for worker in decode_workers])
    waiting_for_prefill = sum(worker.report.num_waiting_reqs for worker in prefill_workers)
    waiting_for_decode = sum(worker.waiting_for_batch for worker in decode_workers)
    report.num_waiting_reqs = waiting_for_prefill + waiting_for_decode
    times = [worker.report.reported_at for worker in workers]
    # If the gateway could read no report, the sum is no report either.
    report.reported_at = times if any(time is not None for time in times) else None
    return report


REPORTS_KEPT = 3
"""Number of recent load reports that are used to estimate how many requests are at work."""


@dataclass(slots=True)
class LoadEstimate:
    """Estimates a worker's present load from its last reports and its number of requests in flight.

    A report may be 10 s old, but the number of requests in flight is exact at any time. Some of these
    requests wait in the scheduler's queue (`#queue-req`). The others are *at work*: they run, or they are on
    the way to the scheduler, or their answers are on the way back. The number at work changes slowly. So the
    estimate takes it from the reports, and counts all further requests in flight as queued.
    """

    _report: WorkerLoad = field(default_factory=WorkerLoad)
    _at_work: deque[int] = field(default_factory=lambda: deque(maxlen=REPORTS_KEPT))
    """Number of requests at work in each of the last reports; reports without requests are left out."""
    _from_others: int = 0
    """Number of requests in the last report that the gateway does not count, such as those of another
    gateway."""

    def observe(self, report: WorkerLoad, in_flight: int) -> None:
        """Process the last report of a worker; a report that was processed before is ignored.

        `in_flight` is the number of requests at the worker now. A new report shows how many of them can be at
        work (running or on the way).
        """
        running, waiting = report.num_running_reqs, report.num_waiting_reqs
        is_idle = running + waiting == 0
        # A report without a time and without requests means that the gateway could not read the worker's
        # load.
        is_missing = is_idle and report.reported_at is None and bool(self._at_work)
        if report == self._report or is_missing:
            return
        self._report = report
        self._from_others = max(0, running + waiting - in_flight)
        if is_idle:
            # An idle worker does not show how many requests it can run at once.
            return
        at_work = in_flight + self._from_others - waiting
        if not waiting:
            # The scheduler has room for more requests, up to its limit. At most twice the present number is
            # assumed, because the KV pool may be too small for more.
            room = at_work
            if report.max_running_requests is not None:
                room = min(room, max(0, report.max_running_requests - running))
            at_work += room
        self._at_work.append(at_work)

    def load_at(self, now: float, *, in_flight: int, scheduler: str, route: str) -> SchedulerLoad:
        """Return the load at the time `now`, in seconds of the monotonic clock, with `in_flight` requests.

        Before the first report with requests, `taken_at` is 0, so that the load does not change the
        concurrency limit.
        """
        limit = self._report.max_running_requests
        requests = in_flight + self._from_others
        # The largest number in recent reports counts, because a report may come from a moment between two
        # batches. Before the first report, all allowed requests are assumed to be at work.
        most_at_work = max(self._at_work, default=requests if limit is None else limit)
        at_work = min(requests, most_at_work)
        return SchedulerLoad(
            scheduler=scheduler,
            source="gateway",
            running=at_work,
            queue=requests - at_work,
            token_usage=self._report.token_usage if requests else 0.0,
            used_tokens=self._report.num_used_tokens,
            max_total_tokens=self._report.max_total_num_tokens,
            max_running=limit,
            route=route,
            taken_at=now if self._at_work else 0.0,
        )


SAME_WEIGHTS = 0.05
"""If two measurements of the weights' memory differ by at most this fraction, they come from the same model.
SGLang measures the memory at each start, and other processes on the GPU change the result a little."""
SAME_WEIGHTS_GB = 0.1
"""If two measurements of the weights' memory differ by at most this many GB, they come from the same model.
SGLang takes the difference of the free memory before and after loading, which other processes change too: a
model of 13 MB was measured with 0.009 to 0.021 GB on one machine (0.5.23 on a CPU)."""


NO_REPORT = ""
"""Time of a load report that the gateway could not read. No real report has this time."""


@dataclass(slots=True)
class WorkerWatch:
    """Detects that a server with another model has taken a worker's address.

    The gateway does not notice this, because it reads a worker's model only when the worker is registered.
    Only the load reports show it: the weights of another model take another amount of memory. When a request
    to the worker fails, the worker is in doubt. Its answers do not count until a report that is certainly
    newer than the failure has shown the weights.
    """

    url: str
    in_doubt: bool = False
    _weights_gb: float | None = None
    """Memory of the weights in the first report that has it; None before. Until then, the worker is never in
    doubt."""
    _report_before: Any = None
    """Time of the last load report that may be older than the failure. It is None until the gateway's list is
    read after the failure, and NO_REPORT if that list has no report of the worker."""

    def record_failure(self) -> bool:
        """Record that a request failed on its way to the worker; return whether the worker was up until then.

        It counts as up if it has reported its load at least once and was not already in doubt.
        """
        if self._weights_gb is None:
            return False
        was_up = not self.in_doubt
        self.in_doubt = True
        self._report_before = None
        return was_up

    def observe(self, worker: GatewayWorker) -> None:
        """Process the worker's entry in the list; raises AnotherModelError for another model's weights.

        The first report sets the size of the weights.
        """
        weights_gb = worker.weights_gb
        if weights_gb is None:
            # The gateway has no report of the worker now, so any later report is newer than the failure.
            self._report_before = NO_REPORT
            return
        if self._weights_gb is None:
            self._weights_gb = weights_gb
        if not math.isclose(weights_gb, self._weights_gb, rel_tol=SAME_WEIGHTS, abs_tol=SAME_WEIGHTS_GB):
            raise another_model(self.url, "weight_gb", str(self._weights_gb), str(weights_gb))
        if self.in_doubt:
            self._settle_doubt(worker.report.reported_at)

    def _settle_doubt(self, reported_at: Any) -> None:
        """End the doubt if a load report, which has shown the right weights, is newer than the failure."""
        if reported_at is None:
            # Reports have no times to compare, so each counts as new.
            self.in_doubt = False
        elif self._report_before is None:
            # This report may be older than the failure, so only the next one ends the doubt.
            self._report_before = reported_at
        elif reported_at != self._report_before:
            self.in_doubt = False


class GatewayQuestions:
    """Asks one gateway for its list of workers."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """`session` sends the API key with each request to the gateway at `url`."""
        self.url = url
        self._session = session
        self._status = ServerStatus(session, url)
        self._lists_workers = True
        """Whether to ask for `/workers`; false if the API key may send rows, but not read this path."""

    async def workers(self, timeout_s: float | None = None) -> list[GatewayWorker]:
        """Return the gateway's workers, including workers that get no new requests.

        Raises EngineDownError if the gateway does not answer within `timeout_s` seconds (by default
        `TIMING.server_open`), if it refuses the API key even for rows, or if the server is no gateway.
        """
        timeout_s = TIMING.server_open if timeout_s is None else timeout_s
        if self._lists_workers:
            status, reply = await self._reached(self._status.mapping(GATEWAY_WORKERS, timeout_s))
            if isinstance(reply.get("workers"), list):
                return _read_workers(reply["workers"])
            if status not in KEY_REFUSED:
                raise EngineDownError(
                    f"{self.url}: is not SGLang's Model Gateway (no path {GATEWAY_WORKERS}): correct "
                    f"engine.url, or write `engine: {self.url}` if a server is there"
                )
        # The key may not read the list of workers, but it may have the right to send rows. `/loads` does not
        # tell, because a gateway answers it for every key.
        workers = await self._workers_in_loads(timeout_s)
        row_status = await self._status_of_empty_row(timeout_s)
        if row_status in KEY_REFUSED:
            raise EngineDownError(
                f"{self.url}: refuses the API key ({row_status}){by_proxy(self.url)}: see engine.api_key_env"
            )
        if not workers:
            raise EngineDownError(
                f"{self.url}: the API key may not read {GATEWAY_WORKERS}, and {GATEWAY_LOADS} names no worker"
            )
        self._lists_workers = False
        return workers

    async def _workers_in_loads(self, timeout_s: float) -> list[GatewayWorker]:
        """Return the workers that `/loads` names; empty if the reply cannot be read.

        Raises EngineDownError if there is no reply.
        """
        _, body = await self._reached(self._status.get(GATEWAY_LOADS, timeout_s))
        try:
            loads = _read_loads.decode(body).loads
        except msgspec.MsgspecError:
            return []
        # `/loads` has an entry for each scheduler. Those of one worker are grouped. Entries that name no
        # worker (`url` is empty) are left out.
        loads_of = defaultdict[tuple[str, str], list[WorkerLoad]](list)
        for load in loads:
            loads_of[load.worker, load.worker_type].append(load)
        return [
            GatewayWorker(url, worker_type=worker_type, engine_load=_EngineLoad(worker_loads))
            for (url, worker_type), worker_loads in loads_of.items()
            if url
        ]

    async def _status_of_empty_row(self, timeout_s: float) -> int:
        """Return the status of a row without a prompt; raises EngineDownError if the gateway does not answer.

        The gateway refuses such a row in any case, but with a status of KEY_REFUSED only if the API key may
        not send rows.
        """
        status, _ = await self._reached(self._status.post(GENERATE_PATH, {}, timeout_s))
        return status

    async def _reached(self, request: Awaitable[Reply]) -> Reply:
        """Return the reply to a request; raises EngineDownError if the gateway does not answer in time."""
        try:
            return await request
        except NOT_REACHED as failure:
            raise EngineDownError(
                f"no connection to {self.url}{by_proxy(self.url)} ({in_words(failure)}): {REMEDY}"
            ) from None


def _read_workers(listed: Sequence[Any]) -> list[GatewayWorker]:
    """Read the entries of a list of workers; skip an entry that does not describe a worker."""
    workers = []
    for entry in listed:
        with contextlib.suppress(msgspec.ValidationError):
            worker = _read_worker.decode(orjson.dumps(entry))
            worker.url = worker.url.rstrip("/")
            workers.append(worker)
    return workers
