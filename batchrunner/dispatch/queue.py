"""Rows that wait for a slot, and the route on which each finds its prefix in the cache. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.dispatch.pending_row import PendingRow


class InFlight(Protocol):
    """Counts requests in flight."""

    def in_flight_on(self, route: str) -> int:
        """Return the number of requests in flight on a route."""


class DispatchQueue:
    """Rows in order; the rows of a prefix group wait for the route that has the group's first row.

    A route with little else to do takes rows of another route: an idle replica costs more than the cache
    saves. But each row that it takes computes a prefix again that the other replica has in its cache. So it
    takes them only while it has less than half of the other's rows, in flight or kept for it.
    """

    def __init__(self, routes: Sequence[str], slots: InFlight, full_rows: int) -> None:
        """With `full_rows` rows in the queue the reader pauses, and kept rows are for every route."""
        self._slots = slots
        self._full_rows = full_rows
        self._any_route: deque[PendingRow] = deque()
        self._kept: dict[str, deque[PendingRow]] = {route: deque() for route in routes}
        self._count = 0  # read for every row, however many routes there are

    def __len__(self) -> int:
        """Count all rows."""
        return self._count

    def add(self, row: PendingRow) -> None:
        """Add a row behind all others."""
        self._any_route.append(row)
        self._count += 1

    def add_first(self, row: PendingRow) -> None:
        """Add a row before all others."""
        self._any_route.appendleft(row)
        self._count += 1

    def has_for(self, route: str) -> bool:
        """Tell whether `take` may return a row for a route.

        Where all rows turn out to be kept for other routes, this is wrong once.
        """
        in_flight = self._slots.in_flight_on(route)
        return bool(self._any_route or self._kept[route] or self._takeable_of_others(in_flight))

    def take(self, route: str) -> PendingRow | None:
        """Take the next row for a route whose slot is already counted; None if the route should wait."""
        row = self._next(route)
        self._count -= row is not None
        return row

    def _next(self, route: str) -> PendingRow | None:
        kept = self._kept[route]
        if kept:
            return kept.popleft()
        while self._any_route:
            row = self._any_route.popleft()
            home = row.group.route if row.group is not None else None
            if home in {None, route}:
                row.route = route  # before the next row of its group is looked at
                return row
            self._kept[home].append(row)
        others = self._takeable_of_others(self._slots.in_flight_on(route) - 1)
        return others.pop() if others else None

    def _takeable_of_others(self, in_flight: int) -> deque[PendingRow]:
        """Return the kept rows of another route that a route with so many in flight may take."""
        other, kept = max(self._kept.items(), key=lambda item: len(item[1]))
        is_busy = 2 * in_flight >= self._slots.in_flight_on(other) + len(kept)
        return deque() if is_busy and self._count < self._full_rows else kept
