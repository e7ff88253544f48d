"""A controller for each scheduler, and the windows of the routes that lead to them. Pure: no clock, no I/O.

A route that leads to one scheduler has that scheduler's window. A gateway, or a server with several DP ranks,
chooses the scheduler itself: then the route's window is the sum of the schedulers' windows, the requests in
flight are assumed to be spread as the schedulers' own running + waiting say, and while one queue of the route
is over the band none of its windows grows.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from batchrunner.core.corner import Corner
from batchrunner.core.types import EngineInfo, SchedulerLoad
from batchrunner.dispatch.concurrency.controller import Controller, Decision
from batchrunner.dispatch.concurrency.corners import CornerChange
from batchrunner.dispatch.concurrency.reading import Reading
from batchrunner.dispatch.concurrency.row_tokens import RowTokens
from batchrunner.dispatch.concurrency.sharing import Shares
from batchrunner.dispatch.concurrency.window import first_window
from batchrunner.job.queue_band import QueueBand

BURST_S = 0.1
"""Seconds over which the rows of a burst are counted."""
BURST_HALF_LIFE_S = 10.0
SILENT_AFTER_S = 5.0
"""Seconds without a load sample after which a route gets no more of the last rows."""
GONE_AFTER_S = 15.0
"""Seconds without a load sample after which one of several schedulers of a route counts as dead."""


@dataclass(slots=True, eq=False)
class _Scheduler:
    route: str
    controller: Controller
    last: SchedulerLoad | None = None
    heard_at: float = 0.0
    rated: tuple[float, int] | None = None
    rate: float = 0.0

    def is_silent(self, now: float) -> bool:
        """Tell whether a scheduler that has reported its load before does not do so any more."""
        return self.last is not None and now - self.heard_at > SILENT_AFTER_S


@dataclass(slots=True)
class _Ends:
    """Rows that ended on a route."""

    count: int = 0
    bucket_began: float = 0.0
    """Beginning of the present tenth of a second."""
    bucket: int = 0
    """Rows in it."""
    burst: float = 0.0
    decayed_at: float = 0.0

    def add(self, now: float) -> None:
        if now - self.bucket_began >= BURST_S:
            self.bucket_began, self.bucket = now, 0
        self.bucket += 1
        self.count += 1
        self.burst = max(self.burst, self.bucket)

    def recent_burst(self, now: float) -> float:
        """Return the largest recent burst, which halves every 10 s."""
        self.burst *= 0.5 ** ((now - self.decayed_at) / BURST_HALF_LIFE_S)
        self.decayed_at = now
        return self.burst


@dataclass(slots=True)
class ConcurrencyLimits:
    """Decides how many requests each route may have in flight."""

    info: EngineInfo
    band: QueueBand
    tokens_a_row: int
    """KV tokens that a row is expected to hold on average while it runs."""
    most: int
    """Largest window of a route, by its connections."""
    fixed: int | None = None
    """Window that the job sets (`window`), over all routes; it is never changed."""
    row_tokens: RowTokens = field(default_factory=RowTokens)
    """Tokens of the KV pool that a row holds, by the rows that have ended."""
    _schedulers: dict[str, _Scheduler] = field(default_factory=dict)
    _on_route: defaultdict[str, list[_Scheduler]] = field(default_factory=lambda: defaultdict(list))
    """Schedulers by route, which is looked up for every row that ends."""
    _ends: defaultdict[str, _Ends] = field(default_factory=lambda: defaultdict(_Ends))
    _draining: bool = False
    _shares: Shares = field(init=False)
    _most_of_rest: dict[str, int] = field(default_factory=dict)
    """Share of each route in the rows that are left."""

    def __post_init__(self) -> None:
        """Set up the shares of the engine's routes."""
        self._shares = Shares(self.info.routes)

    def begin(self, loads: Sequence[SchedulerLoad], now: float, *, unsent: int) -> list[Decision]:
        """Set the first windows, from the engine's limits; return one decision for each scheduler."""
        made = [self._add(load, now) for load in loads]
        silent = [route for route in self.info.routes if not self._on_route[route]]
        made += [self._add(None, now, route) for route in silent]
        self._share_out(unsent, now)
        return made

    @property
    def windows(self) -> dict[str, int]:
        """Window of each route."""
        if self.fixed is not None:
            share = max(1, -(-self.fixed // len(self.info.routes)))
            return dict.fromkeys(self.info.routes, min(share, self.most))
        return {
            route: max(1, min(self._wanted(route), self._most_of_rest.get(route, self.most)))
            for route in self.info.routes
        }

    @property
    def window(self) -> int:
        """Sum of all routes' windows, without the limits on the last rows."""
        if self.fixed is not None:
            return sum(self.windows.values())
        return sum(map(self._wanted, self.info.routes))

    def _wanted(self, route: str) -> int:
        return min(self.most, sum(scheduler.controller.window for scheduler in self._on_route[route]))

    @property
    def bands(self) -> dict[str, QueueBand]:
        """Queue band of each scheduler."""
        return {name: s.controller.band for name, s in self._schedulers.items()}

    @property
    def windows_of_schedulers(self) -> dict[str, int]:
        """Window of each scheduler; empty if the job sets one."""
        if self.fixed is not None:
            return {}
        windows = self.windows
        return {name: min(s.controller.window, windows[s.route]) for name, s in self._schedulers.items()}

    def only_scheduler_on(self, route: str) -> str | None:
        """Return the scheduler that a route leads to; None if it leads to several."""
        names = [name for name, scheduler in self._schedulers.items() if scheduler.route == route]
        return names[0] if len(names) == 1 else None

    @property
    def states(self) -> dict[str, str]:
        """State of each scheduler's controller."""
        if self.fixed is not None:
            return dict.fromkeys(self._schedulers, "tail" if self._draining else "fixed")
        return {name: s.controller.state for name, s in self._schedulers.items()}

    @property
    def corners(self) -> dict[str, Corner]:
        """Corner of each scheduler that is in one; see `corners.py`."""
        controllers = [scheduler.controller for scheduler in self._schedulers.values()]
        return {c.scheduler: c.corner for c in controllers if c.corner is not None and self.fixed is None}

    def corner_news(self) -> list[CornerChange]:
        """Return the corners that schedulers came into since the last call."""
        news = [
            change for scheduler in self._schedulers.values() for change in scheduler.controller.take_news()
        ]
        return [change for change in news if self.fixed is None]

    def observe(
        self,
        loads: Sequence[SchedulerLoad],
        in_flight: Mapping[str, int],
        now: float,
        *,
        unsent: int,
        silenced: Collection[str] = (),
    ) -> list[Decision]:
        """Use a poll's samples, none if it failed; return the changes.

        `unsent` counts the rows that are still to be sent, including those that wait for another attempt.
        The `silenced` schedulers are there, but what they tell is not in `loads`: it cannot be right.
        """
        decisions = [self._add(load, now) for load in loads if load.scheduler not in self._schedulers]
        for name in {*(load.scheduler for load in loads), *silenced} & self._schedulers.keys():
            self._schedulers[name].heard_at = now
        self._draining = unsent == 0
        if self.fixed is not None:
            return []
        if self._draining:
            for scheduler in self._schedulers.values():
                scheduler.controller.drain()
            return decisions
        decisions += self._forget(loads, now)
        decisions += self._share_out(unsent + sum(in_flight.values()), now)
        ours = self._located(loads, in_flight)
        full = {s.route for s in loads if s.queue > self._schedulers[s.scheduler].controller.band.high}
        for load in loads:
            scheduler = self._schedulers[load.scheduler]
            if _is_news(load, scheduler.last):
                scheduler.last = load
                seen = self._reading(load, ours[load.scheduler], now)
                alone = len(self._on_route[load.route]) == 1
                moved = scheduler.controller.sample(now, seen, may_grow=alone or load.route not in full)
                decisions += [moved] if moved else []
        moves = [scheduler.controller.tick(now) for scheduler in self._schedulers.values()]
        return decisions + [move for move in moves if move]

    def restart(self, name: str, now: float) -> list[Decision]:
        """Forget what a scheduler has told, which was not right; its window is the first one at least."""
        scheduler = self._schedulers.get(name)
        if scheduler is None or self.fixed is not None:
            return []
        told, old = scheduler.last, scheduler.controller
        window, why = self._first_window(told, old.band)
        scheduler.last = None
        scheduler.controller = Controller(name, max(window, old.window), old.band, most=self.most, now=now)
        new = scheduler.controller
        return [Decision(name, old.window, new.window, new.state, f"its load cannot be right; {why}")]

    def ended(self, route: str, retractions: int, now: float) -> None:
        """Record a row that ended on a route."""
        self._ends[route].add(now)
        self._shares.ended(route)
        on = self._on_route[route]
        for scheduler in on:
            scheduler.controller.ended(int(len(on) == 1))
            if retractions:
                scheduler.controller.retracted(now)

    def backpressure(self, route: str, what: str, now: float) -> list[Decision]:
        """Narrow the windows of a route that refused a request or let it wait too long."""
        if self.fixed is not None:
            return []
        moves = [scheduler.controller.backpressure(now, what) for scheduler in self._on_route[route]]
        return [move for move in moves if move]

    def _add(self, load: SchedulerLoad | None, now: float, route: str = "") -> Decision:
        name, route = (load.scheduler, load.route) if load is not None else (route, route)
        band = self.band.scaled(self._limits(load)[0])
        window, why = self._first_window(load, band)
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

    def _limits(self, load: SchedulerLoad | None) -> tuple[int | None, int | None]:
        """Return a scheduler's max_running_requests and the tokens of its KV pool."""
        if load is not None:
            return load.max_running, load.max_total_tokens
        count = len(self.info.routes)  # it tells no load: use the limits that the engine reported
        return _part(self.info.max_running, count), _part(self.info.max_total_tokens, count)

    def _first_window(self, load: SchedulerLoad | None, band: QueueBand) -> tuple[int, str]:
        max_running, pool = self._limits(load)
        return first_window(max_running, pool, self.tokens_a_row, band.low, band.high)

    def _forget(self, loads: Sequence[SchedulerLoad], now: float) -> list[Decision]:
        """Remove the schedulers of a shared route that are silent while others report."""
        speaking = {load.route for load in loads}
        gone = [
            (name, s)
            for name, s in self._schedulers.items()
            if s.route in speaking and now - s.heard_at > GONE_AFTER_S and len(self._on_route[s.route]) > 1
        ]
        for name, scheduler in gone:
            del self._schedulers[name]
            self._on_route[scheduler.route].remove(scheduler)
        return [
            Decision(name, s.controller.window, 0, "gone", f"no load sample for {now - s.heard_at:.0f} s")
            for name, s in gone
        ]

    def _share_out(self, left: int, now: float) -> list[Decision]:
        """Limit each route to its share of what is left; return a decision when that begins to matter."""
        if len(self.info.routes) == 1:
            return []
        silent = {r for r, on in self._on_route.items() if on and all(s.is_silent(now) for s in on)}
        before, self._most_of_rest = self._most_of_rest, self._shares.of(left, now, silent)
        return [
            Decision(route, self._wanted(route), most, "share", f"its share of the {left} rows that are left")
            for route, most in self._most_of_rest.items()
            if most < self._wanted(route) <= before.get(route, sys.maxsize)
        ]

    def _located(self, loads: Sequence[SchedulerLoad], in_flight: Mapping[str, int]) -> dict[str, int]:
        """Return this run's requests at each scheduler: exact with a route of its own, else an estimate."""
        busy: defaultdict[str, int] = defaultdict(int)
        for load in loads:
            busy[load.route] += load.running + load.queue
        shares = {}
        for load in loads:
            ours = in_flight.get(load.route, 0)
            count = len(self._on_route[load.route])
            total = busy[load.route]
            part = (load.running + load.queue) / total if total else 1 / count
            shares[load.scheduler] = ours if count == 1 else round(ours * part)
        return shares

    def _reading(self, load: SchedulerLoad, ours: int, now: float) -> Reading:
        max_running, pool = self._limits(load)
        held = self.row_tokens.held
        return Reading(
            load.running,
            load.queue,
            ours,
            self._rate(self._schedulers[load.scheduler], now),
            self._ends[load.route].recent_burst(now) / len(self._on_route[load.route]),
            usage=load.token_usage,
            max_running=max_running,
            fits=pool / held if pool and held else None,
        )

    def _rate(self, scheduler: _Scheduler, now: float) -> float:
        """Return rows per second that end at a scheduler; those of a shared route are split evenly."""
        on = len(self._on_route[scheduler.route])
        ended = self._ends[scheduler.route].count // on
        if scheduler.rated is not None and now > scheduler.rated[0]:
            newest = (ended - scheduler.rated[1]) / (now - scheduler.rated[0])
            scheduler.rate = (scheduler.rate + newest) / 2
        scheduler.rated = (now, ended)
        return scheduler.rate


def _is_news(load: SchedulerLoad, last: SchedulerLoad | None) -> bool:
    """Tell whether a sample is new, by its own time or by any change."""
    if last is None or load.taken_at is None:
        return load != last
    return load.taken_at != last.taken_at


def _part(total: int | None, count: int) -> int | None:
    return None if total is None else max(1, total // count)
