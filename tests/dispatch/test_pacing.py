"""Which row goes next where prefixes are evicted soon, in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.order_simulated import Case, run

SMALL_POOL = 20_000
"""Tokens: less than what 128 rows of 284 tokens need, and two and a half prefill passes."""


@pytest.mark.parametrize("rows", [600, 6000])
def test_followers_find_their_prefix_in_a_small_pool(rows: int) -> None:
    """Rows of 224 prompt tokens, eight to a prefix of 200: hardly more is computed than must be.

    All of them are among the last rows of the input: their leaders do not all go ahead, since their prefixes
    would be evicted, and single misses do not widen the distance.
    """
    found = run(Case("small groups, short prompts", rows, SMALL_POOL, "runner", max_running=128))
    assert found["ratio_to_least"] < 1.1
    assert found["retractions"] == 0
