"""Load samples → a controller for each scheduler → the windows of the routes that lead to them → their slots.

A route that leads to one scheduler has that scheduler's window. A route that leads to several, which its
gateway or server chooses from, has the sum of their windows, and while one queue of the route is over the
band none of its windows grows.

`LoadControl` polls four times a second, resizes the slots, and writes each change with its reason as an
event. All else here is pure: no clock, no I/O.
"""

import asyncio
import logging
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from batchrunner.core.engine_info import Corner, EngineInfo, QueueBand, SchedulerLoad
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Completion
from batchrunner.dispatch.concurrency.controller import Controller, Decision, ForwardPasses, first_window
from batchrunner.dispatch.concurrency.corners import CornerChange, Reading
from batchrunner.dispatch.queue import Backlog, Slots
from batchrunner.engines.base import Engine
from batchrunner.output.events import EventLog

log = logging.getLogger(__name__)

BURST_S = 0.1
"""Seconds over which the rows of a burst are counted."""
BURST_HALF_LIFE_S = 10.0
SILENT_AFTER_S = 5.0
"""Seconds without a load sample after which a route gets no more of the last rows."""
GONE_AFTER_S = 15.0
"""Seconds without a load sample after which one of several schedulers of a route counts as dead."""


@dataclass(slots=True, eq=False)
class KnownScheduler:
    """A scheduler, its controller, and when it was heard."""

    name: str
    route: str
    controller: Controller
    heard_at: float
    last: SchedulerLoad | None = None
    """Its last sample that counted; None before one."""
    rated: tuple[float, int] | None = None
    """When its rows that ended were counted last, and how many they were."""
    rate: float = 0.0
    """Rows that end there per second, smoothed."""

    def is_silent(self, now: float) -> bool:
        """Tell whether it has reported its load before and does not do so any more."""
        return self.last is not None and now - self.heard_at > SILENT_AFTER_S

    def has_news(self, load: SchedulerLoad) -> bool:
        """Tell whether a sample is new, by its own time or by any change."""
        if self.last is None or load.taken_at is None:
            return load != self.last
        return load.taken_at != self.last.taken_at

    def count(self, ended: int, now: float) -> float:
        """Return the rows per second that end there, by how many have ended so far."""
        if self.rated is not None and now > self.rated[0]:
            newest = (ended - self.rated[1]) / (now - self.rated[0])
            self.rate = (self.rate + newest) / 2
        self.rated = (now, ended)
        return self.rate


@dataclass(slots=True)
class RouteEnds:
    """What the rows that ended on a route have come to."""

    rows: int = 0
    output_tokens: int = 0
    retractions: int = 0
    """Times that these rows were retracted."""
    bucket_began: float = 0.0
    """Beginning of the present tenth of a second."""
    bucket: int = 0
    """Rows in it."""
    burst: float = 0.0
    decayed_at: float = 0.0

    def add(self, now: float) -> None:
        """Count a row."""
        if now - self.bucket_began >= BURST_S:
            self.bucket_began, self.bucket = now, 0
        self.bucket += 1
        self.rows += 1
        self.burst = max(self.burst, self.bucket)

    def recent_burst(self, now: float) -> float:
        """Return the largest recent burst, which halves every 10 s."""
        self.burst *= 0.5 ** ((now - self.decayed_at) / BURST_HALF_LIFE_S)
        self.decayed_at = now
        return self.burst


HALF_LIFE_S = 60.0
"""Half-life of the recent rows, in seconds: rows of one length end in waves as long as one of them takes."""
PRIOR_ROWS = 10.0
"""Rows that each route is assumed to have ended at the start, when all count as equally fast."""
LEAST_ROWS = 1e-3
"""Fewest recent rows of a route: after a long silence all routes have so many, and are equal."""


class Shares:
    """The share of each route in the rows that are left, so that all replicas end at the same time.

    A row that waits in a replica's queue cannot move to another one: at the end the replica with the longest
    queue would work alone. So no route may hold more than its share of all rows that have not ended, in
    proportion to the rows that it ended recently. While much input is left, no share is below a window.
    """

    def __init__(self, ends: Mapping[str, RouteEnds]) -> None:
        """Take the rows that ended on each route, which go on being counted."""
        self._ends = ends
        self._recent = dict.fromkeys(ends, PRIOR_ROWS)
        self._counted = dict.fromkeys(ends, 0)
        self._decayed_at: float | None = None  # None until the first call: a clock may begin anywhere

    def of(self, left: int, now: float, silent: Collection[str] = ()) -> dict[str, int]:
        """Return how many of the `left` rows each route may hold at most; a `silent` route gets one.

        Together they are at least `left`, so that no row waits for ever.
        """
        since = now if self._decayed_at is None else self._decayed_at
        self._decayed_at = now
        for route, ends in self._ends.items():
            recent = self._recent[route] + ends.rows - self._counted[route]
            self._recent[route] = max(LEAST_ROWS, recent * 0.5 ** ((now - since) / HALF_LIFE_S))
            self._counted[route] = ends.rows
        able = {r: n for r, n in self._recent.items() if r not in silent} or self._recent
        total = sum(able.values())
        return {r: max(1, math.ceil(left * able.get(r, 0.0) / total)) for r in self._recent}


