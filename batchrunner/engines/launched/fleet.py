"""The engine of a run that starts its own servers: one, or replicas."""

import asyncio
import dataclasses
import functools
import logging
import os
import secrets
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.core.errors import EngineDownError, EngineStartError
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import RowEnded
from batchrunner.engines.device import (
    CPU_NOTE,
    card_name,
    gpus,
    on_cpu,
)
from batchrunner.engines.http.client import HttpEngine
from batchrunner.engines.http.connections import raise_file_limit
from batchrunner.engines.http.server import Endpoint
from batchrunner.engines.launched.server import SGLangServer
from batchrunner.engines.model_files import (
    cards_of,
    check_model,
    check_on_hub,
    model_identity,
    split_over,
    with_tp,
)
from batchrunner.engines.recovery import FlagMemory, Healer, learned_file
from batchrunner.job.engine import ServerEngine
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import GENERATE, TaskName

log = logging.getLogger(__name__)


class LaunchedFleet(HttpEngine):
    """Servers that live as long as this object is open, and never longer than this process.

    Each takes rows by its own load. The run goes on while one of them is left.
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
        # not `token_urlsafe`: a - at its head would read as an option
        self._key = os.environ.get("SGLANG_API_KEY") or secrets.token_hex(24)
        super().__init__(
            api_key=self._key,
            limits=limits,
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
        await asyncio.to_thread(check_on_hub, self._spec)
        spec = self._spec = with_tp(self._spec)
        cpu = on_cpu(spec.device)
        if cpu and spec.device == "auto":
            _refuse_several_gpus(spec)
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
            gpus=len(gpus()) * spec.nodes if alone else None,
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

    async def generate_many(self, requests: Sequence[Request], route: str, ended: RowEnded) -> None:
        """Send several requests in one; see `Engine.generate_many`."""
        await self._until_up(route)
        await super().generate_many(requests, route, ended)

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
                self.endpoints[url].hangs.restarted()
            elif hang := self.endpoints[url].hang_among(loads):
                replica.hangs(hang)
        return loads

    def _new_endpoint(self, url: str) -> Endpoint:
        endpoint = super()._new_endpoint(url)
        endpoint.liveness = self._replicas[url].liveness
        return endpoint

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
            memory=self.memory, incidents=self._incidents,
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


def _refuse_several_gpus(spec: ServerEngine) -> None:
    """Raise EngineStartError for a job that needs several GPUs on a machine that has none.

    A job of one GPU is tried on the CPU instead, which several servers, or parts of one, would only share.
    """
    needed = cards_of(spec.args) * (1 if spec.replicas == "auto" else spec.replicas)
    if needed > 1:
        raise EngineStartError(
            f"engine.replicas {spec.replicas} with {cards_of(spec.args)} each (engine.tp, times pp-size and "
            f"dp-size) needs {needed} GPUs: none is here",
            hint="run it on a machine that has them, or set engine.device: cpu to try it on the CPU",
        )


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
