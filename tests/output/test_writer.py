"""How often a run writes a part."""

import pytest

from batchrunner.output.writer import part_interval_s


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [(0, 30), (600, 30), (1200, 60), (7200, 360), (36_000, 1800), (604_800, 1800)],
)
def test_parts_come_later_in_an_older_run(age_s: float, expected: float) -> None:
    """After 30 s at first, then after a twentieth of the run's time, and never after more than 30 minutes."""
    assert part_interval_s(age_s, 30.0) == pytest.approx(expected)


def test_a_slow_run_of_a_week_writes_some_hundreds_of_parts() -> None:
    """A part every 30 s would be 20,160 files for each worker."""
    age_s, parts = 0.0, 0
    while age_s < 7 * 24 * 3600:
        age_s += part_interval_s(age_s, 30.0)
        parts += 1
    assert 300 < parts < 500
