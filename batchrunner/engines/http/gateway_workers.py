"""What a Model Gateway (smg 1.13) says of its workers: their addresses, models and loads.

`/workers` lists the workers. For each worker it has the number of requests that the gateway has there now,
and the load that the worker last reported, which the gateway reads every `--load-monitor-interval` (10 s). An
API key that may send rows may lack the right to read this list. Then `/loads` has the same loads, without the
number of requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import orjson

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.errors import EngineDownError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.guard import model_in
from batchrunner.engines.http.proxies import by_proxy
from batchrunner.engines.http.server_info import (
    KEY_REFUSED,
    NOT_REACHED,
    WORKERS,
    Requests,
    ServerStatus,
    in_words,
)
from batchrunner.engines.http.wire import GENERATE_PATH

LOADS = "/loads"
"""Path of the loads of a gateway's workers."""
REMEDY = "start the gateway, or correct engine.url"
NEAR_USAGE = 0.8
"""Token usage from which the KV pool counts as nearly full, as in the law of concurrency."""
_LEAVING = "draining"
"""Status of a worker that finishes its requests and gets no new ones."""


class WorkerLoad(msgspec.Struct):
    """The load of one scheduler of a worker, as it last reported it."""

    num_running_reqs: Requests = 0
    num_waiting_reqs: Requests = 0
    token_usage: float = 0.0
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None


class _EngineLoad(msgspec.Struct):
    loads: list[WorkerLoad] = []


class _ListedLoad(WorkerLoad):
    """An entry of `/loads`."""

    worker: str = ""
    worker_type: str = "regular"


class _GatewayLoads(msgspec.Struct):
    loads: list[_ListedLoad]


class GatewayWorker(msgspec.Struct):
    """A worker, as the gateway lists it."""

    url: str
    model_id: str | None = None
    """Name by which the gateway finds the worker for a request."""
    worker_type: str = "regular"
    """`regular`, `prefill` or `decode`."""
    connection_mode: str = "http"
    status: str = "ready"
    is_healthy: bool = True
    labels: Mapping[str, Any] = {}
    """What the worker said of its model and arguments when it was registered, as texts."""
    load: int | None = None
    """Number of requests that the gateway has at the worker now; None if the gateway does not report it."""
    engine_load: _EngineLoad | None = None

    @property
    def is_grpc(self) -> bool:
        """Whether it speaks gRPC and not HTTP."""
        return self.connection_mode == "grpc" or self.url.startswith("grpc")

    @property
    def is_leaving(self) -> bool:
        """Whether it gets no new requests."""
        return self.status == _LEAVING

    @property
    def is_usable(self) -> bool:
        """Whether the gateway sends requests there."""
        return self.is_healthy and not self.is_leaving

    @property
    def model(self) -> dict[str, str]:
        """Its model: the MODEL_FIELDS (guard.py) that the gateway knows."""
        return model_in({**self.labels, "served_model_name": self.model_id})

    @property
    def reported(self) -> WorkerLoad:
        """Its last reported load, summed over its schedulers; only its limits before the first report."""
        loads = self.engine_load.loads if self.engine_load is not None else []
        if loads:
            return sum_of(loads)
        return WorkerLoad(
            max_total_num_tokens=self._number("max_total_tokens"),
            max_running_requests=self._number("max_running_requests"),
        )

    def _number(self, label: str) -> int | None:
        text = str(self.labels.get(label))
        return int(text) if text.isdecimal() else None


_read_loads = msgspec.json.Decoder(_GatewayLoads)
_read_worker = msgspec.json.Decoder(GatewayWorker)


def sum_of(loads: Sequence[WorkerLoad]) -> WorkerLoad:
    """Add up loads. The token usage is the largest one, and a limit is None if any load lacks it."""
    running = [load.max_running_requests for load in loads]
    tokens = [load.max_total_num_tokens for load in loads]
    return WorkerLoad(
        num_running_reqs=sum(load.num_running_reqs for load in loads),
        num_waiting_reqs=sum(load.num_waiting_reqs for load in loads),
        token_usage=max(load.token_usage for load in loads),
        max_total_num_tokens=sum(filter(None, tokens)) if all(tokens) else None,
        max_running_requests=sum(filter(None, running)) if all(running) else None,
    )


