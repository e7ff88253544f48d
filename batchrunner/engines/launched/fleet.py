"""The engine of a run that starts its own servers: one, or replicas behind a Model Gateway."""

import asyncio
import dataclasses
import functools
import secrets
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.core.errors import EngineDownError, EngineStartError
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import IncidentQueue, RowAnswers
from batchrunner.engines.device import CPU_NOTE, card_name, gpus, on_cpu, server_args
from batchrunner.engines.hang_detector import HangDetector
from batchrunner.engines.http import wire
from batchrunner.engines.http.client import Endpoint, HttpEngine, SGLangClient
from batchrunner.engines.http.connections import raise_file_limit
from batchrunner.engines.http.loads import FailureClassifier
from batchrunner.engines.launched.gateway import GatewayProcess
from batchrunner.engines.launched.sglang_server import SGLangServer
from batchrunner.engines.launched.supervisor import ServerSupervisor, Supervised
from batchrunner.engines.logs.reader import LogFollower
from batchrunner.engines.model_files import check_model, model_identity
from batchrunner.engines.parallelism import with_tp
from batchrunner.engines.recovery.fits import cards_of, check_fits, split_over
from batchrunner.engines.recovery.healer import Healer, healer_for
from batchrunner.input.tokenize.detokenizer import Detokenizer
from batchrunner.job.engine import GatewayEngine, ServerEngine
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import GENERATE, TaskName, goes_past_gateways

KEEP_ALIVE_S = 120
"""Seconds for which replicas keep the gateway's idle connections; the gateway drops them after 90 s. With
SGLang's own 5 s it would send rows into connections that are just being closed."""


class FleetReplica(Supervised):
    """A server that a supervisor restarts; without a `gateway` all rows in flight are its own."""

    def __init__(
        self,
        server: SGLangServer,
        gateway: GatewayProcess | None,
        failures: FailureClassifier,
        incidents: IncidentQueue,
        *,
        hang_s: float,
    ) -> None:
        self.server = server
        self.url = server.url
        self.process = server.process
        self.supervisor = ServerSupervisor(self, incidents)
        self.is_up = True
        self._gateway = gateway
        self._failures = failures
        self._hangs = HangDetector(hang_s, alone=gateway is None)

    async def start(self) -> None:
        """Start the server and wait until it takes requests; raises EngineStartError where it does not."""
        await self.server.start()

    def heal(self) -> bool:
        """Change the next start's arguments by the cause of death; return whether any help."""
        return self.server.heal()

    async def went_down(self) -> None:
        """Take the server out of the gateway."""
        await self._set_up(up=False)

    async def came_up(self) -> None:
        """Put the server back into the gateway."""
        await self._set_up(up=True)

    def poll(self, loads: Sequence[SchedulerLoad], endpoint: Endpoint, now: float) -> None:
        """Restart the server if it hangs; let the gateway spare it while it stalls."""
        if not self.is_up:
            return
        own = [load for load in loads if load.server == self.url]
        answers = 0 if self._gateway else endpoint.answers
        hang = self._hangs.poll(now, own, in_flight=endpoint.in_flight, answers=answers)
        if hang:
            self.supervisor.hangs(hang)
        elif self._gateway:
            self._gateway.spare(self.url, stalls=self._hangs.stalls)

    async def _set_up(self, *, up: bool) -> None:
        self.is_up = up
        self._hangs.restarted()
        self._failures.record(self.url, alive=up)
        if self._gateway:
            await self._gateway.list_worker(self.url, listed=up)


