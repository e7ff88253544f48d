"""SGLang's prefix cache, with names instead of tokens: match, insert, lock, evict the least recently used.

A context is a path of segments, each a name and a number of tokens. Segments that samples share have the same
name. A node holds a piece of one segment. The real tree joins consecutive segments in one node, so it frees
more at a time. Cache hits and the order of evictions are the same.

Source: SGLang 0.5.23, `mem_cache/unified_cache/unified_tree_core.py`, `components/full.py` (unlocked leaves
are evicted by last access; their parents become leaves then) and `mem_cache/common.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

Path = tuple[tuple["Hashable", int], ...]


@dataclass(slots=True, eq=False)
class CacheNode:
    """A piece of a segment. The path of its parents is the context before it."""

    parent: CacheNode | None
    key: tuple[Hashable, int]
    """Name of the segment, and the offset of the piece in it, in tokens."""
    tokens: int
    children: dict[tuple[Hashable, int], CacheNode] = field(default_factory=dict)
    locks: int = 0
    touched: int = 0
    queued: bool = False
    """Whether the eviction heap has an entry for the node, perhaps with an outdated access time."""


class RadixCache:
    """The tree of cached contexts. It counts the tokens that could be evicted."""

    def __init__(self) -> None:
        self.root = CacheNode(None, ("", 0), 0)
        self.evictable_tokens = 0
        self._time = 0
        self._leaves: list[tuple[int, int, CacheNode]] = []  # (touched, serial number, node)
        self._serial = 0

    def match(self, path: Iterable[tuple[Hashable, int]], limit: int) -> tuple[CacheNode, int]:
        """Return the last cached node of a context, and the number of cached tokens, at most `limit`.

        All nodes on the path count as accessed. If only the beginning of a node matches, the node is split,
        so that the beginning can be locked alone.
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

    def insert(self, path: Iterable[tuple[Hashable, int]], limit: int) -> tuple[CacheNode, int]:
        """Insert the first `limit` tokens of a context.

        Return the last node, and how many of the tokens were cached before. New nodes are not locked yet, so
        their tokens count as evictable.
        """
        node, matched = self.match(path, limit)
        begin = 0
        for name, tokens in path:
            end = min(tokens, limit - begin)
            at = max(0, matched - begin)
            if at < end:
                node = self._add(node, (name, at), end - at)
            begin += end
        return node, matched

    def lock(self, node: CacheNode) -> None:
        """Protect a node and its ancestors from eviction."""
        while node.parent is not None:
            if node.locks == 0:
                self.evictable_tokens -= node.tokens
            node.locks += 1
            node = node.parent

    def unlock(self, node: CacheNode) -> None:
        """Undo one `lock`."""
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.evictable_tokens += node.tokens
                self._offer(node)
            node = node.parent

    def evict(self, tokens: int) -> int:
        """Evict the least recently used leaves until `tokens` are freed; return how many were freed."""
        freed = 0
        leaves = self._leaves
        while freed < tokens and leaves:
            touched, _, node = heapq.heappop(leaves)
            node.queued = False
            parent = node.parent
            if parent is None or node.locks or node.children:
                continue
            if node.touched > touched:  # accessed since it was queued
                self._offer(node)
                continue
            del parent.children[node.key]
            node.parent = None
            freed += node.tokens
            self.evictable_tokens -= node.tokens
            self._offer(parent)
        return freed

    def _add(self, parent: CacheNode, key: tuple[Hashable, int], tokens: int) -> CacheNode:
        node = parent.children[key] = CacheNode(parent, key, tokens)
        node.touched = self._time
        self.evictable_tokens += tokens
        return node

    def _split(self, node: CacheNode, tokens: int) -> CacheNode:
        """Split a node in two; return the upper one, which has the first `tokens`."""
        assert node.parent is not None
        name, at = node.key
        upper = node.parent.children[node.key] = CacheNode(node.parent, node.key, tokens)
        upper.locks, upper.touched = node.locks, node.touched
        node.key = (name, at + tokens)
        node.parent = upper
        node.tokens -= tokens
        upper.children[node.key] = node
        self._time += 1
        node.touched = self._time  # SGLang too counts the lower node as accessed
        return upper

    def _offer(self, node: CacheNode) -> None:
        """Queue a node for eviction if it is an unlocked leaf."""
        if node.parent is not None and not (node.locks or node.children or node.queued):
            node.queued = True
            self._serial += 1
            heapq.heappush(self._leaves, (node.touched, self._serial, node))
