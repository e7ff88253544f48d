"""The size of a bundle follows the rows that end together."""

import pytest

from batchrunner.dispatch.bundles import (
    FIRST_ROWS,
    MOST_ROWS,
    SHARE,
    BundleSize,
)

FILL_S = 0.015
MANY = 10**6


def size_after(*ends: float) -> BundleSize:
    size = BundleSize(FILL_S)
    for end in ends:
        size.record_end(1000.0 + end)
    return size


@pytest.mark.parametrize(
    ("rows_per_s", "rows"), [(0.5, 1), (20, 1), (300, 5), (1000, 16), (2000, 31), (20_000, 64)]
)
def test_the_size_is_what_ends_while_it_waits(rows_per_s: float, rows: int) -> None:
    """Rows that take seconds each go alone; at 1,000 rows/s 15 more end within 15 ms of a row."""
    found = size_after(*(row / rows_per_s for row in range(int(4 * rows_per_s) + 2))).rows(MANY)
    assert abs(found - rows) <= 1
    assert found <= MOST_ROWS


def test_the_size_follows_the_rows() -> None:
    """Rows go one by one at first, unless their answers are short, and again where they become slow.

    8 rows that end together every 2 seconds are no work for a front process either; a fixed size stays.
    """
    assert BundleSize(FILL_S).rows(MANY) == 1
    short = BundleSize(FILL_S, short=True)
    assert short.rows(MANY) == FIRST_ROWS
    fast, fixed = size_after(*(row / 4000 for row in range(4000))), BundleSize(FILL_S, 7)
    for second in range(1002, 1010):
        for size in (short, fast, fixed):
            size.record_end(float(second))
    assert [size.rows(MANY) for size in (short, fast, fixed)] == [1, 1, 7]
    assert size_after(*(2.0 * wave for wave in range(9) for _ in range(8))).rows(MANY) == 1


def test_a_bundle_has_a_share_of_the_rows_in_flight() -> None:
    """A small window is not used up by one bundle, which would have to wait for its other rows."""
    size = size_after(*(row / 8000 for row in range(8000)))
    assert size.rows(MANY) == MOST_ROWS
    assert size.rows(8) == 8 // SHARE
    assert size.rows(3) <= 1
