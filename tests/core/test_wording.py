"""Counts in words."""

from __future__ import annotations

import pytest

from batchrunner.core.wording import counted


@pytest.mark.parametrize(
    ("number", "spec", "said"),
    [(0, "", "0 rows"), (1, "", "1 row"), (2, "", "2 rows"), (1, ",", "1 row"), (12_000, ",", "12,000 rows")],
)
def test_only_one_has_no_s(number: int, spec: str, said: str) -> None:
    """None is as many as several."""
    assert counted(number, "row", spec) == said
