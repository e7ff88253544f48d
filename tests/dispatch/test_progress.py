"""The time that is left is smooth however rows end, and a run that stops says so."""

import bisect
import itertools
import random

import pytest

from batchrunner.dispatch.progress import TimeLeft
from batchrunner.dispatch.rollouts import work_done


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
    assert [time_left.update(now, 30, 10, 10) for now in (40.0, 60.0, 80.0, 90.0)][-1] is None
    assert time_left.update(91.0, 40, 0, 0) == 0.0


def test_an_estimate_tells_the_time_left_at_once() -> None:
    """From the first second it is what was estimated, and then what rows show, also where that differs."""
    time_left = TimeLeft(0.0, row_s=2.0)
    assert time_left.update(1.0, 0, 40, 1000) == 1999.0
    assert time_left.update(30.0, 4, 40, 996) == 1970.0
    told = [time_left.update(30.0 + 3.0 * done, 4 + done, 40, 996 - done) for done in range(1, 400)]
    assert all(left_s is not None for left_s in told)
    assert told[-1] == pytest.approx(3.0 * 597, rel=0.1)


@pytest.mark.parametrize("in_flight", [1, 16, 1000])
@pytest.mark.parametrize("factor", [0.01, 0.4, 2.5, 100])
def test_an_estimate_that_rows_contradict(in_flight: int, factor: float) -> None:
    """After a tenth of the rows, and twice those in flight, the pace of the rows counts alone."""
    rows, row_s = 10_000, 0.1
    time_left = TimeLeft(0.0, row_s=row_s * factor)
    for done in range(max(rows // 10, 2 * in_flight)):
        time_left.update(row_s * done, done, in_flight, rows - done)
    assert time_left.update(row_s * (done + 1), done + 1, in_flight, rows - done - 1) == pytest.approx(
        row_s * (rows - done - 1), rel=0.01
    )


def test_an_estimate_while_no_row_ends() -> None:
    """Nobody knows the time left of rows that all take far longer than estimated, until some end."""
    time_left = TimeLeft(0.0, row_s=0.01)
    assert time_left.update(30.0, 0, 0, 100_000) == 1000.0  # input is still read
    assert time_left.update(31.0, 0, 50, 100_000) == 999.0
    assert [time_left.update(now, 0, 50, 100_000) for now in (50.0, 70.0, 90.0, 110.0)][2:] == [None, None]
    assert time_left.update(130.0, 50, 50, 99_950) == pytest.approx(100 / 50 * 99_950)


def test_an_estimate_that_rows_confirm() -> None:
    """Rows of different lengths that all begin at once are no contradiction: it counts down evenly."""
    lengths = itertools.cycle([2.0, 60.0, 20.0, 100.0, 38.0, 80.0])  # of 50 s in the mean
    in_flight, rows, row_s = 100, 3000, 0.5
    time_left = TimeLeft(0.0, row_s=row_s)
    ends = sorted(next(lengths) for _ in range(in_flight))
    for done in range(1, rows // 2):
        now = ends.pop(0)
        bisect.insort(ends, now + next(lengths))
        left_s = time_left.update(now, done, in_flight, rows - done)
        assert left_s is not None
        assert now + left_s == pytest.approx(row_s * rows, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_the_time_left_of_a_long_run_with_an_uneven_pace(seed: int) -> None:
    """From a tenth of the run on 90 % of the lines are within 15 %, and no line doubles the one before."""
    rng, rows, in_flight = random.Random(seed), 40_000_000, 400
    time_left, done, now = TimeLeft(0.0), 0, 0.0
    lines: list[tuple[float, int, float]] = []  # the time, the ended rows and the time left
    while done < rows:
        now += 5
        rate = 0 if rng.random() < 0.05 else 8000 * rng.lognormvariate(0, 0.5)  # some pauses are stalls
        done = min(rows, done + round(5 * rate))
        left_s = time_left.update(now, done, min(in_flight, rows - done), rows - done)
        if left_s is not None:
            lines.append((now, done, left_s))
    judged = [(left_s, now - at) for at, ended, left_s in lines if rows // 10 <= ended < rows * 0.98]
    near = [abs(left_s - true_s) <= 0.15 * true_s for left_s, true_s in judged]
    assert sum(near) >= 0.9 * len(near)
    shown = [left_s for at, ended, left_s in lines if ended >= rows // 100 and left_s > 10]
    assert all(later < 2 * earlier for earlier, later in itertools.pairwise(shown))


def test_the_time_left_stands_still_while_no_server_is_up() -> None:
    """A restart of the engine takes 300 s: the time left waits, and is right as soon as rows end again."""
    time_left = TimeLeft(0.0)
    for now in range(1, 401):
        before = time_left.update(float(now), now, 20, 1000 - now)
    assert before == 600.0
    for now in range(401, 701):
        time_left.stand_still(float(now))
        assert time_left.update(float(now), 400, 20, 600) == before
    for now in range(701, 1201):
        left_s = time_left.update(float(now), now - 300, 20, 1300 - now)
        assert left_s == pytest.approx(1300 - now, abs=1)


@pytest.mark.parametrize("pause_s", [60, 3600])
def test_the_time_left_after_the_process_was_stopped(pause_s: int) -> None:
    """Ctrl-Z, and `fg` an hour later: rows go on at their pace, so the time left is what it was."""
    time_left = TimeLeft(0.0)
    for now in range(1, 401):
        before = time_left.update(float(now), now, 20, 1000 - now)
    assert before == 600.0
    # The answers of the rows in flight have come meanwhile.
    for done in range(420, 1001):
        left_s = time_left.update(float(done - 20 + pause_s), done, 20, 1000 - done)
        assert left_s == pytest.approx(1000 - done, abs=1)


def test_the_time_left_after_a_stop_before_the_first_answer() -> None:
    """The rows that were in flight end at once after the stop: nobody knows how long a row takes yet."""
    time_left = TimeLeft(0.0)
    assert time_left.update(1.0, 0, 20, 1000) is None
    assert time_left.update(3601.0, 20, 20, 980) is None
    assert time_left.update(3621.0, 40, 20, 960) == pytest.approx(960, rel=0.1)


def lines_of_rollouts(*, counts_open_rows: bool) -> list[tuple[float, float]]:
    """Run rollouts of three requests, 16 answers a second; return the time left and the true one.

    Now 100 and now 300 rows are open. While further rows are opened, few rows end.
    """
    rng, time_left = random.Random(3), TimeLeft(0.0)
    rows, answers_a_row, answers_per_s = 4000, 3, 16
    end_s = rows * answers_a_row / answers_per_s
    answered: list[int] = []  # of each open row
    opened, lines = 0, list[tuple[float, float]]()
    for second in range(int(end_s)):
        while opened < rows and len(answered) < (100 if second % 120 < 60 else 300):
            answered.append(0)
            opened += 1
        for _ in range(answers_per_s):
            row = rng.randrange(len(answered))
            answered[row] += 1
            if answered[row] == answers_a_row:
                answered.pop(row)
        done = opened - len(answered)
        begun = work_done(answered, answers_a_row) if done and counts_open_rows else 0.0
        left_s = time_left.update(second + 1.0, done + begun, 80, rows - done - begun)
        if end_s / 10 < second < 0.95 * end_s:
            lines.append((left_s or 0.0, end_s - second - 1))
    return lines


def test_the_time_left_of_rollouts_that_end_in_waves() -> None:
    """The answers of open rollouts count, so that the time left is right also while few rows end."""
    near = {}
    for counts_open_rows in (True, False):
        lines = lines_of_rollouts(counts_open_rows=counts_open_rows)
        near[counts_open_rows] = sum(abs(left_s - true_s) <= 0.15 * true_s for left_s, true_s in lines)
    assert near[True] >= 0.9 * len(lines)
    assert near[False] < near[True]
