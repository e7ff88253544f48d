"""A simulated scheduler on a virtual clock."""

from __future__ import annotations

import random

import pytest

from batchrunner.engines.simulation.replica import (
    H100_8B,
    PARTS,
    CostModel,
    PassWork,
    Replica,
    fit_spans,
)
from batchrunner.engines.simulation.scheduler import SchedulerConfig, SimulatedRequest

UNIT = CostModel(1.0, 0.0, 0.0, 0.0)
"""Every pass takes a second."""


def replica(max_running: int = 256) -> Replica:
    return Replica(SchedulerConfig(max_running, 100_000), UNIT)


def test_the_clock_stops_where_it_is_told() -> None:
    """A pass that goes on beyond the moment brings its ends once the clock is there."""
    server = replica()
    server.scheduler.submit(SimulatedRequest(10, 3))
    assert server.advance(0.5) == []
    server.scheduler.submit(SimulatedRequest(10, 1))  # is not in the pass under way
    assert [ended.at_s for ended in server.advance(2.5)] == [2.0]
    assert server.advance(3.9) == []
    assert [ended.at_s for ended in server.advance(100.0)] == [4.0]
    server.scheduler.submit(SimulatedRequest(10, 1))
    assert [ended.at_s for ended in server.advance(101.0)] == [101.0]


def test_small_and_large_ticks_agree() -> None:
    """However the caller moves the clock, the same samples end at the same moments."""

    def ends(tick_s: float) -> list[tuple[float, int]]:
        made = random.Random(4)
        server = Replica(SchedulerConfig(16, 5000), H100_8B)
        for number in range(100):
            server.scheduler.submit(
                SimulatedRequest(made.randint(5, 200), made.randint(1, 200), payload=number)
            )
        found: list[tuple[float, int]] = []
        now_s = 0.0
        while len(found) < 100:
            now_s += tick_s
            found += [(round(ended.at_s, 9), ended.sample.payload) for ended in server.advance(now_s)]
        return found

    assert ends(0.004) == ends(0.1) == ends(1000.0)


def test_gauges_are_as_stale_as_the_real_ones() -> None:
    """Written at each prefill, without those that are prefilled, and then every so many decode passes."""
    server, interval = replica(max_running=1), 15
    for _ in range(3):
        server.scheduler.submit(SimulatedRequest(10, 100))
    seen = {}
    for now_s in range(1, 100):
        server.advance(float(now_s))
        seen[now_s] = (server.load.taken_at, server.load.running, server.load.queue)
    assert seen[1] == (1.0, 0, 2)
    assert seen[interval] == seen[1]
    assert seen[interval + 1] == (interval + 1.0, 1, 2)
    assert seen[2 * interval] == seen[interval + 1]
    assert (seen[99][0], server.load.used_tokens) == (91.0, 10 + 90)
    server.advance(1000.0)
    assert (server.load.running, server.load.queue) == (0, 0)


def test_a_fit_tells_the_time_of_like_work() -> None:
    """Stretches of passes of a known model say how long others take; too few say nothing."""
    made = random.Random(2)
    works = [
        PassWork(
            decodes=made.randint(10, 100),
            prefills=made.randint(0, 20),
            samples=made.randint(1_000, 30_000),
            kv_tokens=made.randint(10**5, 10**8),
            prefill_tokens=made.randint(0, 10**5),
        )
        for _ in range(60)
    ]
    spans = [(work, H100_8B.work_s(work)) for work in works]
    found = fit_spans(spans[:40])
    assert found is not None
    for work, seconds in spans[40:]:
        assert found.work_s(work) == pytest.approx(seconds, rel=0.1)
    assert fit_spans(spans[: PARTS - 1]) is None
