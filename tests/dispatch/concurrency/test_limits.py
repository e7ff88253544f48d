"""What is left is shared out: by speed, all of it, and not to a route that has fallen silent."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.core.types import Completion
from batchrunner.dispatch.bundles import ForwardPasses
from batchrunner.dispatch.concurrency.law import CornerChange, Decision
from batchrunner.dispatch.concurrency.limits import (
    ConcurrencyLimits,
    RouteLimit,
    shares,
)

ROUTES = ("a", "b", "c")


@given(
    left=st.integers(1, 10**9),
    ended=st.lists(st.sampled_from(ROUTES), max_size=50),
    silent=st.sets(st.sampled_from(ROUTES)),
    later_s=st.floats(0, 1e9),
)
def test_no_row_is_kept_back(left: int, ended: list[str], silent: set[str], later_s: float) -> None:
    """Whoever is silent, and for however long, all that is left is shared out, and every route has a row."""
    routes = [RouteLimit(url) for url in ROUTES]
    for url in ended:
        routes[ROUTES.index(url)].ended.add(None)
    for route in routes:
        route.count_recent(later_s)
    found = shares(routes, left, [route for route in routes if route.url in silent])
    assert sum(found) >= left
    assert min(found) >= 1
    if silent != set(ROUTES):
        assert all(share == 1 for route, share in zip(routes, found, strict=True) if route.url in silent)


def test_shares_follow_the_speed() -> None:
    """A replica ten times as fast gets ten times as much; one that slows down gets less by and by."""
    routes = fast, slow = RouteLimit("fast", recent=10), RouteLimit("slow", recent=10)
    assert shares(routes, 1000) == [500, 500]
    fast.ended.rows += 1000
    slow.ended.rows += 90
    for route in routes:
        route.count_recent(1.0)
    assert shares(routes, 1000)[0] > 890
    slow.ended.rows += 1000
    for route in routes:
        route.count_recent(120.0)
    assert 430 < shares(routes, 1000)[0] < 570


def limits_of(*routes: str) -> ConcurrencyLimits:
    info = EngineInfo(kind="attach", model="m", routes=routes)
    return ConcurrencyLimits(info, QueueBand(100, 2000), 100, most=10**6)


def windows_of(limits: ConcurrencyLimits) -> dict[str, int]:
    return {route.url: limits.window_of(route) for route in limits.routes}


def observe(
    limits: ConcurrencyLimits,
    loads: list[SchedulerLoad],
    in_flight: dict[str, int],
    now: float,
    *,
    unsent: int,
) -> list[Decision | CornerChange]:
    """Pass a poll's samples to the limits, with the requests in flight on each route."""
    for route in limits.routes:
        route.in_flight = in_flight[route.url]
    return limits.observe(loads, now, unsent=unsent)


def signal(route: str, queue: int) -> SchedulerLoad:
    return SchedulerLoad(route, "loads", 256, queue, 0.5, 1000, 2000, 256, route, None)


def test_the_first_wave_says_nothing_of_the_speed() -> None:
    """Rows of one length end together: the route that is a second ahead with them is no faster."""
    admission = limits_of("a", "b")
    admission.begin([signal("a", 0), signal("b", 0)], 0.0, unsent=960)
    windows = windows_of(admission)
    for _ in range(50):
        admission.routes[0].ended.add(None)
    observe(admission, [signal("a", 100), signal("b", 100)], windows, 1.0, unsent=910 - sum(windows.values()))
    assert windows_of(admission)["b"] >= windows["b"]


def test_part_of_a_short_input_waits_for_the_faster_route() -> None:
    """Nobody knows the faster of two routes at the start; rows in a queue cannot move any more."""
    info = EngineInfo(kind="attach", model="m", max_running=8192, routes=("a", "b"))
    limits = [
        ConcurrencyLimits(info, QueueBand(100, 2000), 100, most=10**6, prompt_tokens=1000) for _ in range(2)
    ]
    loads = [
        SchedulerLoad(route, "loads", running, 0, 0.5, max_running=4096, route=route)
        for route, running in (("a", 1500), ("b", 500))
    ]
    for each, told in zip(limits, (loads, []), strict=True):
        each.begin(told, 0.0, unsent=4000)
    assert [windows_of(each) for each in limits] == [{"a": 1000, "b": 1000}, {"a": 2000, "b": 2000}]
    observe(limits[0], loads, {"a": 1000, "b": 1000}, 0.25, unsent=2000)
    assert windows_of(limits[0]) == {
        "a": 1500 + 66,
        "b": 1000,
    }  # what it runs and 8 passes of prompts, or half


