"""Concurrency limits of all servers, computed from samples of their schedulers' load.

Nothing here does I/O. Each scheduler has a controller, which sets its limit (window). The limit of a server
(route) is the sum over its schedulers. Most servers have one scheduler. A server with several DP ranks
chooses the rank itself. While the queue of one of its ranks is too long, none of its limits grows.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.bundles import USUAL_TOKENS, ForwardPasses
from batchrunner.dispatch.concurrency.law import (
    TYPICAL_PROMPT_TOKENS,
    Controller,
    CornerChange,
    Decision,
    Reading,
    first_window,
)
from batchrunner.dispatch.route import EndedRows

if TYPE_CHECKING:
    from batchrunner.dispatch.concurrency.background import BackgroundController


@dataclass(slots=True, eq=False)
class SchedulerLimit:
    """Concurrency limit of one scheduler: its controller and its last load sample."""

    name: str
    route: "RouteLimit"
    controller: Controller
    polled_at: float
    """Time of the last poll that returned the scheduler's load, in seconds of the monotonic clock."""
    reports_load: bool
    """Whether the server reports the scheduler's load. If not, the limit does not follow load samples."""
    last: SchedulerLoad | None = None
    """The scheduler's last load sample; None before the first."""
    reported_retractions: int = 0
    """Number of retractions that the scheduler has reported since its first load sample."""

    def is_unreachable(self, now: float) -> bool:
        """Tell whether polls of the scheduler's load have failed for a while."""
        return self.last is not None and now - self.polled_at > TIMING.silent_scheduler

    def update(self, load: SchedulerLoad) -> bool:
        """Store a sample; tell whether it is new.

        Samples without a time are new if any value has changed.
        """
        last, self.last = self.last, load
        if last is None:
            return True
        is_repeated = load == last if load.taken_at is None else load.taken_at == last.taken_at
        if is_repeated:
            return False
        if load.retracted != last.retracted:  # the scheduler repeats the number until its next report
            self.reported_retractions += load.retracted or 0
        return True


HALF_LIFE_S = 60.0
"""Half-life, in seconds, of the count of recently ended rows. It is long, because rows of equal length end in
waves."""
AHEAD_PASSES = 8
"""A replica may always queue prompts for this many prefill passes: two to four seconds of work. So it does
not run dry before the next load samples."""
LEAST_ROWS = 1e-3
"""Minimum of a server's count of recent rows. After a long silence all servers have this count, so they get
equal shares of the rows."""


@dataclass(slots=True, eq=False)
class RouteLimit:
    """Concurrency limit of one server (route), over all runs that use the engine."""

    url: str
    schedulers: list[SchedulerLimit] = field(default_factory=list)
    ended: EndedRows = field(default_factory=EndedRows)
    recent: float = LEAST_ROWS
    """Decaying count of ended rows: the server's speed relative to others. It begins at the size of the first
    window, so that all servers count as about equally fast at first."""
    counted: int = 0
    """Number of ended rows that `recent` already includes."""
    share: int | None = None
    """Maximum requests in flight: the server's share of the remaining rows, by its speed. None before it is
    computed."""
    in_flight: int = 0
    """Number of requests of all runs that were in flight at the last load sample."""

    @property
    def window(self) -> int:
        """Sum of the concurrency limits of its schedulers."""
        return sum(scheduler.controller.window for scheduler in self.schedulers)

    @property
    def only_scheduler(self) -> SchedulerLimit | None:
        """The server's scheduler; None if it has several."""
        return self.schedulers[0] if len(self.schedulers) == 1 else None

    def is_unreachable(self, now: float) -> bool:
        """Tell whether load polls of all the server's schedulers have failed for a while."""
        return bool(self.schedulers) and all(scheduler.is_unreachable(now) for scheduler in self.schedulers)

    def count_recent(self, gap_s: float) -> None:
        """Update the count of recent rows: decay it by `gap_s` seconds, and add the newly ended rows."""
        recent = self.recent + self.ended.rows - self.counted
        self.recent = max(LEAST_ROWS, recent * 0.5 ** (gap_s / HALF_LIFE_S))
        self.counted = self.ended.rows


def shares(
    routes: Sequence[RouteLimit], remaining: int, unreachable: Collection[RouteLimit] = ()
) -> list[int]:
    """Return how many of the remaining rows each server may hold, in proportion to its speed.

    A row in a replica's queue cannot move to another replica. Without shares, the replica with the longest
    queue would work alone at the end. The speed of a server is the number of rows that it ended recently. An
    `unreachable` server gets one row. The shares add up to at least `remaining`, so that no row waits for
    ever.
    """
    reachable = [route for route in routes if route not in unreachable] or routes
    total = sum(route.recent for route in reachable)
    shares_of_routes = []
    for route in routes:
        share = math.ceil(remaining * route.recent / total) if route in reachable else 1
        shares_of_routes.append(max(1, share))
    return shares_of_routes


