"""Spreads samples evenly over an input, for example blocks of neighbouring rows or blocks of a file."""

GOLDEN = 0.618033988749895
"""Fractional part of the golden ratio. Its multiples modulo 1 are spread evenly, however many there are."""


def spread_blocks(total: int, *, blocks: int, size: int) -> list[range]:
    """Return the positions of blocks that are spread evenly over `total` positions.

    `blocks` is the number of blocks, and `size` the number of positions in each block. The first block begins
    at the first position, and the last block ends at the last position. Blocks overlap if together they have
    more than `total` positions.
    """
    # The number of gaps is at least 1, because it is a divisor even for a single block.
    gaps = max(1, blocks - 1)
    begins = [(total - size) * number // gaps for number in range(blocks)]
    return [range(begin, begin + size) for begin in begins]
