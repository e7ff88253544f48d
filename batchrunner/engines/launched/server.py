"""`sglang.launch_server` started by us on a free loopback port, again if it dies or hangs; ended by us."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from typing import TYPE_CHECKING

from batchrunner.engines.device import CPU_NOTE, card_name, gpus, on_cpu, server_args
from batchrunner.engines.hang_detector import HangDetector
from batchrunner.engines.http.client import HttpEngine
from batchrunner.engines.launched.sglang_server import SGLangServer
from batchrunner.engines.launched.supervisor import ServerSupervisor
from batchrunner.engines.logs.load import LogLoad
from batchrunner.engines.model_files import check_model, model_identity
from batchrunner.engines.recovery.fits import check_fits
from batchrunner.engines.recovery.healer import healer_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from batchrunner.core.types import Completion, EngineInfo, Incident, Request, SchedulerLoad
    from batchrunner.input.tokenize.detokenizer import Detokenizer
    from batchrunner.job.spec import LimitsSpec, ServerEngine


LOG_BYTES = 4 << 20
"""Of the log, read at most at one look."""


class LaunchedServer:
    """An SGLang server that lives as long as this object is open, and never longer than this process."""

    def __init__(
        self, spec: ServerEngine, *, log_path: Path, limits: LimitsSpec, reader: Detokenizer | None = None
    ) -> None:
        self._spec = spec
        self._reader = reader
        self._log_path = log_path
        self._timeout_s = limits.request_timeout
        self._vigil = HangDetector(limits.hang)
        self._incidents: list[Incident] = []
        self._server: SGLangServer | None = None
        self._client: HttpEngine | None = None
        self._guard: ServerSupervisor | None = None
        self._watching: asyncio.Task[None] | None = None
        self._log_load: LogLoad | None = None
        self._log_read = log_path.stat().st_size if log_path.exists() else 0

    async def open(self) -> EngineInfo:
        """Start the server and wait until it is ready; see `Engine.open`."""
        spec = self._spec
        check_model(spec.model)
        cpu = on_cpu(spec.device)
        await asyncio.to_thread(check_fits, spec.model, server_args(spec.args, cpu=cpu), cpu=cpu)
        key = secrets.token_hex(24)  # a - at its head would read as an option
        healer = await asyncio.to_thread(healer_for, spec, spec.model, self._incidents.append, cpu=cpu)
        self._server = server = SGLangServer(
            spec, spec.model, key=key, log_path=self._log_path, cpu=cpu, healer=healer
        )
        await server.start()
        self._guard = guard = ServerSupervisor(server.process, server.start, self._tell, heal=server.heal)
        self._watching = asyncio.create_task(guard.watch())
        self._client = HttpEngine(
            [server.url], api_key=key, request_timeout_s=self._timeout_s, reader=self._reader
        )
        self._client.blame.excuses = lambda _, sent_at: guard.excuses(sent_at)
        info = await self._client.open()
        if not self._client.tells_load:
            self._log_load = LogLoad(self._server.url)
        notes = (*((CPU_NOTE,) if cpu else ()), *info.notes)
        return dataclasses.replace(
            info,
            kind="server",
            model=model_identity(spec.model),
            card=None if cpu else await asyncio.to_thread(card_name),
            gpus=None if cpu or "CUDA_VISIBLE_DEVICES" in spec.env else len(gpus()),
            log=str(self._log_path),
            notes=notes,
        )

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once, when the server is up; see `Engine.generate`."""
        assert self._client is not None
        assert self._guard is not None
        await self._guard.ready()
        return await self._client.generate(request, route)

    async def tokens_of(self, request: Request) -> list[int] | None:
        """Ask the server; see `Engine.tokens_of`."""
        assert self._client is not None
        return await self._client.tokens_of(request)

    async def signals(self) -> Sequence[SchedulerLoad]:
        """Return the server's load now, out of its log where it tells it nowhere else."""
        if self._client is None or self._guard is None:
            return []
        signals = await self._client.signals() if self._log_load is None else self._logged(self._log_load)
        (route,) = self._client.routes.values()
        hang = self._vigil.look(time.monotonic(), signals, in_flight=route.in_flight, answers=route.answers)
        if hang:
            self._guard.hangs(hang)
        return signals

    def incidents(self) -> list[Incident]:
        """Return what befell the server; see `Engine.incidents`."""
        told, self._incidents[:] = self._incidents[:], []
        return told

    async def close(self) -> None:
        """End the server and everything it started."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._server is not None:
            await self._server.stop()

    def _tell(self, incident: Incident) -> None:
        assert self._client is not None
        assert self._server is not None
        self._incidents.append(incident)
        self._client.blame.saw(self._server.url, alive=incident.what == "back")
        self._vigil.restarted()

    def _logged(self, load: LogLoad) -> Sequence[SchedulerLoad]:
        with self._log_path.open("rb") as log:
            log.seek(self._log_read)
            text = log.read(LOG_BYTES)
        whole = text.rfind(b"\n") + 1
        self._log_read += whole
        load.read(text[:whole].decode(errors="replace").splitlines())
        return load.signals()
