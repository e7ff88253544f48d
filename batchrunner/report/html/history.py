"""The history of a run for its page: load and incidents from the workers' event logs, on one time axis.

The time is divided into cells of equal width. A cell has the mean of each gauge over its load samples.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from msgspec import UNSET

from batchrunner.output.samples import LoggedSample, sample_of
from batchrunner.report.verdict import GO_ON

MOST_CELLS = 600
"""Maximum number of cells into which the time of a run is divided."""
LEAST_CELL_S = 0.125
"""Minimum width of a cell, in seconds."""
MOST_INCIDENTS = 200
"""Maximum number of incidents of a worker on the page. Older incidents are dropped."""
LONGEST = 300
"""Maximum number of characters of a name or reason on the page."""

RETRACTIONS = "retractions"
"""Name of the gauge that counts retractions since the start."""
WORKER_GAUGES = (
    "output_tokens_per_s", "prompt_tokens_per_s", "cached_tokens_per_s", "window", "in_flight", RETRACTIONS,
)  # fmt: skip
"""Gauges of a whole worker: attributes of LoggedSample."""
SCHEDULER_GAUGES = ("queue", "running", "token_usage", "window", "output_tokens_per_s", RETRACTIONS)
"""Gauges of one scheduler: attributes of the entries in `LoggedSample.signals`."""


Key = tuple[str, str]
"""The name of a gauge, and the name of its scheduler ("" for a gauge of a whole worker)."""


Cell = dict[Key, tuple[float, int]]
"""Sum and number of the values of each gauge in one cell of time."""
Line = list[float | None]
"""Mean of a gauge at each of `Timeline.places`; None for a cell without a load sample."""


@dataclass(slots=True)
class AttemptLoad:
    """The load during one attempt (one start) of a worker. Times are seconds since the epoch."""

    began: float
    """Time of the first event."""
    ended: float
    """Time of the last event."""
    reason: str | None = None
    """Reason why the attempt ended; None if it was killed, or is running."""
    next_step: str = GO_ON
    """What to do about rows that remain; empty if the reason says it."""
    cells: dict[int, Cell] = field(default_factory=dict)
    """Cells by number. The number is the time divided by the width of a cell, rounded down."""
    retractions: int = 0
    """Number of retractions of all schedulers."""


class IncidentMark(NamedTuple):
    """An incident of a server or a worker, such as a death or a takeover of its rows."""

    time: float
    """Seconds since the epoch."""
    what: str
    """Kind of the incident, such as `died`."""
    who: str
    """Name of the server or worker."""
    why: str
    """Reason, in words."""


@dataclass(slots=True)
class WorkerHistory:
    """Summary of the events of all attempts of a worker."""

    task: str
    """Name of the worker."""
    width_s: float
    """Width of a cell in seconds; see `cell_width`."""
    attempts: list[AttemptLoad] = field(default_factory=list)
    incidents: deque[IncidentMark] = field(default_factory=lambda: deque(maxlen=MOST_INCIDENTS))
    order: dict[str, Any] = field(default_factory=dict)
    """The last `order` event."""
    tokenize: dict[str, Any] = field(default_factory=dict)
    """The last `tokenize` event."""
    bands: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Healthy range of `#queue-req` of each scheduler in the last attempt that has load samples."""
    max_running: dict[str, int] = field(default_factory=dict)
    """`max_running_requests` of each scheduler in the last attempt that has load samples."""
    _replica_names: dict[str, str] | None = None
    """Names of launched servers by URL. The port in the URL changes with each attempt, but the name does not.
    None for attached servers, which are named by their URLs."""

    def add(self, event: dict[str, Any]) -> None:
        """Add the next event of the log. An event of unknown kind only extends its attempt."""
        # A damaged log may begin without a `start` event.
        if event["event"] == "start" or not self.attempts:
            self.attempts.append(AttemptLoad(began=event["time"], ended=event["time"]))
            # Only a launched engine has a log.
            is_launched = bool((event.get("engine") or {}).get("log"))
            self._replica_names = {} if is_launched else None
        self.attempts[-1].ended = max(self.attempts[-1].ended, event["time"])
        if (sample := sample_of(event)) is not None:
            self._add_sample(sample)
        match event["event"]:
            case "end":
                attempt = self.attempts[-1]
                attempt.reason, attempt.next_step = _short(event.get("reason")), event.get("next_step", "")
            case "order":
                self.order = event
            case "tokenize":
                self.tokenize = event
            case "takeover":
                why = f"{event.get('rows_left', '?')} rows were left"
                self.incidents.append(IncidentMark(event["time"], "takeover", _short(event.get("task")), why))
            case what if what.startswith("engine_"):
                who, why = _short(event.get("who")), _short(event.get("why"))
                who = (self._replica_names or {}).get(who, who)
                self.incidents.append(IncidentMark(event["time"], what.removeprefix("engine_"), who, why))

    def _add_sample(self, sample: LoggedSample) -> None:
        """Add a load sample to its cell, and update the limits of its schedulers."""
        attempt = self.attempts[-1]
        if not attempt.cells:
            # The sample is the first of an attempt, whose servers and limits may differ from those before.
            self.bands, self.max_running = {}, {}
        cell = attempt.cells.setdefault(int(sample.time / self.width_s), {})
        for name in WORKER_GAUGES:
            _measure(cell, (name, ""), getattr(sample, name))
        for load in sample.signals:
            who = self._name_of(load.scheduler)
            for name in SCHEDULER_GAUGES:
                _measure(cell, (name, who), getattr(load, name))
            if load.max_running:
                self.max_running[who] = load.max_running
        # A load sample counts the retractions since the start of the attempt, so the last one has the total.
        attempt.retractions = sample.retractions
        # Schedulers that are gone keep their last range.
        self.bands.update(sample.bands)

    def _name_of(self, scheduler: str) -> str:
        """Return the name of a scheduler on the page, which stays the same over all attempts."""
        if self._replica_names is None:
            return scheduler
        server, separator, dp_rank = scheduler.partition("#")
        # Servers are numbered in the order in which they first appear in the log of the attempt.
        replica = self._replica_names.setdefault(server, f"replica {len(self._replica_names)}")
        return replica + separator + dp_rank


