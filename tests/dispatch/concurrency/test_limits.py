"""What is left is shared out: by speed, all of it, and not to a route that has fallen silent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.dispatch.concurrency.limits import (
    ENOUGH_ROWS,
    PRIOR_ROWS,
    ConcurrencyLimits,
    RowTokens,
    Shares,
)

ROUTES = ("a", "b", "c")


@given(
    left=st.integers(1, 10**9),
    ended=st.lists(st.sampled_from(ROUTES), max_size=50),
    silent=st.sets(st.sampled_from(ROUTES)),
    now=st.floats(0, 1e9),
    later_s=st.floats(0, 1e9),
)
def test_no_row_is_kept_back(
    left: int, ended: list[str], silent: set[str], now: float, later_s: float
) -> None:
    """Whoever is silent, and for however long, all that is left is shared out, and every route has a row.

    The clock may be the machine's uptime, of a day or a year.
    """
    shares = Shares(ROUTES)
    shares.of(left, now)
    for route in ended:
        shares.ended(route)
    found = shares.of(left, now + later_s, silent)
    assert sum(found.values()) >= left
    assert min(found.values()) >= 1
    if silent != set(ROUTES):
        assert all(found[route] == 1 for route in silent)


def test_shares_follow_the_speed() -> None:
    """A replica ten times as fast gets ten times as much; one that slows down gets less by and by."""
    shares = Shares(("fast", "slow"))
    assert shares.of(1000, 0.0) == {"fast": 500, "slow": 500}
    for _ in range(round(100 * PRIOR_ROWS)):
        shares.ended("fast")
    for _ in range(round(9 * PRIOR_ROWS)):
        shares.ended("slow")
    assert shares.of(1000, 1.0)["fast"] > 890
    for _ in range(round(100 * PRIOR_ROWS)):
        shares.ended("slow")
    assert 430 < shares.of(1000, 121.0)["fast"] < 570


def signal(route: str, queue: int) -> SchedulerLoad:
    return SchedulerLoad(route, "loads", 256, queue, 0.5, 1000, 2000, 256, route, None)


def test_a_long_queue_gets_none_of_the_last_rows() -> None:
    """At the end of the input the replica that was given most waits until the others have caught up."""
    info = EngineInfo(kind="attach", model="m", routes=("a", "b"))
    admission = ConcurrencyLimits(info, QueueBand(100, 2000), 100, most=10**6)
    first = [signal("a", 0), signal("b", 0)]
    admission.begin(first, 0.0, unsent=100_000)
    windows = admission.windows
    assert windows["a"] == windows["b"] == 356
    assert admission.observe(first, {"a": 356, "b": 100}, 0.0, unsent=50_000) == []
    told = admission.observe(first, {"a": 356, "b": 100}, 0.1, unsent=45)
    assert [(d.scheduler, d.new, d.state) for d in told] == [("a", 251, "share"), ("b", 251, "share")]
    assert "501 rows that are left" in told[0].reason
    assert admission.windows == {"a": 251, "b": 251}
    assert admission.observe(first, {"a": 356, "b": 100}, 0.2, unsent=40) == []  # told once


def test_rows_that_come_back_end_the_tail() -> None:
    """When nothing is left to send the windows rest; a row that waits for another try wakes them."""
    info = EngineInfo(kind="attach", model="m", routes=("a",))
    admission = ConcurrencyLimits(info, QueueBand(100, 2000), 100, most=10**6)
    admission.begin([signal("a", 0)], 0.0, unsent=10_000)
    admission.observe([signal("a", 300)], {"a": 500}, 1.0, unsent=0)
    assert admission.states == {"a": "tail"}
    admission.observe([signal("a", 301)], {"a": 499}, 2.0, unsent=1)
    assert admission.states == {"a": "steady"}


@pytest.mark.parametrize("silence", ["the tail", "no poll"])
def test_schedulers_of_one_route_after_a_silence(silence: str) -> None:
    """DP ranks, or a gateway's replicas: those that speak again are not gone, one that is silent is."""
    info = EngineInfo(kind="attach", model="m", routes=("r",))
    admission = ConcurrencyLimits(info, QueueBand(100, 2000), 100, most=10**6)
    ranks = [replace(signal("r", 300), scheduler=f"r#dp{n}") for n in range(3)]
    admission.begin(ranks, 0.0, unsent=100)
    for second in range(1, 31):  # the last rows are long, or the server is away and comes back
        polled = ranks[:2] if silence == "the tail" else []
        admission.observe(polled, {"r": 20}, float(second), unsent=0 if silence == "the tail" else 50)
    told = admission.observe(ranks[:2], {"r": 19}, 31.0, unsent=1)
    assert [(d.scheduler, d.state) for d in told if d.state == "gone"] == [("r#dp2", "gone")]
    assert set(admission.states) == {"r#dp0", "r#dp1"}


def test_long_rows_count_for_the_time_that_they_run() -> None:
    """Rows with 10 and 1000 tokens come in equal number: nearly all that run at one moment are long ones.

    Few rows tell nothing, nor do rows without output.
    """
    tokens, empty = RowTokens(), RowTokens()
    for index in range(2 * ENOUGH_ROWS):
        assert (tokens.held is None) == (index < ENOUGH_ROWS)
        tokens.add(0, 1000 if index % 2 else 10)
        empty.add(64, 0)
    assert empty.held is None
    assert tokens.held == pytest.approx((1000**2 + 10**2) / (2 * 1010), rel=0.01)


def test_rows_that_end_in_waves_are_averaged_over_a_whole_wave() -> None:
    """The short rows of 64 schedulers end first, 20,000 of them, and then the long ones: they count alike."""
    tokens = RowTokens()
    tokens.come_from(64)
    for output in (600, 1000) * 4:
        for _ in range(20_000):
            tokens.add(0, output)
    wave = (600**2 + 1000**2) / (2 * 1600)
    assert tokens.held == pytest.approx(wave, rel=0.05)
