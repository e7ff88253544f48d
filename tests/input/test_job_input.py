"""Rows are cut into leases."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from batchrunner.input.job_input import MOST_LEASE_ROWS, cut_into_leases


@given(groups=st.lists(st.integers(1, 30_000), min_size=1, max_size=30), data=st.data())
def test_leases_part_the_rows(groups: list[int], data: st.DataObject) -> None:
    """They cover the input without gaps, and none is larger than allowed."""
    ends = [sum(groups[: n + 1]) for n in range(len(groups))]
    rows = BitMap64()
    for end in data.draw(st.lists(st.sampled_from(ends), max_size=5)):
        rows.add_range(max(0, end - data.draw(st.integers(1, 9000))), end)
    cuts = cut_into_leases(rows, ends)
    assert (cuts[0], cuts[-1]) == (0, ends[-1])
    assert cuts == sorted(set(cuts))
    counts = [rows.range_cardinality(start, stop) for start, stop in pairwise(cuts)]
    assert sum(counts) == len(rows)
    assert max(counts) <= MOST_LEASE_ROWS


def test_leases_follow_row_groups() -> None:
    """Small row groups are put together, large ones parted evenly, and none is needlessly read by two."""
    rows = BitMap64()
    rows.add_range(0, 64_000)
    assert cut_into_leases(rows, range(100, 64_001, 100))[:4] == [0, 100, 200, 300]
    assert cut_into_leases(rows, range(10, 64_001, 10))[:3] == [0, 120, 240]
    assert cut_into_leases(rows, [300, 64_000])[:4] == [0, 100, 200, 300]
