"""The engine of a run that starts its own servers: one, or replicas."""

import asyncio
import dataclasses
import functools
import logging
import os
import secrets
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import EngineDownError, EngineStartError
from batchrunner.core.files import read_json
from batchrunner.core.timing import TIMING
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
from batchrunner.engines.flags import arguments_in, command_line, variables_in
from batchrunner.engines.http.client import HttpEngine
from batchrunner.engines.http.connections import HeldPort, free_port, raise_file_limit
from batchrunner.engines.http.guard import FailureClassifier
from batchrunner.engines.launched.supervisor import PLANNED, SupervisedProgram, to_argv
from batchrunner.engines.model_files import cards_of, check_model, model_identity, split_over, with_tp
from batchrunner.engines.recovery import EndedServer, Healer, learned_file, remember
from batchrunner.job.engine import ServerEngine
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import GENERATE, TaskName

log = logging.getLogger(__name__)

START_TRIES = 3
"""SGLang draws a port for its processes and binds it seconds later: of eight servers that start on a node at
once, two draw the same one in 28 of 8,000 starts."""
TOKENIZERS = "tokenizer-worker-num"
"""Argument above 1 of which SGLang 0.5.23 refuses to start with an API key."""


class FlagMemory:
    """The flags and variables that were found best for a shape of job, and what each step gained."""

    def __init__(self, file: Path, incidents: list[Incident]) -> None:
        self._file = file
        known = read_json(file)
        self.args: Mapping[str, Any] = known.get("args", {})
        """Those with which a run starts, beside the job's own."""
        self.gains: Mapping[str, float] = known.get("gains", {})
        """Gain of each step that was tried: 0.1 is a tenth more output tokens a second."""
        if self.args:
            why = "found best by an earlier run of such a job"
            log.info("starting with %s, %s; delete %s to forget", command_line(self.args), why, file)
            incidents.append(Incident("recalled", "the engine", why, {"new": self.args}))

    def learn(self, args: Mapping[str, Any], step: str, gain: float) -> None:
        """Write down what to start with, and the gain of a step; other tasks of a run do so too."""
        self.args = args
        self.gains = {**read_json(self._file).get("gains", {}), **self.gains, step: round(gain, 3)}
        remember(self._file, {"args": args, "gains": self.gains})


