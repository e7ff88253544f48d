"""The schedulers of each route: when each was heard last, what this run has there. Pure: no clock, no I/O.

A route of its own leads to one scheduler. A gateway, or a server with several DP ranks, chooses the scheduler
itself: there this run's requests are assumed to be spread as the schedulers' own running + waiting say, and
the rows that end to be spread evenly.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.dispatch.concurrency.controller import Controller
from batchrunner.dispatch.concurrency.reading import Reading

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


class KnownSchedulers:
    """Finds schedulers by name and by route, and reads their samples."""

    def __init__(self) -> None:
        self.by_name: dict[str, KnownScheduler] = {}
        self._on_route: defaultdict[str, list[KnownScheduler]] = defaultdict(list)
        """Schedulers by route, which is looked up for every row that ends."""
        self._ends: defaultdict[str, _Ends] = defaultdict(_Ends)

    def add(self, scheduler: KnownScheduler) -> None:
        """Take a scheduler that was heard for the first time, or a route that tells none."""
        self.by_name[scheduler.name] = scheduler
        self._on_route[scheduler.route].append(scheduler)

    def on(self, route: str) -> Sequence[KnownScheduler]:
        """Return the schedulers that a route leads to."""
        return self._on_route[route]

    def heard(self, names: Collection[str], now: float) -> None:
        """Record that these schedulers are there."""
        for name in self.by_name.keys() & names:
            self.by_name[name].heard_at = now

    def ended(self, route: str, now: float) -> None:
        """Record a row that ended on a route."""
        self._ends[route].add(now)

    def take_gone(self, loads: Sequence[SchedulerLoad], now: float) -> list[KnownScheduler]:
        """Remove the schedulers of a shared route that are silent while others report; return them."""
        speaking = {load.route for load in loads}
        gone = [
            s
            for s in self.by_name.values()
            if s.route in speaking and now - s.heard_at > GONE_AFTER_S and len(self._on_route[s.route]) > 1
        ]
        for scheduler in gone:
            del self.by_name[scheduler.name]
            self._on_route[scheduler.route].remove(scheduler)
        return gone

    def silent_routes(self, now: float) -> set[str]:
        """Return the routes whose schedulers are all silent."""
        return {r for r, on in self._on_route.items() if on and all(s.is_silent(now) for s in on)}

    def located(self, loads: Sequence[SchedulerLoad], in_flight: Mapping[str, int]) -> dict[str, int]:
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

    def reading(
        self,
        load: SchedulerLoad,
        ours: int,
        now: float,
        *,
        max_running: int | None,
        fits: float | None,
        decodes: bool,
    ) -> Reading:
        """Return what a sample tells a controller, beside `ours`, this run's requests at the scheduler."""
        ends, on = self._ends[load.route], len(self._on_route[load.route])
        return Reading(
            load.running,
            load.queue,
            ours,
            self.by_name[load.scheduler].count(ends.count // on, now),
            ends.recent_burst(now) / on,
            usage=load.token_usage if decodes else 0.0,
            max_running=max_running,
            fits=fits,
            decodes=decodes,
        )
