"""The corners: what `#queue-req` and token usage say together, and what the window does then."""

from __future__ import annotations

import pytest

from batchrunner.core.engine_info import Corner, QueueBand
from batchrunner.dispatch.concurrency.controller import Controller
from batchrunner.dispatch.concurrency.corners import HELD_AFTER_S, TOLD_AFTER_S, CornerChange, Reading
from benchmarks.control_simulated import Case, run

BAND = QueueBand(100, 2000)


class Scheduler:
    """A controller, and the load that its scheduler tells twice a second."""

    def __init__(self, window: int = 1000) -> None:
        self.controller = Controller("s", window, BAND, most=1_000_000, now=0.0)
        self.now = 0.0
        self.changes: list[CornerChange] = []

    def tells(
        self,
        seconds: float,
        *,
        queue: int,
        usage: float,
        rise_s: float = 0.0,
        running: int | None = None,
        max_running: int | None = 4096,
        in_use: bool = True,
        fits: float | None = None,
    ) -> None:
        """Tell such a load for some seconds; token usage rises by `rise_s` a second."""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            window = self.controller.window
            in_flight = window if in_use else window // 2
            runs = in_flight - queue if running is None else running
            usage += rise_s * 0.5
            seen = Reading(
                runs, queue, in_flight, rate=runs / 20, usage=usage, max_running=max_running, fits=fits
            )
            self.controller.sample(self.now, seen)
            if self.controller.corner_change is not None:
                self.changes.append(self.controller.corner_change)

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
    scheduler.tells(TOLD_AFTER_S, queue=0, usage=0.5)
    assert scheduler.news == [Corner.SHORT]
    assert scheduler.controller.corner is Corner.SHORT


def test_a_full_pool_is_no_short_queue() -> None:
    """An empty queue and a full pool: no doubling; what is added is the lower end of the band."""
    scheduler = Scheduler()
    scheduler.tells(20, queue=150, usage=0.95)
    before = scheduler.controller.window
    scheduler.tells(1, queue=0, usage=0.95)
    assert scheduler.controller.state == "steady"
    assert scheduler.controller.window <= before + 1.5 * BAND.low
    scheduler.tells(TOLD_AFTER_S, queue=0, usage=0.95)
    assert scheduler.news == [Corner.GOOD, Corner.FULL]


def test_a_pool_that_fills_gets_what_it_has_room_for() -> None:
    """Before usage is 1: no more rows than the pool holds on average, and few that do not run yet."""
    scheduler = Scheduler()
    scheduler.tells(20, queue=150, usage=0.5)
    scheduler.tells(13, queue=20, usage=0.7, rise_s=0.025, running=900, fits=800)
    assert scheduler.controller.corner is Corner.FILLING
    assert scheduler.controller.window <= 800
    scheduler.tells(5, queue=0, usage=0.9, running=400, fits=800)
    assert 400 < scheduler.controller.window <= 440
    scheduler.tells(5, queue=0, usage=0.3, running=400, fits=800)
    assert scheduler.controller.window > 440


@pytest.mark.parametrize(("usage", "rise_s"), [(0.5, 0.04), (0.85, 0.0), (0.95, 0.0)])
def test_neither_a_rise_alone_nor_a_used_pool_fills(usage: float, rise_s: float) -> None:
    """A rise far from 1, and a high usage that stays, need no limit."""
    scheduler = Scheduler()
    scheduler.tells(20, queue=150, usage=usage, fits=200)
    scheduler.tells(5, queue=150, usage=usage, rise_s=rise_s, fits=200)
    assert Corner.FILLING not in scheduler.news


