"""Polls the replicas of one model: each one's load, and whether it answers."""

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.failures import DeathVerdicts, FailureClassifier
from batchrunner.engines.http.model_guard import ModelGuard
from batchrunner.engines.http.status import (
    LOADS,
    METRICS,
    MODEL_INFO,
    NOT_REACHED,
    NOT_SGLANG,
    ServerStatus,
)

log = logging.getLogger(__name__)


class LoadPoller:
    """Asks servers for their load by the path that the first of them has."""

    def __init__(self, guard: ModelGuard, verdicts: DeathVerdicts | None) -> None:
        self.replicas: list[str] = []
        """URLs of the servers that are polled; those behind a gateway may change."""
        self.failures = FailureClassifier(self, verdicts)
        self._guard = guard
        self._route: str | None = None
        self._path: str | None = None
        self._session: aiohttp.ClientSession | None = None

    async def begin(self, session: aiohttp.ClientSession, route: str | None) -> str:
        """Find the path at which the first replica reports its load; return a note for the log.

        The `route` is the one that leads to all replicas; None where each has its own.
        """
        self._session, self._route = session, route
        for path in (LOADS, METRICS):
            if await self._poll(session, self.replicas[0], path):
                self._path = path
                return f"load from {path.partition('?')[0]}"
        return "the server tells no load (no /v1/loads, no /metrics)"

    def end(self) -> None:
        """Poll no more: the session is about to be closed."""
        self._session = None

    @property
    def reports_load(self) -> bool:
        """Whether the first replica reported its load at the beginning."""
        return self._path is not None

    async def loads(self) -> list[SchedulerLoad]:
        """Poll every replica's load; one that does not answer in 2 s is left out."""
        session, path = self._session, self._path
        if session is None or path is None:
            return []
        polls: Sequence[list[SchedulerLoad]] = await asyncio.gather(
            *(self._poll(session, url, path) for url in self.replicas)
        )
        return [load for loads in polls for load in loads]

    async def is_alive(self, url: str) -> bool:
        """Tell whether a replica answers within 2 s, with whatever status."""
        if self._session is None:
            return False
        try:
            await ServerStatus(self._session, url).get(MODEL_INFO[0], TIMING.status_timeout)
        except NOT_REACHED:
            return False
        return True

    async def _poll(self, session: aiohttp.ClientSession, url: str, path: str) -> list[SchedulerLoad]:
        """Return the loads that one replica reports; empty if it does not answer."""
        try:
            loads = await ServerStatus(session, url).load(path, TIMING.status_timeout, self._route)
        except (*NOT_REACHED, *NOT_SGLANG) as failure:
            log.debug("the load of %s could not be read: %r", url, failure)
            if isinstance(failure, NOT_REACHED):
                self._guard.doubt(url)
            return []
        self.failures.record(url, alive=True)
        return loads