def load_now(load: WorkerLoad, in_flight: int, *, scheduler: str, route: str, now: float) -> SchedulerLoad:
    """Estimate a worker's load now, by its last report and the requests that are in flight there.

    A report can be 10 s old, but the number of requests in flight is exact. If requests waited at the time of
    the report and the KV pool was nearly full, the worker can run no more than it ran then. Otherwise it runs
    as many as its limit allows. All other requests in flight count as waiting.
    """
    is_full = load.num_waiting_reqs > 0 and load.token_usage >= NEAR_USAGE
    most_running = load.num_running_reqs if is_full else load.max_running_requests
    running = min(in_flight, in_flight if most_running is None else most_running)
    return SchedulerLoad(
        scheduler=scheduler,
        source="gateway",
        running=running,
        queue=in_flight - running,
        token_usage=load.token_usage if in_flight else 0.0,
        max_total_tokens=load.max_total_num_tokens,
        max_running=load.max_running_requests,
        route=route,
        taken_at=now,
    )


class GatewayQuestions:
    """Asks one gateway for its workers."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session
        self._status = ServerStatus(session, url)
        self._lists_workers = True
        """Whether the key may read the list of workers, as far as known."""

    async def workers(self, timeout_s: float | None = None) -> list[GatewayWorker]:
        """Return the workers, including those that get no new requests.

        Raises EngineDownError if there is no answer, if the key is refused, or if the server is no gateway.
        """
        timeout_s = TIMING.server_open if timeout_s is None else timeout_s
        status, reply = 0, dict[str, Any]()
        if self._lists_workers:
            status, reply = await self._get(WORKERS, timeout_s)
            if isinstance(reply.get("workers"), list):
                return _read_workers(reply["workers"])
        refused = status in KEY_REFUSED
        if refused or not self._lists_workers:
            workers = await self._by_loads(timeout_s)
            if workers and await self._takes_rows(timeout_s):
                self._lists_workers = False
                return workers
        if refused:
            raise EngineDownError(
                f"{self.url}: refuses the API key ({status}){by_proxy(self.url)}: see engine.api_key_env"
            )
        raise EngineDownError(f"{self.url}: is not SGLang's Model Gateway (no {WORKERS})")

    async def _by_loads(self, timeout_s: float) -> list[GatewayWorker]:
        """Return the workers in `/loads`, which the gateway shows to every key; empty if that fails."""
        try:
            _, body = await self._status.get(LOADS, timeout_s)
            loads = _read_loads.decode(body).loads
        except (*NOT_REACHED, msgspec.MsgspecError):
            return []
        of_worker = dict[str, GatewayWorker]()
        for load in loads:
            worker = of_worker.setdefault(
                load.worker,
                GatewayWorker(load.worker, worker_type=load.worker_type, engine_load=_EngineLoad([])),
            )
            assert worker.engine_load is not None
            worker.engine_load.loads.append(load)
        return [worker for worker in of_worker.values() if worker.url]

    async def _takes_rows(self, timeout_s: float) -> bool:
        """Tell whether the key may send rows, by an empty request, which the gateway refuses in any case."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.post(self.url + GENERATE_PATH, json={}, timeout=timeout) as answer:
                return answer.status not in KEY_REFUSED
        except NOT_REACHED:
            return False

    async def _get(self, path: str, timeout_s: float) -> tuple[int, dict[str, Any]]:
        try:
            return await self._status.mapping(path, timeout_s)
        except NOT_REACHED as failure:
            raise EngineDownError(
                f"no connection to {self.url}{by_proxy(self.url)} ({in_words(failure)}): {REMEDY}"
            ) from None


def _read_workers(listed: Sequence[Any]) -> list[GatewayWorker]:
    """Read the entries of a list of workers; skip entries that describe no worker."""
    workers = []
    for entry in listed:
        with contextlib.suppress(msgspec.ValidationError):
            worker = _read_worker.decode(orjson.dumps(entry))
            worker.url = worker.url.rstrip("/")
            workers.append(worker)
    return workers