class SGLangServer(SupervisedProgram):
    """One `sglang.launch_server` with the job's arguments or safer ones, restarted when it dies or hangs."""

    def __init__(
        self,
        spec: ServerEngine,
        model: str,
        *,
        key: str,
        log_path: Path,
        cpu: bool,
        name: str = "the engine",
        environ: Mapping[str, str] | None = None,
        healer: Healer | None = None,
        adapted: Mapping[str, Any] = {},
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
        self._nodes = spec.nodes
        if self._nodes > 1:
            there = os.environ.get("SLURM_JOB_NUM_NODES", "none")
            if there != str(self._nodes):
                raise EngineStartError(
                    f"engine.nodes {self._nodes}: machines of a Slurm job are needed (there: {there})",
                    hint="start it with `batchrun slurm`",
                )
            self.starter = (
                *("srun", f"--nodes={there}", f"--ntasks={there}", "--ntasks-per-node=1"),
                *("--overlap", "--kill-on-bad-exit=1"),
            )  # fmt: skip
        self._start_timeout_s = spec.start_timeout
        self._given = server_args(spec.args, cpu=cpu)
        self._named = {**spec.args, **spec.env}
        self._environ = self.environ
        self.adapted = dict(adapted)
        """Flags and variables that it has beside the job's own."""
        self._before: Mapping[str, Any] | None = {} if adapted else None  # what it goes back to
        self.start_s = 0.0
        """Seconds that its last start took."""
        self.has_work = False
        """Whether it had rows at the last poll, while it is not up."""
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
            self._args = {**self._given, **arguments_in(self.adapted), **self._safer}
            self.environ = {**self._environ, **variables_in(self.adapted)}
            self.argv = [*self._own_argv, *to_argv(self._args)]
            if self.starter:
                meeting = f"{socket.gethostname()}:{free_port()}"
                self.argv += ["--nnodes", str(self._nodes), "--dist-init-addr", meeting]
            if str(self._args.get(TOKENIZERS, 1)) != "1":
                self.key = ""
                log.warning(
                    "%s needs no key, and every user of this machine can use it: SGLang takes none with --%s",
                    self.name, TOKENIZERS,
                )  # fmt: skip
            self._kills = oom_kills()
            log.info("starting SGLang at %s; its log: %s", self.url, self.log_path)
            began = time.monotonic()
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
                self.start_s = time.monotonic() - began
                return

    @property
    def _safer(self) -> Mapping[str, Any]:
        return self._healer.args if self._healer else {}

    @property
    def fixed(self) -> Mapping[str, Any]:
        """What no sign changes: what the job names, what a death has changed, and variables that are set."""
        return {**self._named, **self._safer, **variables_in(self.adapted)}

    def adapt(self, args: Mapping[str, Any], why: str) -> None:
        """Restart it with other flags and variables, once its rows have ended; it goes back if it dies."""
        self._change(args, why)
        self.up = False
        self._settled.clear()
        self.hangs(PLANNED)

    def keep(self) -> None:
        """Take its flags for good: from now on a death is no fault of theirs."""
        self._before = None

    def _change(self, args: Mapping[str, Any], why: str) -> None:
        log.warning("%s: starts again with %s: %s", self.name, command_line(args) or "the job's flags", why)
        self.incidents.append(Incident("adapts", self.name, why, {"old": self.adapted, "new": dict(args)}))
        self._before, self.adapted = self.adapted, dict(args)

    async def drain(self) -> None:
        """Let its rows end, while others wait or go to other replicas; for as long as a start takes."""
        self.has_work = True
        until = time.monotonic() + self.start_s
        while self.has_work and time.monotonic() < until:  # noqa: ASYNC110 - it is a poll that tells
            await asyncio.sleep(TIMING.load_poll)

    def heal(self) -> bool:
        """Change the next start's arguments by the cause of death; return whether any help."""
        if self._before is not None:
            self._change(self._before, self.failure_message("does not live with them"))
            self.keep()
            return True
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
        spec: ServerEngine,
        *,
        log_dir: Path,
        limits: LimitsSpec,
        task: TaskName = GENERATE,
        shape: str | None = None,
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
        self._shape = shape
        self.memory: FlagMemory | None = None
        """What is known of flags for this shape of job; None where they do not change."""
        self._watching: list[asyncio.Task[None]] = []

    async def open(self) -> EngineInfo:
        """Start the servers, all at once, and wait until they are ready; see `Engine.open`."""
        model = self._spec.model
        check_model(model)
        spec = self._spec = await asyncio.to_thread(with_tp, self._spec)
        cpu = on_cpu(spec.device)
        raise_file_limit()  # before they start: they inherit it
        if spec.heal or self._shape:
            file = await asyncio.to_thread(learned_file, spec, model, cpu=cpu)
            self._healer = Healer(spec.args, file, self._incidents) if spec.heal else None
        if self._shape:
            self.memory = FlagMemory(file.with_suffix(f".{self._shape}.json"), self._incidents)
        made = self._make_servers(model, cpu=cpu)
        self._replicas = {server.url: server for server in made}
        await _all_or_first_failure([server.start() for server in made])
        info = await self.connect([*self._replicas])
        self._watching = [asyncio.create_task(server.watch()) for server in made]
        alone = len(made) == 1 and not (cpu or "CUDA_VISIBLE_DEVICES" in spec.env)
        return dataclasses.replace(
            info,
            kind=spec.kind,
            model=model_identity(model),
            card=None if cpu else await asyncio.to_thread(card_name),
            gpus=len(gpus()) if alone else None,
            tp=split_over(spec.args),
            log=str(made[-1].log_path),
            notes=(*((CPU_NOTE,) if cpu else ()), *info.notes),
        )

    @property
    def servers(self) -> Sequence[SGLangServer]:
        """All servers."""
        return [*self._replicas.values()]

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
                replica.has_work = self.endpoints[url].in_flight > 0
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
            adapted=self.memory.args if self.memory else {}, failures=self.failures,
            incidents=self._incidents,
        )  # fmt: skip
        if spec.replicas == 1:
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
