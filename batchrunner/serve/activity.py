"""What a server does, for its page: the running batches, and the engine's load in the last hour."""

from collections import deque
from statistics import fmean
from typing import NamedTuple

from batchrunner.output.samples import RunSample

POINT_EVERY_S = 5.0
"""Minimum number of seconds between two stored samples of the engine's load."""
MOST_POINTS = 720
"""Maximum number of stored load samples: one hour."""


class LoadPoint(NamedTuple):
    """Load of the whole engine at one moment, with the token rates of all batches."""

    time: float
    """Unix time in seconds."""
    running: int | None
    """Running requests; None if the engine does not report its load."""
    queue: int | None
    """Requests that wait in the engine; None if the engine does not report its load."""
    token_usage: float | None
    """Mean token usage of the schedulers; None if the engine does not report its load."""
    output_tokens_per_s: float
    prompt_tokens_per_s: float


class Activity:
    """The latest state of each running batch, and a bounded series of samples of the engine's load."""

    def __init__(self) -> None:
        """Begin without batches and without load samples."""
        self.runs: dict[str, RunSample] = {}
        """Newest state of each batch that uses the engine, by batch ID, the oldest run first."""
        self._points = deque[LoadPoint](maxlen=MOST_POINTS)

    def update(self, batch_id: str, sample: RunSample, now: float) -> None:
        """Store the state of a running batch at the Unix time `now`.

        At most every 5 s, this also adds a sample of the engine's load.
        """
        self.runs[batch_id] = sample
        # The difference is negative if the clock was set back.
        if self._points and 0 <= now - self._points[-1].time < POINT_EVERY_S:
            return
        runs, schedulers = self.runs.values(), sample.signals
        self._points.append(
            LoadPoint(
                time=round(now, 1),
                running=sum(load.running for load in schedulers) if schedulers else None,
                queue=sum(load.queue for load in schedulers) if schedulers else None,
                token_usage=round(fmean(load.token_usage for load in schedulers), 3) if schedulers else None,
                output_tokens_per_s=round(sum(run.output_tokens_per_s for run in runs), 1),
                prompt_tokens_per_s=round(sum(run.prompt_tokens_per_s for run in runs), 1),
            )
        )

    def end(self, batch_id: str) -> None:
        """Forget a batch that no longer uses the engine."""
        self.runs.pop(batch_id, None)

    def load_since(self, since: float) -> dict[str, list[float | None]]:
        """Return the load samples after the Unix time `since`, as one list for each field of LoadPoint."""
        points = [point for point in self._points if point.time > since]
        return {name: [getattr(point, name) for point in points] for name in LoadPoint._fields}
