"""The controller on a scheduler in virtual time: it fills it and holds its queue in the band."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.engine_info import QueueBand
from batchrunner.dispatch.concurrency.controller import BACK_OFF, Controller, Decision
from batchrunner.dispatch.concurrency.corners import Reading
from tests.conftest import examples

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
                rate = self.capacity / self.service_s
                seen = Reading(past[0][1], past[0][2], in_flight, rate)
                moved = self.controller.sample(now, seen) if told else self.controller.tick(now, self.ended)
                self.decisions += [moved] if moved else []

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
    assert any("growing fast" in decision.reason for decision in made.decisions)


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
        controller.sample(float(second), Reading(running=50, queue=0, in_flight=50, rate=5.0))
    assert controller.window == 300


def test_pressure_backs_off_once_a_second() -> None:
    """A burst of refusals is one sign; the window keeps a quarter of the first at least, and recovers."""
    made = plant(window=400)
    made.run(10)
    before = made.controller.window
    decisions = [made.controller.backpressure(10.0 + i / 1000, "503: full") for i in range(100)]
    assert len([d for d in decisions if d]) == 1
    assert made.controller.window == round(before * BACK_OFF)
    for second in range(11, 40):
        made.controller.backpressure(float(second), "503: full")
    assert made.controller.window == 100
    made.queues = [(40.0, 0)]
    made.run(30)
    assert made.controller.state == "steady"
    assert min(made.queues_since(65)) > 0


def test_no_fresh_load_holds_the_window() -> None:
    """When the gauges stop, the window is held to what was known, once and with its reason."""
    made = plant()
    made.run(30)
    before, known = made.controller.window, len(made.decisions)
    made.run(60, told=False)
    assert made.controller.state == "blind"
    assert made.controller.window <= before
    assert len(made.decisions) == known + 1
    assert "no fresh load" in made.decisions[-1].reason
    assert len(made.ends) == 256
    made.run(30)
    assert made.controller.state == "steady"


@pytest.mark.parametrize("capacity", [40, 1500])
def test_without_any_load_the_window_is_found_by_rate(capacity: int) -> None:
    """A server that tells nothing is filled by trying, as long as it helps, and no further."""
    made = plant(window=256, capacity=capacity, service_s=4.0)
    made.run(400, told=False)
    assert made.controller.state == "settled"
    assert len(made.ends) >= 0.95 * capacity
    assert made.controller.window <= max(256, 3 * capacity)


def test_retractions_do_not_add_to_the_queue() -> None:
    """While the KV pool overflows, no more than the low end of the band is asked for."""
    controller = Controller("s", 300, BAND, most=10_000, now=0.0)
    windows = []
    for second in range(40):
        controller.retracted(float(second), 0)
        running = 250
        seen = Reading(running, controller.window - running, controller.window, rate=200.0)
        controller.sample(float(second), seen)
        windows.append(controller.window)
    assert 250 + 75 <= windows[-1] <= 250 + 125


def test_rows_of_others_count() -> None:
    """What others submit to the same scheduler is part of its queue: we send that much less."""
    controller = Controller("s", 356, BAND, most=10_000, now=0.0)
    for second in range(60):
        total = controller.window + 500
        controller.sample(float(second), Reading(256, total - 256, controller.window, rate=5.0))
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
        controller.sample(float(second), Reading(controller.window, 0, controller.window, rate=10.0))
    assert controller.window == 1000
