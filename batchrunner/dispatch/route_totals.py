"""What came back on each route, and how fast: output tokens and retractions."""

from collections import Counter, deque
from collections.abc import Iterable

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


class RouteTotals:
    """Sums over the answers of this attempt, by route."""

    def __init__(self, routes: Iterable[str], now: float) -> None:
        self._tokens: Counter[str] = Counter()
        self._retractions: Counter[str] = Counter()
        self._rates = {route: Rates(now, counts=1) for route in routes}

    @property
    def retractions(self) -> int:
        """Retractions on all routes."""
        return self._retractions.total()

    @property
    def output_tokens(self) -> int:
        """Output tokens on all routes."""
        return self._tokens.total()

    def add(self, route: str, output_tokens: int, retractions: int) -> None:
        """Add an answer, and how often its row was retracted."""
        self._tokens[route] += output_tokens
        if retractions:
            self._retractions[route] += retractions

    def sample(self, now: float) -> dict[str, dict[str, float]]:
        """Return the output tokens a second over the last 30 s, and the retractions so far, by route."""
        return {
            route: {
                "output_tokens_per_s": round(rates.update(now, self._tokens[route])[0], 1),
                "retractions": self._retractions[route],
            }
            for route, rates in self._rates.items()
        }
