"""Rows that were in flight when the engine died or hung: one of them may be the reason. Pure.

Thousands of rows are in flight at a death, and nearly all are harmless. They are sent again a few at a time,
beside rows that are not suspected, so that the next death leaves fewer suspects: after one death 1/16 of the
window is in flight at once, after two 1/256, from three on one row alone. The *degree* of a suspect is the
number of deaths that it has seen. A row that is in flight at a fourth death was the only suspect of its
degree, and is given up.
"""

from collections import Counter, defaultdict, deque
from typing import Generic, TypeVar

FEWER = 16
"""Factor by which each further death reduces the suspects in flight at once."""
MOST_DEATHS = 4
"""Engine deaths after which a row is given up: at the last one it was the only suspect in flight."""

Row = TypeVar("Row")


class PoisonRows(Generic[Row]):
    """The suspected rows that are not in flight, by the number of deaths that each has seen."""

    def __init__(self) -> None:
        self._waiting: defaultdict[int, deque[Row]] = defaultdict(deque)
        self._in_flight: Counter[int] = Counter()

    @property
    def has_rows(self) -> bool:
        """Whether a suspect waits."""
        return bool(self._waiting)

    def add(self, row: Row, deaths: int) -> None:
        """Add a row that was in flight at so many deaths."""
        self._waiting[deaths].append(row)

    def next_degree(self, window: int) -> int | None:
        """Return the number of deaths of the next suspect that may be sent; None if none may.

        `window` is the number of slots of all routes.
        """
        for deaths in sorted(self._waiting, reverse=True):
            most = 1 if deaths >= MOST_DEATHS - 1 else max(1, window // FEWER**deaths)
            if self._waiting[deaths] and self._in_flight[deaths] < most:
                return deaths
        return None

    def take(self, deaths: int) -> Row:
        """Take the first row that has seen so many deaths, which counts as in flight from now on."""
        self._in_flight[deaths] += 1
        return self._waiting[deaths].popleft()

    def came_back(self, deaths: int) -> None:
        """Record that a row with so many deaths is no longer in flight."""
        self._in_flight[deaths] -= 1
