"""The law on schedulers in virtual time: they are kept full, and the words for what they lack are right."""

import heapq
import json
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.engine_info import QueueBand
from batchrunner.dispatch.concurrency.law import (
    BACK_OFF,
    MINUTE_S,
    SHOWN_AFTER_S,
    Controller,
    CornerChange,
    Decision,
    Reading,
)
from batchrunner.engines.simulation.replica import CostModel
from batchrunner.engines.simulation.scheduler import SchedulerConfig, SimulatedRequest
from batchrunner.tuning.signals import Corner
from benchmarks.control_simulated import Case, Fleet, run
from tests.conftest import ROOT, examples

BAND = QueueBand(100, 2000)


@dataclass
class Plant:
    """Runs up to `capacity`, each for about `service_s`; tells its load every `period_s`, `late_s` old."""

    controller: Controller
    capacity: int
    service_s: float
    period_s: float = 0.5
    late_s: float = 0.0
    ends: list[float] = field(default_factory=list)
    waiting: int = 0
    ended: int = 0
    decisions: list[Decision] = field(default_factory=list)
    queues: list[tuple[float, int]] = field(default_factory=list)

    def run(self, seconds: float, *, told: bool = True, step_s: float = 0.05) -> None:
        """Let time pass."""
        luck = random.Random(1)
        now = self.queues[-1][0] if self.queues else 0.0
        end, next_look = now + seconds, now
        past: deque[tuple[float, int, int]] = deque()
        while now < end:
            now += step_s
            while self.ends and self.ends[0] <= now:
                heapq.heappop(self.ends)
                self.ended += 1
            in_flight = len(self.ends) + self.waiting
            self.waiting += max(0, self.controller.window - in_flight)
            while self.waiting and len(self.ends) < self.capacity:
                self.waiting -= 1
                heapq.heappush(self.ends, now + self.service_s * luck.uniform(0.5, 1.5))
            past.append((now, len(self.ends), self.waiting))
            while len(past) > 1 and past[1][0] <= now - self.late_s:
                past.popleft()
            self.queues.append((now, self.waiting))
            if now >= next_look:
                next_look += self.period_s
                in_flight = len(self.ends) + self.waiting
                seen = Reading(past[0][1], past[0][2], in_flight, self.ended)
                moved = self.controller.sample(now, seen) if told else self.controller.tick(now)
                self.decisions += [change for change in moved if isinstance(change, Decision)]

    def queues_since(self, at: float) -> list[int]:
        """The queue at each step since then."""
        return [queue for now, queue in self.queues if now >= at]


def plant(
    window: int = 300,
    capacity: int = 256,
    service_s: float = 10.0,
    period_s: float = 0.5,
    late_s: float = 0.0,
) -> Plant:
    controller = Controller("s", window, BAND, most=1_000_000, now=0.0)
    return Plant(controller, capacity, service_s, period_s, late_s)


@examples(15)
@given(
    window=st.integers(1, 1000),
    capacity=st.integers(20, 4096),
    service_s=st.floats(1.0, 60.0),
    period_s=st.floats(0.1, 4.0),
    late_s=st.floats(0.0, 4.0),
)
def test_the_queue_comes_into_the_band_and_stays(
    window: int, capacity: int, service_s: float, period_s: float, late_s: float
) -> None:
    """Whatever the engine's size and speed, and however old its gauges, one minute is enough."""
    made = plant(window, capacity, service_s, period_s=period_s, late_s=late_s)
    made.run(60 + 20 * (period_s + late_s))
    settled = made.queues[-1][0]
    made.run(120)
    later = made.queues_since(settled)
    inside = sum(BAND.low <= queue <= BAND.high for queue in later) / len(later)
    assert inside >= 0.95
    assert min(later) > 0


def test_the_start_doubles_and_does_not_drown() -> None:
    """From far too small a window the scheduler is full in seconds, and never drowned."""
    made = plant(window=16, capacity=4000, service_s=20.0)
    made.run(15)
    assert len(made.ends) == 4000
    assert max(made.queues_since(0)) <= BAND.high
    assert any("the window grows fast" in decision.reason for decision in made.decisions)


def test_capacity_is_followed() -> None:
    """When rows become shorter and more of them fit, or longer and fewer, the window follows."""
    made = plant()
    made.run(30)
    made.capacity = 1280
    made.run(30)
    assert len(made.ends) == 1280
    assert min(made.queues_since(made.queues[-1][0] - 10)) > 0
    made.capacity = 160
    made.run(60)
    assert max(made.queues_since(made.queues[-1][0] - 10)) <= 600


def test_an_input_that_is_slow_does_not_widen_the_window() -> None:
    """A window that is not used is not grown: the reader is the bottleneck, not the window."""
    controller = Controller("s", 300, BAND, most=10_000, now=0.0)
    for second in range(60):
        controller.sample(float(second), Reading(50, 0, 50, ended=5 * second))
    assert controller.window == 300


