"""The range in which a job keeps the queue of each scheduler, SGLang's `#queue-req`."""

from __future__ import annotations

from dataclasses import dataclass

USUAL_MAX_RUNNING = 256
"""Requests that a scheduler runs at once, from which the band applies as it is; below, it is scaled down."""
LEAST_LOW = 8
"""The lower end is not scaled below this many requests."""


@dataclass(frozen=True, slots=True)
class QueueBand:
    """Healthy `#queue-req` of one scheduler, in requests."""

    low: int
    high: int
    why: str = "the job's"

    def scaled(self, max_running: int | None) -> QueueBand:
        """Return the band for a scheduler that runs at most `max_running` requests at once."""
        if max_running is None or max_running >= USUAL_MAX_RUNNING:
            return self
        share = max_running / USUAL_MAX_RUNNING
        low = min(self.low, max(LEAST_LOW, round(self.low * share)))
        high = min(self.high, max(4 * low, round(self.high * share)))
        return QueueBand(low, high, f"scaled down: the scheduler runs {max_running} at once")
