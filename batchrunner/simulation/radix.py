"""The prefix cache of SGLang with names instead of tokens: match, insert, lock, evict the least recent.

A context is a path of segments (name, tokens): what two samples share has the same name. A node holds a
piece of one segment. The real tree compresses runs of segments into one node, so it frees in larger bites;
which tokens are found and which go first is the same.

Read from SGLang 0.5.23: `mem_cache/unified_cache/unified_tree_core.py`, `components/full.py` (leaves without
a lock are evicted by their last access, parents become leaves then) and `mem_cache/common.py`.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

Path = tuple[tuple["Hashable", int], ...]


class Node:
    """A piece of a segment; the path of its parents is the context before it."""

    __slots__ = ("children", "key", "locks", "parent", "queued", "tokens", "touched")

    def __init__(self, parent: Node | None, key: tuple[Hashable, int], tokens: int) -> None:
        self.parent = parent
        self.key = key
        """Name of the segment and where in it the piece begins."""
        self.tokens = tokens
        self.children: dict[tuple[Hashable, int], Node] = {}
        self.locks = 0
        self.touched = 0
        self.queued = False
        """An entry of the eviction heap stands for it, perhaps with an older time."""


class RadixCache:
    """The tree and the count of tokens in it that could be evicted now."""

    def __init__(self) -> None:
        self.root = Node(None, ("", 0), 0)
        self.evictable_tokens = 0
        self._time = 0
        self._leaves: list[tuple[int, int, Node]] = []  # (touched, serial number, node)
        self._serial = 0

    def match(self, path: Iterable[tuple[Hashable, int]], limit: int) -> tuple[Node, int]:
        """Walk down as far as the context is cached, at most `limit` tokens: the last node and the tokens.

        All that was walked is touched. A node that is matched in part is split, so that the part can be
        locked on its own.
        """
        self._time += 1
        node, matched = self.root, 0
        for name, tokens in path:
            end = min(tokens, limit - matched)
            at = 0
            while at < end:
                child = node.children.get((name, at))
                if child is None:
                    return node, matched
                if child.tokens > end - at:
                    child = self._split(child, end - at)
                child.touched = self._time
                at += child.tokens
                matched += child.tokens
                node = child
        return node, matched

    def insert(self, path: Iterable[tuple[Hashable, int]], limit: int) -> tuple[Node, int]:
        """Put the first `limit` tokens of a context into the tree.

        Return the last node, and how many of the tokens had been there already. The new ones are without
        a lock, so they count as evictable until they get one.
        """
        self._time += 1
        node, at_tokens, known = self.root, 0, 0
        for name, tokens in path:
            end = min(tokens, limit - at_tokens)
            at = 0
            while at < end:
                child = node.children.get((name, at))
                if child is None:
                    child = self._add(node, (name, at), end - at)
                else:
                    if child.tokens > end - at:
                        child = self._split(child, end - at)
                    known += child.tokens
                child.touched = self._time
                at += child.tokens
                node = child
            at_tokens += end
        return node, known

    def extend(self, node: Node, key: tuple[Hashable, int], tokens: int) -> None:
        """Hang a leaf that nobody else has, what a sample put out, under a node; touch the path."""
        self._time += 1
        leaf = self._add(node, key, tokens)
        leaf.touched = self._time
        self._offer(leaf)
        above: Node | None = node
        while above is not None:
            above.touched = self._time
            above = above.parent

    def lock(self, node: Node) -> None:
        """Keep a node and all above it from eviction."""
        while node.parent is not None:
            if node.locks == 0:
                self.evictable_tokens -= node.tokens
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.evictable_tokens += node.tokens
                self._offer(node)
            node = node.parent

    def evict(self, tokens: int) -> int:
        """Drop the least recently touched leaves until at least `tokens` are free; return how many were."""
        freed = 0
        leaves = self._leaves
        while freed < tokens and leaves:
            touched, _, node = heapq.heappop(leaves)
            node.queued = False
            parent = node.parent
            if parent is None or node.locks or node.children:
                continue
            if node.touched > touched:  # used again since it was queued
                self._offer(node)
                continue
            del parent.children[node.key]
            node.parent = None
            freed += node.tokens
            self.evictable_tokens -= node.tokens
            self._offer(parent)
        return freed

    def _add(self, parent: Node, key: tuple[Hashable, int], tokens: int) -> Node:
        node = Node(parent, key, tokens)
        parent.children[key] = node
        self.evictable_tokens += tokens
        return node

    def _split(self, node: Node, tokens: int) -> Node:
        """Cut a node in two; return the upper one, which has the first `tokens`."""
        assert node.parent is not None
        name, at = node.key
        upper = Node(node.parent, node.key, tokens)
        upper.locks, upper.touched = node.locks, node.touched
        node.parent.children[node.key] = upper
        node.key = (name, at + tokens)
        node.parent = upper
        node.tokens -= tokens
        upper.children[node.key] = node
        self._time += 1
        node.touched = self._time  # SGLang does so too
        return upper

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction if it is a leaf without a lock."""
        if node.parent is not None and not (node.locks or node.children or node.queued):
            node.queued = True
            self._serial += 1
            heapq.heappush(self._leaves, (node.touched, self._serial, node))
