"""Servers that run already: somebody else starts them again, and until then rows go elsewhere, or wait."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from batchrunner.core.types import Incident
from batchrunner.engines.hang_detector import HangDetector, marks
from batchrunner.engines.http.client import HttpEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.core.types import Completion, EngineInfo, Request, SchedulerLoad
    from batchrunner.engines.http.endpoint import Route
    from batchrunner.job.spec import LimitsSpec

log = logging.getLogger(__name__)


class AttachedServers:
    """One or more replicas of one model; one that hangs gets no rows for a while, or until it moves."""

    def __init__(self, urls: Sequence[str], *, api_key: str | None, limits: LimitsSpec) -> None:
        self._client = HttpEngine(urls, api_key=api_key, request_timeout_s=limits.request_timeout)
        self._vigils = {url: HangDetector(limits.hang) for url in urls}
        self._closed_s = limits.hang
        self._closed_until: dict[str, float] = {}
        self._closed_with: dict[str, object] = {}
        """What those that hang told when they were found to."""
        self._incidents: list[Incident] = []

    async def open(self) -> EngineInfo:
        """Connect and read what every replica says of itself; see `Engine.open`."""
        return await self._client.open()

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`."""
        return await self._client.generate(request, route)

    async def tokens_of(self, request: Request) -> list[int] | None:
        """Ask the server; see `Engine.tokens_of`."""
        return await self._client.tokens_of(request)

    async def signals(self) -> Sequence[SchedulerLoad]:
        """Return the load of each scheduler that answers now."""
        signals = await self._client.signals()
        now = time.monotonic()
        for url, route in self._client.routes.items():
            told = [signal for signal in signals if signal.server == url]
            if route.closed is None:
                self._watch(url, route, told, now)
            elif now > self._closed_until[url] or (told and marks(told) != self._closed_with[url]):
                self._reopen(url, route)
        return signals

    def incidents(self) -> list[Incident]:
        """Return what befell the servers; see `Engine.incidents`."""
        told, self._incidents = self._incidents, []
        return told

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    def _watch(self, url: str, route: Route, told: Sequence[SchedulerLoad], now: float) -> None:
        hang = self._vigils[url].look(now, told, in_flight=route.in_flight, answers=route.answers)
        if hang is None:
            return
        why = f"{url} {hang.why}"
        log.warning("%s: they go back, and it gets none for %g s or until it moves", why, self._closed_s)
        self._incidents.append(Incident("hangs", url, why))
        self._closed_with[url], self._closed_until[url] = marks(told), now + self._closed_s
        route.close(why)

    def _reopen(self, url: str, route: Route) -> None:
        log.warning("%s gets rows again", url)
        self._incidents.append(Incident("back", url))
        self._vigils[url].restarted()
        route.closed = None