def history_of(task: str, events: Iterable[dict[str, Any]], width_s: float) -> WorkerHistory:
    """Return the history of a worker from its events; events without a time are skipped.

    `task` is the name of the worker, `width_s` the width of a cell in seconds.
    """
    history = WorkerHistory(task, width_s)
    for event in events:
        if isinstance(event.get("time"), (int, float)):
            history.add(event)
    return history


def _measure(cell: Cell, key: Key, value: Any) -> None:
    """Add a value of a gauge to a cell, unless the load sample lacks the gauge."""
    if value is not UNSET:
        total, number = cell.get(key, (0.0, 0))
        cell[key] = total + value, number + 1


def _short(text: object) -> str:
    """Return the first LONGEST characters of a text of an event; "" if the event lacks the text."""
    return str(text or "")[:LONGEST]


MOST_SCHEDULER_LINES = 8
"""Maximum number of schedulers that have a line each in a chart. More schedulers share three lines: the
lowest, the mean and the highest value."""
GAP_S = 10.0
"""Time in seconds without a load sample after which a line ends and a worker counts as idle. A worker logs a
load sample every two seconds."""
STEADY_S = 4.0
"""Minimum width of a cell in seconds if a run has several workers. A worker logs a load sample every two
seconds, so that each cell has a sample of each worker."""


def cell_width(length_s: float, workers: int) -> float:
    """Return the width of a cell in seconds for a run of `length_s` seconds with this number of workers."""
    return max(length_s / MOST_CELLS, STEADY_S if workers > 1 else LEAST_CELL_S)


