"""The gain of a step of flag tuning, by the rates of the servers."""

from collections.abc import Sequence

import pytest

from batchrunner.tuning.adapt import gain_over_others


@pytest.mark.parametrize(
    ("ratios", "ratios_of_others", "gain"),
    [
        ([1.5, 1.4], [], 0.4),
        ([0.8, 0.7], [], -0.2),
        ([1.5, 0.9], [], 0.0),
        ([1.5, 1.5], [[1.5, 1.5], [1.5, 1.5]], 0.0),
        ([1.5, 1.5], [[1.0, 1.0], [1.5, 1.5]], 0.2),
        ([1.0, 1.0], [[0.5, 0.5]], 1.0),
    ],
)
def test_a_gain_is_what_both_rates_show_beyond_the_others(
    ratios: Sequence[float], ratios_of_others: Sequence[Sequence[float]], gain: float
) -> None:
    """The smaller of both rates counts; where one rises and the other falls, the gain is unclear."""
    assert gain_over_others(ratios, ratios_of_others) == pytest.approx(gain)
