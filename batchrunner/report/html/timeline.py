"""Stories of a run's tasks → its load over the time in which it was under way, on one grid for all charts."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from batchrunner.report.html.task_history import OF_TASK, RETRACTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from batchrunner.report.html.task_history import Cell, Key, TaskHistory

MOST_LINES = 8
"""Schedulers that have a line each; of more, their mean and range are drawn, and the two furthest apart."""
SILENT_S = 10.0
"""Without a sample for so long (five are missing then) a line is broken, and a task counts as idle."""
STEADY_S = 4.0
"""Cells of several tasks are at least so wide, two samples: each task has its part in each of them."""
RATE_BINS = 60
"""Retractions a minute are counted over so many parts of the time at most, none shorter than a minute."""


class TimeAxis:
    """Wall clock → seconds for which a run was under way: while no task was at work no time passes."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        """`spans` are from when to when a task was at work, in any order."""
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
        """Return where a moment lies; one in which nobody was at work lies where the work went on."""
        stretch = self.stretch(time)
        if stretch < 0:
            return 0.0
        return self._at[stretch] + min(time, self._ended[stretch]) - self._began[stretch]

    def stretch(self, time: float) -> int:
        """Return the number of the stretch of work that a moment belongs to, or follows; -1 before all."""
        return bisect_right(self._began, time) - 1

    def resumed(self) -> list[float]:
        """Return where work went on after nobody had been at it."""
        return self._at[1:]


class GridValue(NamedTuple):
    """What a line has at one place: the mean over a cell of the grid, and its range."""

    mean: float
    low: float
    high: float


Line = list[GridValue | None]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The load of a run on one grid."""

    axis: TimeAxis
    places: list[float] = field(default_factory=list)
    """Of the grid, in seconds of the axis, ascending."""
    breaks: frozenset[int] = frozenset()
    """Places before which lines are broken."""
    totals: dict[str, Line] = field(default_factory=dict)
    """By what was measured: the sum over all tasks."""
    schedulers: dict[str, dict[str, Line]] = field(default_factory=dict)
    """By what was measured and by scheduler."""
    retractions: int = 0

    def of_schedulers(self, name: str) -> dict[str, Line]:
        """Return each scheduler's line by its label; of many their mean with its range, and the extremes."""
        lines = self.schedulers.get(name, {})
        if len(lines) <= MOST_LINES:
            return lines
        spread = [_spread(column) for column in zip(*lines.values(), strict=True)]
        means = {who: mean.mean for who, line in lines.items() if (mean := _spread(line)) is not None}
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        extremes = {} if low == high else {f"lowest: {low}": lines[low], f"highest: {high}": lines[high]}
        return {f"mean of {len(lines)}, and their range": spread, **extremes}


def make_timeline(histories: Sequence[TaskHistory]) -> Timeline:
    """Lay the tasks' stories together; they are coarsened to one width."""
    axis = TimeAxis((span.began, span.ended) for history in histories for span in history.spans)
    width_s = max((history.width_s for history in histories), default=1.0)
    if len(histories) > 1:
        width_s = max(width_s, STEADY_S)
    for history in histories:
        history.coarsen(width_s)
    grid: dict[int, dict[Key, list[GridValue]]] = {}
    for history in histories:
        prefix = _prefix(history, histories)
        for at, cell in _cells(history, fill=len(histories) > 1):
            into = grid.setdefault(at, {})
            for (name, scheduler), gauge in cell.items():
                value = GridValue(gauge.mean, gauge.low, gauge.high)
                into.setdefault((name, scheduler and prefix + scheduler), []).append(value)
    return _on_grid(axis, width_s, dict(sorted(grid.items())), _retractions(histories))


def _cells(history: TaskHistory, *, fill: bool) -> Iterator[tuple[int, Cell]]:
    """Yield a task's cells; to `fill`, one without a sample has what the one before had, for a while."""
    longest = int(SILENT_S / history.width_s)
    for span in history.spans:
        numbers = sorted(span.cells)
        for at, after in zip(numbers, [*numbers[1:], *numbers[-1:]], strict=True):
            yield at, span.cells[at]
            for between in range(at + 1, min(after, at + longest)) if fill else ():
                yield between, span.cells[at]


def _on_grid(
    axis: TimeAxis,
    width_s: float,
    grid: dict[int, dict[Key, list[GridValue]]],
    retractions: dict[str, list[tuple[float, int]]],
) -> Timeline:
    places = [axis.place((at + 0.5) * width_s) for at in grid]
    ends = [(at + 1) * width_s for at in grid]  # its middle may lie before the start whose sample it has
    silent = max(SILENT_S, 2 * width_s)
    breaks = {
        at
        for at in range(1, len(ends))
        if ends[at] - ends[at - 1] > silent or axis.stretch(ends[at]) != axis.stretch(ends[at - 1])
    }
    keys = {key for cell in grid.values() for key in cell if key[0] != RETRACTIONS}
    totals = {
        name: [_sum(cell.get((name, ""))) for cell in grid.values()] for name in OF_TASK if (name, "") in keys
    }
    schedulers: dict[str, dict[str, Line]] = {}
    for name, who in sorted(key for key in keys if key[1]):
        line = [_sum(cell.get((name, who))) for cell in grid.values()]
        schedulers.setdefault(name, {})[who] = line
    rates = {who: _per_minute(axis, places, counts) for who, counts in sorted(retractions.items())}
    totals[RETRACTIONS] = rates.pop("", [])
    return Timeline(
        axis, places, frozenset(breaks), totals, schedulers | {RETRACTIONS: rates},
        sum(count for _, count in retractions[""]),
    )  # fmt: skip


def _retractions(histories: Sequence[TaskHistory]) -> dict[str, list[tuple[float, int]]]:
    """Return when how many requests were retracted, by scheduler; "" for all of them."""
    found: dict[str, list[tuple[float, int]]] = {"": []}
    for history in histories:
        for span in history.spans:
            for at, cell in span.cells.items():
                for (name, scheduler), gauge in cell.items():
                    if name == RETRACTIONS:
                        who = scheduler and _prefix(history, histories) + scheduler
                        found.setdefault(who, []).append((at * history.width_s, int(gauge.total)))
    return found


def _prefix(history: TaskHistory, histories: Sequence[TaskHistory]) -> str:
    """Return what tells a task's schedulers from those of other tasks."""
    return f"{history.task} " if len(histories) > 1 else ""


def _per_minute(axis: TimeAxis, places: Sequence[float], retractions: Iterable[tuple[float, int]]) -> Line:
    bin_s = max(60.0, axis.length_s / RATE_BINS)
    counts: dict[int, int] = {}
    for time, count in retractions:
        at = int(axis.place(time) / bin_s)
        counts[at] = counts.get(at, 0) + count
    rates = [counts.get(int(place / bin_s), 0) * 60 / bin_s for place in places]
    return [GridValue(rate, rate, rate) for rate in rates]


def _sum(values: list[GridValue] | None) -> GridValue | None:
    return GridValue(*map(sum, zip(*values, strict=True))) if values else None


def _spread(values: Iterable[GridValue | None]) -> GridValue | None:
    means = [value.mean for value in values if value is not None]
    return GridValue(sum(means) / len(means), min(means), max(means)) if means else None
