"""One controller a scheduler, and the windows of the routes that lead to them. Pure: no clock, no I/O.

A route that leads to one scheduler has that scheduler's window. Behind a gateway, or before a server with
several DP ranks, somebody else chooses the scheduler: the route's window is the sum of theirs, the rows in
flight are taken to lie where the schedulers' own running + waiting say, and while one queue of the route is
over the band none of its windows grows: the worst queue limits.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchrunner.dispatch.concurrency.controller import Band, Controller, Decision, Reading
from batchrunner.dispatch.concurrency.sharing import Shares
from batchrunner.dispatch.concurrency.window import first_window

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchrunner.core.types import EngineInfo, SchedulerLoad

BURST_S = 0.1
BURST_HALF_LIFE_S = 10.0
SILENT_AFTER_S = 5.0
"""A route that has not told its load for so long gets none of the last rows."""
GONE_AFTER_S = 15.0
"""A scheduler of several that has not been heard of for so long is dead, and its window with it."""


@dataclass(slots=True, eq=False)
class _Scheduler:
    route: str
    controller: Controller
    last: SchedulerLoad | None = None
    heard_at: float = 0.0
    rated: tuple[float, int] | None = None
    rate: float = 0.0

    def is_silent(self, now: float) -> bool:
        """Whether a scheduler that tells its load has not been heard of for long."""
        return self.last is not None and now - self.heard_at > SILENT_AFTER_S


@dataclass(slots=True)
class _Ends:
    """Rows that came to their end on a route."""

    count: int = 0
    bucket: tuple[float, int] = (0.0, 0)
    """When the present tenth of a second began, and the rows in it."""
    burst: float = 0.0
    decayed_at: float = 0.0

    def add(self, now: float) -> None:
        since, rows = self.bucket
        self.bucket = (since, rows + 1) if now - since < BURST_S else (now, 1)
        self.count += 1
        self.burst = max(self.burst, self.bucket[1])

    def recent_burst(self, now: float) -> float:
        """Return the largest burst of late: it is forgotten by half every 10 s."""
        self.burst *= 0.5 ** ((now - self.decayed_at) / BURST_HALF_LIFE_S)
        self.decayed_at = now
        return self.burst


@dataclass(slots=True)
class ConcurrencyLimits:
    """Decides how many requests each route may have in flight."""

    info: EngineInfo
    band: Band
    tokens_a_row: int
    """Prompt and output tokens that a row is expected to hold on average while it runs."""
    most: int
    """The largest window of a route: what its connections allow."""
    fixed: int | None = None
    """A window that the job has set, over all routes; then nothing is ever changed."""
    _schedulers: dict[str, _Scheduler] = field(default_factory=dict)
    _on_route: defaultdict[str, list[_Scheduler]] = field(default_factory=lambda: defaultdict(list))
    """The same by their route: looked up for every row that ends."""
    _ends: defaultdict[str, _Ends] = field(default_factory=lambda: defaultdict(_Ends))
    _draining: bool = False
    _shares: Shares = field(init=False)
    _most_of_rest: dict[str, int] = field(default_factory=dict)
    """What each route may hold of the rows that are left."""

    def __post_init__(self) -> None:
        """Part what is left between the engine's routes."""
        self._shares = Shares(self.info.routes)

    def begin(self, signals: Sequence[SchedulerLoad], now: float, *, unsent: int) -> list[Decision]:
        """Set the first windows, from the engine's limits."""
        made = [self._add(signal, now) for signal in signals]
        silent = [route for route in self.info.routes if not self._on_route[route]]
        made += [self._add(None, now, route) for route in silent]
        self._share_out(unsent, now)
        return made

    @property
    def windows(self) -> dict[str, int]:
        """The window of each route."""
        if self.fixed is not None:
            share = max(1, -(-self.fixed // len(self.info.routes)))
            return dict.fromkeys(self.info.routes, min(share, self.most))
        return {
            route: max(1, min(self._wanted(route), self._most_of_rest.get(route, self.most)))
            for route in self.info.routes
        }

    @property
    def window(self) -> int:
        """The windows of all routes together, as wide as they are while rows are plenty."""
        if self.fixed is not None:
            return sum(self.windows.values())
        return sum(map(self._wanted, self.info.routes))

    def _wanted(self, route: str) -> int:
        return min(self.most, sum(scheduler.controller.window for scheduler in self._on_route[route]))

    @property
    def bands(self) -> dict[str, Band]:
        """The band of each scheduler."""
        return {name: s.controller.band for name, s in self._schedulers.items()}

    @property
    def windows_of_schedulers(self) -> dict[str, int]:
        """The window of each scheduler; empty where the job has set one."""
        if self.fixed is not None:
            return {}
        windows = self.windows
        return {name: min(s.controller.window, windows[s.route]) for name, s in self._schedulers.items()}

    def only_scheduler_on(self, route: str) -> str | None:
        """Return the scheduler that a route leads to; None where it leads to several."""
        names = [name for name, scheduler in self._schedulers.items() if scheduler.route == route]
        return names[0] if len(names) == 1 else None

    @property
    def states(self) -> dict[str, str]:
        """The controller's state of each scheduler."""
        if self.fixed is not None:
            return dict.fromkeys(self._schedulers, "tail" if self._draining else "fixed")
        return {name: s.controller.state for name, s in self._schedulers.items()}

    def observe(
        self, signals: Sequence[SchedulerLoad], in_flight: Mapping[str, int], now: float, *, unsent: int
    ) -> list[Decision]:
        """Take what a poll brought (nothing, where it failed); return what changed.

        `unsent` are the rows that are not in flight: those that wait for another try among them.
        """
        decisions = [self._add(signal, now) for signal in signals if signal.scheduler not in self._schedulers]
        for signal in signals:
            self._schedulers[signal.scheduler].heard_at = now
        self._draining = unsent == 0
        if self.fixed is not None:
            return []
        if self._draining:
            for scheduler in self._schedulers.values():
                scheduler.controller.drain()
            return decisions
        decisions += self._forget(signals, now)
        decisions += self._share_out(unsent + sum(in_flight.values()), now)
        ours = self._located(signals, in_flight)
        full = {s.route for s in signals if s.queue > self._schedulers[s.scheduler].controller.band.high}
        for signal in signals:
            scheduler = self._schedulers[signal.scheduler]
            if _is_news(signal, scheduler.last):
                scheduler.last = signal
                seen = Reading(
                    signal.running,
                    signal.queue,
                    ours[signal.scheduler],
                    self._rate(scheduler, now),
                    self._ends[signal.route].recent_burst(now) / len(self._on_route[signal.route]),
                )
                alone = len(self._on_route[signal.route]) == 1
                moved = scheduler.controller.sample(now, seen, may_grow=alone or signal.route not in full)
                decisions += [moved] if moved else []
        moves = [scheduler.controller.tick(now) for scheduler in self._schedulers.values()]
        return decisions + [move for move in moves if move]

    def ended(self, route: str, retractions: int, now: float) -> None:
        """Take note of a row that came to its end on a route."""
        self._ends[route].add(now)
        self._shares.ended(route)
        on = self._on_route[route]
        if retractions:
            for scheduler in on:
                scheduler.controller.retracted(now)
        if len(on) == 1:
            on[0].controller.ended()

    def backpressure(self, route: str, what: str, now: float) -> list[Decision]:
        """React to a route that refused a request or let it wait too long."""
        if self.fixed is not None:
            return []
        moves = [scheduler.controller.backpressure(now, what) for scheduler in self._on_route[route]]
        return [move for move in moves if move]

    def _add(self, signal: SchedulerLoad | None, now: float, route: str = "") -> Decision:
        count = len(self.info.routes)
        if signal is not None:
            name, route, max_running = signal.scheduler, signal.route, signal.max_running
            pool = signal.max_total_tokens
        else:  # the engine tells no load: what it said of itself must do
            name, max_running, pool = route, _part(self.info.max_running, count), None
            pool = _part(self.info.max_total_tokens, count)
        band = self.band.scaled(max_running)
        window, why = first_window(max_running, pool, self.tokens_a_row, band.low, band.high)
        controller = Controller(name, window, band, most=self.most, now=now)
        self._schedulers[name] = _Scheduler(route, controller, heard_at=now)
        self._on_route[route].append(self._schedulers[name])
        return Decision(
            name,
            0,
            controller.window,
            controller.state,
            f"{why}; #queue-req {band.low}-{band.high} ({band.why})",
        )

    def _forget(self, signals: Sequence[SchedulerLoad], now: float) -> list[Decision]:
        """Take out the schedulers of a shared route that are silent while others speak."""
        speaking = {signal.route for signal in signals}
        gone = [
            (name, s)
            for name, s in self._schedulers.items()
            if s.route in speaking and now - s.heard_at > GONE_AFTER_S and len(self._on_route[s.route]) > 1
        ]
        for name, scheduler in gone:
            del self._schedulers[name]
            self._on_route[scheduler.route].remove(scheduler)
        return [
            Decision(
                name, s.controller.window, 0, "gone", f"nothing heard of it for {now - s.heard_at:.0f} s"
            )
            for name, s in gone
        ]

    def _share_out(self, left: int, now: float) -> list[Decision]:
        """Let no route hold more than its share of what is left; tell of each when that begins to matter."""
        if len(self.info.routes) == 1:
            return []
        silent = {r for r, on in self._on_route.items() if on and all(s.is_silent(now) for s in on)}
        before, self._most_of_rest = self._most_of_rest, self._shares.of(left, now, silent)
        return [
            Decision(route, self._wanted(route), most, "share", f"its share of the {left} rows that are left")
            for route, most in self._most_of_rest.items()
            if most < self._wanted(route) <= before.get(route, sys.maxsize)
        ]

    def _located(self, signals: Sequence[SchedulerLoad], in_flight: Mapping[str, int]) -> dict[str, int]:
        """Our requests at each scheduler: known where it has a route of its own, else estimated."""
        busy: defaultdict[str, int] = defaultdict(int)
        for signal in signals:
            busy[signal.route] += signal.running + signal.queue
        shares = {}
        for signal in signals:
            ours = in_flight.get(signal.route, 0)
            count = len(self._on_route[signal.route])
            total = busy[signal.route]
            part = (signal.running + signal.queue) / total if total else 1 / count
            shares[signal.scheduler] = ours if count == 1 else round(ours * part)
        return shares

    def _rate(self, scheduler: _Scheduler, now: float) -> float:
        """Rows a second that leave a scheduler, averaged; a shared route's are parted evenly."""
        on = len(self._on_route[scheduler.route])
        ended = self._ends[scheduler.route].count // on
        if scheduler.rated is not None and now > scheduler.rated[0]:
            newest = (ended - scheduler.rated[1]) / (now - scheduler.rated[0])
            scheduler.rate = (scheduler.rate + newest) / 2
        scheduler.rated = (now, ended)
        return scheduler.rate


def _is_news(signal: SchedulerLoad, last: SchedulerLoad | None) -> bool:
    """Tell a fresh sample from the old one told again: by its own time, or by any change."""
    if last is None or signal.taken_at is None:
        return signal != last
    return signal.taken_at != last.taken_at


def _part(total: int | None, count: int) -> int | None:
    return None if total is None else max(1, total // count)
