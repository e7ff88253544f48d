"""Reads the load and the incidents of a run from the workers' event logs, for charts over time.

The time is divided into cells of equal width. A cell has the mean of each gauge, such as the queue length,
over its load samples.
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
"""Maximum number of cells (points of a chart) into which the time of a run is divided."""
LEAST_CELL_S = 0.125
"""Minimum width of a cell (a point of a chart), in seconds."""
MOST_INCIDENTS = 200
"""Maximum number of incidents of a worker on the page. Older incidents are dropped."""
LONGEST = 300
"""Maximum number of characters of a name or reason on the page."""

RETRACTIONS = "retractions"
"""Name of the gauge that counts retractions since the start of the run."""
WORKER_GAUGES = (
    "output_tokens_per_s", "prompt_tokens_per_s", "cached_tokens_per_s", "window", "in_flight", RETRACTIONS,
)  # fmt: skip
"""Gauges of a whole worker, which are attributes of LoggedSample."""
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
    """The load during one start of a worker. Times are seconds since the epoch."""

    began: float
    """Time of the first event."""
    ended: float
    """Time of the last event."""
    reason: str | None = None
    """Reason why it ended; None if the worker was killed, or is running."""
    next_step: str = GO_ON
    """What to do about remaining rows; empty if the reason says it."""
    cells: dict[int, Cell] = field(default_factory=dict)
    """Cells (points of a chart) by number: the time divided by the width of a cell, rounded down."""
    retractions: int = 0
    """Number of retractions of all schedulers."""


class IncidentMark(NamedTuple):
    """An incident of a server or a worker, such as its death."""

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
    """Summary of a worker's events, over all of its starts."""

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
    """Healthy range of each scheduler's `#queue-req`, from the last start with load samples."""
    max_running: dict[str, int] = field(default_factory=dict)
    """Each scheduler's `max_running_requests`, from the last start with load samples."""
    _replica_names: dict[str, str] | None = None
    """Names of the servers that the run started, by URL. The port in the URL changes with each start; the
    name stays. None if the servers were running before. Then their URLs are their names."""

    def add(self, event: dict[str, Any]) -> None:
        """Add the next event of the log. An event of unknown kind only extends the time of its start."""
        # A damaged log may begin without a `start` event.
        if event["event"] == "start" or not self.attempts:
            self.attempts.append(AttemptLoad(began=event["time"], ended=event["time"]))
            # Only an engine that the run started has a log.
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
            # This is the first sample of a start. Its servers and limits may differ from earlier ones.
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
        # Each sample counts the retractions since the start, so the last one has the total.
        attempt.retractions = sample.retractions
        # Schedulers that no longer exist keep their last range.
        self.bands.update(sample.bands)

    def _name_of(self, scheduler: str) -> str:
        """Return the name of a scheduler on the page, which is the same for all starts of the run."""
        if self._replica_names is None:
            return scheduler
        server, separator, dp_rank = scheduler.partition("#")
        # Servers are numbered in the order in which they appear in the log.
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
    """Return a shortened text of an event; "" if the event lacks it."""
    return str(text or "")[:LONGEST]


MOST_SCHEDULER_LINES = 8
"""Maximum number of schedulers with a line each in a chart. If there are more, the chart has three lines: the
lowest, the mean and the highest value."""
GAP_S = 10.0
"""A line of a chart is interrupted after this many seconds without a load sample, and the worker counts as
idle. A worker logs a load sample every two seconds."""
STEADY_S = 4.0
"""Minimum width of a cell (a point of a chart) in seconds, if a run has several workers. Each worker logs a
load sample every two seconds, so each cell has samples of all workers."""


def cell_width(length_s: float, workers: int) -> float:
    """Return the width of a cell (a point of a chart), in seconds, for a run of this length."""
    return max(length_s / MOST_CELLS, STEADY_S if workers > 1 else LEAST_CELL_S)


class TimeAxis:
    """Maps times to positions on a time axis that leaves out the pauses of a run.

    A period of work is a time in which at least one worker was always running.
    """

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        """Build the axis from the times of the first and last event of each start, in any order."""
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
                # This start began during the last period of work, and may extend it.
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
    """The load of all workers of a run over time, as lines for charts."""

    axis: TimeAxis
    places: list[float] = field(default_factory=list)
    """Positions on the time axis of the points of all lines, in seconds, ascending."""
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

        If there are many schedulers, return three lines instead: the lowest, the mean and the highest value.
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
    """Merge the histories of workers into one timeline. Their cells must have the same width."""
    attempts = [attempt for history in histories for attempt in history.attempts]
    axis = TimeAxis((attempt.began, attempt.ended) for attempt in attempts)
    width_s = histories[0].width_s if histories else LEAST_CELL_S
    grid = _sums_of_workers(histories)
    numbers = sorted(grid)
    keys = sorted({key for cell in grid.values() for key in cell})
    lines: dict[Key, Line] = {key: [grid[number].get(key) for number in numbers] for key in keys}
    return Timeline(
        axis=axis,
        # A point is in the middle of its cell.
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
        # With several workers, empty cells are filled from the cell before. Otherwise a worker would count as
        # idle there.
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
    # The end of a cell counts as its time. The middle of the first cell after a pause may lie in the pause.
    ends = [(number + 1) * width_s for number in numbers]
    breaks = set()
    for index, (previous_end, end) in enumerate(pairwise(ends), 1):
        is_silent = end - previous_end > silence_s
        if is_silent or axis.period(end) != axis.period(previous_end):
            breaks.add(index)
    return frozenset(breaks)


def _cells(history: WorkerHistory, *, fill: bool) -> Iterator[tuple[int, Cell]]:
    """Yield the cells of a worker with their numbers.

    With `fill`, a cell is repeated in the empty cells after it, for up to GAP_S. Otherwise the worker would
    count as idle there in the sum over workers.
    """
    most_cells = int(GAP_S / history.width_s)
    for attempt in history.attempts:
        numbers = sorted(attempt.cells)
        # The last cell of a start is not repeated.
        next_numbers = [*numbers[1:], *numbers[-1:]]
        for number, next_number in zip(numbers, next_numbers, strict=True):
            yield number, attempt.cells[number]
            if fill:
                for empty_number in range(number + 1, min(next_number, number + most_cells)):
                    yield empty_number, attempt.cells[number]
