"""What a trial shows, and when it cannot win."""

from __future__ import annotations

import pytest

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.tune.measurement import TrialProgress, TrialWatch


def test_readings_of_several_schedulers_are_added() -> None:
    """With data parallelism running and queue are those of all ranks, token usage is their mean."""
    watch = TrialWatch()
    watch.row_ended(0, 0, 5)
    for at_s in range(30):
        ranks = [
            SchedulerLoad(f"#dp{rank}", "loads", 10 * rank, 3, 0.2 * rank, max_running=32) for rank in (1, 2)
        ]
        watch.record_load(float(at_s), ranks)
        for _ in range(10):
            watch.row_ended(0, 0, 5)
    signs = watch.result("measured", "", 30.0, 30.0).signs
    assert (signs.running, signs.queue, signs.max_running) == (30, 6, 64)
    assert signs.usage == pytest.approx(0.3)


def test_passes_are_those_of_the_tokens_counted() -> None:
    """A trial too short for steady time counts from its first row to its last: so does its log."""
    watch = TrialWatch()
    end = TrialProgress(20.0, 80, 16, 2000)
    for at_s, size in ((3.0, 300), (6.0, 600), (7.0, 700)):
        watch.row_ended(0, 0, 5)
        watch.record_load(at_s, [SchedulerLoad("0", "loads", 1, 3, 0.5)], size)
    assert watch.measured_span(end) == ((0.0, 0, 0, 0), end)
    watch.row_ended(0, 0, 5)
    watch.record_load(16.0, [SchedulerLoad("0", "loads", 1, 3, 0.5)], 1600)
    assert watch.measured_span(end) == ((3.0, 5, 1, 300), (16.0, 20, 4, 1600))
