"""Shares the last rows out between routes, so that all replicas end at the same time. Pure.

A row that waits in a replica's queue cannot move to another one. While input is left that costs nothing: a
replica that is done gets more. At the end the replica with the longest queue would work alone. So no route
may hold more than its share of all rows that have not ended, in flight or unsent; shares are in proportion
to the rows that each route ended recently. While much input is left, the shares are larger than any window.
"""

import math
from collections.abc import Collection, Sequence

HALF_LIFE_S = 60.0
"""Half-life of the recent rows, in seconds: rows of one length end in waves as long as one of them takes."""
PRIOR_ROWS = 10.0
"""Rows that each route is assumed to have ended at the start, when all count as equally fast."""
LEAST_ROWS = 1e-3
"""Fewest recent rows of a route: after a long silence all routes have so many, and are equal."""


class Shares:
    """The share of each route in the rows that are left."""

    def __init__(self, routes: Sequence[str]) -> None:
        self._ended = dict.fromkeys(routes, PRIOR_ROWS)
        self._decayed_at: float | None = None  # None until the first call: a clock may begin anywhere

    def ended(self, route: str) -> None:
        """Record a row that ended on a route."""
        self._ended[route] += 1

    def of(self, left: int, now: float, silent: Collection[str] = ()) -> dict[str, int]:
        """Return how many of the `left` rows each route may hold at most; a `silent` route gets one.

        Together they are at least `left`, so that no row waits for ever.
        """
        since = now if self._decayed_at is None else self._decayed_at
        self._decayed_at = now
        for route, rows in self._ended.items():
            self._ended[route] = max(LEAST_ROWS, rows * 0.5 ** ((now - since) / HALF_LIFE_S))
        able = {r: n for r, n in self._ended.items() if r not in silent} or self._ended
        total = sum(able.values())
        return {r: max(1, math.ceil(left * able.get(r, 0.0) / total)) for r in self._ended}
