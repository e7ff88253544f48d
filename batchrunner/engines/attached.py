"""Engines that run already: servers, or a gateway and its workers. Others restart them if they fail."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import EngineDownError, EngineStartError
from batchrunner.core.timing import TIMING
from batchrunner.engines.hang_detector import HangDetector, progress_of
from batchrunner.engines.http.client import GATEWAY_ROUTE, HttpEngine
from batchrunner.engines.http.server_info import WorkerList
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import GENERATE, TaskName

log = logging.getLogger(__name__)


class AttachedServers(HttpEngine):
    """Replicas of one model, or a Model Gateway: one route to all its workers, whose loads are polled.

    A replica that hangs gets no rows for a while, or until it moves; a gateway chooses its workers itself.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        gateway: str | None = None,
        api_key: str | None,
        limits: LimitsSpec,
        task: TaskName = GENERATE,
    ) -> None:
        """Take the URLs of the replicas, or that of a `gateway`, which knows them."""
        super().__init__(api_key=api_key, request_timeout_s=limits.request_timeout, task=task)
        self._urls = urls
        self._gateway = gateway
        self._workers = WorkerList(gateway, api_key) if gateway else None
        self._hang_s = limits.hang
        self._hangs: dict[str, HangDetector] = {}
        self._closed: dict[str, tuple[float, object]] = {}
        """By server that hangs: the time until which it gets no rows, and its load when it was found."""
        self._model_watch: asyncio.Task[None] | None = None

    async def open(self) -> EngineInfo:
        """Connect and read the description of every server; see `Engine.open`."""
        if self._workers is None:
            info = await self.connect(self._urls)
            self._model_watch = asyncio.create_task(self._watch_model())
            return info
        urls = await self._workers.addresses()
        if not urls:
            raise EngineStartError(f"{self._gateway}: the gateway has no workers that speak HTTP")
        info = await self.connect(urls, gateway=self._gateway, workers=self._workers)
        notes = (f"{len(urls)} workers behind the gateway {self._gateway}: {', '.join(urls)}", *info.notes)
        return dataclasses.replace(info, kind="gateway", notes=notes)

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load of each scheduler that answers now; raises AnotherModelError for a new model."""
        if self._model_watch is not None and self._model_watch.done():
            self._model_watch.result()
        loads = await super().loads()
        now = time.monotonic()
        for url in self.replicas:
            own = [load for load in loads if load.server == url]
            if url not in self._closed:
                self._watch(url, own, now)
            else:
                until, last = self._closed[url]
                if now > until or (own and progress_of(own) != last):
                    self._reopen(url)
        return loads

    async def close(self) -> None:
        """Close all connections."""
        if self._model_watch is not None:
            self._model_watch.cancel()
            await asyncio.gather(self._model_watch, return_exceptions=True)
        if self._workers is not None:
            await self._workers.close()
        await super().close()

    async def _watch_model(self) -> None:
        """Ask servers for their model now and then: behind a proxy it may become another one unseen."""
        while True:
            await asyncio.sleep(TIMING.model_check)
            for url in self._urls:
                with contextlib.suppress(EngineDownError):  # it is away: rows find out
                    await self.guard.confirm(url)

    def _watch(self, url: str, loads: Sequence[SchedulerLoad], now: float) -> None:
        endpoint = self.endpoints[GATEWAY_ROUTE if self._gateway else url]
        detector = self._hangs.setdefault(url, HangDetector(self._hang_s, alone=self._gateway is None))
        answers = 0 if self._gateway else endpoint.answers
        hang = detector.poll(now, loads, in_flight=endpoint.in_flight, answers=answers)
        if hang is None:
            return
        why = f"{url} {hang.why}"
        self._incidents.append(Incident("hangs", url, why))
        if self._gateway:
            log.warning("%s: only its gateway can take it out", why)
            return
        log.warning(
            "%s: its rows are sent again, and it gets none for %g s or until it moves", why, self._hang_s
        )
        self._closed[url] = now + self._hang_s, progress_of(loads)
        endpoint.close(why)

    def _reopen(self, url: str) -> None:
        log.warning("%s gets rows again", url)
        self._incidents.append(Incident("back", url))
        del self._closed[url]
        self.endpoints[url].reopen()
