"""How fast counts grow."""

from __future__ import annotations

from collections import deque

SPAN_S = 30.0
"""Seconds over which a rate is taken."""


class Rates:
    """Rates of several counts over the last 30 s."""

    def __init__(self, now: float, counts: int) -> None:
        """There are so many `counts`, all of them 0 now."""
        self._points: deque[tuple[float, tuple[int, ...]]] = deque([(now, (0,) * counts)])

    def update(self, now: float, *counts: int) -> list[float]:
        """Add the counts so far; return the rate of each, per second."""
        self._points.append((now, counts))
        while len(self._points) > 2 and self._points[1][0] <= now - SPAN_S:  # noqa: PLR2004
            self._points.popleft()
        then, counts_then = self._points[0]
        span = max(now - then, 1e-9)
        return [(count - before) / span for count, before in zip(counts, counts_then, strict=True)]
