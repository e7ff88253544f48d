"""Watches a live server for some seconds, for `batchrun advise`: its load, counters and arguments."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
from yarl import URL

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.errors import InputError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.proxies import by_proxy
from batchrunner.engines.http.server_info import (
    KEY_REFUSED,
    METRIC_PREFIX,
    METRICS,
    MODEL_INFO,
    NOT_REACHED,
    NOT_SGLANG,
    SERVER_INFO,
    ServerStatus,
    counters_in,
    first_scheduler_state,
    limit_in_effect,
    memory_caps_running,
)
from batchrunner.job.engine import API_KEY_VARIABLE
from batchrunner.sglang.flags import StatePool, number, slots_per_request
from batchrunner.sglang.logs.lines import ServerReady
from batchrunner.sglang.logs.reader import Facts
from batchrunner.sglang.logs.series import Series, sample_of_load
from batchrunner.tuning.situation import Situation


def watch_server(url: str, span_s: float) -> Situation:
    """Watch a server for `span_s` seconds, or until Ctrl-C, and return its situation.

    Raises InputError if no server answers, or if the server is not SGLang.
    """
    return asyncio.run(_watch(url.rstrip("/"), span_s))


async def _watch(url: str, span_s: float) -> Situation:
    """Poll a server for `span_s` seconds, or until Ctrl-C; see `watch_server`."""
    interrupted = asyncio.Event()
    # A signal handler can be set only in the main thread. Elsewhere, Ctrl-C is not for this function.
    with contextlib.suppress(NotImplementedError, RuntimeError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    key = os.environ.get(API_KEY_VARIABLE)
    # For a URL with a password, aiohttp sets this header itself.
    has_password = URL(url).password is not None
    headers = {"Authorization": f"Bearer {key}"} if key and not has_password else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        server = _WatchedServer(ServerStatus(session, url))
        await server.read_facts()
        end = time.monotonic() + span_s
        while not interrupted.is_set() and time.monotonic() < end:
            await server.poll()
            # Ctrl-C ends the wait for the next poll.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(interrupted.wait(), TIMING.load_poll)
        return server.situation()


class _WatchedServer:
    """One server that is polled, with the results of all polls so far."""

    def __init__(self, status: ServerStatus) -> None:
        """`status` sends the requests to the server."""
        self._status = status
        self._series = Series()
        self._facts = Facts()
        self._report_times: dict[str, float | None] = {}
        """Time stamp of the last load report of each scheduler; empty if the server reports no load."""
        self._first_counters: dict[str, float] = {}
        """Counters of the first poll of `/metrics`, by their names."""
        self._last_counters: dict[str, float] = {}
        """Counters of the last poll of `/metrics`, by their names."""
        self._next_metrics = 0.0
        """Time of the next poll of `/metrics`, in seconds of the monotonic clock."""

    async def read_facts(self) -> None:
        """Read the server's arguments, limits and memory; raises InputError if it is not an SGLang server."""
        info = await self._server_info()
        self._facts.version = info.get("version")
        self._facts.arguments = {
            name: value for name, value in info.items() if name not in {"version", "internal_states"}
        }
        state = first_scheduler_state(info)
        memory = state.get("memory_usage")
        memory = memory if isinstance(memory, dict) else {}
        self._facts.ready = _limits(info, state, memory)
        slots = int(number(state.get("max_mamba_cache_size")) or 0)
        if slots:
            per_request = slots_per_request({**info, **state})
            self._facts.states = StatePool(slots, per_request, kv_gb=number(memory.get("kvcache")))
        self._facts.weights_gb = number(memory.get("weight"))
        self._facts.card_gb = _free_before_loading(memory)
        # The class of the model is optional, so a failed request is ignored.
        with contextlib.suppress(*NOT_REACHED):
            _, model_info = await self._status.mapping(MODEL_INFO, TIMING.advise_timeout)
            classes = model_info.get("architectures")
            self._facts.model = str(classes[0]) if isinstance(classes, list) and classes else None

    async def _server_info(self) -> dict[str, Any]:
        """Return the server's reply to `/server_info`; raises InputError if it is not an SGLang server."""
        url = self._status.url
        try:
            status, info = await self._status.mapping(SERVER_INFO, TIMING.advise_timeout)
        except NOT_REACHED as failure:
            reason = str(getattr(failure, "os_error", failure))
            reason = reason or f"no answer within {TIMING.advise_timeout:g} s"
            raise InputError(f"{url}: no server answers{by_proxy(url)}: {reason}") from None
        if status in KEY_REFUSED:
            raise InputError(f"{url}: refuses the API key", hint=f"set {API_KEY_VARIABLE}")
        if "model_path" not in info:
            raise InputError(
                f"{url}: not an SGLang server (no path {SERVER_INFO})",
                hint="give a server's own address, not a gateway's",
            )
        return info

    async def poll(self) -> None:
        """Record one load sample of each scheduler; a poll that fails is skipped."""
        with contextlib.suppress(*NOT_REACHED, *NOT_SGLANG):
            if time.monotonic() >= self._next_metrics:
                await self._read_metrics()
            pool = self._facts.states
            running_by_states = pool.most_running if pool else None
            self._record(await self._status.load(TIMING.advise_timeout, running_by_states))

    def situation(self) -> Situation:
        """Return the situation, with the growth of the counters since the first poll."""
        growth = dict[str, int]()
        for name, value in self._last_counters.items():
            # A counter that fell was reset by a restart of the server.
            growth[name] = int(max(0.0, value - self._first_counters.get(name, 0.0)))
        prefills = self._series.prefills
        prefills.cached_tokens = growth.get("cached_tokens_total", 0)
        prefills.new_tokens = max(0, growth.get("prompt_tokens_total", 0) - prefills.cached_tokens)
        prefills.prompts = growth.get("num_requests_total", 0)
        self._series.retractions = growth.get("num_retracted_requests_total", 0)
        self._series.settle()
        self._facts.mute = not self._report_times
        # Without the server's log, the polls stand for it.
        return Situation(load=self._series, log=self._series, facts=self._facts)

    async def _read_metrics(self) -> None:
        """Record the counters of `/metrics`, if the server has this path."""
        self._next_metrics = time.monotonic() + TIMING.advise_metrics
        status, body = await self._status.get(METRICS, TIMING.advise_timeout)
        text = body.decode(errors="replace") if status == HTTPStatus.OK else ""
        self._facts.metrics = METRIC_PREFIX in text
        if self._facts.metrics:
            self._last_counters = counters_in(text)
            self._first_counters = self._first_counters or self._last_counters

    def _record(self, loads: Sequence[SchedulerLoad]) -> None:
        """Record the load of each scheduler that has work.

        The values of `/metrics` are sums over all schedulers, so each scheduler gets an equal part.
        """
        counters = self._last_counters
        graphs_in_use = counters.get("is_cuda_graph")
        rate_sum = counters.get("gen_throughput")
        state_usage_sum = counters.get("mamba_usage", 0.0)
        for load in loads:
            # SGLang repeats a scheduler's last report until there is a new one, so each is counted once.
            last_report_time = self._report_times.get(load.scheduler)
            is_repeated = load.taken_at is not None and load.taken_at == last_report_time
            self._report_times[load.scheduler] = load.taken_at
            if is_repeated or not load.has_work:
                continue
            # The counter says nothing about a scheduler without running requests.
            uses_graph = None
            if graphs_in_use is not None and load.running:
                uses_graph = bool(graphs_in_use)
            rate = None if rate_sum is None else rate_sum / len(loads)
            sample = sample_of_load(load, at=time.monotonic(), graph=uses_graph, rate=rate)
            # `/v1/loads` or `/metrics` may lack the usage of the state pool; it is 0 then.
            state_usage = max(sample.state_usage, state_usage_sum / len(loads))
            self._series.add(load.scheduler, sample._replace(state_usage=state_usage))


