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
from batchrunner.engines.http.worker_list import WorkerList
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import GENERATE, TaskName

log = logging.getLogger(__name__)


class AttachedServers(HttpEngine):
    """One or more replicas of one model; one that hangs gets no rows for a while, or until it moves."""

    def __init__(
        self, urls: Sequence[str], *, api_key: str | None, limits: LimitsSpec, task: TaskName = GENERATE
    ) -> None:
        self._urls = urls
        super().__init__(api_key=api_key, request_timeout_s=limits.request_timeout, task=task)
        self._hangs = {url: HangDetector(limits.hang) for url in urls}
        self._closed_s = limits.hang
        self._closed: dict[str, tuple[float, object]] = {}
        """By server that hangs: the time until which it gets no rows, and its load when it was found."""
        self._model_watch: asyncio.Task[None] | None = None

    async def open(self) -> EngineInfo:
        """Connect and read the description of every server; see `Engine.open`."""
        info = await self.connect(self._urls)
        self._model_watch = asyncio.create_task(self._watch_model())
        return info

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load of each scheduler that answers now; raises AnotherModelError for a new model."""
        if self._model_watch is not None and self._model_watch.done():
            self._model_watch.result()
        loads = await super().loads()
        now = time.monotonic()
        for url in self.endpoints:
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
        await super().close()

    async def _watch_model(self) -> None:
        """Ask servers for their model now and then: behind a proxy it may become another one unseen."""
        while True:
            await asyncio.sleep(TIMING.model_check)
            for url in self._urls:
                with contextlib.suppress(EngineDownError):  # it is away: rows find out
                    await self.guard.confirm(url)

    def _watch(self, url: str, loads: Sequence[SchedulerLoad], now: float) -> None:
        endpoint = self.endpoints[url]
        hang = self._hangs[url].poll(now, loads, in_flight=endpoint.in_flight, answers=endpoint.answers)
        if hang is None:
            return
        why = f"{url} {hang.why}"
        log.warning(
            "%s: its rows are sent again, and it gets none for %g s or until it moves", why, self._closed_s
        )
        self._incidents.append(Incident("hangs", url, why))
        self._closed[url] = now + self._closed_s, progress_of(loads)
        endpoint.close(why)

    def _reopen(self, url: str) -> None:
        log.warning("%s gets rows again", url)
        self._incidents.append(Incident("back", url))
        del self._closed[url]
        self._hangs[url].restarted()
        self.endpoints[url].reopen()


class AttachedGateway(HttpEngine):
    """A Model Gateway that runs already: one route leads to all workers, each of which reports its load."""

    def __init__(
        self, url: str, *, api_key: str | None, limits: LimitsSpec, task: TaskName = GENERATE
    ) -> None:
        self._url = url
        super().__init__(api_key=api_key, request_timeout_s=limits.request_timeout, task=task)
        self._hang_s = limits.hang
        self._hangs: dict[str, HangDetector] = {}
        self._workers = WorkerList(url, api_key)

    async def open(self) -> EngineInfo:
        """Find the workers and read the description of each; see `Engine.open`."""
        urls = await self._workers.addresses()
        if not urls:
            raise EngineStartError(f"{self._url}: the gateway has no workers that speak HTTP")
        info = await self.connect(urls, gateway=self._url, workers=self._workers)
        notes = (f"{len(urls)} workers behind the gateway {self._url}: {', '.join(urls)}", *info.notes)
        return dataclasses.replace(info, kind="gateway", notes=notes)

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load of each worker that answers now."""
        loads = await super().loads()
        for url in self.replicas:
            self._watch(url, [load for load in loads if load.server == url])
        return loads

    async def close(self) -> None:
        """Close all connections."""
        await self._workers.close()
        await super().close()

    def _watch(self, url: str, loads: Sequence[SchedulerLoad]) -> None:
        """Report a worker that hangs; only the gateway can stop giving it rows."""
        in_flight = self.endpoints[GATEWAY_ROUTE].in_flight
        detector = self._hangs.setdefault(url, HangDetector(self._hang_s, alone=False))
        hang = detector.poll(time.monotonic(), loads, in_flight=in_flight)
        if hang:
            log.warning("%s %s: only its gateway can take it out", url, hang.why)
            self._incidents.append(Incident("hangs", url, hang.why))
