"""Replicas and a Model Gateway before them, started by us, and started again where one dies or hangs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from typing import TYPE_CHECKING

from batchrunner.core.errors import EngineStartError
from batchrunner.core.types import Incident
from batchrunner.engines.device import CPU_NOTE, card_name, gpus, on_cpu, server_args
from batchrunner.engines.hang_detector import HangDetector
from batchrunner.engines.http.client import GATEWAY_ROUTE, HttpEngine
from batchrunner.engines.http.connections import raise_file_limit
from batchrunner.engines.http.worker_list import WorkerList
from batchrunner.engines.launched.gateway import gateway_process, start_gateway
from batchrunner.engines.launched.sglang_server import SGLangServer
from batchrunner.engines.launched.supervisor import ServerSupervisor
from batchrunner.engines.model_files import check_model, model_identity
from batchrunner.engines.recovery.fits import cards_of, check_fits
from batchrunner.engines.recovery.healer import healer_for

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from pathlib import Path
    from typing import Any

    from batchrunner.core.types import Completion, EngineInfo, Request, SchedulerLoad
    from batchrunner.engines.launched.process import LaunchedProcess
    from batchrunner.engines.recovery.healer import Healer
    from batchrunner.input.tokenize.detokenizer import Detokenizer
    from batchrunner.job.spec import GatewayEngine, LimitsSpec

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 120
"""How long replicas keep the gateway's idle connections; it drops them itself after 90 s. SGLang's 5 s would
have it send rows into connections that are just being closed."""


class LaunchedGateway:
    """Replicas and gateway that live as long as this object is open, and never longer than this process."""

    def __init__(
        self, spec: GatewayEngine, *, log_dir: Path, limits: LimitsSpec, reader: Detokenizer | None = None
    ) -> None:
        self._spec = spec
        self._reader = reader
        self._log_dir = log_dir
        self._limits = limits
        self._key = secrets.token_hex(24)  # a - at its head would read as an option
        self._client: HttpEngine | None = None
        self._servers: list[SGLangServer] = []
        self._gateway: LaunchedProcess | None = None
        self._workers: WorkerList | None = None
        self._ready: set[str] = set()  # replicas that are up
        self._listed: set[str] = set()  # what the gateway's list should be
        self._guards: dict[str, ServerSupervisor] = {}
        """Of each replica by its URL, and of the gateway."""
        self._vigils: dict[str, HangDetector] = {}
        self._incidents: list[Incident] = []
        self._watching: set[asyncio.Task[None]] = set()

    async def open(self) -> EngineInfo:
        """Start the replicas and the gateway, all at once, and wait until they are ready."""
        spec = self._spec
        assert spec.model is not None
        check_model(spec.model)
        cpu = on_cpu(spec.device)
        raise_file_limit()  # before they start: they inherit it, and the gateway needs two files a row
        args = server_args(spec.args, cpu=cpu)
        await asyncio.to_thread(check_fits, spec.model, args, tp=spec.tp, cpu=cpu)
        healer = await asyncio.to_thread(
            healer_for, spec, spec.model, self._incidents.append, tp=spec.tp, cpu=cpu
        )
        self._servers = self._make_servers(spec.model, cpu=cpu, healer=healer)
        self._gateway, url = gateway_process(
            spec, key=self._key, log_dir=self._log_dir, request_timeout_s=self._limits.request_timeout
        )
        self._workers = WorkerList(url, self._key)
        await _all_or_first_failure([self._start_gateway(), *(server.start() for server in self._servers)])
        urls = [server.url for server in self._servers]
        self._ready |= set(urls)
        self._listed |= self._ready
        if not await self._workers.bring_to(self._listed):
            raise EngineStartError(self._gateway.obituary("the gateway did not take the replicas"))
        self._client = HttpEngine(
            urls,
            api_key=self._key,
            request_timeout_s=self._limits.request_timeout,
            gateway=url,
            reader=self._reader,
        )
        info = await self._client.open()
        tell = self._incidents.append
        self._guards = {server.url: self._guard(server) for server in self._servers}
        self._guards[GATEWAY_ROUTE] = ServerSupervisor(
            self._gateway, self._start_gateway, tell, up=self._give_workers
        )
        self._client.blame.excuses = lambda url, sent_at: self._guards[url].excuses(sent_at)
        self._vigils = {
            name: HangDetector(self._limits.hang, alone=name not in urls) for name in self._guards
        }
        self._watching = {asyncio.create_task(guard.watch()) for guard in self._guards.values()}
        notes = (*((CPU_NOTE,) if cpu else ()), *info.notes)
        return dataclasses.replace(
            info,
            kind="gateway",
            model=model_identity(spec.model),
            card=None if cpu else await asyncio.to_thread(card_name),
            log=str(self._gateway.log_path),
            notes=notes,
        )

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`."""
        assert self._client is not None
        lost = [guard.lost for guard in self._guards.values() if guard.lost]
        gateway = self._guards[GATEWAY_ROUTE].lost
        if gateway or len(lost) == len(self._servers):  # with one replica left the run goes on
            raise gateway or lost[0]
        return await self._client.generate(request, route)

    async def tokens_of(self, request: Request) -> list[int] | None:
        """Ask a replica; see `Engine.tokens_of`."""
        assert self._client is not None
        return await self._client.tokens_of(request)

    async def signals(self) -> Sequence[SchedulerLoad]:
        """Return the load of each replica that answers now."""
        if self._client is None:
            return []
        signals = await self._client.signals()
        self._watch(signals)
        return signals

    def incidents(self) -> list[Incident]:
        """Return what befell the replicas and the gateway; see `Engine.incidents`."""
        told, self._incidents[:] = self._incidents[:], []
        return told

    async def close(self) -> None:
        """End the gateway, the replicas and everything they started."""
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for connections in (self._client, self._workers):
            if connections is not None:
                await connections.close()
        self._client = None
        stops = [server.stop() for server in self._servers]
        if self._gateway is not None:
            stops.append(self._gateway.stop())
        await asyncio.gather(*stops)

    def _make_servers(self, model: str, *, cpu: bool, healer: Healer | None = None) -> list[SGLangServer]:
        spec = self._spec
        slices = gpu_slices([] if cpu else gpus(spec.env), cards_of(spec.args, spec.tp), spec.replicas)
        return [
            SGLangServer(
                spec,
                model,
                key=self._key,
                log_path=self._log_dir / f"engine-replica-{n}.log",
                cpu=cpu,
                name=f"replica {n}",
                argv=("--tp-size", str(spec.tp)) if spec.tp > 1 else (),
                environ={
                    "SGLANG_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
                    **({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}),
                },
                healer=healer,
            )
            for n, devices in enumerate(slices)
        ]

    async def _start_gateway(self) -> None:
        assert self._gateway is not None
        assert self._workers is not None
        await start_gateway(self._gateway, self._workers.url)

    def _watch(self, signals: Sequence[SchedulerLoad]) -> None:
        """Find the replicas that hang, and the gateway: where it has rows, and no replica has."""
        assert self._client is not None
        route, now = self._client.routes[GATEWAY_ROUTE], time.monotonic()
        for url in self._ready:
            told = [signal for signal in signals if signal.server == url]
            hang = self._vigils[url].look(now, told, in_flight=route.in_flight)
            if hang:
                self._guards[url].hangs(hang)
            elif self._vigils[url].stalls == (url in self._listed):
                self._spare(url)
        idle = self._ready <= {signal.server for signal in signals} and not any(s.has_work for s in signals)
        hang = self._vigils[GATEWAY_ROUTE].look(
            now, signals, in_flight=route.in_flight if idle else 0, answers=route.answers
        )
        if hang:
            self._guards[GATEWAY_ROUTE].hangs(hang)

    def _spare(self, url: str) -> None:
        """Take a replica that stalls off the gateway's list, if it is not the last, or put it back.

        Else the gateway would go on giving it rows, until all that may be in flight are there.
        """
        listed = url not in self._listed
        if listed or len(self._listed) > 1:
            change = asyncio.create_task(self._list(url, listed=listed))
            self._watching.add(change)
            change.add_done_callback(self._watching.discard)

    def _guard(self, server: SGLangServer) -> ServerSupervisor:
        """Take a replica that dies out of the gateway, start it again, put it back."""
        return ServerSupervisor(
            server.process,
            server.start,
            self._incidents.append,
            down=lambda: self._set_ready(server.url, ready=False),
            up=lambda: self._set_ready(server.url, ready=True),
            heal=server.heal,
            then="taken out of the gateway and started again",
        )

    async def _set_ready(self, url: str, *, ready: bool) -> None:
        assert self._client is not None
        (self._ready.add if ready else self._ready.discard)(url)
        self._vigils[url].restarted()
        self._client.blame.saw(url, alive=ready)
        await self._list(url, listed=ready)

    async def _list(self, url: str, *, listed: bool) -> None:
        """Put a replica on the gateway's list, or take it off."""
        assert self._workers is not None
        changed = listed != (url in self._listed)
        (self._listed.add if listed else self._listed.discard)(url)
        if not await self._workers.bring_to(self._listed):
            log.warning("the gateway's list is not what it should be: %s", ", ".join(sorted(self._listed)))
        elif changed:
            self._incidents.append(Incident("in" if listed else "out", url))

    async def _give_workers(self) -> None:
        assert self._workers is not None
        await self._workers.bring_to(self._listed)


def gpu_slices(devices: Sequence[str], each: int, replicas: int | str) -> list[list[str]]:
    """Deal the GPUs out, as many to each replica; an empty slice leaves CUDA_VISIBLE_DEVICES as it is.

    Without GPUs that can be counted (a CPU, or a vendor's own way of naming) `auto` is one replica. Raises
    EngineStartError where there are too few.
    """
    if not devices:
        return [[] for _ in range(1 if replicas == "auto" else int(replicas))]
    count = len(devices) // each if replicas == "auto" else int(replicas)
    if count * each > len(devices) or count == 0:
        raise EngineStartError(
            f"engine.replicas {replicas} with {each} each (engine.tp, times pp-size and dp-size) needs "
            f"{max(count, 1) * each} GPUs: {len(devices)} there"
        )
    return [list(devices[n * each : (n + 1) * each]) for n in range(count)]


async def _all_or_first_failure(starts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first that fails ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for start in starts:
                group.create_task(start)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
