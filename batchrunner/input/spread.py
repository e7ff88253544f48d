"""Samples that are spread evenly over an input: blocks of neighbouring rows, or of a file's bytes."""


def spread_blocks(total: int, *, blocks: int, size: int) -> list[range]:
    """Return the positions of so many blocks of a size, from the first to the last of `total` positions.

    Blocks overlap where they have more positions than there are.
    """
    return [
        range(begin, begin + size)
        for begin in ((total - size) * block // max(blocks - 1, 1) for block in range(blocks))
    ]