@dataclass(slots=True)
class ConcurrencyLimits:
    """Decides how many requests each server may have in flight.

    A server with several DP ranks chooses the rank itself. So this run's requests are assumed to be spread
    over its ranks as their running and waiting requests are, and its ended rows evenly.
    """

    info: EngineInfo
    band: QueueBand
    tokens_a_row: int
    """Expected mean number of KV tokens of a running row."""
    most: int
    """Maximum concurrency limit of a server: the number of connections allowed."""
    fixed: int | None = None
    """Constant concurrency limit over all servers, from the job's `window`; None if it follows the load."""
    passes: ForwardPasses | None = None
    """How many rows fill a forward pass in a task without decoding; None for generation."""
    returned_rows: int = 0
    """Number of rows that were cancelled to make room for users of the engine."""
    tokens_lost: int = 0
    """Output tokens of the cancelled rows. They have to be generated again."""
    prompt_tokens: float = TYPICAL_PROMPT_TOKENS
    """Mean number of prompt tokens per row that the engine computes."""
    schedulers: dict[str, SchedulerLimit] = field(default_factory=dict)
    routes: list[RouteLimit] = field(init=False)
    """Servers of the engine; more may be added later."""
    _shared_at: float | None = None  # time at which the shares were last computed

    def __post_init__(self) -> None:
        """Create a limit for each server of the engine. `begin` adds the schedulers."""
        self.routes = [RouteLimit(url) for url in self.info.routes]

    def begin(self, loads: Sequence[SchedulerLoad], now: float, *, unsent: int) -> list[Decision]:
        """Set each scheduler's first concurrency limit by the engine's own limits; return the decisions."""
        decisions = [self._add(load, now) for load in loads]
        without_load = [route for route in self.routes if not route.schedulers]
        decisions += [self._add(self._assumed_load(route), now) for route in without_load]
        self._share_out(unsent, now)  # The first decisions do not report the limits by shares.
        return decisions

    def window_of(self, route: RouteLimit) -> int:
        """Return the concurrency limit of a server, at most its share of the remaining rows."""
        if self.fixed is not None:  # each server gets an equal part, rounded up
            return min(max(1, math.ceil(self.fixed / len(self.routes))), self.most)
        window = self._wanted(route)
        if route.share is not None:
            window = min(window, route.share)
        # Only a background run, which yields to the server's users, may send nothing.
        return max(0 if self.is_background else 1, window)

    @property
    def current_window(self) -> int:
        """Sum of all servers' concurrency limits."""
        return sum(map(self.window_of, self.routes))

    @property
    def window(self) -> int:
        """Sum of all servers' concurrency limits, before their shares of the remaining rows limit them."""
        if self.fixed is not None:
            return self.current_window
        return sum(map(self._wanted, self.routes))

    def _wanted(self, route: RouteLimit) -> int:
        return min(self.most, route.window)

    @property
    def is_background(self) -> bool:
        """Whether the engine serves its users before the rows of this run (`engine.background`)."""
        return self.info.yields is not None

    def routes_to_relieve(self) -> Iterator[tuple[RouteLimit, int]]:
        """Yield each server on which rows must be cancelled, and how many of its rows may stay in flight."""
        for route in self.routes if self.is_background else ():
            laws = [cast("BackgroundController", scheduler.controller) for scheduler in route.schedulers]
            if any(law.kept is not None for law in laws):
                yield route, sum(law.ours if law.kept is None else law.kept for law in laws)

    def count_returned(self, tokens: int) -> None:
        """Count a row that was cancelled (preempted) after this number of output tokens."""
        self.returned_rows += 1
        self.tokens_lost += tokens

    @property
    def retractions(self) -> int:
        """Number of retractions over all rows that have ended."""
        return sum(route.ended.retractions for route in self.routes)

    def observe(
        self, loads: Sequence[SchedulerLoad], now: float, *, unsent: int
    ) -> list[Decision | CornerChange]:
        """Process the load samples of a poll; return changes of concurrency limits and of load states.

        `loads` is empty if the poll failed. `in_flight` of each server must be up to date. `unsent` is the
        number of rows still to be sent, including those that wait for another attempt.
        """
        changes: list[Decision | CornerChange] = [
            self._add(load, now) for load in loads if load.scheduler not in self.schedulers
        ]
        for load in loads:
            self.schedulers[load.scheduler].polled_at = now
        self._forget_absent_schedulers(now)
        # The limits stay as they are if no row remains to be sent, or if the job sets them.
        if not self.is_background and (unsent == 0 or self.fixed is not None):
            for scheduler in self.schedulers.values():
                scheduler.controller.stop_steering("fixed" if unsent else "tail")
            # If the job sets the limit, first limits of new schedulers have no effect.
            return [] if self.fixed is not None else changes
        changes += self._sample(loads, now)
        changes += self._share_out(unsent + sum(route.in_flight for route in self.routes), now)
        for scheduler in self.schedulers.values():
            changes += scheduler.controller.tick(now)
        return changes

    def _forget_absent_schedulers(self, now: float) -> None:
        """Forget a scheduler that stopped reporting although others behind the same address report.

        The gateway at that address has then lost the server with this scheduler.
        """
        for route in self.routes:
            reporting = [scheduler for scheduler in route.schedulers if not scheduler.is_unreachable(now)]
            if reporting and len(reporting) < len(route.schedulers):
                for scheduler in route.schedulers:
                    if scheduler not in reporting:
                        del self.schedulers[scheduler.name]
                route.schedulers = reporting

    def backpressure(self, url: str, why: str, now: float) -> list[Decision]:
        """Lower the concurrency limits of a server that refused a request or did not answer in time."""
        if self.fixed is not None:
            return []
        decisions: list[Decision] = []
        for scheduler in self._route_to(url).schedulers:
            decisions += scheduler.controller.backpressure(now, why)
        return decisions

    def _route_to(self, url: str) -> RouteLimit:
        """Return the limit of a server; create it if there is none."""
        for route in self.routes:
            if route.url == url:
                return route
        self.routes.append(RouteLimit(url))
        return self.routes[-1]

    def _assumed_load(self, route: RouteLimit) -> SchedulerLoad:
        """Return an idle load for a server that reports none, with an equal part of the engine's limits."""
        count = len(self.info.routes)

        def part_of(limit: int | None) -> int | None:
            return limit and max(1, limit // count)

        return SchedulerLoad(
            scheduler=route.url,
            source="engine",
            running=0,
            queue=0,
            token_usage=0.0,
            max_total_tokens=part_of(self.info.max_total_tokens),
            max_running=part_of(self.info.max_running),
            route=route.url,
        )

    def _add(self, load: SchedulerLoad, now: float) -> Decision:
        """Start to control the scheduler of this load; return its first concurrency limit as a decision."""
        name, max_running, band = load.scheduler, load.max_running, self._band(load)
        if self.passes is not None:
            window = self.passes.first_window(max_running)
            why = f"a forward pass takes about {self.passes.rows(max_running)} rows"
        else:
            window, why = first_window(
                max_running, load.max_total_tokens, self.tokens_a_row, low=band.low, high=band.high
            )
        if self.info.yields is None:
            controller = Controller(name, window, band, most=self.most, now=now)
        else:
            from batchrunner.dispatch.concurrency.background import (  # noqa: PLC0415 - only for such runs
                BackgroundController as Background,
            )

            # A background run sends nothing at first. Its controller needs the number of rows that fit the KV
            # pool.
            fits = window
            if self.passes is None and load.max_total_tokens is not None:
                fits = max(1, load.max_total_tokens // self.tokens_a_row)
            controller = Background(name, fits, band, most=self.most, now=now, yields=self.info.yields)
            why = "background: spare capacity"
        route = self._route_to(load.route)
        scheduler = SchedulerLimit(
            name=name,
            route=route,
            controller=controller,
            polled_at=now,
            reports_load=load.source != "engine",
        )
        self.schedulers[name] = scheduler
        route.schedulers.append(scheduler)
        # Until rows have ended, the servers' shares are in proportion to their first limits. A background run
        # begins with a limit of 0, and needs no shares.
        route.recent += controller.window
        why = f"{why}; #queue-req {band.low:,}-{band.high:,} ({band.why})"
        return Decision(scheduler=name, old=0, new=controller.window, state=controller.state, reason=why)

    def _sample(self, loads: Sequence[SchedulerLoad], now: float) -> list[Decision | CornerChange]:
        """Pass each new load sample to its scheduler's controller.

        Return the changes of concurrency limits and of load states.
        """
        # Running and waiting requests of each server, over all its schedulers.
        requests = Counter[RouteLimit]()
        full_routes = set[RouteLimit]()
        for load in loads:
            scheduler = self.schedulers[load.scheduler]
            requests[scheduler.route] += load.running + load.queue
            if load.queue > scheduler.controller.band.high:
                full_routes.add(scheduler.route)
        changes: list[Decision | CornerChange] = []
        for load in loads:
            scheduler = self.schedulers[load.scheduler]
            route, controller = scheduler.route, scheduler.controller
            # An idle scheduler repeats its last sample. Only a background run needs the repeated sample: it
            # says that there are still no users.
            if not scheduler.update(load) and (load.has_work or not self.is_background):
                continue
            # A restarted server may have other limits, so the healthy queue length is computed anew.
            controller.band = self._band(load)
            may_grow = len(route.schedulers) == 1 or route not in full_routes
            reading = self._reading(scheduler, load, requests[route])
            changes += controller.sample(now, reading, may_grow=may_grow)
        return changes

    def _reading(self, scheduler: SchedulerLimit, load: SchedulerLoad, requests: int) -> Reading:
        """Return the load of a scheduler, and its part of the counts of its server.

        `requests` is the number of requests that run or wait on the whole server.
        """
        route, count = scheduler.route, len(scheduler.route.schedulers)
        in_flight = route.in_flight
        if count > 1:
            share = (load.running + load.queue) / requests if requests else 1 / count
            in_flight = round(in_flight * share)
        return Reading(
            running=load.running,
            queue=load.queue,
            in_flight=in_flight,
            ended=route.ended.rows / count,
            # Rows of a task without decoding do not use the KV pool.
            usage=load.token_usage if self.passes is None else 0.0,
            retractions=self._retractions_of(scheduler),
            max_running=load.max_running,
            state_usage=load.state_usage,
        )

    def _retractions_of(self, scheduler: SchedulerLimit) -> float:
        """Return how many requests a scheduler has retracted, by its own report or by the ended rows.

        An ended row does not tell which scheduler of its server retracted it. So the schedulers of a server
        share the count evenly, unless one of them reports retractions itself.
        """
        route, reported = scheduler.route, scheduler.reported_retractions
        if any(other.reported_retractions for other in route.schedulers if other is not scheduler):
            return reported
        return max(reported, route.ended.retractions / len(route.schedulers))

    def _band(self, load: SchedulerLoad) -> QueueBand:
        """Return the healthy range (band) of a scheduler's queue length."""
        if self.passes is None:
            return self.band.scaled(load.max_running)
        return self.passes.band(load.max_running)

    def _soon_used(self, route: RouteLimit, share: int) -> int:
        """Return how many rows of its share a server may hold now. A faster server can take the others.

        This is at least half of the share. It is more if the server can use more rows soon: those that run,
        and prompts for AHEAD_PASSES prefill passes. A server that reports no load may hold its whole share.
        """
        if not all(scheduler.reports_load for scheduler in route.schedulers):
            return share
        running = sum(scheduler.last.running for scheduler in route.schedulers if scheduler.last)
        prefill_tokens = AHEAD_PASSES * (self.info.prefill_tokens or USUAL_TOKENS)
        prompts_ahead = math.ceil(prefill_tokens / self.prompt_tokens)
        return min(share, max(math.ceil(share / 2), running + prompts_ahead))

    def _share_out(self, remaining: int, now: float) -> list[Decision]:
        """Limit each server to its share of the remaining rows; return a decision for each new limit."""
        if len(self.routes) == 1:
            return []
        since_last_s = now - (now if self._shared_at is None else self._shared_at)
        self._shared_at = now
        # Each server's recently ended rows are counted in background runs too. The counts serve as the
        # relative speeds of the servers.
        for route in self.routes:
            route.count_recent(since_last_s)
        # A background run needs no shares, because the engine's users limit each server.
        if self.is_background:
            return []
        unreachable = [route for route in self.routes if route.is_unreachable(now)]
        new_shares = shares(self.routes, remaining, unreachable)
        decisions: list[Decision] = []
        for route, new_share in zip(self.routes, new_shares, strict=True):
            old_share, window = route.share, self._wanted(route)
            share = route.share = self._soon_used(route, new_share)
            # Report a share only when it begins to limit the server.
            was_limited = old_share is not None and old_share < window
            if share < window and not was_limited:
                why = f"the route's share of the {remaining} remaining rows"
                decisions.append(
                    Decision(scheduler=route.url, old=window, new=share, state="share", reason=why)
                )
        return decisions
