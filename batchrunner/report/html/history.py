"""The history of a run: load and incidents in each worker's event log, and all workers on one time axis."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from msgspec import UNSET

from batchrunner.output.samples import LoggedSample, sample_of

MOST_CELLS = 600
"""Maximum number of cells of time into which a run is divided."""
LEAST_CELL_S = 0.125
"""Minimum width of a cell, in seconds."""
MOST_INCIDENTS = 200
"""Maximum number of incidents of a worker on the page; older ones are dropped."""
LONGEST = 300
"""Maximum number of characters of a text on the page."""

RETRACTIONS = "retractions"
WORKER_GAUGES = (
    "output_tokens_per_s", "prompt_tokens_per_s", "cached_tokens_per_s", "window", "in_flight", RETRACTIONS,
)  # fmt: skip
SCHEDULER_GAUGES = ("queue", "running", "token_usage", "window", "output_tokens_per_s", RETRACTIONS)


Key = tuple[str, str]
"""The name of a gauge, and its scheduler ("" for all schedulers of the worker)."""


Cell = dict[Key, tuple[float, int]]
"""Sum and number of the values of each gauge in a cell of time."""
Line = list[float | None]
"""Mean of a gauge at each point of the grid; None without a load sample."""


@dataclass(slots=True)
class AttemptLoad:
    """The load during an attempt. Times are seconds since the epoch."""

    began: float
    ended: float
    """Time of its last event."""
    reason: str | None = None
    """Why it ended; None if it was killed, or is running."""
    cells: dict[int, Cell] = field(default_factory=dict)
    """Cells by number. The number is the time divided by the width of a cell, rounded down."""
    retractions: int = 0
    """Retractions of all schedulers."""


class IncidentMark(NamedTuple):
    """An incident of an engine or a worker."""

    time: float
    what: str
    who: str
    why: str


@dataclass(slots=True)
class WorkerHistory:
    """Summary of the events of all attempts of a worker."""

    task: str
    width_s: float
    """Width of a cell in seconds; see `cell_width`."""
    attempts: list[AttemptLoad] = field(default_factory=list)
    incidents: deque[IncidentMark] = field(default_factory=lambda: deque(maxlen=MOST_INCIDENTS))
    order: dict[str, Any] = field(default_factory=dict)
    """The last `order` event."""
    tokenize: dict[str, Any] = field(default_factory=dict)
    """The last `tokenize` event."""
    bands: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Healthy range of `#queue-req` of each scheduler in the newest attempt."""
    max_running: dict[str, int] = field(default_factory=dict)
    """`max_running_requests` of each scheduler in the newest attempt."""
    _replica_names: dict[str, str] | None = None
    """Names of launched servers by URL, whose port changes with each attempt; None for attached servers."""

    def add(self, event: dict[str, Any]) -> None:
        """Add the next event. An unknown event only extends its attempt."""
        if event["event"] == "start" or not self.attempts:
            self.attempts.append(AttemptLoad(event["time"], event["time"]))
            self._replica_names = {} if (event.get("engine") or {}).get("log") else None
        self.attempts[-1].ended = max(self.attempts[-1].ended, event["time"])
        if (sample := sample_of(event)) is not None:
            self._add_sample(sample)
        match event["event"]:
            case "end":
                self.attempts[-1].reason = _short(event.get("reason"))
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
        attempt = self.attempts[-1]
        if not attempt.cells:
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
        attempt.retractions = sample.retractions
        self.bands.update(sample.bands)

    def _name_of(self, scheduler: str) -> str:
        if self._replica_names is None:
            return scheduler
        server, separator, dp_rank = scheduler.partition("#")
        replica = self._replica_names.setdefault(server, f"replica {len(self._replica_names)}")
        return replica + separator + dp_rank


def history_of(task: str, events: Iterable[dict[str, Any]], width_s: float) -> WorkerHistory:
    """Return the history of events in cells of this width; events without a time are skipped."""
    history = WorkerHistory(task, width_s)
    for event in events:
        if isinstance(event.get("time"), (int, float)):
            history.add(event)
    return history


def _measure(cell: Cell, key: Key, value: Any) -> None:
    if value is not UNSET:
        total, times = cell.get(key, (0.0, 0))
        cell[key] = total + value, times + 1


def _short(text: object) -> str:
    return str(text or "")[:LONGEST]


MOST_SCHEDULER_LINES = 8
"""Maximum number of schedulers that have a line each in a chart. More schedulers share three lines: the
lowest, the mean and the highest value."""
GAP_S = 10.0
"""Seconds without a load sample after which a line ends and a worker counts as idle. Five samples are missing
then."""
STEADY_S = 4.0
"""Minimum width of a cell in seconds if there are several workers. It spans two load samples, so that no cell
lacks one."""


def cell_width(length_s: float, tasks: int) -> float:
    """Return the width of the cells, in seconds, of a run of this length with this number of workers."""
    return max(length_s / MOST_CELLS, STEADY_S if tasks > 1 else LEAST_CELL_S)


