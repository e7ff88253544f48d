"""Watches a live server for some seconds: its load, its counters and its arguments."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
from yarl import URL

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.errors import InputError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.proxies import by_proxy
from batchrunner.engines.http.server_info import (
    KEY_REFUSED,
    METRICS,
    MODEL_INFO,
    NOT_REACHED,
    NOT_SGLANG,
    SERVER_INFO,
    ServerStatus,
    counters_in,
    limit_in_effect,
    memory_caps_running,
    scheduler_states,
)
from batchrunner.sglang.flags import StatePool, number, slots_per_request
from batchrunner.sglang.logs.lines import ServerReady
from batchrunner.sglang.logs.reader import Facts
from batchrunner.sglang.logs.series import Series, sample_of_load
from batchrunner.tuning.situation import Situation

KEY_VARIABLE = "SGLANG_API_KEY"


def watch_server(url: str, span_s: float) -> Situation:
    """Watch a server for `span_s` seconds, or until Ctrl-C, and return its situation.

    Raises InputError if no server answers, or if the server is not SGLang.
    """
    return asyncio.run(_watch(url.rstrip("/"), span_s))


async def _watch(url: str, span_s: float) -> Situation:
    enough = asyncio.Event()
    with contextlib.suppress(NotImplementedError, RuntimeError):  # not in the main thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, enough.set)
    key = os.environ.get(KEY_VARIABLE)
    has_password = URL(url).password is not None  # aiohttp sends it in the same header
    headers = {"Authorization": f"Bearer {key}"} if key and not has_password else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        server = _Server(ServerStatus(session, url))
        await server.ask_arguments()
        end = time.monotonic() + span_s
        while not enough.is_set() and time.monotonic() < end:
            await server.poll()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(enough.wait(), TIMING.load_poll)
        return server.situation()


class _Server:
    """One server that is polled."""

    def __init__(self, status: ServerStatus) -> None:
        self._status = status
        self._series = Series()
        self._facts = Facts()
        self._seen: dict[str, float | None] = {}
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._next_metrics = 0.0

    async def ask_arguments(self) -> None:
        """Read the server's arguments and limits; raises InputError."""
        url, wait_s = self._status.url, TIMING.advise_timeout
        try:
            status, info = await self._status.mapping(SERVER_INFO, wait_s)
        except NOT_REACHED as failure:
            reason = str(getattr(failure, "os_error", failure)) or f"no answer within {wait_s:g} s"
            raise InputError(f"{url}: no server answers there{by_proxy(url)}: {reason}") from None
        if status in KEY_REFUSED:
            raise InputError(f"{url}: refuses the API key", hint=f"set {KEY_VARIABLE}")
        if "model_path" not in info:
            raise InputError(
                f"{url}: not an SGLang server (no {SERVER_INFO})",
                hint="give a server's own address, not a gateway's",
            )
        self._facts.version = info.get("version")
        self._facts.arguments = {k: v for k, v in info.items() if k not in {"version", "internal_states"}}
        state = next(iter(scheduler_states(info)), {})
        memory = state.get("memory_usage")
        memory = memory if isinstance(memory, dict) else {}
        self._facts.ready = _limits(info, state, memory)
        if slots := int(number(state.get("max_mamba_cache_size")) or 0):
            per_request, kv_gb = slots_per_request({**info, **state}), number(memory.get("kvcache"))
            self._facts.states = StatePool(slots, per_request, kv_gb=kv_gb)
        self._facts.weights_gb = number(memory.get("weight"))
        self._facts.card_gb = _free_at_first(memory)
        with contextlib.suppress(*NOT_REACHED):  # The model's class is optional.
            _, model = await self._status.mapping(MODEL_INFO, TIMING.advise_timeout)
            classes = model.get("architectures")
            self._facts.model = str(classes[0]) if isinstance(classes, list) and classes else None

    async def poll(self) -> None:
        """Record one sample of each scheduler; a poll that fails is skipped."""
        with contextlib.suppress(*NOT_REACHED, *NOT_SGLANG):
            if time.monotonic() >= self._next_metrics:
                await self._metrics()
            pool = self._facts.states
            by_states = pool.most_running if pool else None
            self._add(await self._status.load(TIMING.advise_timeout, by_states))

    def situation(self) -> Situation:
        """Return the situation, with the growth of the counters since the first poll."""
        grown = {name: max(0.0, value - self._first.get(name, 0.0)) for name, value in self._last.items()}
        prefills, prompt = self._series.prefills, grown.get("prompt_tokens_total", 0.0)
        prefills.cached_tokens = int(grown.get("cached_tokens_total", 0))
        prefills.new_tokens = max(0, int(prompt) - prefills.cached_tokens)
        prefills.prompts = int(grown.get("num_requests_total", 0))
        self._series.retractions = int(grown.get("num_retracted_requests_total", 0))
        self._series.settle()
        self._facts.mute = not self._seen
        return Situation(self._series, self._series, self._facts)

    async def _metrics(self) -> None:
        """Record the counters of `/metrics`, if the server has it."""
        self._next_metrics = time.monotonic() + TIMING.advise_metrics
        status, body = await self._status.get(METRICS, TIMING.advise_timeout)
        text = body.decode(errors="replace") if status == 200 else ""  # noqa: PLR2004
        self._facts.metrics = "sglang:" in text
        if self._facts.metrics:
            self._last = counters_in(text)
            self._first = self._first or self._last

    def _add(self, loads: Sequence[SchedulerLoad]) -> None:
        """Record the load of each scheduler. Counters are sums, so each scheduler gets an equal part."""
        graph, rate = self._last.get("is_cuda_graph"), self._last.get("gen_throughput")
        states = self._last.get("mamba_usage", 0.0)
        for load in loads:
            new = load.taken_at is None or self._seen.get(load.scheduler) != load.taken_at
            self._seen[load.scheduler] = load.taken_at
            if new and load.has_work:
                sample = sample_of_load(
                    load,
                    at=time.monotonic(),
                    graph=None if graph is None or not load.running else bool(graph),
                    rate=rate and rate / len(loads),
                )
                state_usage = max(sample.state_usage, states / len(loads))
                self._series.add(load.scheduler, sample._replace(state_usage=state_usage))


def _free_at_first(memory: dict[str, Any]) -> float | None:
    """Return the GPU memory in GB that was free before the weights were loaded, as the sum of its uses."""
    graphs = memory.get("graph")
    parts = [memory.get(name) for name in ("weight", "kvcache", "startup_available")]
    parts += graphs.values() if isinstance(graphs, dict) else []
    sizes = [part for part in map(number, parts) if part is not None]
    return sum(sizes) if len(sizes) == len(parts) else None


def _limits(info: dict[str, Any], state: dict[str, Any], memory: dict[str, Any]) -> ServerReady:
    """Return the limits of the first scheduler; its state overrides arguments, which may be null."""
    merged = {**info, **{name: value for name, value in state.items() if value}}
    most = "max_running_requests"
    merged[most] = limit_in_effect(state, most) or merged.get(most)
    names = ("max_total_num_tokens", "chunked_prefill_size", "max_running_requests", "context_length")
    pool, chunk, running, context = (
        None if (limit := number(merged.get(name))) is None else int(limit) for name in names
    )
    free_gb = None if info.get("device") == "cpu" else number(memory.get("startup_available"))
    return ServerReady(
        max_total_num_tokens=pool,
        chunked_prefill_size=chunk,
        max_running_requests=running,
        context_len=context,
        gpu_gb=free_gb,
        memory_caps_running=memory_caps_running(info),
    )
