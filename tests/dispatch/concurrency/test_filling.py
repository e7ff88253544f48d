"""Token usage in the loop, in virtual time: the cheap part of benchmarks/control_simulated.py."""

from __future__ import annotations

import pytest

from batchrunner.dispatch.concurrency.filling import Filling
from batchrunner.dispatch.concurrency.reading import Reading
from benchmarks.control_simulated import Case, run


@pytest.mark.parametrize("late_s", [0.1, 4.0])
def test_rows_that_grow_together_are_not_retracted_together(late_s: float) -> None:
    """At most half of the best fixed window's retractions, at no less of its speed; no starved scheduler.

    Rows of 64 prompt tokens and 600 to 1000 new ones grow together, and do not fit together. The best fixed
    window of this workload is that of benchmarks/results/control_simulated.json.
    """
    best = run(Case("short/long", 1, 6000, 1024, 0.0))
    found = run(Case("short/long", 1, 6000, None, late_s))
    assert found["tokens_per_s"] >= 0.99 * best["tokens_per_s"]
    assert found["retractions"] <= best["retractions"] / 2
    assert found["longest_starved_s"] <= late_s + 1


def test_the_first_rows_to_end_do_not_slow_down_the_next() -> None:
    """None of the first rows ends for a while: their life looks endless, but not for long."""
    filling, life_s, running, gap_s = Filling(), 28.0, 500, 0.25
    for step in range(int(2.5 * life_s / gap_s)):
        rate = running / life_s if step * gap_s > 0.7 * life_s else 0.0
        seen = Reading(running, 0, running, rate, 0.0, usage=0.85, fits=1000.0)
        filling.sample(step * gap_s, seen)
    most = filling.most(seen)
    assert most is not None
    needed = running / life_s * gap_s
    assert needed <= most - running <= 4 * needed


@pytest.mark.parametrize("workload", ["KV-starved", "heavy tail", "long/short"])
def test_where_nothing_is_retracted_nothing_is_held(workload: str) -> None:
    """The limit by tokens costs no speed where the pool is full, but rows do not grow out of it."""
    found = run(Case(workload, 1, 2000, None, 0.1))
    best = run(Case(workload, 1, 2000, 4096, 0.0))
    assert found["tokens_per_s"] >= 0.98 * best["tokens_per_s"]
