"""A task's event log → its starts with their load over time, in memory that does not grow with the run."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from batchrunner.output.events import read_events

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MOST_CELLS = 600
"""When a log fills more cells of time, two become one."""
FIRST_CELL_S = 0.125
MOST_INCIDENTS = 200
"""Of an engine; of more, only their number is kept."""
MOST_REASONS = 50
"""For which windows were changed; numbers in them do not count."""
LONGEST = 300
"""Characters of a text that are kept."""

OF_TASK = ("output_tokens_per_s", "prompt_tokens_per_s", "cached_tokens_per_s", "window", "in_flight")
OF_SCHEDULER = ("queue", "running", "token_usage", "window", "output_tokens_per_s")
RETRACTIONS = "retractions"
_NUMBERS = re.compile(r"\d[\d.,]*")


Key = tuple[str, str]
"""What was measured, and of which scheduler: "" for the whole task."""


@dataclass(slots=True)
class CellStats:
    """What was measured in a cell of time; made a million times for a day's log."""

    total: float
    low: float
    high: float
    times: int = 1

    @property
    def mean(self) -> float:
        """The mean of what was measured."""
        return self.total / self.times

    def add(self, total: float, low: float, high: float, times: int) -> None:
        """Take in more of it."""
        self.total += total
        self.times += times
        self.low = min(self.low, low)
        self.high = max(self.high, high)


Cell = dict[Key, CellStats]


@dataclass(slots=True)
class AttemptLoad:
    """One start: times are seconds since the epoch."""

    began: float
    ended: float
    """When its last event was written."""
    reason: str | None = None
    """Why it ended; None where its log does not say: it was killed, or goes on."""
    exit_code: int | None = None
    cells: dict[int, Cell] = field(default_factory=dict)
    """By their number since the epoch, which is a cell's time in widths of a cell."""
    retracted: dict[str, int] = field(default_factory=dict)
    """So far, by scheduler; "" for all."""


class IncidentMark(NamedTuple):
    """Something that befell an engine, or a task."""

    time: float
    what: str
    who: str
    why: str


@dataclass(slots=True)
class TaskHistory:
    """What a task's events say, from its first start to its last."""

    task: str
    spans: list[AttemptLoad] = field(default_factory=list)
    width_s: float = FIRST_CELL_S
    """Of a cell: a power of two, so that cells of several tasks can be laid together."""
    incidents: list[IncidentMark] = field(default_factory=list)
    incidents_left_out: int = 0
    order: dict[str, Any] = field(default_factory=dict)
    tokenize: dict[str, Any] = field(default_factory=dict)
    rows_total: int = 0
    """That the task knew of, as of its last event that says so."""
    windows: Counter[str] = field(default_factory=Counter)
    """Why windows were changed, with the numbers left out."""
    leads: int = 0
    bands: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each scheduler the healthy `#queue-req`, as it was last: of the newest start, like max_running."""
    max_running: dict[str, int] = field(default_factory=dict)
    _ours: dict[str, str] | None = None
    """What the servers of a start are called where we started them: each has a new port every time."""
    _cells: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """Take the next event; one of an unknown kind only moves the end of its start."""
        if event["event"] == "start" or not self.spans:
            self.spans.append(AttemptLoad(event["time"], event["time"]))
            self._ours = {} if (event.get("engine") or {}).get("log") else None
        self.spans[-1].ended = max(self.spans[-1].ended, event["time"])
        self.rows_total = event.get("rows_total", self.rows_total)
        match event["event"]:
            case "sample":
                self._add_sample(event)
            case "end":
                self.spans[-1].reason = _short(event.get("reason"))
                self.spans[-1].exit_code = event.get("exit_code")
            case "order":
                self.order = event
            case "tokenize":
                self.tokenize = event
            case "window":
                self._count_window(_short(event.get("reason")))
            case "lead":
                self.leads += 1
            case "takeover":
                why = f"{event.get('rows_left', '?')} rows were left"
                self._note(IncidentMark(event["time"], "takeover", _short(event.get("task")), why))
            case what if what.startswith("engine_"):
                who, why = _short(event.get("who")), _short(event.get("why"))
                who = (self._ours or {}).get(who, who)
                self._note(IncidentMark(event["time"], what.removeprefix("engine_"), who, why))

    def coarsen(self, width_s: float) -> None:
        """Lay cells together until they are at least so wide."""
        while self.width_s < width_s:
            self.width_s *= 2
            self._cells = sum(map(_halve, self.spans))

    def _add_sample(self, sample: dict[str, Any]) -> None:
        span = self.spans[-1]
        at = int(sample["time"] / self.width_s)
        before = len(span.cells)
        if not before:
            self.bands, self.max_running = {}, {}
        cell = span.cells.setdefault(at, {})
        for name in OF_TASK:
            _measure(cell, (name, ""), sample.get(name))
        retracted = {"": sample.get(RETRACTIONS) or 0}
        for signal in sample.get("signals") or ():
            who = self._called(signal["scheduler"])
            for name in OF_SCHEDULER:
                _measure(cell, (name, who), signal.get(name))
            if signal.get("max_running"):
                self.max_running[who] = signal["max_running"]
            if RETRACTIONS in signal:
                retracted[who] = signal[RETRACTIONS]
        for who, count in retracted.items():
            _measure(cell, (RETRACTIONS, who), max(0, count - span.retracted.get(who, 0)))
        span.retracted |= retracted
        self.bands.update(sample.get("bands") or {})
        self._cells += len(span.cells) - before
        if self._cells > MOST_CELLS:
            self.coarsen(2 * self.width_s)

    def _called(self, scheduler: str) -> str:
        if self._ours is None:
            return scheduler
        server, dp, rank = scheduler.partition("#")
        return self._ours.setdefault(server, f"replica {len(self._ours)}") + dp + rank

    def _note(self, incident: IncidentMark) -> None:
        if len(self.incidents) < MOST_INCIDENTS:
            self.incidents.append(incident)
        else:
            self.incidents_left_out += 1

    def _count_window(self, reason: str) -> None:
        kind = _NUMBERS.sub("N", reason)
        self.windows[kind if kind in self.windows or len(self.windows) < MOST_REASONS else "other"] += 1


def read_history(task: str, events: Path) -> TaskHistory:
    """Read a task's event log; one that is not there has no starts."""
    return history_of(task, read_events(events))


def history_of(task: str, events: Iterable[dict[str, Any]]) -> TaskHistory:
    """Return the story of events; those without a time are nothing of ours."""
    history = TaskHistory(task)
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
        found.add(value, value, value, 1)


def _halve(span: AttemptLoad) -> int:
    """Lay cells together two by two; return how many are left."""
    joined: dict[int, Cell] = {}
    for at, cell in span.cells.items():
        into = joined.setdefault(at // 2, cell)
        if into is cell:
            continue
        for key, gauge in cell.items():
            found = into.setdefault(key, gauge)
            if found is not gauge:
                found.add(gauge.total, gauge.low, gauge.high, gauge.times)
    span.cells = joined
    return len(joined)


def _short(text: object) -> str:
    return str(text or "")[:LONGEST]
