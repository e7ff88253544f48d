"""Rows that wait for a place, and the route on which each finds its beginning in the cache. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchrunner.dispatch.pending_row import PendingRow


class DispatchQueue:
    """Rows in order; those of a family wait for the route that has the first of it.

    A route that has little else to do takes rows of another: an idle one would cost more than the cache
    saves. But each row that it takes computes a beginning again that the other has, also where several of a
    family are taken together. So it waits until it has less than half of what the other has, in flight or
    kept.
    """

    def __init__(self, routes: Sequence[str], in_flight: Callable[[str], int], full: int) -> None:
        """`in_flight` counts a route's rows; once so many wait that it is `full`, no others are read."""
        self._in_flight = in_flight
        self._full = full
        self._anywhere: deque[PendingRow] = deque()
        self._kept: dict[str, deque[PendingRow]] = {route: deque() for route in routes}
        self._count = 0  # looked up for every row, however many routes there are

    def __len__(self) -> int:
        """Count them all."""
        return self._count

    def add(self, work: PendingRow) -> None:
        """Add a row behind all others."""
        self._anywhere.append(work)
        self._count += 1

    def add_first(self, work: PendingRow) -> None:
        """Put a row before all others: it has waited for long."""
        self._anywhere.appendleft(work)
        self._count += 1

    def has_for(self, route: str) -> bool:
        """Tell whether a route may get a row; where none of them is its own, once it is told so falsely."""
        return bool(self._anywhere or self._kept[route] or self._others(self._in_flight(route)))

    def take(self, route: str) -> PendingRow | None:
        """Take the next row for a route, which counts as in flight there; None where it should wait."""
        work = self._next(route)
        self._count -= work is not None
        return work

    def _next(self, route: str) -> PendingRow | None:
        kept = self._kept[route]
        if kept:
            return kept.popleft()
        while self._anywhere:
            work = self._anywhere.popleft()
            home = work.family.route if work.family is not None else None
            if home in {None, route}:
                work.route = route  # before the next of its family is looked at
                return work
            self._kept[home].append(work)
        others = self._others(self._in_flight(route) - 1)
        return others.pop() if others else None

    def _others(self, in_flight: int) -> deque[PendingRow]:
        """Return the rows of another route that one with so many in flight may take."""
        other, kept = max(self._kept.items(), key=lambda item: len(item[1]))
        enough = 2 * in_flight >= self._in_flight(other) + len(kept) and self._count < self._full
        return deque() if enough else kept
