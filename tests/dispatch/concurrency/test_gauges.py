"""Queues that cannot be right do not hold the window down; long queues that are real do."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

import pytest

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.dispatch.concurrency.gauges import GaugeVerdict, QueueGauges
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits

URL = "http://127.0.0.1:30000"
LOAD = SchedulerLoad(URL, "loads", 0, 0, 0.1, 100, 10**6, 64, URL)


@dataclass
class VirtualRun:
    """A scheduler that runs 64 rows at once, first come, first served, and a run on it, in virtual time."""

    service_s: float
    others: int = 0
    """Requests of others that wait at any time: whenever one ends, another one comes."""
    told: int | None = None
    """What the gauge says of the queue; None for the truth."""
    now: float = 0.0
    running: list[tuple[float, float]] = field(default_factory=list)
    waiting: list[float | None] = field(default_factory=list)
    verdicts: list[GaugeVerdict] = field(default_factory=list)
    ended: int = 0

    def __post_init__(self) -> None:
        self.gauges = QueueGauges()
        self.limits = ConcurrencyLimits(
            EngineInfo("attach", "m", routes=(URL,)), QueueBand(100, 2000), 100, 10**4
        )
        self.limits.begin(self.gauges.believable([self.load], {}, 0.0), 0.0, unsent=10**6)
        self.waiting = [None] * self.others

    @property
    def load(self) -> SchedulerLoad:
        queue = len(self.waiting) if self.told is None else self.told
        return replace(LOAD, running=len(self.running), queue=queue, taken_at=self.now)

    @property
    def in_flight(self) -> int:
        return sum(sent >= 0 for _, sent in self.running) + sum(sent is not None for sent in self.waiting)

    def run(self, seconds: float, step_s: float = 0.05) -> None:
        """Let time pass."""
        end, polls = self.now + seconds, 0
        while self.now < end:
            self.now += step_s
            while self.running and self.running[0][0] <= self.now:
                _, sent = heapq.heappop(self.running)
                if sent < 0:
                    self.waiting.append(None)
                else:
                    self.ended += 1
                    self.limits.ended(URL, 0, self.now)
                    self.gauges.ended(URL, sent, self.now)
            self.waiting += [self.now] * max(0, self.limits.window - self.in_flight)
            while self.waiting and len(self.running) < 64:
                sent_at = self.waiting.pop(0)
                entry = (self.now + self.service_s, -1.0 if sent_at is None else sent_at)
                heapq.heappush(self.running, entry)
            polls += 1
            if polls % 5 == 0:
                self.poll()

    def poll(self) -> None:
        believed = self.gauges.believable([self.load], self.limits.bands, self.now)
        for verdict in self.gauges.news():
            self.verdicts.append(verdict)
            if not verdict.believed:
                self.limits.restart(verdict.scheduler, self.now)
        silenced = self.gauges.silenced
        self.limits.observe(believed, {URL: self.in_flight}, self.now, unsent=10**6, silenced=silenced)


@pytest.mark.parametrize("told", [10**12, 10**6 + 1, 500_000, 30_000])
@pytest.mark.parametrize("service_s", [0.2, 2.0])
def test_a_stuck_gauge_does_not_hold_the_window(told: int, service_s: float) -> None:
    """For minutes the gauge shows a queue that is not there: within seconds all places are in use again."""
    run = VirtualRun(service_s)
    run.run(20)
    run.told = told
    run.run(60)
    assert [(verdict.believed, verdict.queue) for verdict in run.verdicts] == [(False, told)]
    before = run.ended
    run.run(120)
    assert run.ended - before > 0.9 * 120 * 64 / (service_s + 0.05)
    assert run.limits.window >= 64


def test_a_gauge_that_is_stuck_from_the_start() -> None:
    run = VirtualRun(0.5, told=10**12)
    run.run(60)
    assert run.limits.window >= 64
    assert run.ended > 0.8 * 60 * 64 / 0.55


def test_a_gauge_that_recovers_is_believed_again() -> None:
    """The verdicts say so, and the queue is steered into its band as before."""
    run = VirtualRun(0.5)
    run.run(20)
    run.told = 10**12
    run.run(60)
    run.told = None
    run.run(60)
    assert [verdict.believed for verdict in run.verdicts] == [False, True]
    band = run.limits.bands[URL]
    assert band.low <= run.load.queue <= band.high


@pytest.mark.parametrize("others", [2_000, 20_000])
def test_a_long_queue_of_others_is_believed(others: int) -> None:
    """Rows wait behind it for as long as it takes, and no more of them are sent than one."""
    run = VirtualRun(0.05, others=others)
    run.run(120)
    assert run.verdicts == []
    assert run.limits.window == 1


def test_one_of_two_schedulers_of_a_route() -> None:
    """A row may have gone to the other one: nothing is known of the long queue, unless it cannot be."""
    gauges = QueueGauges()
    bands = {f"{URL}#dp{rank}": QueueBand(100, 2000) for rank in range(2)}
    one, two = (
        replace(LOAD, scheduler=name, queue=queue) for name, queue in zip(bands, (50_000, 5), strict=True)
    )
    for second in range(30):
        assert gauges.believable([one, two], bands, float(second)) == [one, two]
        gauges.ended(URL, float(second), second + 0.1)
    absurd = replace(one, queue=10**12)
    assert gauges.believable([absurd, two], bands, 31.0) == [two]
    assert gauges.silenced == [absurd.scheduler]


def take_ended(places: list[tuple[float, float]], now: float) -> list[float]:
    """Take the requests that have ended; return when they were sent."""
    ended = [sent_at for ends_at, sent_at in places if ends_at <= now]
    places[:] = [place for place in places if place[0] > now]
    heapq.heapify(places)
    return ended


def two_schedulers(told: int | None, others: int) -> tuple[list[GaugeVerdict], float]:
    """Run rows of 2 s for two minutes on a route that gives them in turn to two schedulers of 64 places.

    The first one tells a queue of `told`, or the truth, and has so many requests of others in its queue.
    Returns the verdicts, and the share of places that were in use in the second minute.
    """
    gauges, names = QueueGauges(), [f"{URL}#dp{rank}" for rank in range(2)]
    limits = ConcurrencyLimits(EngineInfo("attach", "m", routes=(URL,)), QueueBand(100, 2000), 100, 10**4)
    running: list[list[tuple[float, float]]] = [[], []]
    waiting: list[list[float]] = [[-1.0] * others, []]
    verdicts: list[GaugeVerdict] = []
    sent, used, steps = 0, 0.0, 0
    for now in (step * 0.05 for step in range(120 * 20)):
        for places, queue in zip(running, waiting, strict=True):
            ended = take_ended(places, now)
            queue += [-1.0 for sent_at in ended if sent_at < 0]
            for sent_at in (at for at in ended if at >= 0):
                limits.ended(URL, 0, now)
                gauges.ended(URL, sent_at, now)
        ours = sum(at >= 0 for places in running for _, at in places)
        ours += sum(at >= 0 for queue in waiting for at in queue)
        loads = [
            replace(LOAD, scheduler=name, running=len(places), queue=len(queue), taken_at=now)
            for name, places, queue in zip(names, running, waiting, strict=True)
        ]
        loads[0] = loads[0] if told is None else replace(loads[0], queue=told)
        believed = gauges.believable(loads, limits.bands, now, {URL: ours})
        if not now:
            limits.begin(believed, now, unsent=10**6)
        for verdict in gauges.news():
            verdicts.append(verdict)
            limits.restart(verdict.scheduler, now)
        limits.observe(believed, {URL: ours}, now, unsent=10**6, silenced=gauges.silenced)
        for number in range(sent, sent := sent + max(0, limits.window - ours)):
            waiting[number % 2].append(now)
        for places, queue in zip(running, waiting, strict=True):
            while queue and len(places) < 64:
                heapq.heappush(places, (now + 2.0, queue.pop(0)))
        if now >= 60:
            used, steps = used + sum(map(len, running)) / 128, steps + 1
    return verdicts, used / steps


@pytest.mark.parametrize("told", [30_000, 500_000])
def test_a_stuck_gauge_beside_one_that_is_right(told: int) -> None:
    """A queue that nobody waits in holds the windows of its route down for seconds only."""
    verdicts, used = two_schedulers(told, others=0)
    assert [(verdict.scheduler, verdict.believed) for verdict in verdicts] == [(f"{URL}#dp0", False)]
    assert used > 0.95


@pytest.mark.parametrize("others", [2_000, 20_000])
def test_a_long_queue_beside_a_short_one(others: int) -> None:
    """The rows that wait in it tell that it is real."""
    verdicts, _ = two_schedulers(None, others)
    assert verdicts == []
