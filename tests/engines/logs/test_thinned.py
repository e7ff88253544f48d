"""A list of bounded length that stands for a series of any length."""

from __future__ import annotations

from batchrunner.engines.logs.series import Thinned


def test_what_is_kept_is_spread_evenly() -> None:
    """Nothing is dropped of a short series; of a long one, what is left is evenly far apart."""
    short = Thinned[int](8)
    for item in range(8):
        short.add(item)
    assert list(short) == list(range(8))
    assert short.every == 1
    long = Thinned[int](8)
    for item in range(1000):
        long.add(item)
    kept = list(long)
    assert len(kept) == len(long) <= 8
    assert kept == list(range(0, 1000, long.every))
    assert long.counted == 1000
