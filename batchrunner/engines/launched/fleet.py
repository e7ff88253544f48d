"""The engine of a run that starts its own servers: one, or replicas behind a gateway (`smg`)."""

import asyncio
import dataclasses
import functools
import logging
import math
import os
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import EngineDownError, EngineStartError
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import RowAnswers
from batchrunner.engines.device import (
    CPU_NOTE,
    card_name,
    gpus,
    on_cpu,
    oom_kills,
    program_environment,
    server_args,
)
from batchrunner.engines.http.client import HttpEngine
from batchrunner.engines.http.connections import HeldPort, free_port, raise_file_limit
from batchrunner.engines.http.guard import FailureClassifier
from batchrunner.engines.http.server_info import WorkerList
from batchrunner.engines.launched.supervisor import SupervisedProgram, to_argv
from batchrunner.engines.model_files import cards_of, check_model, model_identity, split_over, with_tp
from batchrunner.engines.recovery import EndedServer, Healer, healer_for
from batchrunner.job.engine import GatewayEngine, LaunchedEngine, ServerEngine
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import GENERATE, TaskName

log = logging.getLogger(__name__)

START_TRIES = 3
"""SGLang draws a port for its processes and binds it seconds later: of eight servers that start on a node at
once, two draw the same one in 28 of 8,000 starts."""
TOKENIZERS = "tokenizer-worker-num"
"""Argument above 1 of which SGLang 0.5.23 refuses to start with an API key."""
GATEWAY_START_S = 120.0
"""Longest start of the gateway. It takes half a second on a quiet machine."""
NEVER_S = 10**9
LATER_S = 60.0
"""Seconds that the gateway waits for an answer beyond the runner's own limit, which is to end first."""


class GatewayProcess(SupervisedProgram):
    """A gateway that is restarted, and the list of workers that it should have.

    It starts without workers, and they are added over HTTP. So there is one way to add them at the first
    start, when a replica comes back and when the gateway does, and their key is in no command line.
    """

    needs = "smg: install batchrunner[gateway], or set engine.python"

    def __init__(
        self, spec: GatewayEngine, incidents: list[Incident], *, key: str, log_dir: Path, limits: LimitsSpec
    ) -> None:
        super().__init__(
            "smg.launch_router",
            key=key,
            environ=program_environment(spec.env),
            log_path=log_dir / "engine-gateway.log",
            python=spec.python,
            name="the gateway",
            incidents=incidents,
        )
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.argv = ["--host", "127.0.0.1", "--port", str(port), *to_argv(_gateway_arguments(spec, limits))]
        self._workers = WorkerList(self.url, key)
        self._listed: set[str] = set()

    async def start(self) -> None:
        """Start it and wait until it takes workers; raises EngineStartError where it does not."""
        await self.launch()
        # not /readiness, which is 503 before there is a worker
        await self.wait_until_ready(self.url + "/health", GATEWAY_START_S)

    async def set_up(self, *, up: bool) -> None:
        """Give a restarted gateway its workers again."""
        if up:
            await self._workers.bring_to(self._listed)

    async def take_workers(self, urls: Sequence[str]) -> None:
        """Give the gateway its first workers; raises EngineStartError where it does not take them."""
        self._listed.update(urls)
        if not await self._workers.bring_to(self._listed):
            raise EngineStartError(self.failure_message("did not take the replicas"))

    async def list_worker(self, url: str, *, listed: bool) -> None:
        """Put a worker on the gateway's list, or take it off."""
        (self._listed.add if listed else self._listed.discard)(url)
        if not await self._workers.bring_to(self._listed):
            log.warning("the gateway's list is not what it should be: %s", ", ".join(sorted(self._listed)))

    async def close(self) -> None:
        """End the gateway."""
        await self._workers.close()
        await self.stop()


