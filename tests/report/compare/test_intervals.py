"""The interval of a ratio holds the true one as often as it says."""

from __future__ import annotations

import random

import pytest

from batchrunner.report.compare.intervals import LEAST_BATCHES, MOST_BATCHES, batches_of, ratio_interval


@pytest.mark.parametrize(("base", "mine", "noise"), [(5, 5, 0.05), (20, 20, 0.1), (20, 8, 0.2)])
def test_the_interval_holds_the_ratio_19_times_of_20(base: int, mine: int, noise: float) -> None:
    """The first run does 1,000 tokens/s and the other 1,300, with this noise in each stretch of time."""
    dice, held = random.Random(7), 0
    for _ in range(2000):
        before = [dice.gauss(1000, 1000 * noise) for _ in range(base)]
        after = [dice.gauss(1300, 1300 * noise) for _ in range(mine)]
        found = ratio_interval(after, before)
        assert found is not None
        assert found.low <= found.ratio <= found.high
        held += found.low <= 1.3 <= found.high
    assert 0.93 <= held / 2000 <= 0.975


def test_runs_without_noise() -> None:
    """Rates that never change leave no doubt."""
    assert ratio_interval([200.0] * 5, [100.0] * 5) == (2, 2, 2)


@pytest.mark.parametrize("rates", [[100.0] * (LEAST_BATCHES - 1), [], [0.0] * 10])
def test_no_interval(rates: list[float]) -> None:
    """A run with too few stretches has none, in either place; nor has one that did nothing."""
    assert ratio_interval(rates, [100.0] * 10) is None
    assert ratio_interval([100.0] * 10, rates) is None


@pytest.mark.parametrize(
    ("length_s", "row_s", "count"),
    [(1000, 1, MOST_BATCHES), (100, 5, 10), (100, 10.1, 0), (4, 0.1, 0), (8, 0.1, 8), (0, 0, 0)],
)
def test_a_stretch_is_longer_than_a_row(length_s: float, row_s: float, count: int) -> None:
    """Rows that begin together end together: within two rows' time rates say the same thing twice."""
    assert batches_of(length_s, row_s, 1.0) == count
