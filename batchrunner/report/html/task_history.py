"""Read a task's event log: its attempts with their load over time, in memory that does not grow with it."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_CELLS = 600
"""Cells of time that are kept; when there are more, two neighbours are merged."""
FIRST_CELL_S = 0.125
"""Width of a cell at first, in seconds."""
MOST_INCIDENTS = 200
"""Incidents that are kept; further ones are only counted."""
MOST_REASONS = 50
"""Different reasons for window changes that are kept, numbers in them aside."""
LONGEST = 300
"""Characters of a text that are kept."""

TASK_GAUGES = ("output_tokens_per_s", "prompt_tokens_per_s", "cached_tokens_per_s", "window", "in_flight")
SCHEDULER_GAUGES = ("queue", "running", "token_usage", "window", "output_tokens_per_s")
RETRACTIONS = "retractions"
_NUMBERS = re.compile(r"\d[\d.,]*")


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

    def add(self, total: float, low: float, high: float, times: int) -> None:
        """Add values."""
        self.total += total
        self.times += times
        self.low = min(self.low, low)
        self.high = max(self.high, high)


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
    retracted: dict[str, int] = field(default_factory=dict)
    """Retractions so far, by scheduler; "" for all of them."""


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
    attempts: list[AttemptLoad] = field(default_factory=list)
    width_s: float = FIRST_CELL_S
    """Width of a cell in seconds, a power of two, so that cells of several tasks can be merged."""
    incidents: list[IncidentMark] = field(default_factory=list)
    incidents_left_out: int = 0
    order: dict[str, Any] = field(default_factory=dict)
    tokenize: dict[str, Any] = field(default_factory=dict)
    rows_total: int = 0
    """Rows of the task, by its last event that has them."""
    windows: Counter[str] = field(default_factory=Counter)
    """Reasons for window changes, with numbers replaced by N, and how often each occurred."""
    leads: int = 0
    """Corrections of the reuse distance."""
    bands: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Healthy `#queue-req` of each scheduler of the newest attempt."""
    max_running: dict[str, int] = field(default_factory=dict)
    """`max_running_requests` of each scheduler of the newest attempt."""
    _ours: dict[str, str] | None = None
    """Names of launched servers, by their address; a server has a new port in each attempt."""
    _cells: int = 0

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
                kind = _NUMBERS.sub("N", _short(event.get("reason")))
                known = kind in self.windows or len(self.windows) < MOST_REASONS
                self.windows[kind if known else "other"] += 1
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
        """Merge cells until they are at least `width_s` wide."""
        while self.width_s < width_s:
            self.width_s *= 2
            self._cells = sum(map(_halve, self.attempts))

    def _add_sample(self, sample: dict[str, Any]) -> None:
        attempt = self.attempts[-1]
        at = int(sample["time"] / self.width_s)
        before = len(attempt.cells)
        if not before:
            self.bands, self.max_running = {}, {}
        cell = attempt.cells.setdefault(at, {})
        for name in TASK_GAUGES:
            _measure(cell, (name, ""), sample.get(name))
        retracted = {"": sample.get(RETRACTIONS) or 0}
        for signal in sample.get("signals") or ():
            who = self._name_of(signal["scheduler"])
            for name in SCHEDULER_GAUGES:
                _measure(cell, (name, who), signal.get(name))
            if signal.get("max_running"):
                self.max_running[who] = signal["max_running"]
            if RETRACTIONS in signal:
                retracted[who] = signal[RETRACTIONS]
        for who, count in retracted.items():
            _measure(cell, (RETRACTIONS, who), max(0, count - attempt.retracted.get(who, 0)))
        attempt.retracted |= retracted
        self.bands.update(sample.get("bands") or {})
        self._cells += len(attempt.cells) - before
        if self._cells > MOST_CELLS:
            self.coarsen(2 * self.width_s)

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


def history_of(task: str, events: Iterable[dict[str, Any]]) -> TaskHistory:
    """Return the history of these events; events without a time are skipped."""
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


def _halve(attempt: AttemptLoad) -> int:
    """Merge cells in pairs; return how many are left."""
    joined: dict[int, Cell] = {}
    for at, cell in attempt.cells.items():
        into = joined.setdefault(at // 2, cell)
        if into is cell:
            continue
        for key, stats in cell.items():
            found = into.setdefault(key, stats)
            if found is not stats:
                found.add(stats.total, stats.low, stats.high, stats.times)
    attempt.cells = joined
    return len(joined)


def _short(text: object) -> str:
    return str(text or "")[:LONGEST]