def _gateway_arguments(spec: GatewayEngine, limits: LimitsSpec) -> dict[str, Any]:
    """Return the gateway's arguments. Bodies up to 512 MB pass by default."""
    return {
        # a new affinity key goes to the replica with the fewest requests, and the same key follows it. Rows
        # without a common prefix have a key each, so keys are forgotten soon (of itself: after four hours)
        "policy": "manual",
        "assignment-mode": "min_load",
        "max-idle-secs": 300,
        # the runner retries, with pauses. Without retries the gateway passes requests on as they are
        "disable-retries": True,
        "max-concurrent-requests": 0,  # no limit, and so no queue of its own
        "request-timeout-secs": math.ceil(limits.request_timeout + LATER_S),
        # the runner takes out what ended or hangs, and the gateway nothing: a queue and a full KV pool are
        # what the runner aims at, and an answer may take long
        "disable-circuit-breaker": True,
        "disable-worker-overload-protection": True,
        "disable-health-check": True,
        "disable-load-monitoring": True,
        "worker-stall-secs": NEVER_S,
        "worker-wedge-secs": NEVER_S,
        "shutdown-grace-period-secs": 1,
        "log-level": "warn",  # `info` is two lines a row
        # its metrics cannot be turned off, and two gateways cannot share the default port
        "prometheus-host": "127.0.0.1",
        "prometheus-port": free_port(),
        **spec.gateway_args,
    }


class SGLangServer(SupervisedProgram):
    """One `sglang.launch_server` with the job's arguments or safer ones, restarted when it dies or hangs.

    Without a `gateway` all rows in flight are its own.
    """

    def __init__(
        self,
        spec: LaunchedEngine,
        model: str,
        *,
        key: str,
        log_path: Path,
        cpu: bool,
        name: str = "the engine",
        environ: Mapping[str, str] | None = None,
        healer: Healer | None = None,
        gateway: GatewayProcess | None = None,
        failures: FailureClassifier,
        incidents: list[Incident],
    ) -> None:
        """`spec` describes all servers of a job; `environ` is that of this server alone."""
        offline = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")} if Path(model).exists() else {}
        super().__init__(
            "sglang.launch_server",
            key=key,
            environ=program_environment({**offline, **spec.env, **(environ or {})}, cpu=cpu),
            log_path=log_path,
            python=spec.python,
            name=name,
            incidents=incidents,
        )
        self._port = HeldPort()
        self.url = f"http://127.0.0.1:{self._port.number}"
        self._own_argv = [
            *("--model-path", model, "--host", "127.0.0.1", "--port", str(self._port.number)),
        ]  # fmt: skip
        self._start_timeout_s = spec.start_timeout
        self._given = server_args(spec.args, cpu=cpu)
        self._args: dict[str, Any] = {}  # of the last start
        self._kills: int | None = None  # the kernel's count at the last start
        self._healer = healer
        self._gateway = gateway
        self._failures = failures

    async def start(self) -> None:
        """Start it and wait until it takes requests; raises EngineStartError where it does not.

        A start that fails for want of memory is repeated with safer arguments, as after a death.
        """
        tries_left = START_TRIES
        while True:
            self._args = {**self._given, **(self._healer.args if self._healer else {})}
            self.argv = [*self._own_argv, *to_argv(self._args)]
            if str(self._args.get(TOKENIZERS, 1)) != "1":
                self.key = ""
                log.warning(
                    "%s needs no key, and every user of this machine can use it: SGLang takes none with --%s",
                    self.name, TOKENIZERS,
                )  # fmt: skip
            self._kills = oom_kills()
            log.info("starting SGLang at %s; its log: %s", self.url, self.log_path)
            await self.launch()
            try:
                await self.wait_until_ready(self.url + "/ready", self._start_timeout_s)
            except EngineStartError:
                tries_left -= 1
                if tries_left and self.found_port_taken():
                    log.warning("%s: another process took one of its ports: starting it again", self.name)
                elif not self.heal():
                    raise
                await self.stop()
            else:
                return

    def heal(self) -> bool:
        """Change the next start's arguments by the cause of death; return whether any help."""
        if self._healer is None or self.exit_code is None:
            return False
        kills = (oom_kills() or 0) - (self._kills or 0)
        return self._healer.heal(self.name, EndedServer(self.logged(), self._args, self.exit_code, kills))

    async def close(self) -> None:
        """End it, and give its port back."""
        if self._healer and self.up:
            self._healer.outlived(self._args)
        await self.stop()
        self._port.release()

    async def set_up(self, *, up: bool) -> None:
        """Put the server back into the gateway, or take it out."""
        self._failures.record(self.url, alive=up)
        if self._gateway:
            await self._gateway.list_worker(self.url, listed=up)


