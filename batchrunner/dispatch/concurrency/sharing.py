"""What is left, shared out: no replica is given more than it can do in the time of the others. Pure.

A row that waits in a replica's queue cannot move to another one. As long as the input lasts that costs
nothing: whoever is done first gets more. At its end the replica with the longest queue would work alone. So
no route may hold more than its share of all rows that have not ended, in flight or unsent, by the rows that
each route brought to an end of late. While the input is long the shares are larger than any window.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

HALF_LIFE_S = 60.0
"""Of what is known of a route's speed: rows of one length end in waves as long as one of them takes."""
PRIOR_ROWS = 10.0
"""Rows that each route is taken to have ended before the first: at the start all are alike."""
LEAST_ROWS = 1e-3
"""What is left of them after a long silence, which makes all alike again."""


class Shares:
    """How the rows that are left are parted between the routes."""

    def __init__(self, routes: Sequence[str]) -> None:
        self._ended = dict.fromkeys(routes, PRIOR_ROWS)
        self._decayed_at: float | None = None  # no clock begins at 0: an uptime is no silence

    def ended(self, route: str) -> None:
        """Take note of a row that came to its end on a route."""
        self._ended[route] += 1

    def of(self, left: int, now: float, silent: Collection[str] = ()) -> dict[str, int]:
        """Return the most rows of `left` that each route may hold; a silent one gets none but its last.

        Together they are at least `left`, so that no row is kept back.
        """
        since = now if self._decayed_at is None else self._decayed_at
        self._decayed_at = now
        for route, rows in self._ended.items():
            self._ended[route] = max(LEAST_ROWS, rows * 0.5 ** ((now - since) / HALF_LIFE_S))
        able = {r: n for r, n in self._ended.items() if r not in silent} or self._ended
        total = sum(able.values())
        return {r: max(1, math.ceil(left * able.get(r, 0.0) / total)) for r in self._ended}
