"""Rows that wait for a place, and the route on which each finds its beginning in the cache. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.work import Work


class Ready:
    """Rows in order; those of a family wait for the route that has the first of it.

    A route that has nothing else to do takes the rows of another: an idle one would cost more than the cache
    saves.
    """

    def __init__(self, routes: Sequence[str]) -> None:
        self._anywhere: deque[Work] = deque()
        self._kept: dict[str, deque[Work]] = {route: deque() for route in routes}
        self._count = 0  # looked up for every row, however many routes there are

    def __len__(self) -> int:
        """Count them all."""
        return self._count

    def add(self, work: Work) -> None:
        """Add a row behind all others."""
        self._anywhere.append(work)
        self._count += 1

    def add_first(self, work: Work) -> None:
        """Put a row before all others: it has waited for long."""
        self._anywhere.appendleft(work)
        self._count += 1

    def take(self, route: str) -> Work | None:
        """Take the next row for a route; None where none waits."""
        work = self._next(route)
        self._count -= work is not None
        return work

    def _next(self, route: str) -> Work | None:
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
        longest = max(self._kept.values(), key=len)
        return longest.pop() if longest else None