class LaunchedFleet(HttpEngine):
    """Servers that live as long as this object is open, and never longer than this process.

    One server takes rows directly. Replicas take those that generate through a gateway, and those of other
    tasks directly, each by its own load. The run goes on while one of them is left.
    """

    def __init__(
        self,
        spec: ServerEngine | GatewayEngine,
        *,
        log_dir: Path,
        limits: LimitsSpec,
        task: TaskName = GENERATE,
    ) -> None:
        # not `token_urlsafe`: a - at its head would read as an option
        self._key = os.environ.get("SGLANG_API_KEY") or secrets.token_hex(24)
        super().__init__(
            api_key=self._key,
            limits=limits,
            excuses=self.excuses,
            task=task,
        )
        self._spec = spec
        self._log_dir = log_dir
        self._gateway = (
            GatewayProcess(spec, self._incidents, key=self._key, log_dir=log_dir, limits=limits)
            if isinstance(spec, GatewayEngine) and task == GENERATE
            else None
        )
        self._replicas: dict[str, SGLangServer] = {}
        self._healer: Healer | None = None
        self._watching: list[asyncio.Task[None]] = []

    async def open(self) -> EngineInfo:
        """Start servers and gateway, all at once, and wait until they are ready; see `Engine.open`."""
        model = self._spec.model
        assert model is not None
        check_model(model)
        spec = self._spec = await asyncio.to_thread(with_tp, self._spec)
        cpu = on_cpu(spec.device)
        raise_file_limit()  # before they start: they inherit it, and the gateway needs two files a row
        self._healer = await asyncio.to_thread(healer_for, spec, model, self._incidents, cpu=cpu)
        made = self._make_servers(model, cpu=cpu)
        self._replicas = {server.url: server for server in made}
        programs: list[SGLangServer | GatewayProcess] = [*self._replicas.values()]
        if self._gateway:
            programs.append(self._gateway)
        log_path = programs[-1].log_path
        await _all_or_first_failure([program.start() for program in programs])
        if self._gateway:
            await self._gateway.take_workers([*self._replicas])
        info = await self.connect([*self._replicas], self._gateway.url if self._gateway else None)
        self._watching = [asyncio.create_task(program.watch()) for program in programs]
        counted = not (self._gateway or cpu or "CUDA_VISIBLE_DEVICES" in spec.env)
        return dataclasses.replace(
            info,
            kind=spec.kind,
            model=model_identity(model),
            card=None if cpu else await asyncio.to_thread(card_name),
            gpus=len(gpus()) if counted else None,
            tp=split_over(spec.args),
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
        lost = [replica.lost for replica in self._replicas.values() if replica.lost]
        if self._gateway is None:
            replica = self._replicas[route]
            if replica.lost and len(lost) < len(self._replicas):
                raise EngineDownError(str(replica.lost))  # other replicas do its rows
            await replica.ready()
        elif self._gateway.lost or len(lost) == len(self._replicas):
            raise self._gateway.lost or lost[0]

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load of each server; restart what hangs."""
        loads = await super().loads()
        for url, replica in self._replicas.items():
            if not replica.up:
                self._hangs[url].restarted()
            elif hang := self._hang_of(url, loads):
                replica.hangs(hang)
        return loads

    async def excuses(self, url: str, sent_at: float) -> bool:
        """Tell whether a server ended after `sent_at` for a reason that is no row's fault."""
        return await self._replicas[url].excuses(sent_at)

    async def close(self) -> None:
        """End the gateway, the servers and everything they started."""
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await super().close()
        stops = [replica.close() for replica in self._replicas.values()]
        await asyncio.gather(*stops, *([self._gateway.close()] if self._gateway else []))

    def _make_servers(self, model: str, *, cpu: bool) -> list[SGLangServer]:
        spec = self._spec
        make = functools.partial(
            SGLangServer, spec, model, key=self._key, cpu=cpu, healer=self._healer, gateway=self._gateway,
            failures=self.failures, incidents=self._incidents,
        )  # fmt: skip
        if not isinstance(spec, GatewayEngine):
            return [make(log_path=self._log_dir / "engine-server.log")]
        slices = gpu_slices([] if cpu else gpus(spec.env), cards_of(spec.args), spec.replicas)
        return [
            make(
                log_path=self._log_dir / f"engine-replica-{n}.log",
                name=f"replica {n}",
                environ={"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {},
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