class TimeAxis:
    """Maps times to seconds of work; pauses in which no worker ran take no time."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        """`spans` are the times of the first and last event of attempts, in any order."""
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._places: list[float] = []
        self.length_s = 0.0
        for begin, end in sorted(spans):
            if self._ends and begin <= self._ends[-1]:
                self.length_s += max(0.0, end - self._ends[-1])
                self._ends[-1] = max(self._ends[-1], end)
                continue
            self._places.append(self.length_s)
            self._begins.append(begin)
            self._ends.append(end)
            self.length_s += end - begin

    def place(self, time: float) -> float:
        """Return the position of a time on the axis, in seconds; all times of a pause have one position."""
        stretch = self.stretch(time)
        if stretch < 0:
            return 0.0
        return self._places[stretch] + min(time, self._ends[stretch]) - self._begins[stretch]

    def stretch(self, time: float) -> int:
        """Return the index of the stretch of work around or before a time; -1 before the first."""
        return bisect_right(self._begins, time) - 1

    def resumed(self) -> list[float]:
        """Return the positions at which work resumed after a pause."""
        return self._places[1:]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The load of all workers of a run, at common points in time."""

    axis: TimeAxis
    places: list[float] = field(default_factory=list)
    """Points of the grid on the axis, in seconds, ascending."""
    breaks: frozenset[int] = frozenset()
    """Indices of the points before which lines are interrupted."""
    lines: dict[Key, Line] = field(default_factory=dict)
    """Lines by gauge and scheduler; a line without a scheduler is the sum over all workers."""
    retractions: int = 0

    def total(self, name: str) -> Line | None:
        """Return the sum of a gauge over all workers."""
        return self.lines.get((name, ""))

    def of_schedulers(self, name: str) -> dict[str, Line]:
        """Return a line for each scheduler; for many, only the lowest, the mean and the highest."""
        lines = {who: line for (gauge, who), line in self.lines.items() if gauge == name and who}
        if len(lines) <= MOST_SCHEDULER_LINES:
            return lines
        columns = [
            [value for value in column if value is not None] for column in zip(*lines.values(), strict=True)
        ]
        summaries: dict[str, Callable[[list[float]], float]] = {
            "lowest": min,
            f"mean of {len(lines)}": fmean,
            "highest": max,
        }
        return {
            label: [summary(column) if column else None for column in columns]
            for label, summary in summaries.items()
        }


def make_timeline(histories: Sequence[WorkerHistory]) -> Timeline:
    """Merge the histories of workers, whose cells have the same width."""
    attempts = [attempt for history in histories for attempt in history.attempts]
    axis = TimeAxis((attempt.began, attempt.ended) for attempt in attempts)
    width_s = histories[0].width_s if histories else LEAST_CELL_S
    grid = _sums_of_workers(histories)
    numbers = sorted(grid)
    keys = sorted({key for cell in grid.values() for key in cell})
    lines: dict[Key, Line] = {key: [grid[number].get(key) for number in numbers] for key in keys}
    return Timeline(
        axis=axis,
        places=[axis.place((number + 0.5) * width_s) for number in numbers],
        breaks=_breaks(numbers, width_s, axis),
        lines=lines,
        retractions=sum(attempt.retractions for attempt in attempts),
    )


def _sums_of_workers(histories: Sequence[WorkerHistory]) -> dict[int, dict[Key, float]]:
    """Return for each cell, by number, the means of its gauges; a gauge of workers is the sum over all."""
    several = len(histories) > 1
    grid: dict[int, dict[Key, float]] = {}
    for history in histories:
        prefix = f"{history.task} " if several else ""
        for number, cell in _cells(history, fill=several):
            sums = grid.setdefault(number, {})
            for (name, scheduler), (total, times) in cell.items():
                key = name, scheduler and prefix + scheduler
                sums[key] = sums.get(key, 0.0) + total / times
    return grid


def _breaks(numbers: list[int], width_s: float, axis: TimeAxis) -> frozenset[int]:
    """Return the indices of the cells before which a silence, or a pause of work, interrupts lines."""
    silence_s = max(GAP_S, 2 * width_s)
    ends = [(number + 1) * width_s for number in numbers]  # the middle of a cell may lie before its attempt
    breaks = set()
    for index, (last_end, end) in enumerate(pairwise(ends), 1):
        is_silent = end - last_end > silence_s
        if is_silent or axis.stretch(end) != axis.stretch(last_end):
            breaks.add(index)
    return frozenset(breaks)


def _cells(history: WorkerHistory, *, fill: bool) -> Iterator[tuple[int, Cell]]:
    """Yield a worker's cells; with `fill` repeat a cell in the empty cells after it, for up to GAP_S."""
    most_cells = int(GAP_S / history.width_s)
    for attempt in history.attempts:
        numbers = sorted(attempt.cells)
        for at, next_at in zip(numbers, [*numbers[1:], *numbers[-1:]], strict=True):
            end = min(next_at, at + most_cells) if fill else at + 1
            yield at, attempt.cells[at]
            for empty_at in range(at + 1, end):
                yield empty_at, attempt.cells[at]