class LaunchedFleet(HttpEngine):
    """Servers that live as long as this object is open, and never longer than this process.

    One server without a gateway takes rows directly. Replicas take them through a gateway, or directly where
    it has no endpoint for the task, and the run goes on while one of them is left.
    """

    def __init__(
        self,
        spec: ServerEngine | GatewayEngine,
        *,
        log_dir: Path,
        limits: LimitsSpec,
        detokenizer: Detokenizer | None = None,
        task: TaskName = GENERATE,
    ) -> None:
        self._key = secrets.token_hex(24)  # a - at its head would read as an option
        timeout_s = limits.request_timeout
        super().__init__(
            SGLangClient(
                api_key=self._key,
                request_timeout_s=timeout_s,
                detokenizer=detokenizer,
                verdicts=self,
                task=task,
            )
        )
        self._spec = spec
        self._log_dir = log_dir
        self._hang_s = limits.hang
        self._gateway = (
            GatewayProcess(spec, self._incidents, key=self._key, log_dir=log_dir, limits=limits)
            if isinstance(spec, GatewayEngine) and not goes_past_gateways(task)
            else None
        )
        self._replicas: dict[str, FleetReplica] = {}
        self._healer: Healer | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._follower: LogFollower | None = None

    async def open(self) -> EngineInfo:
        """Start servers and gateway, all at once, and wait until they are ready; see `Engine.open`."""
        model = self._spec.model
        assert model is not None
        check_model(model)
        spec = self._spec = await asyncio.to_thread(with_tp, self._spec)
        cpu = on_cpu(spec.device)
        raise_file_limit()  # before they start: they inherit it, and the gateway needs two files a row
        tp = int(spec.tp) if isinstance(spec, GatewayEngine) else None
        await asyncio.to_thread(check_fits, model, server_args(spec.args, cpu=cpu), tp=tp, cpu=cpu)
        self._healer = await asyncio.to_thread(healer_for, spec, model, self._incidents, tp=tp, cpu=cpu)
        self._replicas = {
            server.url: FleetReplica(
                server, self._gateway, self._client.failures, self._incidents, hang_s=self._hang_s
            )
            for server in self._make_servers(model, cpu=cpu, healer=self._healer)
        }
        programs: list[FleetReplica | GatewayProcess] = [*self._replicas.values()]
        if self._gateway:
            programs.append(self._gateway)
        log_path = programs[-1].process.log_path
        is_one = self._gateway is None and len(self._replicas) == 1
        follower = LogFollower(next(iter(self._replicas)), log_path) if is_one else None
        await _all_or_first_failure([program.start() for program in programs])
        if self._gateway:
            await self._gateway.take_workers([*self._replicas])
        info = await self._client.open([*self._replicas], self._gateway.url if self._gateway else None)
        self._follower = None if self._client.reports_load else follower
        self._watching = [asyncio.create_task(program.supervisor.watch()) for program in programs]
        counted = not (self._gateway or cpu or "CUDA_VISIBLE_DEVICES" in spec.env)
        return dataclasses.replace(
            info,
            kind=spec.kind,
            model=model_identity(model),
            card=None if cpu else await asyncio.to_thread(card_name),
            gpus=len(gpus()) if counted else None,
            tp=split_over(spec.args, tp),
            log=str(log_path),
            notes=(*((CPU_NOTE,) if cpu else ()), *info.notes),
        )

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once, to one server not before it is up; see `Engine.generate`."""
        await self._until_up(route)
        return await super().generate(request, route)

    async def generate_many(self, requests: Sequence[Request], route: str, answers: RowAnswers) -> None:
        """Send several requests in one; see `Engine.generate_many`."""
        await self._until_up(route)
        await super().generate_many(requests, route, answers)

    async def _until_up(self, route: str) -> None:
        lost = [replica.supervisor.lost for replica in self._replicas.values() if replica.supervisor.lost]
        if self._gateway is None:
            supervisor = self._replicas[route].supervisor
            if supervisor.lost and len(lost) < len(self._replicas):
                raise EngineDownError(str(supervisor.lost))  # other replicas do its rows
            await supervisor.ready()
        elif self._gateway.supervisor.lost or len(lost) == len(self._replicas):
            raise self._gateway.supervisor.lost or lost[0]

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load of each server, from its log if it has no other source; restart what hangs."""
        loads = self._follower.poll() if self._follower else await self._client.loads()
        now = time.monotonic()
        for route, endpoint in self._client.endpoints.items():
            for replica in self._replicas.values() if self._gateway else (self._replicas[route],):
                replica.poll(loads, endpoint, now)
            if self._gateway:
                polled = {load.server for load in loads}
                up = {replica.url for replica in self._replicas.values() if replica.is_up}
                idle = up <= polled and not any(load.has_work for load in loads)
                self._gateway.poll(loads, endpoint, now, idle=idle)
        return loads

    def admit_more(self) -> float | None:
        """Start servers less careful from now on; see `Engine.admit_more`."""
        return self._healer.admit_more() if self._healer else None

    async def excuses(self, url: str, sent_at: float) -> bool:
        """Tell whether a server ended after `sent_at` for a reason that is no row's fault."""
        return await self._replicas[url].supervisor.excuses(sent_at)

    async def close(self) -> None:
        """End the gateway, the servers and everything they started."""
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await super().close()
        stops = [replica.server.close() for replica in self._replicas.values()]
        await asyncio.gather(*stops, *([self._gateway.close()] if self._gateway else []))

    def _make_servers(self, model: str, *, cpu: bool, healer: Healer | None = None) -> list[SGLangServer]:
        spec = self._spec
        make = functools.partial(SGLangServer, spec, model, key=self._key, cpu=cpu, healer=healer)
        if not isinstance(spec, GatewayEngine):
            return [make(log_path=self._log_dir / "engine-server.log")]
        slices = gpu_slices([] if cpu else gpus(spec.env), cards_of(spec.args, int(spec.tp)), spec.replicas)
        return [
            make(
                log_path=self._log_dir / f"engine-replica-{n}.log",
                name=f"replica {n}",
                argv=(
                    *(("--tp-size", str(spec.tp)) if int(spec.tp) > 1 else ()),
                    *(("--stream-interval", str(wire.STREAM_INTERVAL)) if self._gateway else ()),
                ),
                environ={
                    "SGLANG_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
                    **({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}),
                },
            )
            for n, devices in enumerate(slices)
        ]


def gpu_slices(devices: Sequence[str], each: int, replicas: int | str) -> list[list[str]]:
    """Give each replica its own GPUs; an empty slice leaves CUDA_VISIBLE_DEVICES as it is.

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