def test_pressure_backs_off_once_a_second() -> None:
    """A burst of refusals is one sign; the window keeps a quarter of the first at least, and recovers."""
    made = plant(window=400)
    made.run(10)
    before = made.controller.window
    decisions = [d for i in range(100) for d in made.controller.backpressure(10.0 + i / 1000, "503: full")]
    assert len(decisions) == 1
    assert made.controller.window == round(before * BACK_OFF)
    for second in range(11, 40):
        made.controller.backpressure(float(second), "503: full")
    assert made.controller.window == 100
    assert made.controller.backpressure(40.5, "503: full") == []
    made.queues = [(40.0, 0)]
    made.run(30)
    assert made.controller.state == "steady"
    assert min(made.queues_since(65)) > 0


def test_rows_of_others_count() -> None:
    """What others submit to the same scheduler is part of its queue: we send that much less."""
    controller = Controller("s", 356, BAND, most=10_000, now=0.0)
    for second in range(60):
        total = controller.window + 500
        controller.sample(float(second), Reading(256, total - 256, controller.window, ended=5 * second))
    assert 100 <= controller.window + 500 - 256 <= 300 or controller.window == 1


@pytest.mark.parametrize(
    ("max_running", "low", "high"),
    [(None, 100, 2000), (4096, 100, 2000), (256, 100, 2000), (128, 50, 1000), (32, 12, 250), (4, 8, 32)],
)
def test_the_band_is_scaled_to_a_small_engine(max_running: int | None, low: int, high: int) -> None:
    """An engine that runs 32 at once needs no 100 in wait; the band says why it is another one."""
    band = BAND.scaled(max_running)
    assert (band.low, band.high) == (low, high)
    assert ("scaled" in band.why) == ((low, high) != (100, 2000))


def test_the_window_never_exceeds_the_connections() -> None:
    """Whatever the queue says, sockets are finite."""
    controller = Controller("s", 5000, BAND, most=1000, now=0.0)
    assert controller.window == 1000
    for second in range(30):
        controller.sample(float(second), Reading(controller.window, 0, controller.window, ended=10 * second))
    assert controller.window == 1000


class Scheduler:
    """A controller, and the load that its scheduler tells twice a second; a row takes 20 s."""

    def __init__(self, window: int = 1000) -> None:
        self.controller = Controller("s", window, BAND, most=1_000_000, now=0.0)
        self.now, self.ended, self.retractions = 0.0, 0.0, 0.0
        self.changes: list[CornerChange] = []

    def tells(
        self,
        seconds: float,
        *,
        queue: int,
        usage: float,
        noise: float = 0.0,
        running: int | None = None,
        max_running: int | None = 4096,
        in_use: bool = True,
        retracted_a_minute: float = 0.0,
    ) -> None:
        """Tell such a load for some seconds; token usage goes up and down by `noise`."""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            in_flight = self.controller.window if in_use else self.controller.window // 2
            runs = max(0, in_flight - queue) if running is None else running
            self.ended += runs / 40
            self.retractions += retracted_a_minute / 120
            told = usage + noise * (1 if int(self.now) % 2 else -1)
            seen = Reading(runs, queue, in_flight, self.ended, told, int(self.retractions), max_running)
            changes = self.controller.sample(self.now, seen)
            self.changes += [change for change in changes if isinstance(change, CornerChange)]

    @property
    def news(self) -> list[str]:
        """Corners that it came into since the last look."""
        news, self.changes = self.changes, []
        return [change.corner for change in news]


def test_a_short_queue_is_sent_more_faster() -> None:
    """An empty queue and an unused pool: the window doubles until there is a queue."""
    scheduler = Scheduler(window=400)
    scheduler.tells(20, queue=150, usage=0.5)
    before = scheduler.controller.window
    scheduler.tells(1, queue=0, usage=0.5)
    assert scheduler.controller.window == 4 * before
    scheduler.tells(SHOWN_AFTER_S, queue=0, usage=0.5)
    assert scheduler.news == [Corner.SHORT]
    assert scheduler.controller.corner is Corner.SHORT


def test_a_full_pool_is_no_short_queue() -> None:
    """An empty queue and a full pool: no doubling; rows begin as fast as others end."""
    scheduler = Scheduler()
    scheduler.tells(20, queue=150, usage=0.95)
    before = scheduler.controller.window
    scheduler.tells(1, queue=0, usage=0.95)
    assert before <= scheduler.controller.window <= before + BAND.low
    scheduler.tells(SHOWN_AFTER_S, queue=0, usage=0.95)
    assert scheduler.news == [Corner.GOOD, Corner.FULL]


def test_noise_fills_no_pool() -> None:
    """Token usage of 0.95, more or less, with a queue and no retraction is what the guides call good."""
    scheduler = Scheduler()
    scheduler.tells(600, queue=150, usage=0.95, noise=0.01)
    assert scheduler.news == [Corner.GOOD]
    assert 900 <= scheduler.controller.window <= 1050


