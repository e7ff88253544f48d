"""What came back on each route: output tokens and retractions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from batchrunner.dispatch.rates import Rates

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchrunner.core.types import Completion


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

    def add(self, route: str, completion: Completion | None) -> None:
        """Add an answer; one without a completion adds nothing."""
        if completion is not None:
            self._retractions[route] += completion.retractions
            self._tokens[route] += completion.output_tokens

    def sample(self, now: float) -> dict[str, dict[str, float]]:
        """Return the output tokens a second over the last 30 s, and the retractions so far, by route."""
        return {
            route: {
                "output_tokens_per_s": round(rates.update(now, self._tokens[route])[0], 1),
                "retractions": self._retractions[route],
            }
            for route, rates in self._rates.items()
        }
