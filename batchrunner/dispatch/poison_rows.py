"""Rows that an engine had when it died, or hung and was ended: one of them may be why. Pure.

Thousands are in flight at a death, nearly all of them innocent. They are sent again a few at a time, among
rows that are not suspected, so that the next death leaves fewer: of rows that were there at one death a
sixteenth of the window, at two a 256th, and from three on one alone. The row that kills the engine once more
then, with no other suspect of its degree beside it, is given up.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Generic, TypeVar

FEWER = 16
MOST_DEATHS = 4
"""A row that was in flight at so many deaths is given up: at the last one it was alone under suspicion."""

Row = TypeVar("Row")


class PoisonRows(Generic[Row]):
    """The rows that are under suspicion and not in flight, by the number of deaths that they saw."""

    def __init__(self) -> None:
        self._waiting: defaultdict[int, deque[Row]] = defaultdict(deque)
        self._in_flight: Counter[int] = Counter()

    def add(self, row: Row, deaths: int) -> None:
        """Put a row aside that saw so many deaths."""
        self._waiting[deaths].append(row)

    def degree(self, window: int) -> int | None:
        """Return the degree of suspicion that has a row to send and room for it; None where none has."""
        for deaths in sorted(self._waiting, reverse=True):
            room = 1 if deaths >= MOST_DEATHS - 1 else max(1, window // FEWER**deaths)
            if self._waiting[deaths] and self._in_flight[deaths] < room:
                return deaths
        return None

    def take(self, deaths: int) -> Row:
        """Take the first row of a degree."""
        self._in_flight[deaths] += 1
        return self._waiting[deaths].popleft()

    def landed(self, deaths: int) -> None:
        """Take note that a row of a degree is no longer in flight."""
        self._in_flight[deaths] -= 1
