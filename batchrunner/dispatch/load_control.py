"""Load samples → the slots of the routes, four times a second; each change is an event with its reason."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from batchrunner.core.engine_info import Corner, SchedulerLoad
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.concurrency.controller import Decision
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.queue import Backlog, Slots
from batchrunner.engines.base import Engine
from batchrunner.output.events import EventLog

log = logging.getLogger(__name__)


class LoadControl:
    """Polls the engine's load while rows are sent, and resizes the slots of its routes."""

    def __init__(
        self,
        engine: Engine,
        limits: ConcurrencyLimits,
        slots: Slots,
        backlog: Backlog,
        events: EventLog,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._slots = slots
        self._backlog = backlog
        self._events = events

    async def run(self, polled: Callable[[Sequence[SchedulerLoad], float], None]) -> None:
        """Poll until cancelled; call `polled` with each sample once the slots are resized. It may raise.

        A sample is empty where the load is unknown; its time is in seconds of the monotonic clock.
        """
        while True:
            loads = await self._engine.loads()
            now = time.monotonic()
            self.observe(loads, now, unsent=self._backlog.unsent)
            self._backlog.wake_dispatcher()
            polled(loads, now)
            await asyncio.sleep(TIMING.load_poll)

    def observe(self, loads: Sequence[SchedulerLoad], now: float, *, unsent: int) -> None:
        """Resize the slots by a poll of the load; `unsent` rows are still to be sent."""
        self._apply(self._limits.observe(loads, self._slots.by_route, now, unsent=unsent))
        for news in self._limits.corner_news():
            self._events.write("corner", **asdict(news))
            if news.corner == Corner.HELD:
                log.info("%s: the server holds back: %s", news.scheduler, news.reason)

    def refused(self, route: str, why: str, now: float) -> None:
        """Narrow the windows of a route that took no request, or let one wait too long."""
        self._apply(self._limits.backpressure(route, why, now))

    def _apply(self, decisions: Iterable[Decision]) -> None:
        for route, window in self._limits.windows.items():
            self._slots.resize(route, window)
        write_decisions(self._events, decisions)


def write_decisions(events: EventLog, decisions: Iterable[Decision]) -> None:
    """Write changes of windows to the event log."""
    for decision in decisions:
        events.write("window", **asdict(decision))
