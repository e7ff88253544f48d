"""Shards part the rows of an input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.runner.shard import Shard
from tests.conftest import batchrun, job_of, write_job

if TYPE_CHECKING:
    from pathlib import Path


@given(
    groups=st.lists(st.integers(1, 5000), min_size=1, max_size=50),
    count=st.integers(1, 70),
)
def test_shards_part_the_rows(groups: list[int], count: int) -> None:
    """They are contiguous, miss nothing, overlap nowhere, and are even to a tenth of a shard at each end."""
    ends = [sum(groups[: n + 1]) for n in range(len(groups))]
    total = ends[-1]
    parts = [Shard(index, count).rows(total, ends) for index in range(count)]
    assert [row for part in parts for row in part] == list(range(total))
    assert all(abs(len(part) - total / count) <= 0.2 * total / count + 1 for part in parts)


def test_shards_follow_row_groups() -> None:
    """Where the row groups are near to even shares, none is read by two tasks."""
    ends = [1000, 2000, 3000, 4000]
    assert [Shard(i, 2).rows(4000, ends) for i in range(2)] == [range(2000), range(2000, 4000)]
    assert Shard(0, 2).rows(4100, [1000, 2000, 3000, 4100]) == range(2000)
    assert Shard(0, 3).rows(4000, ends) == range(1333)  # 1000 would be too uneven


@pytest.mark.parametrize("text", ["3", "3/3", "a/b", "-1/3", "1/0"])
def test_wrong_shards(tmp_path: Path, text: str) -> None:
    """What is no share is refused in one line."""
    file = write_job(job_of(tmp_path), tmp_path)
    refused = batchrun(file, f"--shard={text}")
    assert refused.exit_code == 2
    assert "write it as i/n" in refused.stderr
