"""Samples of the load → what the report says of it, in memory that does not grow with the run."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.core.types import SchedulerLoad
    from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits

MOST_POINTS = 200
"""Points of the window over time; when there are more, every second one is dropped."""


class LoadSummary:
    """How healthy the queues were while the run was under way.

    Steady time begins for a scheduler when its window leaves the state `start`, and ends with the tail.
    """

    def __init__(self) -> None:
        self.retractions = 0
        self._last: float | None = None
        self._s: defaultdict[str, float] = defaultdict(float)
        self._usage = 0.0
        self._queue = 0.0
        self._running: defaultdict[str, float] = defaultdict(float)
        self._points: list[tuple[float, int]] = []
        self._began = 0.0
        self._every_s = 0.0
        self._window_min: int | None = None
        self._window_max: int | None = None

    def add(
        self, now: float, signals: Sequence[SchedulerLoad], admission: ConcurrencyLimits, window: int
    ) -> None:
        """Add what one poll brought, for the time since the one before."""
        if self._last is None:
            self._last = self._began = now
        span, self._last = now - self._last, now
        self._s["all"] += span
        self._point(now, window)
        states, bands = admission.states, admission.bands
        if "tail" in states.values():
            self._s["tail"] += span
        for signal in signals:
            if states.get(signal.scheduler) in {None, "start", "tail"}:
                continue
            band = bands[signal.scheduler]
            self._s["steady"] += span
            self._s["in_band"] += span * (band.low <= signal.queue <= band.high)
            self._s["empty"] += span * (signal.queue == 0)
            self._usage += span * signal.token_usage
            self._queue += span * signal.queue
            self._running[signal.scheduler] += span * signal.running

    def as_dict(self) -> dict[str, Any]:
        """Return it as report.json has it; shares are of steady time, None where there was none."""
        steady = self._s["steady"]

        def share(value: float, of: float) -> float | None:
            return round(value / of, 4) if of else None

        return {
            "steady_s": round(steady, 1),
            "in_band_share": share(self._s["in_band"], steady),
            "empty_queue_share": share(self._s["empty"], steady),
            "mean_queue": share(self._queue, steady),
            "mean_token_usage": share(self._usage, steady),
            "tail_share": share(self._s["tail"], self._s["all"]),
            "imbalance": self._imbalance(),
            "retractions": self.retractions,
            "window_min": self._window_min,
            "window_max": self._window_max,
            "window_over_time": [[round(at - self._began, 1), window] for at, window in self._points],
        }

    def _imbalance(self) -> float | None:
        """Return by how much the idlest scheduler ran less than the busiest, as a share of the latter."""
        means = list(self._running.values())
        return round((max(means) - min(means)) / max(means), 4) if len(means) > 1 and max(means) else None

    def _point(self, now: float, window: int) -> None:
        self._window_min = min(window, self._window_min or window)
        self._window_max = max(window, self._window_max or window)
        if self._points and now - self._points[-1][0] < self._every_s:
            return
        self._points.append((now, window))
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._every_s = (now - self._began) / len(self._points)
