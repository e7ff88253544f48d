"""The history of a run over time: each task's event log, and all tasks on one axis."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_CELLS = 600
"""Cells of time that a run's work is divided into."""
LEAST_CELL_S = 0.125
"""Least width of a cell, in seconds."""
MOST_INCIDENTS = 200
"""Incidents that are kept; further ones are only counted."""
LONGEST = 300
"""Characters of a text that are kept."""

RETRACTIONS = "retractions"
TASK_GAUGES = (
    "output_tokens_per_s", "prompt_tokens_per_s", "cached_tokens_per_s", "window", "in_flight", RETRACTIONS,
)  # fmt: skip
SCHEDULER_GAUGES = ("queue", "running", "token_usage", "window", "output_tokens_per_s", RETRACTIONS)


Key = tuple[str, str]
"""The name of a gauge, and its scheduler; "" for the whole task."""


@dataclass(slots=True)
class CellStats:
    """Sum and range of a gauge in a cell of time; a day's log makes a million of these."""

    total: float
    low: float
    high: float
    times: int = 1

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.total / self.times

    def add(self, value: float) -> None:
        """Add a value."""
        self.total += value
        self.times += 1
        self.low = min(self.low, value)
        self.high = max(self.high, value)


Cell = dict[Key, CellStats]


@dataclass(slots=True)
class AttemptLoad:
    """The load of one attempt; times are seconds since the epoch."""

    began: float
    ended: float
    """Time of its last event."""
    reason: str | None = None
    """Why it ended; None where the log does not say: it was killed, or is running."""
    exit_code: int | None = None
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
    incidents: list[IncidentMark] = field(default_factory=list)
    incidents_left_out: int = 0
    order: dict[str, Any] = field(default_factory=dict)
    tokenize: dict[str, Any] = field(default_factory=dict)
    rows_total: int = 0
    """Rows of the task, by its last event that has them."""
    moves: int = 0
    """Changes of the window."""
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
        self.rows_total = event.get("rows_total", self.rows_total)
        match event["event"]:
            case "sample":
                self._add_sample(event)
            case "end":
                self.attempts[-1].reason = _short(event.get("reason"))
                self.attempts[-1].exit_code = event.get("exit_code")
            case "order":
                self.order = event
            case "tokenize":
                self.tokenize = event
            case "window":
                self.moves += 1
            case "takeover":
                why = f"{event.get('rows_left', '?')} rows were left"
                self._note(IncidentMark(event["time"], "takeover", _short(event.get("task")), why))
            case what if what.startswith("engine_"):
                who, why = _short(event.get("who")), _short(event.get("why"))
                who = (self._ours or {}).get(who, who)
                self._note(IncidentMark(event["time"], what.removeprefix("engine_"), who, why))

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

    def _note(self, incident: IncidentMark) -> None:
        if len(self.incidents) < MOST_INCIDENTS:
            self.incidents.append(incident)
        else:
            self.incidents_left_out += 1


def history_of(task: str, events: Iterable[dict[str, Any]], width_s: float) -> TaskHistory:
    """Return the history of these events in cells of this width; events without a time are skipped."""
    history = TaskHistory(task, width_s)
    for event in events:
        if isinstance(event.get("time"), (int, float)):
            history.add(event)
    return history


def _measure(cell: Cell, key: Key, value: Any) -> None:
    if value is None:
        return
    found = cell.get(key)
    if found is None:
        cell[key] = CellStats(value, value, value)
    else:
        found.add(value)


def _short(text: object) -> str:
    return str(text or "")[:LONGEST]


MOST_LINES = 8
"""Schedulers that get a line each; of more, the mean with its range is drawn."""
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


class GridValue(NamedTuple):
    """A line's value at one point: the mean over a cell of the grid, and its range."""

    mean: float
    low: float
    high: float


