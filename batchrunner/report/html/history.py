"""The history of a run over time: each task's event log, and all tasks on one axis."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

MOST_CELLS = 600
"""Cells of time that a run's work is divided into."""
LEAST_CELL_S = 0.125
"""Least width of a cell, in seconds."""
MOST_INCIDENTS = 200
"""Incidents that are kept, the newest."""
LONGEST = 300
"""Characters of a text that are kept."""

RETRACTIONS = "retractions"
TASK_GAUGES = (
    "output_tokens_per_s", "prompt_tokens_per_s", "cached_tokens_per_s", "window", "in_flight", RETRACTIONS,
)  # fmt: skip
SCHEDULER_GAUGES = ("queue", "running", "token_usage", "window", "output_tokens_per_s", RETRACTIONS)


Key = tuple[str, str]
"""The name of a gauge, and its scheduler; "" for the whole task."""


Cell = dict[Key, tuple[float, int]]
"""Sum and number of the values of each gauge in a cell of time."""
Line = list[float | None]
"""A gauge's mean at each point of the grid."""


@dataclass(slots=True)
class AttemptLoad:
    """The load of one attempt; times are seconds since the epoch."""

    began: float
    ended: float
    """Time of its last event."""
    reason: str | None = None
    """Why it ended; None where the log does not say: it was killed, or is running."""
    cells: dict[int, Cell] = field(default_factory=dict)
    """Cells by number: time since the epoch divided by the width of a cell."""
    retractions: int = 0
    """Retractions of all schedulers."""


class IncidentMark(NamedTuple):
    """An incident of an engine or a task."""

    time: float
    what: str
    who: str
    why: str


@dataclass(slots=True)
class TaskHistory:
    """What the events of a task tell, over all its attempts."""

    task: str
    width_s: float
    """Width of a cell in seconds; see `cell_width`."""
    attempts: list[AttemptLoad] = field(default_factory=list)
    incidents: deque[IncidentMark] = field(default_factory=lambda: deque(maxlen=MOST_INCIDENTS))
    order: dict[str, Any] = field(default_factory=dict)
    tokenize: dict[str, Any] = field(default_factory=dict)
    bands: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Healthy `#queue-req` of each scheduler of the newest attempt."""
    max_running: dict[str, int] = field(default_factory=dict)
    """`max_running_requests` of each scheduler of the newest attempt."""
    _ours: dict[str, str] | None = None
    """Names of launched servers, by their address; a server has a new port in each attempt."""

    def add(self, event: dict[str, Any]) -> None:
        """Add the next event; an unknown kind only moves the end of its attempt."""
        if event["event"] == "start" or not self.attempts:
            self.attempts.append(AttemptLoad(event["time"], event["time"]))
            self._ours = {} if (event.get("engine") or {}).get("log") else None
        self.attempts[-1].ended = max(self.attempts[-1].ended, event["time"])
        match event["event"]:
            case "sample":
                self._add_sample(event)
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
                who = (self._ours or {}).get(who, who)
                self.incidents.append(IncidentMark(event["time"], what.removeprefix("engine_"), who, why))

    def _add_sample(self, sample: dict[str, Any]) -> None:
        attempt = self.attempts[-1]
        if not attempt.cells:
            self.bands, self.max_running = {}, {}
        cell = attempt.cells.setdefault(int(sample["time"] / self.width_s), {})
        for name in TASK_GAUGES:
            _measure(cell, (name, ""), sample.get(name))
        for signal in sample.get("signals") or ():
            who = self._name_of(signal["scheduler"])
            for name in SCHEDULER_GAUGES:
                _measure(cell, (name, who), signal.get(name))
            if signal.get("max_running"):
                self.max_running[who] = signal["max_running"]
        attempt.retractions = sample.get(RETRACTIONS) or 0
        self.bands.update(sample.get("bands") or {})

    def _name_of(self, scheduler: str) -> str:
        if self._ours is None:
            return scheduler
        server, dp, rank = scheduler.partition("#")
        return self._ours.setdefault(server, f"replica {len(self._ours)}") + dp + rank


def history_of(task: str, events: Iterable[dict[str, Any]], width_s: float) -> TaskHistory:
    """Return the history of these events in cells of this width; events without a time are skipped."""
    history = TaskHistory(task, width_s)
    for event in events:
        if isinstance(event.get("time"), (int, float)):
            history.add(event)
    return history


def _measure(cell: Cell, key: Key, value: Any) -> None:
    if value is not None:
        total, times = cell.get(key, (0.0, 0))
        cell[key] = total + value, times + 1


def _short(text: object) -> str:
    return str(text or "")[:LONGEST]


MOST_LINES = 8
"""Schedulers that get a line each; of more, the lowest, the mean and the highest are drawn."""
SILENT_S = 10.0
"""Seconds without a sample (five are missing) after which a line ends and a task counts as idle."""
STEADY_S = 4.0
"""Least width of a cell with several tasks: two samples, so that each task is in each cell."""


def cell_width(length_s: float, tasks: int) -> float:
    """Return the width of the cells, in seconds, of a run that worked for so long with so many tasks."""
    return max(length_s / MOST_CELLS, STEADY_S if tasks > 1 else LEAST_CELL_S)


class TimeAxis:
    """Maps wall-clock time to the seconds for which a run was running; pauses without a task take no time."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        """`spans` are the beginnings and ends of attempts, in any order."""
        self._began: list[float] = []
        self._ended: list[float] = []
        self._at: list[float] = []
        self.length_s = 0.0
        for began, ended in sorted(spans):
            if self._ended and began <= self._ended[-1]:
                self.length_s += max(0.0, ended - self._ended[-1])
                self._ended[-1] = max(self._ended[-1], ended)
                continue
            self._at.append(self.length_s)
            self._began.append(began)
            self._ended.append(ended)
            self.length_s += ended - began

    def place(self, time: float) -> float:
        """Return the position of a time in seconds; all times in a pause have the position of the pause."""
        stretch = self.stretch(time)
        if stretch < 0:
            return 0.0
        return self._at[stretch] + min(time, self._ended[stretch]) - self._began[stretch]

    def stretch(self, time: float) -> int:
        """Return the number of the stretch of work that a time is in, or follows; -1 before the first."""
        return bisect_right(self._began, time) - 1

    def resumed(self) -> list[float]:
        """Return the positions at which work resumed after a pause."""
        return self._at[1:]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The load of a run on one grid."""

    axis: TimeAxis
    places: list[float] = field(default_factory=list)
    """Points of the grid, in seconds of the axis, ascending."""
    breaks: frozenset[int] = frozenset()
    """Indices of points before which lines are broken."""
    lines: dict[Key, Line] = field(default_factory=dict)
    """By gauge and scheduler; those of whole tasks are sums over all of them."""
    retractions: int = 0

    def total(self, name: str) -> Line | None:
        """Return the line of all tasks together."""
        return self.lines.get((name, ""))

    def of_schedulers(self, name: str) -> dict[str, Line]:
        """Return a line for each scheduler; of many, their lowest, their mean and their highest."""
        lines = {who: line for (gauge, who), line in self.lines.items() if gauge == name and who}
        if len(lines) <= MOST_LINES:
            return lines
        columns = [
            [value for value in column if value is not None] for column in zip(*lines.values(), strict=True)
        ]
        drawn: dict[str, Callable[[list[float]], float]] = {
            "lowest": min,
            f"mean of {len(lines)}": fmean,
            "highest": max,
        }
        return {
            label: [of_all(column) if column else None for column in columns]
            for label, of_all in drawn.items()
        }


