"""Load samples → a controller for each scheduler → the windows of the routes that lead to them. Pure.

A route has the window of its scheduler. A server with several DP ranks, which chooses one itself, has the sum
of their windows, and while one queue is over the band none of its windows grows.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Completion
from batchrunner.dispatch.bundles import USUAL_TOKENS, ForwardPasses
from batchrunner.dispatch.concurrency.background import BackgroundController
from batchrunner.dispatch.concurrency.law import (
    TYPICAL_PROMPT_TOKENS,
    Controller,
    CornerChange,
    Decision,
    Reading,
    first_window,
)


@dataclass(slots=True, eq=False)
class KnownScheduler:
    """A scheduler, its controller, and when it was heard."""

    name: str
    route: str
    controller: Controller
    heard_at: float
    tells: bool
    """Whether it tells its load."""
    last: SchedulerLoad | None = None
    """Its last sample that counted; None before one."""
    told_retractions: int = 0
    """Retractions that its load has told since the first sample."""

    def is_silent(self, now: float) -> bool:
        """Tell whether it has reported its load before and does not do so any more."""
        return self.last is not None and now - self.heard_at > TIMING.silent_scheduler

    def take(self, load: SchedulerLoad) -> bool:
        """Take a sample; tell whether it is new, by its own time or by any change."""
        last, self.last = self.last, load
        if last is None:
            return True
        if load == last if load.taken_at is None else load.taken_at == last.taken_at:
            return False
        if load.retracted != last.retracted:  # it stands until the next report
            self.told_retractions += load.retracted or 0
        return True


HALF_LIFE_S = 60.0
"""Half-life of the recent rows, in seconds: rows of one length end in waves as long as one of them takes."""
AHEAD_PASSES = 8
"""Prefill passes of prompts that a replica may have in its queue in any case: two to four seconds of work, in
which the next samples come."""
LEAST_ROWS = 1e-3
"""Fewest recent rows of a route: after a long silence all routes have so many, and are equal."""


@dataclass(slots=True)
class RouteEnds:
    """What the rows that ended on a route have come to."""

    rows: int = 0
    output_tokens: int = 0
    retractions: int = 0
    """Times that these rows were retracted."""
    recent: float = LEAST_ROWS
    """Rows that ended lately, never 0: see `shares`. At first it is the first window, so that all routes
    count as about equally fast until a wave of rows has ended."""
    counted: int = 0
    """Rows that `recent` has taken in."""


def shares(
    routes: Mapping[str, RouteEnds], left: int, gap_s: float, silent: Collection[str] = ()
) -> dict[str, int]:
    """Return how many of the rows that are `left` each route may hold at most, `gap_s` after the last call.

    A row that waits in a replica's queue cannot move to another one: at the end the replica with the longest
    queue would work alone. So no route may hold more than its share of all rows that have not ended, in
    proportion to the rows that it ended recently; a `silent` route gets one. Together they are at least
    `left`, so that no row waits for ever. While much input is left, no share is below a window.
    """
    for ends in routes.values():
        ends.recent = max(LEAST_ROWS, (ends.recent + ends.rows - ends.counted) * 0.5 ** (gap_s / HALF_LIFE_S))
        ends.counted = ends.rows
    able = {name for name in routes if name not in silent} or routes.keys()
    total = sum(routes[name].recent for name in able)
    return {
        name: max(1, math.ceil(left * ends.recent / total)) if name in able else 1
        for name, ends in routes.items()
    }


@dataclass(slots=True)
class ConcurrencyLimits:
    """Decides how many requests each route may have in flight.

    A server with several DP ranks chooses the scheduler itself: there this run's requests are assumed to be
    spread as the schedulers' own running + waiting say, and the rows that end to be spread evenly.
    """

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
    given_back: int = 0
    """Rows that were taken from the engine again, as its users came."""
    tokens_lost: int = 0
    """Output tokens of theirs that have to be generated again."""
    prompt_tokens: float = TYPICAL_PROMPT_TOKENS
    """Tokens of a prompt, on average, that the engine computes."""
    known: dict[str, KnownScheduler] = field(default_factory=dict)
    """Schedulers by their names."""
    _on_route: defaultdict[str, list[KnownScheduler]] = field(default_factory=lambda: defaultdict(list))
    """Schedulers by route."""
    ends: dict[str, RouteEnds] = field(init=False)
    """Rows that ended on each route; there may be more routes later."""
    _shared_at: float | None = None  # a clock may begin anywhere
    _most_of_rest: dict[str, int] = field(default_factory=dict)
    """Share of each route in the rows that are left."""

    def __post_init__(self) -> None:
        """Count no row yet."""
        self.ends = {route: RouteEnds() for route in self.info.routes}

    def begin(self, loads: Sequence[SchedulerLoad], now: float, *, unsent: int) -> list[Decision]:
        """Set the first windows, from the engine's limits; return one decision for each scheduler."""
        made = [self._add(load, now) for load in loads]
        made += [
            self._add(self._unheard(route), now) for route in self.info.routes if not self._on_route[route]
        ]
        self._share_out(unsent, now)
        return made

    @property
    def windows(self) -> dict[str, int]:
        """Window of each route."""
        if self.fixed is not None:
            share = max(1, -(-self.fixed // len(self.ends)))
            return dict.fromkeys(self.ends, min(share, self.most))
        least = 0 if self.is_background else 1
        return {
            route: max(least, min(self._wanted(route), self._most_of_rest.get(route, self.most)))
            for route in self.ends
        }

    @property
    def speeds(self) -> dict[str, float]:
        """How fast each route is: the rows that it ended lately."""
        return {route: ends.recent for route, ends in self.ends.items()}

    @property
    def window(self) -> int:
        """Sum of all routes' windows, without the limits on the last rows."""
        if self.fixed is not None:
            return sum(self.windows.values())
        return sum(map(self._wanted, self.ends))

    def _wanted(self, route: str) -> int:
        return min(self.most, sum(scheduler.controller.window for scheduler in self._on_route[route]))

    @property
    def is_background(self) -> bool:
        """Whether the engine serves others first."""
        return self.info.yields is not None

    @property
    def kept(self) -> dict[str, int]:
        """Rows that may stay in flight on each route from which some are to be given back."""
        found: dict[str, int] = {}
        for route, on in self._on_route.items():
            laws = [s.controller for s in on if isinstance(s.controller, BackgroundController)]
            if any(law.kept is not None for law in laws):
                found[route] = sum(law.ours if law.kept is None else law.kept for law in laws)
        return found

    def gave_back(self, tokens: int) -> None:
        """Count a row that was given back after so many output tokens."""
        self.given_back += 1
        self.tokens_lost += tokens

    @property
    def retractions(self) -> int:
        """Retractions of all rows that have ended."""
        return sum(ends.retractions for ends in self.ends.values())

    def only_scheduler_on(self, route: str) -> str | None:
        """Return the scheduler that a route leads to; None if it leads to several."""
        on = self._on_route[route]
        return on[0].name if len(on) == 1 else None

    def observe(
        self, loads: Sequence[SchedulerLoad], in_flight: Mapping[str, int], now: float, *, unsent: int
    ) -> list[Decision | CornerChange]:
        """Use a poll's samples, none if it failed; return the changes of windows, and of corners.

        `unsent` counts the rows that are still to be sent, including those that wait for another attempt.
        """
        changes: list[Decision | CornerChange] = [
            self._add(load, now) for load in loads if load.scheduler not in self.known
        ]
        for load in loads:
            self.known[load.scheduler].heard_at = now
        if not self.is_background and (unsent == 0 or self.fixed is not None):
            for scheduler in self.known.values():
                scheduler.controller.state = "fixed" if unsent else "tail"
                scheduler.controller.corner = None
            return [] if self.fixed is not None else changes
        changes += self._sample(loads, in_flight, now)
        changes += self._share_out(unsent + sum(in_flight.values()), now)
        for scheduler in self.known.values():
            changes += scheduler.controller.tick(now)
        return changes

    def ended(self, route: str, answer: Completion | None) -> None:
        """Record a row that ended on a route; None for its answer where it was refused.

        This is all that a row tells: the rest is done when the next sample comes.
        """
        ends = self.ends[route]
        ends.rows += 1
        if answer is not None:
            ends.output_tokens += answer.output_tokens
            ends.retractions += answer.retractions

    def backpressure(self, route: str, what: str, now: float) -> list[Decision]:
        """Narrow the windows of a route that refused a request or let it wait too long."""
        if self.fixed is not None:
            return []
        return [move for s in self._on_route[route] for move in s.controller.backpressure(now, what)]

    def _unheard(self, route: str) -> SchedulerLoad:
        """Return a load for a route that tells none: its part of the limits that the engine reported."""
        count = len(self.info.routes)
        running, tokens = (
            limit and max(1, limit // count) for limit in (self.info.max_running, self.info.max_total_tokens)
        )
        return SchedulerLoad(
            route, "engine", 0, 0, 0.0, max_total_tokens=tokens, max_running=running, route=route
        )

    def _add(self, load: SchedulerLoad, now: float) -> Decision:
        """Take a scheduler that was heard for the first time, or a route that tells none."""
        name, most, band = load.scheduler, load.max_running, self._band(load)
        if self.passes is not None:
            rows = self.passes.rows(most)
            window, why = self.passes.first_window(most), f"a forward pass takes about {rows} rows"
        else:
            window, why = first_window(most, load.max_total_tokens, self.tokens_a_row, band.low, band.high)
        controller = Controller(name, window, band, most=self.most, now=now)
        if self.info.yields is not None:
            fits = window
            if self.passes is None and load.max_total_tokens is not None:
                fits = max(1, load.max_total_tokens // self.tokens_a_row)
            controller = BackgroundController(
                name, fits, band, most=self.most, now=now, yields=self.info.yields
            )
            why = "background: what the users leave"
        self.known[name] = KnownScheduler(name, load.route, controller, now, load.source != "engine")
        self._on_route[load.route].append(self.known[name])
        self.ends.setdefault(load.route, RouteEnds()).recent += controller.window
        why = f"{why}; #queue-req {band.low:,}-{band.high:,} ({band.why})"
        return Decision(name, 0, controller.window, controller.state, why)

    def _sample(
        self, loads: Sequence[SchedulerLoad], in_flight: Mapping[str, int], now: float
    ) -> list[Decision | CornerChange]:
        """Let each controller see its scheduler's sample, if it is news; return what that changed."""
        decodes = self.passes is None
        busy: defaultdict[str, int] = defaultdict(int)
        for load in loads:
            busy[load.route] += load.running + load.queue
        full = {load.route for load in loads if load.queue > self.known[load.scheduler].controller.band.high}
        changes: list[Decision | CornerChange] = []
        for load in loads:
            scheduler, on = self.known[load.scheduler], len(self._on_route[load.route])
            if not scheduler.take(load) and (load.has_work or not self.is_background):
                continue  # an idle scheduler tells nothing new
            ours = in_flight.get(load.route, 0)
            if on > 1:
                total = busy[load.route]
                ours = round(ours * ((load.running + load.queue) / total if total else 1 / on))
            scheduler.controller.band = self._band(load)  # it may have been started with other limits
            seen = Reading(
                load.running,
                load.queue,
                ours,
                self.ends[load.route].rows / on,
                load.token_usage if decodes else 0.0,
                self._retractions_of(scheduler),
                load.max_running,
            )
            may_grow = on == 1 or load.route not in full
            changes += scheduler.controller.sample(now, seen, may_grow=may_grow)
        return changes

    def _retractions_of(self, scheduler: KnownScheduler) -> float:
        """Return how many requests a scheduler has retracted, by its load or by the rows that came back.

        A row tells it when it ends, and not which of the schedulers on its route it was: those whose load
        tells no retraction share what the rows tell only where no other one's load does.
        """
        told = scheduler.told_retractions
        on = self._on_route[scheduler.route]
        if any(other.told_retractions for other in on if other is not scheduler):
            return told
        return max(told, self.ends[scheduler.route].retractions / len(on))

    def _band(self, load: SchedulerLoad) -> QueueBand:
        """Return the healthy queue of a scheduler, without decoding by what its passes take."""
        if self.passes is None:
            return self.band.scaled(load.max_running)
        return self.passes.band(load.max_running)

    def _soon_used(self, route: str, share: int) -> int:
        """Return how many rows of its share a route may hold now: the faster one can take the others.

        It is half of its share, or what it can use soon, where that is more: as many as it runs, and some
        passes of prompts in its queue. Where it tells no load it is all of its share.
        """
        on = self._on_route[route]
        if not all(scheduler.tells for scheduler in on):
            return share
        running = sum(scheduler.last.running for scheduler in on if scheduler.last)
        prompts = AHEAD_PASSES * (self.info.prefill_tokens or USUAL_TOKENS) / self.prompt_tokens
        return min(share, max(math.ceil(share / 2), running + math.ceil(prompts)))

    def _share_out(self, left: int, now: float) -> list[Decision]:
        """Limit each route to its share of what is left; return a decision when that begins to matter."""
        if len(self.ends) == 1:
            return []
        silent = {r for r, on in self._on_route.items() if on and all(s.is_silent(now) for s in on)}
        gap_s = now - (now if self._shared_at is None else self._shared_at)
        self._shared_at = now
        before, found = self._most_of_rest, shares(self.ends, left, gap_s, silent)
        if self.is_background:  # its users limit each route, and the speeds are all that is wanted
            return []
        self._most_of_rest = {route: self._soon_used(route, share) for route, share in found.items()}
        return [
            Decision(route, self._wanted(route), most, "share", f"its share of the {left} rows that are left")
            for route, most in self._most_of_rest.items()
            if most < self._wanted(route) <= before.get(route, sys.maxsize)
        ]