ENOUGH_ROWS = 100
"""Rows that must have ended before their average is used."""
MEMORY_ROWS = 2000
"""Rows of each scheduler over which the averages are taken: of older ones, less and less is left. Rows that
began together end by their length: fewer than run at once would be the short ones, and then the long ones."""


class RowTokens:
    """How many tokens of the KV pool a row holds on average, by the rows that have ended.

    A row with p prompt tokens of its own and L output tokens, one a pass, holds p + L/2 while it runs. Long
    rows run longer: p + E[L²] / 2 E[L] is the average over those that run at one moment. Short rows end
    first: at the beginning of a run the figure is too low, and limits less than it should.
    """

    def __init__(self) -> None:
        self.schedulers = 1
        """Number of schedulers that the rows come from."""
        self._rows = 0
        self._own = 0.0
        self._output = 0.0
        self._output_squared = 0.0

    def add(self, own_prompt_tokens: int, output_tokens: int) -> None:
        """Count a row that ended; the tokens of its prompt without those that the prefix cache held."""
        self._rows += 1
        weight = 1 / min(self._rows, MEMORY_ROWS * self.schedulers)
        self._own += weight * (own_prompt_tokens - self._own)
        self._output += weight * (output_tokens - self._output)
        self._output_squared += weight * (output_tokens * output_tokens - self._output_squared)

    @property
    def held(self) -> float | None:
        """Tokens that a running row holds on average; None before enough rows have ended."""
        if self._rows < ENOUGH_ROWS or self._output <= 0:
            return None
        return self._own + self._output_squared / (2 * self._output)