def test_a_long_queue_gets_none_of_the_last_rows() -> None:
    """At the end of the input the replica that was given most waits until the others have caught up."""
    admission = limits_of("a", "b")
    first = [signal("a", 0), signal("b", 0)]
    admission.begin(first, 0.0, unsent=100_000)
    windows = windows_of(admission)
    assert windows["a"] == windows["b"] == 356
    assert observe(admission, first, {"a": 356, "b": 100}, 0.0, unsent=50_000) == []
    told = observe(admission, first, {"a": 356, "b": 100}, 0.1, unsent=45)
    moves = [(d.scheduler, d.new, d.state) for d in told if isinstance(d, Decision)]
    assert moves == [("a", 251, "share"), ("b", 251, "share")]
    assert "501 remaining rows" in told[0].reason
    assert windows_of(admission) == {"a": 251, "b": 251}
    assert observe(admission, first, {"a": 356, "b": 100}, 0.2, unsent=40) == []  # told once


def test_a_retraction_counts_for_its_rank() -> None:
    """One of four DP ranks retracts requests: only its load tells it, and it alone counts."""
    admission = limits_of("r")
    workers = [replace(signal("r", 100), scheduler=f"w{n}", retracted=0) for n in range(4)]
    admission.begin(workers, 0.0, unsent=10**6)
    answer = Completion([], [], [8], 8, 0, retractions=1)
    for step in range(240):  # 20 retractions in a minute
        polled = [replace(worker, taken_at=float(step)) for worker in workers]
        if step % 12 == 0:
            polled[2] = replace(polled[2], retracted=1)
        observe(admission, polled, {"r": 1424}, step / 4, unsent=10**6)
        if step % 12 == 6:
            admission.routes[0].ended.add(answer)
    overfull = [name for name, limit in admission.schedulers.items() if limit.controller.is_overfull]
    assert overfull == ["w2"]


# What a forward pass holds, and the window and the queue that follow from it


URL = "http://server"
HALF_MINUTE = 120


class Server:
    """A scheduler that computes a pass at a time, and tells its load after each, as SGLang does."""

    def __init__(self, tokens: int, max_running: int, *, passes_a_sample: int) -> None:
        self.passes = ForwardPasses(tokens)
        self.max_running, self.passes_a_sample = max_running, passes_a_sample
        info = EngineInfo("attach", "m", routes=(URL,), prefill_tokens=tokens)
        self.limits = ConcurrencyLimits(info, QueueBand(100, 2000), 256, most=10**5, passes=self.passes)
        self.now, self.waiting, self.starved = 0.0, 0, 0
        self.limits.begin([self._load()], self.now, unsent=10**6)

    def runs(self, samples: int, row_tokens: int) -> None:
        """Let rows come and go; what ended in one pass travels during the next one."""
        travelling = 0
        for _ in range(samples):
            for _ in range(self.passes_a_sample):
                window = self.limits.current_window
                self.waiting += max(0, window - self.waiting - travelling)
                self.waiting = self.waiting or window  # without work the scheduler waits until they are back
                pass_rows = min(self.max_running, max(1, self.passes.tokens // row_tokens))
                self.starved += self.waiting < pass_rows
                travelling = min(self.waiting, pass_rows)
                self.waiting -= travelling
                for _ in range(travelling):
                    self.passes.record_sent(row_tokens)
                    self.limits.routes[0].ended.add(None)
                self.now += 0.25 / self.passes_a_sample
            load = self._load()
            observe(self.limits, [load], {URL: max(window, self.waiting)}, self.now, unsent=10**6)

    def _load(self) -> SchedulerLoad:
        return SchedulerLoad(
            URL, "loads", 0, self.waiting, 0.0, 0, 10**5, self.max_running, URL, taken_at=self.now
        )


@pytest.mark.parametrize(
    ("tokens", "max_running", "row_tokens", "passes_a_sample"),
    [(16_384, 32, 100, 1), (16_384, 4096, 16, 1), (8192, 4096, 500, 10)],
)
def test_the_window_neither_starves_nor_piles_up(
    tokens: int, max_running: int, row_tokens: int, passes_a_sample: int
) -> None:
    """After a short start each pass is full, a few more wait, and the server is never said to hold back."""
    server = Server(tokens, max_running, passes_a_sample=passes_a_sample)
    server.runs(40, row_tokens)
    server.starved = 0
    server.runs(HALF_MINUTE, row_tokens)
    rows = server.passes.rows(max_running)
    assert server.starved == 0
    assert 2 * rows <= server.limits.current_window <= 10 * rows
    assert server.limits.schedulers[URL].controller.corner is None


def test_a_worker_that_a_gateway_has_lost_holds_no_window() -> None:
    """Its window goes once it is silent, as long as another worker of the route reports."""
    limits = limits_of("gateway")
    one, two = (replace(signal("gateway", 10), scheduler=f"gateway#{n}", running=64) for n in (1, 2))
    limits.begin([one, two], 0.0, unsent=10**6)
    limits.observe([one, two], 0.0, unsent=10**6)
    both = windows_of(limits)["gateway"]
    for second in range(1, 12):
        limits.observe([replace(one, taken_at=float(second))], float(second), unsent=10**6)
    assert [scheduler.name for scheduler in limits.routes[0].schedulers] == ["gateway#1"]
    assert windows_of(limits)["gateway"] < both
