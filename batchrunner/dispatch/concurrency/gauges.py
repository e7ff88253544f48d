"""Queue gauges that cannot be right: a scheduler with one counts as a scheduler that tells no load. Pure.

A broken gauge that shows a long queue for ever would hold the window at one request for ever. A queue cannot
be right in two cases:

- It, or the number of running requests, is above MOST_REQUESTS: each of them has a connection.
- Rows overtake it. SGLang's queue is first come, first served: a row that is sent while q requests wait ends
  after all of these have begun. No scheduler begins more than MOST_PER_S requests a second. If ROWS_NEEDED
  rows of ours in succession come back sooner than q requests can begin, there are no q requests. Where a
  route leads to several schedulers and all queues are long, a row counts if it is too early for the shortest.
  Where only some are long, rows may go to the others. But a row that goes to a long queue keeps its place
  there, and resets the count at its end. If so many come back in succession that each place in flight was
  used PLACES_USED times for each scheduler, none of them waits in a long queue: there is none, or the route
  does not lead to it, and it need not hold the window either.

The gauge is believed again when its queue is back in the band.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from batchrunner.core.engine_info import QueueBand, SchedulerLoad

MOST_REQUESTS = 1_000_000
"""Most requests at one scheduler: sixteen times as many as one address has ports."""
MOST_PER_S = 5_000.0
"""Most requests that a scheduler begins a second; SGLang's HTTP process takes fewer than half as many."""
MOST_FORWARD_PER_S = 50_000.0
"""The same for rows without decoding, of which a request has many: a pass of some hundred takes 5 ms."""
MOST_PER_SLOT_S = 200.0
"""Most requests that one of `max_running_requests` places takes a second: a forward pass takes 5 ms."""
ROWS_NEEDED = 10
PLACES_USED, ROWS_NEEDED_EACH = 4, 100
"""Rows needed where some queues of a route are long: for each scheduler 4 times those in flight, and 100."""


@dataclass(frozen=True, slots=True)
class GaugeVerdict:
    """Whether the load of a scheduler is believed from now on, as the event log has it."""

    scheduler: str
    believed: bool
    queue: int
    reason: str


@dataclass(slots=True)
class _Gauge:
    scheduler: str
    per_s: float
    least: int = 0
    """Shortest queue since it is over the band."""
    over_since: float | None = None
    """Time since which the queue is over the band; None while it is not."""
    believed: bool = True


class QueueGauges:
    """Judges the loads that the schedulers of an engine tell. Times are seconds of one clock."""

    def __init__(self, most_per_s: float = MOST_PER_S) -> None:
        """No scheduler begins more than `most_per_s` requests a second."""
        self._most_per_s = most_per_s
        self._gauges: dict[str, _Gauge] = {}
        self._on_route: dict[str, list[_Gauge]] = {}
        self._early: dict[str, int] = {}
        """Rows in succession, by route, that came back too early."""
        self._in_flight: Mapping[str, int] = {}
        """Requests of ours in flight, by route."""
        self._news: list[GaugeVerdict] = []

    @property
    def silenced(self) -> Collection[str]:
        """Schedulers whose load is not believed."""
        return [name for name, gauge in self._gauges.items() if not gauge.believed]

    def believable(
        self,
        loads: Sequence[SchedulerLoad],
        bands: Mapping[str, QueueBand],
        now: float,
        in_flight: Mapping[str, int] | None = None,
    ) -> list[SchedulerLoad]:
        """Return the loads that are believed.

        `bands` are those of the schedulers that are known, `in_flight` our requests of each route.
        """
        self._in_flight = in_flight or {}
        return [load for load in loads if self._believes(load, bands.get(load.scheduler), now)]

    def ended(self, route: str, sent_at: float, now: float) -> None:
        """Record a row that was sent on a route and answered."""
        for gauge in self._on_route.get(route, ()):
            if gauge.over_since is not None:
                break
        else:  # nearly always, and this is asked for every row
            self._early[route] = 0
            return
        on = [gauge for gauge in self._on_route[route] if gauge.believed]
        long = [(gauge, gauge.over_since) for gauge in on if gauge.over_since is not None]
        if not long:
            self._early[route] = 0
            return
        if any(since > sent_at for _, since in long):
            return  # it was sent before the queue was long
        soonest_s = min(gauge.least / gauge.per_s for gauge, _ in long)
        self._early[route] = self._early.get(route, 0) + 1 if now - sent_at < soonest_s else 0
        needed = ROWS_NEEDED
        if len(long) < len(on):
            needed = len(on) * (ROWS_NEEDED_EACH + PLACES_USED * self._in_flight.get(route, 0))
        if self._early[route] >= needed:
            for gauge, _ in long:
                reason = f"#queue-req {gauge.least}: {needed} rows came back sooner than so many can begin"
                self._judge(gauge, believed=False, queue=gauge.least, reason=reason)

    def news(self) -> list[GaugeVerdict]:
        """Return the verdicts since the last call, oldest first."""
        news, self._news = self._news, []
        return news

    def _believes(self, load: SchedulerLoad, band: QueueBand | None, now: float) -> bool:
        gauge = self._gauges.get(load.scheduler)
        if gauge is None:
            gauge = self._gauges[load.scheduler] = _Gauge(load.scheduler, self._most_per_s)
            self._on_route.setdefault(load.route, []).append(gauge)
        if load.max_running:
            gauge.per_s = min(self._most_per_s, load.max_running * MOST_PER_SLOT_S)
        if max(load.queue, load.running) > MOST_REQUESTS:
            reason = f"#queue-req {load.queue}: no scheduler has more than {MOST_REQUESTS} requests"
            self._judge(gauge, believed=False, queue=load.queue, reason=reason)
            return False
        if band is None or load.queue <= band.high:
            gauge.over_since = None
            self._judge(gauge, believed=True, queue=load.queue, reason="the queue is in its band")
        elif gauge.over_since is None:
            gauge.over_since, gauge.least = now, load.queue
        else:
            gauge.least = min(gauge.least, load.queue)
        return gauge.believed

    def _judge(self, gauge: _Gauge, *, believed: bool, queue: int, reason: str) -> None:
        if gauge.believed != believed:
            gauge.believed = believed
            self._news.append(GaugeVerdict(gauge.scheduler, believed, queue, reason))
