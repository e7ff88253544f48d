"""Which row goes before which: prompts as a tree of their beginnings. Pure.

An engine computes a beginning once only if the first row that has it is through its prefill before the others
are admitted. So of the rows below each node of the tree one goes first, and the others follow. It is the one
that goes first in the largest branch below: so a row waits for as few others as possible, for log2 of them at
most, and a conversation's longest turn computes all the shorter ones.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from batchrunner.input.prefixes import common

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_SHARED_BYTES = 256
"""Some 64 tokens: a shorter beginning is not worth an order."""
GRAIN_BYTES = 64
"""What a node adds to the one above it, at least: rows have a few bytes more in common by chance."""


class TreePlace(NamedTuple):
    """A row's place below another."""

    parent: int
    """Index of the row that goes before it."""
    shared: int
    """Bytes that it has in common with that."""
    rows: int
    """Rows that have this beginning."""


class _Branch(NamedTuple):
    """Rows with a common beginning, of which one goes first."""

    first: int
    rows: int


def find_prefix_groups(prefixes: Sequence[bytes], gone: int = 0) -> dict[int, TreePlace]:
    """Return the place of each row that follows another; the first `gone` of them have been sent already."""
    order = sorted(range(len(prefixes)), key=prefixes.__getitem__)
    depths = [_depth(prefixes[one], prefixes[other]) for one, other in pairwise(order)]
    if not any(depths):
        return {}
    tree = _Tree(prefixes, gone)
    for index, depth in zip(order, [*depths, 0], strict=True):
        tree.add(index, depth)
    return tree.places


def _depth(one: bytes, other: bytes) -> int:
    shared = common(one, other)
    return shared if shared >= LEAST_SHARED_BYTES else 0


class _Tree:
    """The nodes on the way from the root to the row that was added last; those left of it are closed."""

    def __init__(self, prefixes: Sequence[bytes], gone: int) -> None:
        self._prefixes = prefixes
        self._gone = gone
        self._open: list[tuple[int, list[_Branch]]] = [(0, [])]  # depth in bytes, and the branches below
        self.places: dict[int, TreePlace] = {}

    def add(self, index: int, depth: int) -> None:
        """Add the next row in sorted order, which shares `depth` bytes with the one after it."""
        below = [_Branch(index, 1)]
        while self._open[-1][0] > depth:
            node_depth, branches = self._open.pop()
            below = [*branches, *below]
            if node_depth - max(depth, self._open[-1][0]) >= GRAIN_BYTES:
                below = [self._close(node_depth, below)]
        if self._open[-1][0] < depth:
            self._open.append((depth, []))
        self._open[-1][1].extend(below)

    def _close(self, depth: int, branches: list[_Branch]) -> _Branch:
        first = max(branches, key=self._rank).first
        rows = sum(branch.rows for branch in branches)
        for branch in branches:
            if branch.first != first:
                self.places[branch.first] = TreePlace(first, depth, rows)
        return _Branch(first, rows)

    def _rank(self, branch: _Branch) -> tuple[bool, int, int]:
        return branch.first < self._gone, branch.rows, len(self._prefixes[branch.first])