Line = list[GridValue | None]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The load of a run on one grid."""

    axis: TimeAxis
    places: list[float] = field(default_factory=list)
    """Points of the grid, in seconds of the axis, ascending."""
    breaks: frozenset[int] = frozenset()
    """Indices of points before which lines are broken."""
    totals: dict[str, Line] = field(default_factory=dict)
    """Sums over all tasks, by gauge."""
    schedulers: dict[str, dict[str, Line]] = field(default_factory=dict)
    """Lines by gauge and by scheduler."""
    retractions: int = 0

    def of_schedulers(self, name: str) -> dict[str, Line]:
        """Return a line for each scheduler; of many, their mean with its range."""
        lines = self.schedulers.get(name, {})
        if len(lines) <= MOST_LINES:
            return lines
        band = [_mean_and_range(column) for column in zip(*lines.values(), strict=True)]
        return {f"mean of {len(lines)}, and their range": band}


def make_timeline(histories: Sequence[TaskHistory]) -> Timeline:
    """Merge the histories of tasks, which have cells of one width."""
    axis = TimeAxis((attempt.began, attempt.ended) for history in histories for attempt in history.attempts)
    width_s = histories[0].width_s if histories else LEAST_CELL_S
    grid: dict[int, dict[Key, list[GridValue]]] = {}
    for history in histories:
        prefix = _prefix(history, histories)
        for at, cell in _cells(history, fill=len(histories) > 1):
            into = grid.setdefault(at, {})
            for (name, scheduler), gauge in cell.items():
                value = GridValue(gauge.mean, gauge.low, gauge.high)
                into.setdefault((name, scheduler and prefix + scheduler), []).append(value)
    retractions = sum(attempt.retractions for history in histories for attempt in history.attempts)
    return _on_grid(axis, width_s, dict(sorted(grid.items())), retractions)


def _cells(history: TaskHistory, *, fill: bool) -> Iterator[tuple[int, Cell]]:
    """Yield a task's cells; with `fill`, a cell without a sample repeats the last one, up to SILENT_S."""
    longest = int(SILENT_S / history.width_s)
    for attempt in history.attempts:
        numbers = sorted(attempt.cells)
        for at, after in zip(numbers, [*numbers[1:], *numbers[-1:]], strict=True):
            yield at, attempt.cells[at]
            for between in range(at + 1, min(after, at + longest)) if fill else ():
                yield between, attempt.cells[at]


def _on_grid(
    axis: TimeAxis, width_s: float, grid: dict[int, dict[Key, list[GridValue]]], retractions: int
) -> Timeline:
    places = [axis.place((at + 0.5) * width_s) for at in grid]
    ends = [(at + 1) * width_s for at in grid]  # the middle of a cell may lie before its attempt
    silent = max(SILENT_S, 2 * width_s)
    breaks = {
        at
        for at in range(1, len(ends))
        if ends[at] - ends[at - 1] > silent or axis.stretch(ends[at]) != axis.stretch(ends[at - 1])
    }
    keys = {key for cell in grid.values() for key in cell}
    gauges = [name for name in TASK_GAUGES if (name, "") in keys]
    totals = {name: [_sum(cell.get((name, ""))) for cell in grid.values()] for name in gauges}
    schedulers: dict[str, dict[str, Line]] = {}
    for name, who in sorted(key for key in keys if key[1]):
        line = [_sum(cell.get((name, who))) for cell in grid.values()]
        schedulers.setdefault(name, {})[who] = line
    return Timeline(axis, places, frozenset(breaks), totals, schedulers, retractions)


def _prefix(history: TaskHistory, histories: Sequence[TaskHistory]) -> str:
    """Return the prefix that distinguishes a task's schedulers from those of other tasks."""
    return f"{history.task} " if len(histories) > 1 else ""


def _sum(values: list[GridValue] | None) -> GridValue | None:
    return GridValue(*map(sum, zip(*values, strict=True))) if values else None


def _mean_and_range(values: Iterable[GridValue | None]) -> GridValue | None:
    means = [value.mean for value in values if value is not None]
    return GridValue(sum(means) / len(means), min(means), max(means)) if means else None