class TimeAxis:
    """Maps times to positions on an axis on which pauses of the whole run take no space.

    A period of work is a time in which at least one worker ran without a break.
    """

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        """Build the axis from the times of the first and last event of each attempt, in any order."""
        self._begins: list[float] = []
        """Times at which the periods of work began, ascending."""
        self._ends: list[float] = []
        """Times at which the periods of work ended."""
        self._places: list[float] = []
        """Positions on the axis at which the periods of work begin, in seconds."""
        self.length_s = 0.0
        """Length of the axis in seconds."""
        for begin, end in sorted(spans):
            if self._ends and begin <= self._ends[-1]:
                # The attempt began during the last period of work, and may extend it.
                self.length_s += max(0.0, end - self._ends[-1])
                self._ends[-1] = max(self._ends[-1], end)
                continue
            self._places.append(self.length_s)
            self._begins.append(begin)
            self._ends.append(end)
            self.length_s += end - begin

    def place(self, time: float) -> float:
        """Return the position of a time on the axis, in seconds.

        All times within a pause have the same position.
        """
        period = self.period(time)
        if period < 0:
            return 0.0
        return self._places[period] + min(time, self._ends[period]) - self._begins[period]

    def period(self, time: float) -> int:
        """Return the index of the period of work that contains a time.

        For a time in a pause, return the index of the period before the pause; -1 if there is none.
        """
        return bisect_right(self._begins, time) - 1

    def resumed(self) -> list[float]:
        """Return the positions on the axis at which work resumed after a pause."""
        return self._places[1:]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The load of all workers of a run, cell by cell on one time axis."""

    axis: TimeAxis
    places: list[float] = field(default_factory=list)
    """Positions on the time axis of the middle of each cell, in seconds, ascending."""
    breaks: frozenset[int] = frozenset()
    """Indices in `places` at which each line begins anew, without a connection to the point before."""
    lines: dict[Key, Line] = field(default_factory=dict)
    """Lines by gauge and scheduler. A line without a scheduler is the sum over all workers."""
    retractions: int = 0
    """Number of retractions in the whole run."""

    def total(self, name: str) -> Line | None:
        """Return a line with the sum of a gauge over all workers; None if the gauge has no values."""
        return self.lines.get((name, ""))

    def of_schedulers(self, name: str) -> dict[str, Line]:
        """Return the line of a gauge for each scheduler, by label.

        If there are more than MOST_SCHEDULER_LINES schedulers, return three lines instead: the lowest, the
        mean and the highest value of all schedulers.
        """
        lines = {who: line for (gauge, who), line in self.lines.items() if gauge == name and who}
        if len(lines) <= MOST_SCHEDULER_LINES:
            return lines
        # For each cell, the values of all schedulers that have one.
        values_by_cell = [
            [value for value in values if value is not None] for values in zip(*lines.values(), strict=True)
        ]
        summaries: dict[str, Callable[[list[float]], float]] = {
            "lowest": min,
            f"mean of {len(lines)}": fmean,
            "highest": max,
        }
        return {
            label: [summary(values) if values else None for values in values_by_cell]
            for label, summary in summaries.items()
        }


def make_timeline(histories: Sequence[WorkerHistory]) -> Timeline:
    """Merge the histories of workers, whose cells must have the same width, into one timeline."""
    attempts = [attempt for history in histories for attempt in history.attempts]
    axis = TimeAxis((attempt.began, attempt.ended) for attempt in attempts)
    width_s = histories[0].width_s if histories else LEAST_CELL_S
    grid = _sums_of_workers(histories)
    numbers = sorted(grid)
    keys = sorted({key for cell in grid.values() for key in cell})
    lines: dict[Key, Line] = {key: [grid[number].get(key) for number in numbers] for key in keys}
    return Timeline(
        axis=axis,
        # A value stands in the middle of its cell.
        places=[axis.place((number + 0.5) * width_s) for number in numbers],
        breaks=_breaks(numbers, width_s, axis),
        lines=lines,
        retractions=sum(attempt.retractions for attempt in attempts),
    )


def _sums_of_workers(histories: Sequence[WorkerHistory]) -> dict[int, dict[Key, float]]:
    """Return the value of each gauge in each cell, by the number of the cell.

    The value of a scheduler's gauge is its mean over the load samples in the cell. For a gauge of whole
    workers, the means of all workers are added up.
    """
    has_several = len(histories) > 1
    grid: dict[int, dict[Key, float]] = {}
    for history in histories:
        # Replicas of two workers may have the same name.
        prefix = f"{history.task} " if has_several else ""
        # If there are several workers, cells without a load sample are filled from the cell before. Otherwise
        # a worker would count as idle there.
        for number, cell in _cells(history, fill=has_several):
            sums = grid.setdefault(number, {})
            for (name, scheduler), (total, number_of_values) in cell.items():
                # A gauge of the whole worker has no scheduler.
                key = name, (prefix + scheduler) if scheduler else ""
                sums[key] = sums.get(key, 0.0) + total / number_of_values
    return grid


def _breaks(numbers: list[int], width_s: float, axis: TimeAxis) -> frozenset[int]:
    """Return the indices of the cells before which lines are interrupted.

    A line is interrupted by a time without load samples, and by a pause of the whole run. `numbers` are the
    numbers of the cells, ascending.
    """
    silence_s = max(GAP_S, 2 * width_s)
    # Take the end of each cell as its time. The middle of an attempt's first cell may lie before the attempt,
    # and so in the pause before it.
    ends = [(number + 1) * width_s for number in numbers]
    breaks = set()
    for index, (previous_end, end) in enumerate(pairwise(ends), 1):
        is_silent = end - previous_end > silence_s
        if is_silent or axis.period(end) != axis.period(previous_end):
            breaks.add(index)
    return frozenset(breaks)


def _cells(history: WorkerHistory, *, fill: bool) -> Iterator[tuple[int, Cell]]:
    """Yield the cells of a worker with their numbers.

    With `fill`, a cell is repeated in the empty cells after it, for up to GAP_S, so that a worker without a
    load sample in a cell does not count as idle in the sum over workers.
    """
    most_cells = int(GAP_S / history.width_s)
    for attempt in history.attempts:
        numbers = sorted(attempt.cells)
        # The last cell of an attempt has no next cell, and is not repeated.
        next_numbers = [*numbers[1:], *numbers[-1:]]
        for number, next_number in zip(numbers, next_numbers, strict=True):
            yield number, attempt.cells[number]
            if fill:
                for empty_number in range(number + 1, min(next_number, number + most_cells)):
                    yield empty_number, attempt.cells[number]
