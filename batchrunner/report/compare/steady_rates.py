"""The rates of a run in its steady time, stretch by stretch, from the samples in its event logs.

Two readings of each log, in memory that does not grow with it: the first finds the steady time, the second
shares out what was counted between two samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchrunner.output.events import read_events
from batchrunner.report.compare.intervals import batches_of
from batchrunner.report.html.timeline import TimeAxis

RAMP_UP = 0.1
"""Share of an attempt's time at its beginning that is not steady: the engine fills up."""
LEAST_BATCH_S = 1.0
"""Least length of a stretch in seconds: a few samples."""
COUNTS = {
    "rows_done": "rows_per_s",
    "output_tokens": "output_tokens_per_s",
    "prompt_tokens": "prompt_tokens_per_s",
}
"""Counters of a sample, and the rates that are made of them. Runs of earlier versions count rows only."""


@dataclass(frozen=True, slots=True)
class SteadyRates:
    """The rates of a run in its steady time: not while it fills the engine, nor when few rows are left."""

    length_s: float = 0.0
    """Seconds of steady time; those in which several tasks were at work count once."""
    by_stretch: dict[str, list[float]] = field(default_factory=dict)
    """The mean rate in each of some equal stretches of this time, by the rate's name; empty for too few."""

    def mean(self, name: str) -> float | None:
        """Return a mean rate; None where it is not known."""
        rates = self.by_stretch.get(name)
        return sum(rates) / len(rates) if rates else None


def steady_rates(logs: Sequence[Path], row_s: float) -> SteadyRates:
    """Return the rates of the tasks with these event logs together.

    `row_s` is the median latency of a row, in seconds.
    """
    axis = TimeAxis(span for log in logs for span in _steady_spans(log))
    count = batches_of(axis.length_s, row_s, LEAST_BATCH_S)
    if not count:
        return SteadyRates(axis.length_s)
    stretches = _Stretches(axis, count)
    for log in logs:
        for before, after in _neighbours(log):
            stretches.add(before, after)
    return SteadyRates(axis.length_s, stretches.rates())


def _steady_spans(log: Path) -> Iterator[tuple[float, float]]:
    """Yield the steady time of each attempt: from its tenth on, while more rows were left than in flight."""
    began = ended = busy = 0.0
    for event in read_events(log):
        time = event.get("time", 0.0)
        if event["event"] == "start":
            if busy > began + RAMP_UP * (ended - began):
                yield began + RAMP_UP * (ended - began), busy
            began = ended = busy = time
        ended = max(ended, time)
        if event["event"] == "sample" and began and _unsent(event) > 0:
            busy = time
    if busy > began + RAMP_UP * (ended - began):
        yield began + RAMP_UP * (ended - began), busy


def _unsent(sample: dict[str, Any]) -> int:
    return int(sample.get("rows_total", 0) - sample.get("rows_done", 0) - sample.get("in_flight", 0))


def _neighbours(log: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each sample of an attempt with the one before."""
    before: dict[str, Any] | None = None
    for event in read_events(log):
        if event["event"] == "start":
            before = None
        elif event["event"] == "sample":
            if before is not None and event.get("time", 0.0) > before.get("time", 0.0):
                yield before, event
            before = event


class _Stretches:
    """Sums of what was counted, over equal stretches of an axis of time."""

    def __init__(self, axis: TimeAxis, count: int) -> None:
        self._axis = axis
        self._width_s = axis.length_s / count
        self._sums = {name: [0.0] * count for name in COUNTS}
        self._known = dict.fromkeys(COUNTS, True)

    def add(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Share out what was counted between two samples evenly over the steady part of this time."""
        at, end = self._axis.place(before["time"]), self._axis.place(after["time"])
        span_s = after["time"] - before["time"]
        while at < end:
            stretch = min(int(at / self._width_s), len(self._sums["rows_done"]) - 1)
            last = stretch == len(self._sums["rows_done"]) - 1
            until = end if last else min(end, (stretch + 1) * self._width_s)
            for name, sums in self._sums.items():
                if name in before and name in after:
                    sums[stretch] += max(0, after[name] - before[name]) * (until - at) / span_s
                else:
                    self._known[name] = False
            at = until if until > at else end

    def rates(self) -> dict[str, list[float]]:
        """Return the mean rates, of counters that every sample has."""
        return {
            COUNTS[name]: [value / self._width_s for value in sums]
            for name, sums in self._sums.items()
            if self._known[name]
        }
