"""How the engine takes the rows → the slots of its routes: each change is an event with its reason."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from batchrunner.core.types import Completion, SchedulerLoad
from batchrunner.dispatch.concurrency.controller import Decision
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.pending_row import PendingRow
from batchrunner.dispatch.prefix_order.reorder import Reorderer
from batchrunner.dispatch.route_totals import RouteTotals
from batchrunner.dispatch.slots import Slots
from batchrunner.output.events import EventLog


class Feedback:
    """Passes answers, refusals and load samples to what learns from them, and applies its decisions."""

    def __init__(
        self,
        limits: ConcurrencyLimits,
        slots: Slots,
        reorderer: Reorderer,
        totals: RouteTotals,
        events: EventLog,
    ) -> None:
        self._limits = limits
        self._slots = slots
        self._reorderer = reorderer
        self._totals = totals
        self._events = events

    def answered(self, row: PendingRow, route: str, completion: Completion | None, now: float) -> None:
        """Record a row that the engine ended; a row that it refused has no completion."""
        self._totals.add(route, completion)
        self._limits.ended(route, completion.retractions if completion else 0, now)
        change = self._reorderer.record(row, completion) if completion else None
        if change is not None:
            self._events.write("lead", **asdict(change))

    def refused(self, route: str, why: str, now: float) -> None:
        """Record a route that took no request, or let one wait too long."""
        self._apply(self._limits.backpressure(route, why, now))

    def observe(self, loads: Sequence[SchedulerLoad], now: float, *, unsent: int) -> None:
        """Record a poll of the load; `unsent` rows are still to be sent."""
        self._apply(self._limits.observe(loads, self._slots.by_route, now, unsent=unsent))

    def _apply(self, decisions: Sequence[Decision]) -> None:
        for route, window in self._limits.windows.items():
            self._slots.resize(route, window)
        write_decisions(self._events, decisions)


def write_decisions(events: EventLog, decisions: Iterable[Decision]) -> None:
    """Write changes of windows to the event log."""
    for decision in decisions:
        events.write("window", **asdict(decision))