def test_retractions_count_after_their_total_has_fallen() -> None:
    """A total that was shared among schedulers falls once another scheduler reports; then its own counts."""
    law = Controller("s", 100, BAND, most=1000, now=0.0)
    for now, retractions in ((0.0, 0), (1.0, 8), (400.0, 0), (401.0, 4)):
        law.sample(now, Reading(100, 50, 150, 0, 0.95, retractions))
    assert law.is_overfull


@pytest.mark.parametrize("running", [100, 1000])
@pytest.mark.parametrize(("a_minute", "overfull"), [(0.5, False), (1, False), (20, True)])
def test_retractions_count_by_the_minute(running: int, a_minute: float, *, overfull: bool) -> None:
    """One a minute changes nothing; 20 a minute mean the same at 5 rows/s and at 50: no more than fits."""
    scheduler, calm = Scheduler(running + 150), Scheduler(running + 150)
    for each, retracted in ((scheduler, a_minute), (calm, 0.0)):
        each.tells(300, queue=150, usage=0.95, running=running, retracted_a_minute=retracted)
    if not overfull:
        assert scheduler.controller.window == calm.controller.window
        assert Corner.FILLING not in scheduler.news
    else:
        assert scheduler.controller.corner is Corner.FILLING
        assert scheduler.controller.window <= running
    scheduler.tells(4 * MINUTE_S, queue=150, usage=0.95)
    assert scheduler.controller.corner is Corner.GOOD


@pytest.mark.parametrize(("queue", "usage", "noise"), [(150, 0.6, 0.0), (300, 0.7, 0.22)])
def test_a_server_that_holds_back_is_told(queue: int, usage: float, noise: float) -> None:
    """A queue and an unused pool for most of a minute: said once, with figures; the window follows the queue.

    The pool may be well used for moments.
    """
    scheduler = Scheduler()
    scheduler.tells(MINUTE_S - 5, queue=queue, usage=usage, noise=noise)
    assert Corner.HELD not in {change.corner for change in scheduler.changes}
    scheduler.tells(300, queue=queue, usage=usage, noise=noise)
    held = [change for change in scheduler.changes if change.corner == Corner.HELD]
    assert len(held) == 1
    assert held[0].queue == queue
    assert f"token usage {held[0].token_usage:.2f}" in held[0].reason
    assert scheduler.controller.corner is Corner.HELD


def test_rows_that_grow_together_are_not_retracted_together() -> None:
    """At most half of the best fixed window's retractions, at no less of its speed; no starved scheduler.

    Rows of 64 prompt tokens and 600 to 1000 new ones grow together, and do not fit together. The best fixed
    window of this workload is that of benchmarks/results/control_simulated.json; the load is told 4 s late.
    """
    best = run(Case("short/long", 1, 6000, 1024, 0.0))
    found = run(Case("short/long", 1, 6000, None, 4.0))
    assert found["tokens_per_s"] >= best["tokens_per_s"]
    assert found["retractions"] <= best["retractions"] / 2


@pytest.mark.parametrize("late_s", [0.1, 4.0])
def test_a_full_pool_has_a_queue(late_s: float) -> None:
    """Where the pool is full, but rows do not grow out of it, the queue is hardly ever empty."""
    found = run(Case("KV-starved", 1, 6000, None, late_s))
    best = run(Case("KV-starved", 1, 6000, 1024, 0.0))
    assert found["tokens_per_s"] >= 0.997 * best["tokens_per_s"]
    assert found["empty_queue_share"] <= 0.05


def test_retractions_that_are_few_cost_nothing() -> None:
    """Rows of very different length: a few are retracted, and the speed is that of a wide window."""
    found = run(Case("heavy tail", 1, 2000, None, 0.1))
    best = run(Case("heavy tail", 1, 2000, 4096, 0.0))
    assert found["tokens_per_s"] >= 0.98 * best["tokens_per_s"]


@pytest.mark.parametrize("late_s", [0.1, 1.0])
def test_a_small_fast_engine_is_kept_full(late_s: float) -> None:
    """8 slots, passes of 3 ms, 3,000 rows of 8 tokens that use 0.83 of the pool: 9 s without a gap."""
    rows = (SimulatedRequest(100, 8, 8, ignore_eos=True) for _ in range(3000))
    fleet = Fleet(rows, 3000, SchedulerConfig(8, 960), late_s=late_s, cost=CostModel(3e-3, 0, 0, 0))
    fleet.run()
    assert fleet.now <= 9.0 / 0.97


def test_the_gauges_of_a_card() -> None:
    """They begin late, are up to 1.7 s apart, and are read right: the window stays a queue above the places.

    What the law read on an H200 whose 2,048 places were full is played back: at first nothing has arrived,
    which is no empty queue, and a pool half used is no server that holds back.
    """
    log = ROOT / "tests" / "support" / "logs" / "h200_slots_full.readings"
    told = [json.loads(line) for line in log.read_text().splitlines()]
    law = Controller("card", 2148, BAND, most=1_000_000, now=told[0][0])
    for at, *seen, window, _corner in told:
        assert not any(isinstance(change, CornerChange) for change in law.sample(at, Reading(*seen)))
        assert abs(law.window - window) <= BAND.low / 2
    assert law.state == "steady"
