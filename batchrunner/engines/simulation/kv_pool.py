"""The KV pool of a simulated server: which of its tokens are free, cached or used, and by whom."""

from batchrunner.engines.simulation.radix import CacheNode, RadixCache
from batchrunner.engines.simulation.sample import SimulatedRequest


class KvPool:
    """The tokens of one server's pool, with its prefix cache."""

    def __init__(self, tokens: int, *, caching: bool) -> None:
        """`tokens` is the size of the pool; without `caching`, contexts are freed when samples leave."""
        self.tokens = tokens
        self.caching = caching
        self.cache = RadixCache()
        self.free_tokens = tokens
        """Tokens that hold nothing."""

    @property
    def used_tokens(self) -> int:
        """Tokens that hold something needed."""
        return self.tokens - self.available_tokens

    @property
    def available_tokens(self) -> int:
        """Tokens that a sample could get: free ones, and those of cached contexts that nobody uses."""
        return self.free_tokens + self.cache.evictable_tokens

    def lock_prefix(self, sample: SimulatedRequest) -> tuple[CacheNode, int]:
        """Lock what the cache has of a context; return the last node and the tokens found.

        The last token is never taken from the cache: computing it generates the first new token.
        """
        node, matched = self.cache.root, 0
        if self.caching:
            node, matched = self.cache.match(sample.path, sample.fill_tokens - 1)
        self.cache.lock(node)
        return node, matched

    def make_room(self, tokens: int) -> bool:
        """Evict cached contexts until `tokens` are free; return whether they are."""
        if self.free_tokens < tokens:
            self.free_tokens += self.cache.evict(tokens - self.free_tokens)
        return self.free_tokens >= tokens

    def checkpoint(self, sample: SimulatedRequest) -> None:
        """Move the computed context into the cache; tokens that the cache has by now are freed."""
        if not self.caching:
            return
        node, known_tokens = self.cache.insert(sample.path, sample.filled_tokens)
        self.free_tokens += known_tokens - sample.protected_tokens
        self.cache.lock(node)
        if sample.node is not None:
            self.cache.unlock(sample.node)
        sample.node, sample.protected_tokens = node, sample.filled_tokens

    def release(self, sample: SimulatedRequest, context_tokens: int, *, keep: bool) -> None:
        """Let go of a context; with `keep` the cache gets all of it, else what it lacks is freed."""
        own_tokens = context_tokens - sample.protected_tokens
        if keep and self.caching and sample.node is not None:
            if own_tokens:
                key = (sample, sample.protected_tokens - sample.prefix_tokens)
                self.cache.extend(sample.node, key, own_tokens)
        else:
            self.free_tokens += own_tokens
        if sample.node is not None:
            self.cache.unlock(sample.node)
            sample.node = None
        sample.protected_tokens = sample.filled_tokens = 0
