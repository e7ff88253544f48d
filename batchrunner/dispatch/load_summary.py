"""Load samples → what report.json says of the load, in memory that does not grow with the run."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from batchrunner.core.engine_info import Corner, SchedulerLoad
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.slots import Slots

MOST_POINTS = 200
"""Points of the window over time; with more, every second one is dropped."""


class LoadSummary:
    """How healthy the queues were during the run.

    Steady time begins for a scheduler when its window leaves the state `start`, and ends with the tail.
    """

    def __init__(self, limits: ConcurrencyLimits, slots: Slots) -> None:
        self._limits = limits
        self._slots = slots
        self._last: float | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._corners: defaultdict[str, float] = defaultdict(float)
        self._usage = 0.0
        self._queue = 0.0
        self._running: defaultdict[str, float] = defaultdict(float)
        self._points: list[tuple[float, int]] = []
        self._began = 0.0
        self._point_every_s = 0.0
        self._window_min: int | None = None
        self._window_max: int | None = None

    def polled(self, loads: Sequence[SchedulerLoad], now: float) -> None:
        """Add a sample, for the time since the one before."""
        if self._last is None:
            self._last = self._began = now
        span, self._last = now - self._last, now
        self._seconds["all"] += span
        self._add_point(now, self._slots.window)
        states, bands, corners = self._limits.states, self._limits.bands, self._limits.corners
        if "tail" in states.values():
            self._seconds["tail"] += span
        for load in loads:
            if states.get(load.scheduler) in {None, "start", "tail"}:
                continue
            band = bands[load.scheduler]
            self._seconds["steady"] += span
            self._seconds["in_band"] += span * (band.low <= load.queue <= band.high)
            self._seconds["empty"] += span * (load.queue == 0)
            if load.scheduler in corners:
                self._corners[corners[load.scheduler]] += span
            self._usage += span * load.token_usage
            self._queue += span * load.queue
            self._running[load.scheduler] += span * load.running

    def as_dict(self, *, retractions: int) -> dict[str, Any]:
        """Return report.json's `load`; shares are of steady time, None if there was none."""
        steady = self._seconds["steady"]

        def share(value: float, whole: float) -> float | None:
            return round(value / whole, 4) if whole else None

        return {
            "steady_s": round(steady, 1),
            "in_band_share": share(self._seconds["in_band"], steady),
            "empty_queue_share": share(self._seconds["empty"], steady),
            "corner_shares": {str(name): share(self._corners[name], steady) for name in Corner},
            "mean_queue": share(self._queue, steady),
            "mean_token_usage": share(self._usage, steady),
            "tail_share": share(self._seconds["tail"], self._seconds["all"]),
            "imbalance": self._imbalance(),
            "retractions": retractions,
            "window_min": self._window_min,
            "window_max": self._window_max,
            "window_over_time": [[round(at - self._began, 1), window] for at, window in self._points],
        }

    def _imbalance(self) -> float | None:
        """Return how much less the idlest scheduler ran than the busiest, as a share of the latter."""
        means = list(self._running.values())
        return round((max(means) - min(means)) / max(means), 4) if len(means) > 1 and max(means) else None

    def _add_point(self, now: float, window: int) -> None:
        self._window_min = min(window, self._window_min or window)
        self._window_max = max(window, self._window_max or window)
        if self._points and now - self._points[-1][0] < self._point_every_s:
            return
        self._points.append((now, window))
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._point_every_s = (now - self._began) / len(self._points)
