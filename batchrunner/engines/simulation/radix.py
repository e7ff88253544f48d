"""SGLang's prefix cache with names instead of tokens: match, insert, lock, evict the least recently used.

A context is the tokens of a prompt and of its output so far. Here it is a path of segments, each with a name
and a number of tokens. Segments that contexts share have the same name. A node of the tree holds a piece of
one segment. SGLang's own tree joins consecutive segments in one node, so it frees more tokens at a time.
Cache hits and the order of evictions are the same.

Source: SGLang 0.5.23, `mem_cache/unified_cache/unified_tree_core.py`, `components/full.py` (unlocked leaves
are evicted by last access; their parents become leaves then) and `mem_cache/common.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class CacheNode:
    """A cached piece of a context. The ancestors of the node hold the context before the piece."""

    parent: CacheNode | None
    """None for the root of the tree, and for a node that was evicted."""
    key: tuple[Hashable, int]
    """Name of the segment, and the offset in tokens at which the piece begins in it."""
    tokens: int
    """Number of tokens in the piece."""
    children: dict[tuple[Hashable, int], CacheNode] = field(default_factory=dict)
    """Pieces that follow this one, by their `key`."""
    locks: int = 0
    """Number of running requests whose contexts contain the piece. A locked piece is not evicted."""
    touched: int = 0
    """Time of the last access, as a count of all accesses to the cache."""
    queued: bool = False
    """Whether the eviction heap has an entry for the node; the entry's access time may be outdated."""


class RadixCache:
    """The tree of cached contexts. It counts the tokens that could be evicted."""

    def __init__(self) -> None:
        self.root = CacheNode(parent=None, key=("", 0), tokens=0)
        self.evictable_tokens = 0
        """Number of tokens in nodes that are not locked."""
        self._time = 0
        """Number of accesses so far."""
        self._leaves: list[tuple[int, int, CacheNode]] = []
        """Heap of nodes that may be evicted, as (`touched`, serial number, node). The serial number orders
        nodes with the same access time."""
        self._serial = 0

    def match(self, path: Iterable[tuple[Hashable, int]], limit: int) -> tuple[CacheNode, int]:
        """Return the last cached node of a context, and the number of cached tokens, at most `limit`.

        All nodes on the path count as accessed. If the context ends inside a node, the node is split, so that
        its first part can be locked alone.
        """
        self._time += 1
        node, matched = self.root, 0
        for name, tokens in path:
            # Number of tokens of this segment to look up.
            end = min(tokens, limit - matched)
            offset = 0
            while offset < end:
                child = node.children.get((name, offset))
                if child is None:
                    return node, matched
                if child.tokens > end - offset:
                    child = self._split(child, end - offset)
                child.touched = self._time
                offset += child.tokens
                matched += child.tokens
                node = child
        return node, matched

    def insert(self, path: Iterable[tuple[Hashable, int]], limit: int) -> tuple[CacheNode, int]:
        """Insert the first `limit` tokens of a context.

        Return the last node, and the number of tokens that were cached before. New nodes are not locked, so
        their tokens count as evictable.
        """
        node, matched = self.match(path, limit)
        # `segment_begin` is the position of the segment in the context, in tokens.
        segment_begin = 0
        for name, tokens in path:
            end = min(tokens, limit - segment_begin)
            cached = max(0, matched - segment_begin)
            if cached < end:
                node = self._add(node, (name, cached), end - cached)
            segment_begin += end
        return node, matched

    def lock(self, node: CacheNode) -> None:
        """Protect a node and its ancestors from eviction."""
        while node.parent is not None:
            if node.locks == 0:
                self.evictable_tokens -= node.tokens
            node.locks += 1
            node = node.parent

    def unlock(self, node: CacheNode) -> None:
        """Undo one call of `lock`; a node without locks may be evicted."""
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.evictable_tokens += node.tokens
                self._offer(node)
            node = node.parent

    def evict(self, tokens: int) -> int:
        """Evict the least recently used leaves until `tokens` are freed; return the number freed."""
        freed = 0
        leaves = self._leaves
        while freed < tokens and leaves:
            queued_touched, _, node = heapq.heappop(leaves)
            node.queued = False
            parent = node.parent
            # Since it was queued, the node may have been evicted or locked, or may have got a child.
            if parent is None or node.locks or node.children:
                continue
            # If the node was accessed since it was queued, it goes back into the queue, behind older nodes.
            if node.touched > queued_touched:
                self._offer(node)
                continue
            del parent.children[node.key]
            node.parent = None
            freed += node.tokens
            self.evictable_tokens -= node.tokens
            # Without this child, the parent may be a leaf, so it can be evicted too.
            self._offer(parent)
        return freed

    def _add(self, parent: CacheNode, key: tuple[Hashable, int], tokens: int) -> CacheNode:
        node = parent.children[key] = CacheNode(parent, key, tokens)
        node.touched = self._time
        self.evictable_tokens += tokens
        return node

    def _split(self, node: CacheNode, tokens: int) -> CacheNode:
        """Split a node in two; return the upper one, which gets the first `tokens`."""
        assert node.parent is not None
        name, offset = node.key
        upper = node.parent.children[node.key] = CacheNode(node.parent, node.key, tokens)
        upper.locks, upper.touched = node.locks, node.touched
        node.key = (name, offset + tokens)
        node.parent = upper
        node.tokens -= tokens
        upper.children[node.key] = node
        self._time += 1
        # The split counts as an access of the lower node, as in SGLang.
        node.touched = self._time
        return upper

    def _offer(self, node: CacheNode) -> None:
        """Queue a node for eviction, if it is an unlocked leaf and not queued already."""
        if node.parent is not None and not (node.locks or node.children or node.queued):
            node.queued = True
            self._serial += 1
            heapq.heappush(self._leaves, (node.touched, self._serial, node))
