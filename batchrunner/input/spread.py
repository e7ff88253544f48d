"""Spreads samples evenly over an input, such as blocks of rows or of bytes."""

GOLDEN = 0.618033988749895
"""Fractional part of the golden ratio. Any number of its multiples, modulo 1, are evenly spread."""


def spread_blocks(total: int, *, blocks: int, size: int) -> list[range]:
    """Return `blocks` ranges of `size` positions each, spread evenly over `total` positions.

    The first block begins at the first position, and the last block ends at the last. Blocks overlap if
    together they have more than `total` positions.
    """
    # A single block has no gap, but a divisor must not be 0.
    gaps = max(1, blocks - 1)
    begins = [(total - size) * number // gaps for number in range(blocks)]
    return [range(begin, begin + size) for begin in begins]
