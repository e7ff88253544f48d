"""How the engine takes the rows → the slots of its routes: each change is an event with its reason."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from batchrunner.core.engine_info import Corner, SchedulerLoad
from batchrunner.core.types import Completion
from batchrunner.dispatch.concurrency.controller import Decision
from batchrunner.dispatch.concurrency.gauges import QueueGauges
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.pending_row import PendingRow
from batchrunner.dispatch.prefix_order.reorder import Reorderer
from batchrunner.dispatch.route_totals import RouteTotals
from batchrunner.dispatch.slots import Slots
from batchrunner.output.events import EventLog

log = logging.getLogger(__name__)


class Feedback:
    """Passes answers, refusals and load samples to what learns from them, and applies its decisions."""

    def __init__(
        self,
        limits: ConcurrencyLimits,
        gauges: QueueGauges,
        slots: Slots,
        reorderer: Reorderer,
        totals: RouteTotals,
        events: EventLog,
    ) -> None:
        self._limits = limits
        self._gauges = gauges
        self._slots = slots
        self._reorderer = reorderer
        self._totals = totals
        self._events = events

    def answered(self, row: PendingRow, route: str, completion: Completion | None, now: float) -> None:
        """Record a row that the engine ended; a row that it refused has no completion."""
        if completion is None:  # a row that was refused has not waited in the queue
            self._limits.ended(route, 0, now)
            return
        output_tokens = completion.output_tokens
        self._totals.add(route, output_tokens, completion.retractions)
        self._limits.ended(route, completion.retractions, now)
        self._gauges.ended(route, row.sent_at, now)
        prompt, cached = completion.prompt_tokens or 0, completion.cached_tokens
        own_tokens = 0 if cached is None else max(0, prompt - cached)
        self._limits.row_tokens.add(own_tokens, output_tokens)
        change = self._reorderer.record(row, completion, output_tokens)
        if change is not None:
            self._events.write("lead", **asdict(change))

    def refused(self, route: str, why: str, now: float) -> None:
        """Record a route that took no request, or let one wait too long."""
        self._apply(self._limits.backpressure(route, why, now))

    def observe(self, loads: Sequence[SchedulerLoad], now: float, *, unsent: int) -> list[SchedulerLoad]:
        """Record a poll of the load; return what can be right of it. `unsent` rows are still to be sent."""
        in_flight = self._slots.by_route
        believed = self._gauges.believable(loads, self._limits.bands, now, in_flight)
        for verdict in self._gauges.news():
            self._events.write("gauge", **asdict(verdict))
            if verdict.believed:
                log.warning("%s: its load is used again", verdict.scheduler)
            else:
                log.warning("%s: its load is not used (%s)", verdict.scheduler, verdict.reason)
                self._apply(self._limits.restart(verdict.scheduler, now))
        silenced = self._gauges.silenced
        self._apply(self._limits.observe(believed, in_flight, now, unsent=unsent, silenced=silenced))
        for news in self._limits.corner_news():
            self._events.write("corner", **asdict(news))
            if news.corner == Corner.HELD:
                log.info("%s: the server holds back: %s", news.scheduler, news.reason)
        return believed

    def _apply(self, decisions: Sequence[Decision]) -> None:
        for route, window in self._limits.windows.items():
            self._slots.resize(route, window)
        write_decisions(self._events, decisions)


def write_decisions(events: EventLog, decisions: Iterable[Decision]) -> None:
    """Write changes of windows to the event log."""
    for decision in decisions:
        events.write("window", **asdict(decision))
