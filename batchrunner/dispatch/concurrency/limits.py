"""A controller for each scheduler, and the windows of the routes that lead to them. Pure: no clock, no I/O.

A route that leads to one scheduler has that scheduler's window. A route that leads to several, which its
gateway or server chooses from, has the sum of their windows, and while one queue of the route is over the
band none of its windows grows.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from batchrunner.core.engine_info import Corner, EngineInfo, QueueBand, SchedulerLoad
from batchrunner.dispatch.concurrency.controller import Controller, Decision
from batchrunner.dispatch.concurrency.corners import CornerChange
from batchrunner.dispatch.concurrency.row_tokens import RowTokens
from batchrunner.dispatch.concurrency.schedulers import KnownScheduler, KnownSchedulers
from batchrunner.dispatch.concurrency.sharing import Shares
from batchrunner.dispatch.concurrency.window import first_window
from batchrunner.dispatch.forward_passes import ForwardPasses


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
    passes: ForwardPasses | None = None
    """Passes of a task without decoding, which the queue's band follows; None for generating."""
    own_band: bool = False
    """Whether the job sets the band (`queue`), which then holds for passes too."""
    row_tokens: RowTokens = field(default_factory=RowTokens)
    """Tokens of the KV pool that a row holds, by the rows that have ended."""
    _schedulers: KnownSchedulers = field(default_factory=KnownSchedulers)
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
        silent = [route for route in self.info.routes if not self._schedulers.on(route)]
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
        return min(self.most, sum(scheduler.controller.window for scheduler in self._schedulers.on(route)))

    @property
    def bands(self) -> dict[str, QueueBand]:
        """Queue band of each scheduler."""
        return {name: s.controller.band for name, s in self._schedulers.by_name.items()}

    @property
    def windows_of_schedulers(self) -> dict[str, int]:
        """Window of each scheduler; empty if the job sets one."""
        if self.fixed is not None:
            return {}
        windows = self.windows
        return {
            name: min(s.controller.window, windows[s.route]) for name, s in self._schedulers.by_name.items()
        }

    def only_scheduler_on(self, route: str) -> str | None:
        """Return the scheduler that a route leads to; None if it leads to several."""
        on = self._schedulers.on(route)
        return on[0].name if len(on) == 1 else None

    @property
    def states(self) -> dict[str, str]:
        """State of each scheduler's controller."""
        if self.fixed is not None:
            return dict.fromkeys(self._schedulers.by_name, "tail" if self._draining else "fixed")
        return {name: s.controller.state for name, s in self._schedulers.by_name.items()}

    @property
    def corners(self) -> dict[str, Corner]:
        """Corner of each scheduler that is in one; see `corners.py`."""
        controllers = [scheduler.controller for scheduler in self._schedulers.by_name.values()]
        return {c.scheduler: c.corner for c in controllers if c.corner is not None and self.fixed is None}

    def corner_news(self) -> list[CornerChange]:
        """Return the corners that schedulers came into since the last call."""
        news = [
            change
            for scheduler in self._schedulers.by_name.values()
            for change in scheduler.controller.take_news()
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
        known = self._schedulers
        decisions = [self._add(load, now) for load in loads if load.scheduler not in known.by_name]
        known.heard({*(load.scheduler for load in loads), *silenced}, now)
        self._draining = unsent == 0
        if self.fixed is not None:
            return []
        if self._draining:
            for scheduler in known.by_name.values():
                scheduler.controller.drain()
            return decisions
        decisions += [
            Decision(s.name, s.controller.window, 0, "gone", f"no load sample for {now - s.heard_at:.0f} s")
            for s in known.take_gone(loads, now)
        ]
        self.row_tokens.come_from(len(known.by_name))
        decisions += self._share_out(unsent + sum(in_flight.values()), now)
        decisions += self._sample(loads, in_flight, now)
        moves = [scheduler.controller.tick(now) for scheduler in known.by_name.values()]
        return decisions + [move for move in moves if move]

    def restart(self, name: str, now: float) -> list[Decision]:
        """Forget what a scheduler has told, which was not right; its window is the first one at least."""
        scheduler = self._schedulers.by_name.get(name)
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
        self._schedulers.ended(route, now)
        self._shares.ended(route)
        on = self._schedulers.on(route)
        for scheduler in on:
            scheduler.controller.ended(int(len(on) == 1))
            if retractions:
                scheduler.controller.retracted(now)

    def backpressure(self, route: str, what: str, now: float) -> list[Decision]:
        """Narrow the windows of a route that refused a request or let it wait too long."""
        if self.fixed is not None:
            return []
        moves = [scheduler.controller.backpressure(now, what) for scheduler in self._schedulers.on(route)]
        return [move for move in moves if move]

    def _add(self, load: SchedulerLoad | None, now: float, route: str = "") -> Decision:
        name, route = (load.scheduler, load.route) if load is not None else (route, route)
        band = self._band(load)
        window, why = self._first_window(load, band)
        controller = Controller(name, window, band, most=self.most, now=now)
        self._schedulers.add(KnownScheduler(name, route, controller, heard_at=now))
        self.row_tokens.come_from(len(self._schedulers.by_name))
        return Decision(
            name,
            0,
            controller.window,
            controller.state,
            f"{why}; #queue-req {band.low}-{band.high} ({band.why})",
        )

    def _sample(
        self, loads: Sequence[SchedulerLoad], in_flight: Mapping[str, int], now: float
    ) -> list[Decision]:
        """Let each controller see its scheduler's sample, if it is news; return their moves."""
        known, held = self._schedulers, self.row_tokens.held
        ours = known.located(loads, in_flight)
        bands = self.bands
        full = {load.route for load in loads if load.queue > bands[load.scheduler].high}
        moves = []
        for load in loads:
            scheduler = known.by_name[load.scheduler]
            if scheduler.has_news(load):
                scheduler.last = load
                max_running, pool = _limits(self.info, load)
                fits = pool / held if pool and held else None
                if self.passes is not None:
                    scheduler.controller.band = self._band(load)
                seen = known.reading(
                    load,
                    ours[load.scheduler],
                    now,
                    max_running=max_running,
                    fits=fits,
                    decodes=self.passes is None,
                )
                may_grow = len(known.on(load.route)) == 1 or load.route not in full
                moves.append(scheduler.controller.sample(now, seen, may_grow=may_grow))
        return [move for move in moves if move]

    def _band(self, load: SchedulerLoad | None) -> QueueBand:
        """Return the healthy queue of a scheduler: as the job says, or by what its passes take."""
        max_running = _limits(self.info, load)[0]
        if self.passes is None or self.own_band:
            return self.band.scaled(max_running)
        return self.passes.band(max_running)

    def _first_window(self, load: SchedulerLoad | None, band: QueueBand) -> tuple[int, str]:
        max_running, pool = _limits(self.info, load)
        if self.passes is not None:
            rows = self.passes.rows(max_running)
            return self.passes.first_window(max_running), f"a forward pass takes about {rows} rows"
        return first_window(max_running, pool, self.tokens_a_row, band.low, band.high)

    def _share_out(self, left: int, now: float) -> list[Decision]:
        """Limit each route to its share of what is left; return a decision when that begins to matter."""
        if len(self.info.routes) == 1:
            return []
        silent = self._schedulers.silent_routes(now)
        before, self._most_of_rest = self._most_of_rest, self._shares.of(left, now, silent)
        return [
            Decision(route, self._wanted(route), most, "share", f"its share of the {left} rows that are left")
            for route, most in self._most_of_rest.items()
            if most < self._wanted(route) <= before.get(route, sys.maxsize)
        ]


def _limits(info: EngineInfo, load: SchedulerLoad | None) -> tuple[int | None, int | None]:
    """Return a scheduler's max_running_requests and the tokens of its KV pool."""
    if load is not None:
        return load.max_running, load.max_total_tokens
    count = len(info.routes)  # it tells no load: use the limits that the engine reported
    return _part(info.max_running, count), _part(info.max_total_tokens, count)


def _part(total: int | None, count: int) -> int | None:
    return None if total is None else max(1, total // count)
