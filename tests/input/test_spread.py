"""Samples that are spread over an input."""

import pytest

from batchrunner.input.spread import spread_blocks


@pytest.mark.parametrize(
    ("total", "blocks", "size", "expected"),
    [
        (10, 3, 2, [(0, 2), (4, 6), (8, 10)]),
        (10, 1, 4, [(0, 4)]),
        (6, 3, 2, [(0, 2), (2, 4), (4, 6)]),
        (5, 3, 3, [(0, 3), (1, 4), (2, 5)]),
    ],
)
def test_blocks_reach_from_the_first_to_the_last_row(
    total: int, blocks: int, size: int, expected: list[tuple[int, int]]
) -> None:
    """Blocks begin at the first row, end with the last one, and lie evenly between."""
    found = spread_blocks(total, blocks=blocks, size=size)
    assert [(block.start, block.stop) for block in found] == expected
