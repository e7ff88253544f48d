"""A Model Gateway that runs already: rows go to it, the load comes from its workers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from batchrunner.core.errors import EngineStartError
from batchrunner.core.types import Incident
from batchrunner.engines.hang_detector import HangDetector
from batchrunner.engines.http.client import GATEWAY_ROUTE, HttpEngine
from batchrunner.engines.http.worker_list import WorkerList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.core.types import Completion, EngineInfo, Request, SchedulerLoad
    from batchrunner.job.spec import LimitsSpec

log = logging.getLogger(__name__)

REFRESH_S = 15.0
"""Somebody else adds and removes the workers: the list is read again after this time."""


class AttachedGateway:
    """Somebody else's gateway and workers; one route leads to all of them."""

    def __init__(self, url: str, *, api_key: str | None, limits: LimitsSpec) -> None:
        self._url = url
        self._key = api_key
        self._timeout_s = limits.request_timeout
        self._vigils = defaultdict[str, HangDetector](lambda: HangDetector(limits.hang, alone=False))
        self._incidents: list[Incident] = []
        self._workers = WorkerList(url, api_key)
        self._client: HttpEngine | None = None
        self._read_at = 0.0

    async def open(self) -> EngineInfo:
        """Find the workers and read what they say of themselves; see `Engine.open`."""
        urls = await self._workers.addresses()
        self._read_at = time.monotonic()
        if not urls:
            raise EngineStartError(f"{self._url}: the gateway has no workers that speak HTTP")
        self._client = HttpEngine(
            urls, api_key=self._key, request_timeout_s=self._timeout_s, gateway=self._url
        )
        info = await self._client.open()
        notes = (f"{len(urls)} workers behind the gateway {self._url}: {', '.join(urls)}", *info.notes)
        return dataclasses.replace(info, kind="gateway", notes=notes)

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`."""
        assert self._client is not None
        return await self._client.generate(request, route)

    async def tokens_of(self, request: Request) -> list[int] | None:
        """Ask a worker; see `Engine.tokens_of`."""
        assert self._client is not None
        return await self._client.tokens_of(request)

    async def signals(self) -> Sequence[SchedulerLoad]:
        """Return the load of each worker that answers now."""
        if self._client is None:
            return []
        if time.monotonic() - self._read_at > REFRESH_S:
            self._read_at = time.monotonic()
            with contextlib.suppress(EngineStartError):  # it is down: those that we know are what there is
                self._client.urls = await self._workers.addresses() or self._client.urls
        signals = await self._client.signals()
        for url in self._client.urls:
            self._watch(url, [signal for signal in signals if signal.server == url])
        return signals

    def incidents(self) -> list[Incident]:
        """Return which workers hang; see `Engine.incidents`."""
        told, self._incidents = self._incidents, []
        return told

    async def close(self) -> None:
        """Close all connections."""
        await self._workers.close()
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _watch(self, url: str, told: Sequence[SchedulerLoad]) -> None:
        """Tell of a worker that hangs: whether it goes on getting rows is for the gateway to say."""
        assert self._client is not None
        route = self._client.routes[GATEWAY_ROUTE]
        hang = self._vigils[url].look(time.monotonic(), told, in_flight=route.in_flight)
        if hang:
            log.warning("%s %s: it is the gateway's to take it out", url, hang.why)
            self._incidents.append(Incident("hangs", url, hang.why))
