"""The engine of a run that starts its own servers: one server, or replicas."""

import asyncio
import dataclasses
import functools
import logging
import os
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.core.errors import EngineDownError, EngineStartError
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import RowEnded
from batchrunner.engines.http.client import HttpEngine
from batchrunner.engines.http.connections import raise_file_limit
from batchrunner.engines.http.server import Endpoint
from batchrunner.engines.http.server_info import why_no_budget
from batchrunner.engines.launched.server import SGLangServer
from batchrunner.job.engine import API_KEY_VARIABLE, THINK_LIMIT, ServerEngine
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import GENERATE, TaskName
from batchrunner.sglang.device import (
    CPU_NOTE,
    card_name,
    gpus,
    on_cpu,
)
from batchrunner.sglang.model_files import (
    cards_of,
    check_model,
    check_on_hub,
    model_identity,
    split_over,
    with_tp,
)
from batchrunner.tuning.memory import FlagMemory, memory_of
from batchrunner.tuning.recover import Healer

if TYPE_CHECKING:
    from batchrunner.engines.launched.gateway import LaunchedGateway

log = logging.getLogger(__name__)


class LaunchedFleet(HttpEngine):
    """Servers that live as long as this object is open, and never longer than this process.

    Each server gets rows according to its own load. The run continues while at least one of them is alive.
    """

    starts_servers = True

    def __init__(
        self,
        spec: ServerEngine,
        *,
        log_dir: Path,
        limits: LimitsSpec,
        task: TaskName = GENERATE,
        shape: str | None = None,
    ) -> None:
        # The key is hexadecimal, because a key that begins with - would look like an option.
        self._key = os.environ.get(API_KEY_VARIABLE) or secrets.token_hex(24)
        super().__init__(api_key=self._key, limits=limits, task=task)
        self._spec = spec
        self._log_dir = log_dir
        self._replicas: dict[str, SGLangServer] = {}
        """The servers by their URLs, which are also the names of the routes."""
        self._healer: Healer | None = None
        """Chooses safer arguments after the death of a server; None without recovery."""
        self._shape = shape
        """Digest of the job, by which tuned flags are stored for similar jobs; None if flags are not
        tuned."""
        self.memory: FlagMemory | None = None
        """Flags that earlier runs of similar jobs have learned; None if flags are not tuned during the
        run."""
        self._watch_loops: list[asyncio.Task[None]] = []
        """Tasks that restart the servers and the gateway."""
        self.gateway: LaunchedGateway | None = None
        """The gateway in front of the servers; None without `engine.gateway`."""

    async def open(self) -> EngineInfo:
        """Start all servers at the same time, and wait until they are ready; see `Engine.open`."""
        model = self._spec.model
        check_model(model)
        await asyncio.to_thread(check_on_hub, self._spec)
        spec = self._spec = with_tp(self._spec)
        cpu = on_cpu(spec.device)
        if cpu and spec.device == "auto":
            _refuse_several_gpus(spec)
        if spec.gateway:
            from batchrunner.engines.launched.gateway import check_installed  # noqa: PLC0415 - for few jobs

            await asyncio.to_thread(check_installed, spec.python)
        # The limit is raised before the servers start, because they inherit it.
        raise_file_limit()
        if spec.heal or self._shape:
            # Recovery and flag tuning share the file with the results of earlier runs.
            memory = await asyncio.to_thread(memory_of, spec, model, cpu=cpu)
            if spec.heal:
                self._healer = Healer(spec.args, memory, self._incidents)
            if self._shape:
                self.memory = FlagMemory(memory, self._shape, self._incidents)
        servers = self._make_servers(model, cpu=cpu)
        self._replicas = {server.url: server for server in servers}
        await _start_all([server.start() for server in servers])
        info = await self.connect([*self._replicas])
        if THINK_LIMIT in spec.env:
            # With a default budget, every reasoning parser supports the thinking budgets of rows.
            described = [endpoint.arguments for endpoint in self.serving if endpoint.arguments is not None]
            reasons = [why_no_budget(arguments, has_default_budget=True) for arguments in described]
            self._no_thinking_budget = next(filter(None, reasons), None)
            info = dataclasses.replace(info, no_thinking_budget=self._no_thinking_budget)
        self._watch_loops = [asyncio.create_task(server.watch()) for server in servers]
        notes = [*info.notes]
        if cpu:
            notes.insert(0, CPU_NOTE)
        if spec.gateway:
            gateway_url = await self._start_gateway()
            notes.insert(0, f"other clients can use the replicas through the gateway {gateway_url}")
        # With several servers, none of them has all GPUs.
        has_all_gpus = len(servers) == 1 and not (cpu or "CUDA_VISIBLE_DEVICES" in spec.env)
        return dataclasses.replace(
            info,
            kind=spec.kind,
            model=model_identity(model),
            card=None if cpu else await asyncio.to_thread(card_name),
            gpus=len(gpus()) * spec.nodes if has_all_gpus else None,
            tp=split_over(spec.args),
            log=str(servers[-1].log_path),
            notes=tuple(notes),
        )

    async def _start_gateway(self) -> str:
        """Start a gateway in front of the servers, which must be up; return its URL."""
        from batchrunner.engines.launched.gateway import LaunchedGateway  # noqa: PLC0415 - for few jobs

        self.gateway = LaunchedGateway(
            python=self._spec.python, key=self._key, log_path=self._log_dir / "engine-gateway.log"
        )
        await self.gateway.start([*self._replicas])
        self._watch_loops.append(asyncio.create_task(self.gateway.watch()))
        return self.gateway.url

    @property
    def servers(self) -> Sequence[SGLangServer]:
        """All servers of the run, including servers that will not be restarted."""
        return [*self._replicas.values()]

    def may_speculate(self) -> bool:
        """Tell whether a server uses n-gram speculation, or flag tuning may try it."""
        return self.memory is not None or super().may_speculate()

    def arguments_of(self, url: str) -> Mapping[str, Any]:
        """Return a server's present arguments, tuned flags included, with underscores in the names."""
        tuned_flags = self._replicas[url].adapted
        tuned_arguments = {name.replace("-", "_"): value for name, value in tuned_flags.items()}
        return {**super().arguments_of(url), **tuned_arguments}

    def start_of(self, url: str) -> int:
        """Return a number that changes whenever the server is started again."""
        # Each start appends to the log.
        return self._replicas[url].log_offset

    async def generate(self, request: Request, route: str) -> Completion:
        """Send a request once, as soon as its server is up; see `Engine.generate`."""
        await self._until_up(route)
        return await super().generate(request, route)

    async def generate_many(self, requests: Sequence[Request], route: str, ended: RowEnded) -> None:
        """Send a bundle as soon as its server is up; see `Engine.generate_many`."""
        await self._until_up(route)
        await super().generate_many(requests, route, ended)

    async def _until_up(self, route: str) -> None:
        """Wait until the server of a route is up; raises EngineDownError or EngineLostError."""
        server = self._replicas[route]
        are_all_lost = all(replica.lost for replica in self._replicas.values())
        if server.lost and not are_all_lost:
            # The rows of this lost server go to other replicas.
            raise EngineDownError(str(server.lost))
        # If all servers are lost, this raises EngineLostError, which ends the run.
        await server.ready()

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load of each server, and let servers that hang be restarted."""
        loads = await super().loads()
        for url, replica in self._replicas.items():
            endpoint = self.endpoints[url]
            # A server that starts or drains is not checked for hangs. While it drains, it waits until
            # `has_work` is false.
            if not replica.up:
                replica.has_work = endpoint.in_flight > 0
                endpoint.hang_detector.restarted()
            elif hang := endpoint.check_for_hang(loads):
                replica.report_hang(hang)
        return loads

    def _new_endpoint(self, url: str) -> Endpoint:
        endpoint = super()._new_endpoint(url)
        endpoint.liveness = self._replicas[url].liveness
        return endpoint

    async def excuses(self, url: str, sent_at: float) -> bool:
        """Tell whether a server died after `sent_at` for a reason that is no row's fault."""
        return await self._replicas[url].excuses(sent_at)

    async def close(self) -> None:
        """End the servers and all their processes."""
        for watch_loop in self._watch_loops:
            watch_loop.cancel()
        await asyncio.gather(*self._watch_loops, return_exceptions=True)
        await super().close()
        if self.gateway is not None:
            await self.gateway.close()
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))

    def _make_servers(self, model: str, *, cpu: bool) -> list[SGLangServer]:
        """Return the servers, not yet started. Replicas divide the GPUs among them.

        A single server sees all GPUs, and logs to `engine-server.log`.
        """
        spec = self._spec
        make = functools.partial(
            SGLangServer, spec, model, key=self._key, cpu=cpu, healer=self._healer,
            memory=self.memory, incidents=self._incidents,
        )  # fmt: skip
        if spec.replicas == 1:
            return [make(log_path=self._log_dir / "engine-server.log")]
        slices = gpu_slices(
            [] if cpu else gpus(spec.env), gpus_per_replica=cards_of(spec.args), replicas=spec.replicas
        )
        return [
            make(
                log_path=self._log_dir / f"engine-replica-{number}.log",
                name=f"replica {number}",
                environ={"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {},
            )
            for number, devices in enumerate(slices)
        ]


def _refuse_several_gpus(spec: ServerEngine) -> None:
    """Raise EngineStartError for a job that needs several GPUs on a machine without a GPU.

    A job that needs one GPU runs on the CPU instead. Several servers, or several ranks of one server, would
    only compete for that CPU.
    """
    gpus_per_replica = cards_of(spec.args)
    gpu_count = gpus_per_replica * (1 if spec.replicas == "auto" else spec.replicas)
    if gpu_count > 1:
        raise EngineStartError(
            f"engine.replicas {spec.replicas} with {gpus_per_replica} GPUs each (engine.tp, times pp-size "
            f"and dp-size) needs {gpu_count} GPUs: this machine has none",
            hint="run the job on a machine with GPUs, or set engine.device: cpu to try the job on the CPU",
        )


def gpu_slices(
    devices: Sequence[str], *, gpus_per_replica: int, replicas: int | Literal["auto"]
) -> list[list[str]]:
    """Divide the GPUs among the replicas: return the devices of each replica.

    `devices` is empty on a CPU, or if the GPUs are unknown. Then each replica gets an empty list, and `auto`
    means one replica. Raises EngineStartError if there are too few GPUs.
    """
    if not devices:
        return [[] for _ in range(1 if replicas == "auto" else replicas)]
    count = len(devices) // gpus_per_replica if replicas == "auto" else replicas
    # With too few GPUs for a single replica, `auto` would mean none.
    needed = max(count, 1) * gpus_per_replica
    if needed > len(devices):
        raise EngineStartError(
            f"engine.replicas {replicas} with {gpus_per_replica} GPUs each (engine.tp, times pp-size and "
            f"dp-size) needs {needed} GPUs: this machine has {len(devices)}"
        )
    begins = range(0, count * gpus_per_replica, gpus_per_replica)
    return [list(devices[begin : begin + gpus_per_replica]) for begin in begins]


async def _start_all(starts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all starts at the same time; if one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for start in starts:
                group.create_task(start)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
