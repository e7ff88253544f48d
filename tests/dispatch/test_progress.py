"""The time that is left is smooth however rows end, and a run that stops says so."""

import itertools

import pytest

from batchrunner.dispatch.progress import TimeLeft


def test_the_time_left_of_a_slow_engine() -> None:
    """Rows that end sixteen at once, every 20 s: it is near the truth from the start, and counts down."""
    time_left, rows, burst, pause_s = TimeLeft(0.0), 400, 16, 20
    told: dict[int, float] = {}
    for now in range(1, rows // burst * pause_s):
        done = now // pause_s * burst
        left_s = time_left.update(now, done, min(burst, rows - done), rows - done)
        assert (left_s is None) == (now < pause_s)
        if left_s is not None:
            told[now] = left_s
    assert all(abs(now + left_s - 500) < 1 for now, left_s in told.items())
    assert all(later <= earlier for earlier, later in itertools.pairwise(told.values()))


def test_nothing_is_told_that_is_not_known() -> None:
    """The first rows to end are the quick ones; and a row that is overdue ends at an unknown time."""
    time_left = TimeLeft(0.0)
    assert time_left.update(1.0, 0, 40, 40) is None
    assert time_left.update(2.0, 3, 37, 37) is None
    assert time_left.update(20.0, 30, 10, 10) is not None
    assert time_left.update(90.0, 30, 10, 10) is None
    assert time_left.update(91.0, 40, 0, 0) == 0.0


def test_an_estimate_tells_the_time_left_at_once() -> None:
    """From the first second it is what was estimated, and then what rows show, also where that differs."""
    time_left = TimeLeft(0.0, row_s=2.0)
    assert time_left.update(1.0, 0, 40, 1000) == 1999.0
    assert time_left.update(30.0, 4, 40, 996) == 1970.0
    told = [time_left.update(30.0 + 3.0 * done, 4 + done, 40, 996 - done) for done in range(1, 400)]
    assert all(left_s is not None for left_s in told)
    assert told[-1] == pytest.approx(3.0 * 597, rel=0.1)
