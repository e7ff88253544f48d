"""A live server, ours or not, watched for a while: its load, counters and arguments."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import aiohttp

from batchrunner.advise.situation import Situation
from batchrunner.core.errors import InputError
from batchrunner.engines.http.load import counters_in, from_metrics
from batchrunner.engines.http.server_info import limit_in_effect, scheduler_states
from batchrunner.engines.http.status import (
    KEY_REFUSED,
    LOADS,
    METRICS,
    MODEL_INFO,
    NOT_REACHED,
    NOT_SGLANG,
    SERVER_INFO,
    ServerStatus,
)
from batchrunner.engines.logs.facts import Facts, number
from batchrunner.engines.logs.records import ServerReady
from batchrunner.engines.logs.series import Series, spread
from batchrunner.engines.logs.signs import LoadSample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.core.types import SchedulerLoad
    from batchrunner.engines.logs.thresholds import Thresholds

POLL_S = 0.25
"""`/v1/loads` reads shared memory; a sample that was seen before is not counted again."""
METRICS_S = 1.5
"""Between two looks at `/metrics`: a long text, whose gauges are seconds old."""
TIMEOUT_S = 5.0
KEY_VARIABLE = "SGLANG_API_KEY"


def watch_server(url: str, limits: Thresholds, span_s: float) -> Situation:
    """Watch a server for `span_s` seconds, or until Ctrl-C, and return what was seen.

    Raises InputError where nobody answers there, or nobody who is SGLang.
    """
    return asyncio.run(_watch(url.rstrip("/"), limits, span_s))


async def _watch(url: str, limits: Thresholds, span_s: float) -> Situation:
    enough = asyncio.Event()
    with contextlib.suppress(NotImplementedError, RuntimeError):  # not in the main thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, enough.set)
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        server = _Server(ServerStatus(session, url), limits)
        await server.ask_arguments()
        end = time.monotonic() + span_s
        while not enough.is_set() and time.monotonic() < end:
            await server.look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(enough.wait(), POLL_S)
        return server.situation()


class _Server:
    """One server that is polled."""

    def __init__(self, status: ServerStatus, limits: Thresholds) -> None:
        self._status = status
        self._series = Series(limits)
        self._facts = Facts()
        self._seen: dict[str, float | None] = {}
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._summed = 1
        """Schedulers whose counters these are."""
        self._next_metrics = 0.0

    async def ask_arguments(self) -> None:
        """Read what the server says of itself; raises InputError."""
        url = self._status.url
        try:
            status, info = await self._status.mapping(SERVER_INFO, TIMEOUT_S)
        except NOT_REACHED as failure:
            reason = f"{getattr(failure, 'os_error', failure)}" or f"no answer within {TIMEOUT_S:g} s"
            raise InputError(f"{url}: no server answers there: {reason}") from None
        if status in KEY_REFUSED:
            raise InputError(f"{url}: refuses the API key: set {KEY_VARIABLE}")
        if "model_path" not in info:
            raise InputError(
                f"{url}: not an SGLang server (no {SERVER_INFO[0]}): give a server's own address, "
                "not a gateway's"
            )
        self._facts.version = info.get("version")
        self._facts.arguments = {k: v for k, v in info.items() if k not in {"version", "internal_states"}}
        state = next(iter(scheduler_states(info)), {})
        memory = state.get("memory_usage")
        memory = memory if isinstance(memory, dict) else {}
        self._facts.ready = _limits(info, state, memory)
        self._facts.weights_gb = number(memory.get("weight"))
        self._facts.card_gb = _free_at_first(memory)
        with contextlib.suppress(*NOT_REACHED):  # one can do without
            _, model = await self._status.mapping(MODEL_INFO, TIMEOUT_S)
            classes = model.get("architectures")
            self._facts.model = str(classes[0]) if isinstance(classes, list) and classes else None

    async def look(self) -> None:
        """Take one sample of each scheduler; a poll that fails is left out."""
        with contextlib.suppress(*NOT_REACHED, *NOT_SGLANG):
            metrics: Sequence[SchedulerLoad] = []
            if time.monotonic() >= self._next_metrics:
                metrics = await self._metrics()
            self._add(await self._status.load(LOADS, TIMEOUT_S) or metrics)

    def situation(self) -> Situation:
        """Return what was seen, with the counters' growth."""
        grown = {name: max(0.0, value - self._first.get(name, 0.0)) for name, value in self._last.items()}
        prefills, prompt = self._series.prefills, grown.get("prompt_tokens_total", 0.0)
        prefills.cached_tokens = int(grown.get("cached_tokens_total", 0))
        prefills.new_tokens = max(0, int(prompt) - prefills.cached_tokens)
        prefills.prompts = int(grown.get("num_requests_total", 0))
        tracks = list(self._series.tracks.values())[: self._summed]
        spread(int(grown.get("num_retracted_requests_total", 0)), tracks)
        self._series.settle()
        self._facts.mute = not self._seen
        return Situation(self._series, self._series, self._facts)

    async def _metrics(self) -> list[SchedulerLoad]:
        """Take the counters of `/metrics`; return the load that it tells, if it is there."""
        self._next_metrics = time.monotonic() + METRICS_S
        status, body = await self._status.get(METRICS, TIMEOUT_S)
        text = body.decode(errors="replace") if status == 200 else ""  # noqa: PLR2004
        self._facts.metrics = "sglang:" in text
        if not self._facts.metrics:
            return []
        self._last = counters_in(text)
        self._first = self._first or self._last
        load = from_metrics(text, self._status.url)
        self._summed = len(load) or 1
        return load

    def _add(self, loads: Sequence[SchedulerLoad]) -> None:
        graph, rate = self._last.get("is_cuda_graph"), self._last.get("gen_throughput")
        for load in loads:
            new = load.taken_at is None or self._seen.get(load.scheduler) != load.taken_at
            self._seen[load.scheduler] = load.taken_at
            if new and load.has_work:
                sample = LoadSample(
                    time.monotonic(), load.running, load.queue, load.token_usage, load.max_running,
                    None if graph is None or not load.running else bool(graph),
                    rate and rate / self._summed,
                )  # fmt: skip
                self._series.add(load.scheduler, sample)


def _free_at_first(memory: dict[str, Any]) -> float | None:
    """Return what a card had free before the weights were loaded: what became of it, in GB."""
    graphs = memory.get("graph")
    parts = [memory.get(name) for name in ("weight", "kvcache", "startup_available")]
    parts += graphs.values() if isinstance(graphs, dict) else []
    told = [part for part in map(number, parts) if part is not None]
    return sum(told) if len(told) == len(parts) else None


def _limits(info: dict[str, Any], state: dict[str, Any], memory: dict[str, Any]) -> ServerReady:
    """Return the first scheduler's limits: its own numbers are resolved, the arguments may be null."""
    told = {**info, **{name: value for name, value in state.items() if value}}
    most = "max_running_requests"
    told[most] = limit_in_effect(state, most) or told.get(most)
    names = ("max_total_num_tokens", "chunked_prefill_size", "max_running_requests", "context_length")
    pool, chunk, running, context = (
        None if (limit := number(told.get(name))) is None else int(limit) for name in names
    )
    left = None if info.get("device") == "cpu" else number(memory.get("startup_available"))
    return ServerReady(pool, chunk, running, context, left)