def test_rows_that_were_retracted_fill_the_pool() -> None:
    """Where many rows come back retracted, fewer are sent; one in a hundred is fine."""
    scheduler = Scheduler()
    scheduler.tells(20, queue=150, usage=0.85, fits=600)
    scheduler.controller.retracted(scheduler.now, 1)
    scheduler.tells(15, queue=150, usage=0.85, fits=600)
    assert scheduler.news == []
    for _ in range(3):
        scheduler.controller.retracted(scheduler.now, 101)
    scheduler.tells(TOLD_AFTER_S + 1, queue=150, usage=0.85, running=500, fits=600)
    assert scheduler.news == [Corner.FILLING]
    assert scheduler.controller.window <= 600


def test_a_server_that_holds_back_is_told() -> None:
    """A minute with a queue and an unused pool: said once, with figures; the window follows the queue."""
    scheduler = Scheduler()
    scheduler.tells(HELD_AFTER_S - 1, queue=150, usage=0.6)
    assert scheduler.news == []
    before = scheduler.controller.window
    scheduler.tells(300, queue=150, usage=0.6)
    (change,) = scheduler.changes
    assert (change.corner, change.queue, change.token_usage) == (Corner.HELD, 150, 0.6)
    assert "token usage 0.60" in change.reason
    assert scheduler.controller.window == before


@pytest.mark.parametrize(
    ("queue", "usage", "max_running", "in_use"),
    [(150, 0.6, 870, True), (150, 0.92, 4096, True), (50, 0.6, 4096, True), (150, 0.6, 4096, False)],
)
def test_what_is_no_holding_back(queue: int, usage: float, max_running: int, *, in_use: bool) -> None:
    """Not where as many run as may, where the pool is used, where few wait, and where the input is slow."""
    scheduler = Scheduler()
    for _ in range(40):
        scheduler.tells(5, queue=queue, usage=usage, max_running=max_running, in_use=in_use, running=850)
    assert Corner.HELD not in scheduler.news


def test_a_corner_that_does_not_last_is_not_told() -> None:
    """A scheduler that goes to and fro every second does not fill the event log."""
    scheduler = Scheduler()
    for second in range(100):
        scheduler.tells(1, queue=150 * (second % 2), usage=0.95)
    assert scheduler.news == []


@pytest.mark.parametrize(("usage", "in_use"), [(0.88, True), (0.9, False)])
def test_a_corner_ends(usage: float, *, in_use: bool) -> None:
    """A scheduler that has been in no corner for a while is shown in none; it is back in one without news."""
    scheduler, shown = Scheduler(), []
    good, other = (0.9, True), (usage, in_use)
    for seconds, (told, is_used) in ((20, good), (1, other), (TOLD_AFTER_S, other), (TOLD_AFTER_S + 1, good)):
        scheduler.tells(seconds, queue=150, usage=told, in_use=is_used)
        shown.append(scheduler.controller.corner)
    assert shown == [Corner.GOOD, Corner.GOOD, None, Corner.GOOD]
    assert scheduler.news == [Corner.GOOD]


def test_rows_that_grow_together_are_not_retracted_together() -> None:
    """At most half of the best fixed window's retractions, at no less of its speed; no starved scheduler.

    Rows of 64 prompt tokens and 600 to 1000 new ones grow together, and do not fit together. The best fixed
    window of this workload is that of benchmarks/results/control_simulated.json; the load is told 4 s late.
    """
    best = run(Case("short/long", 1, 6000, 1024, 0.0))
    found = run(Case("short/long", 1, 6000, None, 4.0))
    assert found["tokens_per_s"] >= 0.99 * best["tokens_per_s"]
    assert found["retractions"] <= best["retractions"] / 2
    assert found["longest_starved_s"] <= 5


@pytest.mark.parametrize("workload", ["KV-starved", "heavy tail"])
def test_where_nothing_is_retracted_nothing_is_held(workload: str) -> None:
    """The limit by tokens costs no speed where the pool is full, but rows do not grow out of it."""
    found = run(Case(workload, 1, 2000, None, 0.1))
    best = run(Case(workload, 1, 2000, 4096, 0.0))
    assert found["tokens_per_s"] >= 0.98 * best["tokens_per_s"]
