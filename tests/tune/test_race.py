"""Which of two settings is faster."""

from __future__ import annotations

import math

import pytest

from batchrunner.tune.race import _quantile as quantile
from batchrunner.tune.race import compare, trial_noise


@pytest.mark.parametrize("freedom", [*range(4, 15), 20, 40])
def test_the_interval_is_students(freedom: int) -> None:
    """One-sided 95 %, by the density's own integral; from 14 degrees of freedom on a little more."""
    step = quantile(freedom) / 1000
    scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    density = [(1 + ((at + 0.5) * step) ** 2 / freedom) ** (-(freedom + 1) / 2) for at in range(1000)]
    covered = 0.5 + scale * step * sum(density)
    assert 0.9499 < covered < (0.9501 if freedom < 15 else 0.9575)


def test_more_output_a_pass_settles_a_near_tie() -> None:
    """Where the scheduler's own count says faster, and the times agree, no further trial is spent on it."""
    spread = trial_noise([])
    assert compare([103], [100], spread)[0] == "again"
    assert compare([103], [100], spread, more_per_pass=True)[0] == "faster"
    assert compare([80], [100], spread, more_per_pass=True)[0] == "no faster"