def make_timeline(histories: Sequence[TaskHistory]) -> Timeline:
    """Merge the histories of tasks, which have cells of one width."""
    axis = TimeAxis((attempt.began, attempt.ended) for history in histories for attempt in history.attempts)
    width_s = histories[0].width_s if histories else LEAST_CELL_S
    several = len(histories) > 1
    grid: dict[int, dict[Key, float]] = {}
    for history in histories:
        prefix = f"{history.task} " if several else ""
        for at, cell in _cells(history, fill=several):
            into = grid.setdefault(at, {})
            for (name, scheduler), (total, times) in cell.items():
                key = name, scheduler and prefix + scheduler
                into[key] = into.get(key, 0.0) + total / times
    numbers = sorted(grid)
    ends = [(at + 1) * width_s for at in numbers]  # the middle of a cell may lie before its attempt
    silent = max(SILENT_S, 2 * width_s)
    return Timeline(
        axis,
        [axis.place((at + 0.5) * width_s) for at in numbers],
        frozenset(
            at
            for at, (before, end) in enumerate(pairwise(ends), 1)
            if end - before > silent or axis.stretch(end) != axis.stretch(before)
        ),
        {
            key: [grid[at].get(key) for at in numbers]
            for key in sorted({key for cell in grid.values() for key in cell})
        },
        sum(attempt.retractions for history in histories for attempt in history.attempts),
    )


def _cells(history: TaskHistory, *, fill: bool) -> Iterator[tuple[int, Cell]]:
    """Yield a task's cells; with `fill`, a cell without a sample repeats the last one, up to SILENT_S."""
    longest = int(SILENT_S / history.width_s)
    for attempt in history.attempts:
        numbers = sorted(attempt.cells)
        for at, after in zip(numbers, [*numbers[1:], *numbers[-1:]], strict=True):
            yield at, attempt.cells[at]
            for between in range(at + 1, min(after, at + longest)) if fill else ():
                yield between, attempt.cells[at]