@dataclass(slots=True)
class ConcurrencyLimits:
    """Decides how many requests each route may have in flight.

    A route of its own leads to one scheduler. A gateway, or a server with several DP ranks, chooses the
    scheduler itself: there this run's requests are assumed to be spread as the schedulers' own running +
    waiting say, and the rows that end to be spread evenly.
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
    own_band: bool = False
    """Whether the job sets the band (`queue`), which then holds for passes too."""
    row_tokens: RowTokens = field(default_factory=RowTokens)
    """Tokens of the KV pool that a row holds, by the rows that have ended."""
    known: dict[str, KnownScheduler] = field(default_factory=dict)
    """Schedulers by their names."""
    _on_route: defaultdict[str, list[KnownScheduler]] = field(default_factory=lambda: defaultdict(list))
    """Schedulers by route."""
    ends: dict[str, RouteEnds] = field(init=False)
    """Rows that ended on each route."""
    _shares: Shares = field(init=False)
    _most_of_rest: dict[str, int] = field(default_factory=dict)
    """Share of each route in the rows that are left."""

    def __post_init__(self) -> None:
        """Count no row yet."""
        self.ends = {route: RouteEnds() for route in self.info.routes}
        self._shares = Shares(self.ends)

    def begin(self, loads: Sequence[SchedulerLoad], now: float, *, unsent: int) -> list[Decision]:
        """Set the first windows, from the engine's limits; return one decision for each scheduler."""
        made = [self._add(load, now) for load in loads]
        made += [self._add(None, now, route) for route in self.info.routes if not self._on_route[route]]
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
        if unsent == 0 or self.fixed is not None:
            for scheduler in self.known.values():
                scheduler.controller.state = "fixed" if unsent else "tail"
            return [] if self.fixed is not None else changes
        changes += self._forget_gone(loads, now)
        self.row_tokens.schedulers = len(self.known)
        changes += self._share_out(unsent + sum(in_flight.values()), now)
        found = self._sample(loads, in_flight, now)
        found += [s.controller.tick(now, self._ended_on(s)) for s in self.known.values()]
        return changes + [change for change in found if change]

    def ended(self, route: str, now: float, answer: Completion | None) -> None:
        """Record a row that ended on a route; None for its answer where it was refused.

        This is all that a row tells: the rest is done when the next sample comes.
        """
        ends = self.ends[route]
        ends.add(now)
        if answer is None:
            return
        output_tokens, cached = answer.output_tokens, answer.cached_tokens
        own_tokens = 0 if cached is None else max(0, (answer.prompt_tokens or 0) - cached)
        self.row_tokens.add(own_tokens, output_tokens)
        ends.output_tokens += output_tokens
        if answer.retractions:
            ends.retractions += answer.retractions
            for scheduler in self._on_route[route]:
                scheduler.controller.retracted(now, ends.rows)

    def _ended_on(self, scheduler: KnownScheduler) -> int:
        """Return the rows that ended at a scheduler; 0 if they may be another one's on the same route."""
        route = scheduler.route
        return self.ends[route].rows if self.only_scheduler_on(route) is not None else 0

    def backpressure(self, route: str, what: str, now: float) -> list[Decision]:
        """Narrow the windows of a route that refused a request or let it wait too long."""
        if self.fixed is not None:
            return []
        moves = [scheduler.controller.backpressure(now, what) for scheduler in self._on_route[route]]
        return [move for move in moves if move]

    def _add(self, load: SchedulerLoad | None, now: float, route: str = "") -> Decision:
        """Take a scheduler that was heard for the first time, or a route that tells none."""
        name, route = (load.scheduler, load.route) if load is not None else (route, route)
        band = self._band(load)
        window, why = self._first_window(load, band)
        controller = Controller(name, window, band, most=self.most, now=now)
        self.known[name] = KnownScheduler(name, route, controller, heard_at=now)
        self._on_route[route].append(self.known[name])
        self.row_tokens.schedulers = len(self.known)
        why = f"{why}; #queue-req {band.low:,}-{band.high:,} ({band.why})"
        return Decision(name, 0, controller.window, controller.state, why)

    def _forget_gone(self, loads: Sequence[SchedulerLoad], now: float) -> list[Decision]:
        """Forget the schedulers of a shared route that are silent while others report."""
        decisions = []
        for route in {load.route for load in loads}:
            on = self._on_route[route]
            gone = [s for s in on if now - s.heard_at > GONE_AFTER_S] if len(on) > 1 else []
            for s in gone:
                why = f"no load sample for {now - s.heard_at:.0f} s"
                decisions.append(Decision(s.name, s.controller.window, 0, "gone", why))
                del self.known[s.name]
                on.remove(s)
        return decisions

    def _sample(
        self, loads: Sequence[SchedulerLoad], in_flight: Mapping[str, int], now: float
    ) -> list[Decision | CornerChange | None]:
        """Let each controller see its scheduler's sample, if it is news; return what that changed."""
        held, decodes = self.row_tokens.held, self.passes is None
        busy: defaultdict[str, int] = defaultdict(int)
        for load in loads:
            busy[load.route] += load.running + load.queue
        full = {load.route for load in loads if load.queue > self.known[load.scheduler].controller.band.high}
        changes: list[Decision | CornerChange | None] = []
        for load in loads:
            scheduler, on = self.known[load.scheduler], len(self._on_route[load.route])
            if not scheduler.has_news(load):
                continue
            scheduler.last = load
            ours = in_flight.get(load.route, 0)
            if on > 1:
                total = busy[load.route]
                ours = round(ours * ((load.running + load.queue) / total if total else 1 / on))
            max_running, pool = _limits(self.info, load)
            if not decodes:
                scheduler.controller.band = self._band(load)
            ends = self.ends[load.route]
            seen = Reading(
                load.running,
                load.queue,
                ours,
                scheduler.count(ends.rows // on, now),
                ends.recent_burst(now) / on,
                usage=load.token_usage if decodes else 0.0,
                max_running=max_running,
                fits=pool / held if pool and held else None,
                decodes=decodes,
            )
            may_grow = on == 1 or load.route not in full
            controller = scheduler.controller
            changes += [controller.sample(now, seen, may_grow=may_grow), controller.corner_change]
        return changes

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
        silent = {r for r, on in self._on_route.items() if on and all(s.is_silent(now) for s in on)}
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


@dataclass(slots=True)
class LoadControl:
    """Polls the engine's load while rows are sent, and resizes the slots of its routes."""

    _engine: Engine
    _concurrency: ConcurrencyLimits
    _slots: Slots
    _backlog: Backlog
    _events: EventLog

    async def run(self, polled: Callable[[Sequence[SchedulerLoad], float], None]) -> None:
        """Poll until cancelled; call `polled` with each sample once the slots are resized. It may raise.

        A sample is empty where the load is unknown; its time is in seconds of the monotonic clock.
        """
        while True:
            loads = await self._engine.loads()
            now = time.monotonic()
            in_flight, unsent = self._slots.by_route, self._backlog.unsent
            self._apply(self._concurrency.observe(loads, in_flight, now, unsent=unsent))
            self._backlog.wake_dispatcher()
            polled(loads, now)
            await asyncio.sleep(TIMING.load_poll)

    def refused(self, route: str, why: str, now: float) -> None:
        """Narrow the windows of a route that took no request, or let one wait too long."""
        self._apply(self._concurrency.backpressure(route, why, now))

    def _apply(self, changes: Iterable[Decision | CornerChange]) -> None:
        for route, window in self._concurrency.windows.items():
            self._slots.resize(route, window)
        write_changes(self._events, changes)


def write_changes(events: EventLog, changes: Iterable[Decision | CornerChange]) -> None:
    """Write changes of windows and corners to the event log."""
    for change in changes:
        events.write("window" if isinstance(change, Decision) else "corner", **asdict(change))
        if isinstance(change, CornerChange) and change.corner == Corner.HELD:
            log.info("%s: the server holds back: %s", change.scheduler, change.reason)