def _free_before_loading(memory: dict[str, Any]) -> float | None:
    """Return the GPU memory in GB that was free before the weights were loaded; None if unknown.

    It is the sum of weights, KV pool, CUDA graphs and the memory that was free after the start.
    """
    values = [memory.get(name) for name in ("weight", "kvcache", "startup_available")]
    graphs = memory.get("graph")
    if isinstance(graphs, dict):
        values += graphs.values()
    sizes_gb = [number(value) for value in values]
    if None in sizes_gb:
        return None
    return sum(size_gb or 0.0 for size_gb in sizes_gb)


def _limits(info: dict[str, Any], state: dict[str, Any], memory: dict[str, Any]) -> ServerReady:
    """Return the limits of a server's first scheduler.

    A value in the scheduler's `state` takes precedence over the server's arguments in `info`, unless it is
    null or 0. `memory` is the scheduler's `memory_usage`.
    """
    state_values = {name: value for name, value in state.items() if value}
    limits = {**info, **state_values}
    running_name = "max_running_requests"
    # With DP attention, a scheduler may run only its share of the requests in the argument.
    limits[running_name] = limit_in_effect(state, running_name) or limits.get(running_name)

    def limit(name: str) -> int | None:
        value = number(limits.get(name))
        return None if value is None else int(value)

    free_gb = None if info.get("device") == "cpu" else number(memory.get("startup_available"))
    return ServerReady(
        max_total_num_tokens=limit("max_total_num_tokens"),
        chunked_prefill_size=limit("chunked_prefill_size"),
        max_running_requests=limit(running_name),
        context_len=limit("context_length"),
        gpu_gb=free_gb,
        memory_caps_running=memory_caps_running(info),
    )
