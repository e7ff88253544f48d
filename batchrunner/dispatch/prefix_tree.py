"""Which row each row follows: the prompts as a tree of their common prefixes. Pure.

An engine computes a shared prefix only once if the first row that has it is through its prefill before the
others are admitted. So below each node of the tree one row leads and the others follow it. The leader is the
one that leads in the largest branch below: then each row waits for as few others as possible, log2 of their
number at most, and the longest turn of a conversation computes all the shorter ones.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from batchrunner.input.prefixes import common_length

LEAST_SHARED_BYTES = 256
"""Length of the shortest prefix that is worth an order: about 64 tokens."""
LEAST_NODE_BYTES = 64
"""Length that a node's prefix must have beyond that of the node above; a few bytes are shared by chance."""


class TreePlace(NamedTuple):
    """The leader of a row, and the prefix that they share."""

    leader: int
    """Index of the row that goes first."""
    shared_bytes: int
    group_rows: int
    """Number of rows that begin with this prefix."""


class _Branch(NamedTuple):
    """Rows with a common prefix; `leader` is the index of the one that goes first."""

    leader: int
    rows: int


def find_leaders(prefixes: Sequence[bytes], sent: int = 0) -> dict[int, TreePlace]:
    """Return the place of each row that follows another one; the first `sent` rows were sent before."""
    order = sorted(range(len(prefixes)), key=prefixes.__getitem__)
    depths = [_depth(prefixes[one], prefixes[other]) for one, other in pairwise(order)]
    if not any(depths):
        return {}
    tree = _Tree(prefixes, sent)
    for index, depth in zip(order, [*depths, 0], strict=True):
        tree.add(index, depth)
    return tree.places


def _depth(one: bytes, other: bytes) -> int:
    if one[:LEAST_SHARED_BYTES] != other[:LEAST_SHARED_BYTES]:  # most rows
        return 0
    shared = common_length(one, other)
    return shared if shared >= LEAST_SHARED_BYTES else 0


class _Tree:
    """The nodes between the root and the row that was added last; nodes left of them are closed."""

    def __init__(self, prefixes: Sequence[bytes], sent: int) -> None:
        self._prefixes = prefixes
        self._sent = sent
        self._open: list[tuple[int, list[_Branch]]] = [(0, [])]  # depth in bytes, and the branches below
        self.places: dict[int, TreePlace] = {}

    def add(self, index: int, depth: int) -> None:
        """Add the next row in sorted order, which shares `depth` bytes with the one after it."""
        below = [_Branch(index, 1)]
        while self._open[-1][0] > depth:
            node_depth, branches = self._open.pop()
            below = [*branches, *below]
            if node_depth - max(depth, self._open[-1][0]) >= LEAST_NODE_BYTES:
                below = [self._close(node_depth, below)]
        if self._open[-1][0] < depth:
            self._open.append((depth, []))
        self._open[-1][1].extend(below)

    def _close(self, depth: int, branches: list[_Branch]) -> _Branch:
        leader = max(branches, key=self._rank).leader
        rows = sum(branch.rows for branch in branches)
        for branch in branches:
            if branch.leader != leader:
                self.places[branch.leader] = TreePlace(leader, depth, rows)
        return _Branch(leader, rows)

    def _rank(self, branch: _Branch) -> tuple[bool, int, int]:
        return branch.leader < self._sent, branch.rows, len(self._prefixes[branch.leader])
