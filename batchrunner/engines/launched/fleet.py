"""The engine of a run that starts its own servers: one, or replicas."""

import asyncio
import dataclasses
import functools
import logging
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
from batchrunner.engines.http.connections import HeldPort, raise_file_limit
from batchrunner.engines.http.guard import FailureClassifier
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


class SGLangServer(SupervisedProgram):
    """One `sglang.launch_server` with the job's arguments or safer ones, restarted when it dies or hangs."""

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
        """Record whether the server is alive, which tells why rows are cut off."""
        self._failures.record(self.url, alive=up)


class LaunchedFleet(HttpEngine):
    """Servers that live as long as this object is open, and never longer than this process.

    Each takes rows by its own load. The run goes on while one of them is left.
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
        self._replicas: dict[str, SGLangServer] = {}
        self._healer: Healer | None = None
        self._watching: list[asyncio.Task[None]] = []

    async def open(self) -> EngineInfo:
        """Start the servers, all at once, and wait until they are ready; see `Engine.open`."""
        model = self._spec.model
        assert model is not None
        check_model(model)
        spec = self._spec = await asyncio.to_thread(with_tp, self._spec)
        cpu = on_cpu(spec.device)
        raise_file_limit()  # before they start: they inherit it
        self._healer = await asyncio.to_thread(healer_for, spec, model, self._incidents, cpu=cpu)
        made = self._make_servers(model, cpu=cpu)
        self._replicas = {server.url: server for server in made}
        await _all_or_first_failure([server.start() for server in made])
        info = await self.connect([*self._replicas])
        self._watching = [asyncio.create_task(server.watch()) for server in made]
        counted = isinstance(spec, ServerEngine) and not (cpu or "CUDA_VISIBLE_DEVICES" in spec.env)
        return dataclasses.replace(
            info,
            kind=spec.kind,
            model=model_identity(model),
            card=None if cpu else await asyncio.to_thread(card_name),
            gpus=len(gpus()) if counted else None,
            tp=split_over(spec.args),
            log=str(made[-1].log_path),
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
        replica = self._replicas[route]
        if replica.lost and not all(each.lost for each in self._replicas.values()):
            raise EngineDownError(str(replica.lost))  # other replicas do its rows
        await replica.ready()

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
        """End the servers and everything they started."""
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await super().close()
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))

    def _make_servers(self, model: str, *, cpu: bool) -> list[SGLangServer]:
        spec = self._spec
        make = functools.partial(
            SGLangServer, spec, model, key=self._key, cpu=cpu, healer=self._healer,
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
