"""Which waiting samples the next prefill pass takes in: the admission of SGLang's scheduler.

The samples wait in the order of SGLang's schedule policy; the budget of a pass is `PrefillAdder` and
`PrefillBudget` of SGLang 0.5.23.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from batchrunner.engines.simulation.radix import CacheNode, RadixCache
from batchrunner.engines.simulation.request import SchedulerConfig, SimulatedRequest


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


PAGE_TOKENS = 1
"""Tokens reserved for each admitted sample beside its own: the default page of flashinfer and fa3."""
MATCHED_AT_MOST = 128
"""`WAITING_QUEUE_PREFIX_MATCH_MAX`: a longer queue is served first come, first served under `lpm` too."""
REFRESH_PASSES = 32
"""`WAITING_PREFIX_REFRESH_INTERVAL`: admission passes between two refreshes of waiting prefixes."""
SHORT_MATCH_TOKENS = 32
"""`IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD` and `…_DEPRIORITIZE_THRESHOLD`, which are the same."""


class WaitingQueue:
    """The samples that wait; a dropped sample stays in the list and is skipped at the head."""

    def __init__(self) -> None:
        self._samples: deque[SimulatedRequest] = deque()
        self._length = 0
        self._refreshes = 0

    def __len__(self) -> int:
        return self._length

    def append(self, sample: SimulatedRequest) -> None:
        """Put a sample at the end: a new one, or one that was retracted with its outputs."""
        own_tokens = sample.fill_tokens - sample.prefix_tokens
        sample.path = (*sample.prefix, (sample, own_tokens))
        sample.state = "waiting"
        self._samples.append(sample)
        self._length += 1

    def drop(self, sample: SimulatedRequest) -> None:
        """Abort a sample that waits."""
        sample.state = "dropped"
        self._length -= 1
        if not self._length:
            self._samples.clear()

    def head(self) -> SimulatedRequest:
        """Return the first sample that waits."""
        while self._samples[0].state != "waiting":
            self._samples.popleft()
        return self._samples[0]

    def pop(self) -> SimulatedRequest:
        """Take the sample that `head` returned."""
        self._length -= 1
        return self._samples.popleft()

    def sort_by_prefix(self, cache: RadixCache) -> None:
        """Put the longest cached prefix first, and last the samples whose prefix another one will compute."""
        others = RadixCache()
        ranked = []
        for sample in self._waiting():
            matched = cache.match(sample.path, sample.fill_tokens)[1]
            rank = float(-min(matched, sample.fill_tokens - 1))
            if matched <= SHORT_MATCH_TOKENS and sample.prefix:
                if others.match(sample.path, sample.fill_tokens)[1] >= SHORT_MATCH_TOKENS:
                    rank = math.inf
                else:
                    others.insert(sample.path, sample.fill_tokens)
            ranked.append((rank, sample))
        ranked.sort(key=lambda pair: pair[0])
        self._samples = deque(sample for _, sample in ranked)

    def refresh(self, cache: RadixCache) -> None:
        """Touch the cached prefixes of the first samples, every REFRESH_PASSES calls."""
        if self._refreshes % REFRESH_PASSES == 0:
            first = list(islice(self._waiting(), MATCHED_AT_MOST))
            for sample in reversed(first):  # the head is touched last, so it is the most recent
                cache.match(sample.path, sample.fill_tokens)
        self._refreshes += 1

    def _waiting(self) -> Iterator[SimulatedRequest]:
        return (sample for sample in self._samples if sample.state == "waiting")


@dataclass(slots=True)
class PrefillBudget:
    """The limits of a prefill pass, less what it has admitted."""

    input_tokens: int
    """Tokens left of `--max-prefill-tokens`."""
    chunk_tokens: int | None
    """Tokens left of `--chunked-prefill-size`; None: prompts are never cut."""
    expected_tokens: float
    """Tokens of the pool that running and admitted samples are expected to take beyond what they hold."""

    @property
    def spent(self) -> bool:
        """Whether the pass is as large as it may be, whatever is left of the pool."""
        return self.input_tokens <= 0 or (self.chunk_tokens is not None and self.chunk_tokens <= 0)

    def cut(self, tokens: int) -> int:
        """Return how many of these tokens the chunk has room for."""
        return tokens if self.chunk_tokens is None else min(tokens, self.chunk_tokens)

    def cut_next_chunk(self, tokens: int, free_tokens: int) -> int:
        """Return how many tokens of a prompt that was begun come next, of `free_tokens` at most.

        It continues even where running samples are expected to take all of the pool.
        """
        room_tokens = math.floor(free_tokens - self.expected_tokens)
        assert self.chunk_tokens is not None
        chunk_tokens = max(self.chunk_tokens, 1)
        limit = min(chunk_tokens, room_tokens) if room_tokens > 0 else chunk_tokens
        return min(tokens, limit, free_tokens)

    def charge_decodes(self, samples: int) -> None:
        """Count samples that decode in the same pass."""
        self.expected_tokens += samples
        self.input_tokens -= samples
        if self.chunk_tokens is not None:
            self.chunk_tokens -= samples

    def charge(self, prefill_tokens: int, new_tokens: int) -> None:
        """Count an admitted sample; a prompt in chunks pays for its outputs with the last chunk only."""
        self.expected_tokens += prefill_tokens + PAGE_TOKENS + new_tokens
        self.input_tokens -= prefill_tokens
        if self.chunk_tokens is not None:
            self.chunk_tokens -= prefill_tokens


class Admission:
    """Takes samples from the queue into the pool, as long as the pass's budget and the pool allow it."""

    def __init__(self, config: SchedulerConfig, pool: KvPool) -> None:
        self.waiting = WaitingQueue()
        self.chunked: SimulatedRequest | None = None
        """The sample whose prompt is prefilled over several passes."""
        self.full = False
        """Whether no admission is tried until the running batch shrinks."""
        self.cached_tokens = 0
        """Tokens that all admitted samples found in the cache."""
        self._config = config
        self._pool = pool

    def take(self, running: int, expected_tokens: float) -> list[tuple[SimulatedRequest, int]]:
        """Choose what is prefilled now, each with its tokens in this pass and its cached prefix locked.

        `running` samples decode, and are expected to take `expected_tokens` more of the pool.
        """
        config = self._config
        if not self._may_begin(running):
            return []
        if self.chunked is not None and not self._pool.available_tokens:
            return []  # a real server would run out of memory; here the others go on, or are retracted
        self._order_queue()
        budget = PrefillBudget(config.max_prefill_tokens, config.chunked_prefill_tokens, expected_tokens)
        if config.mixes:  # each running sample gets its next token in this pass
            budget.charge_decodes(running)
        admitted: list[tuple[SimulatedRequest, int]] = []
        if self.chunked is not None:
            admitted.append(self._next_chunk(self.chunked, budget))
        while self._may_add(budget, running + len(admitted)):
            tokens = self._admit(self.waiting.head(), budget, first=not admitted)
            if tokens is None:
                self.full = running > 0 or bool(admitted)
            if not tokens:
                break
            admitted.append((self.waiting.pop(), tokens))
            if self._pool.available_tokens <= budget.expected_tokens:
                self.full = True
        return admitted

    def _may_begin(self, running: int) -> bool:
        """Tell whether to try an admission; after one that failed, only once the batch has shrunk."""
        if not running:
            self.full = False
        if self.chunked is not None:
            return True
        if self.full or not self.waiting:
            return False
        self.full = running >= self._config.max_running
        return not self.full

    def _may_add(self, budget: PrefillBudget, seats: int) -> bool:
        """Tell whether the pass may look at the head of the queue."""
        if not self.waiting or self.full:
            return False
        if budget.spent and self._pool.available_tokens > budget.expected_tokens:
            return False
        self.full = seats >= self._config.max_running
        return not self.full

    def _admit(self, sample: SimulatedRequest, budget: PrefillBudget, *, first: bool) -> int | None:
        """Admit the head of the queue; return its tokens in this pass.

        0: it has to wait for another pass; None: the pool has no room for it.
        """
        node, matched = self._pool.lock_prefix(sample)  # first: what is locked does not count as available
        missing = sample.fill_tokens - matched
        new_tokens = min(max(sample.asked_tokens - sample.outputs, 0), self._config.clip_tokens)
        tokens: int | None
        if missing + new_tokens + PAGE_TOKENS >= self._pool.available_tokens - budget.expected_tokens:
            tokens = None
        elif budget.chunk_tokens is None and not first and missing >= budget.input_tokens:
            tokens = 0
        else:
            tokens = budget.cut(missing)
        if not tokens:
            self._pool.cache.unlock(node)
            return tokens
        if tokens < missing:
            self.chunked = sample
            sample.state = "chunked"
        self._charge(budget, sample, tokens, missing)
        sample.node, sample.protected_tokens, sample.filled_tokens = node, matched, matched
        if not sample.prefilled:
            sample.prefilled = True
            sample.cached_tokens = matched
        self.cached_tokens += matched
        return tokens

    def _next_chunk(self, sample: SimulatedRequest, budget: PrefillBudget) -> tuple[SimulatedRequest, int]:
        """Continue the prompt that did not fit into one pass."""
        missing = sample.fill_tokens - sample.filled_tokens
        tokens = budget.cut_next_chunk(missing, self._pool.available_tokens)
        if tokens == missing:
            self.chunked = None
        self._charge(budget, sample, tokens, missing)
        return sample, tokens

    def _charge(self, budget: PrefillBudget, sample: SimulatedRequest, tokens: int, missing: int) -> None:
        """Count an admitted sample, with its outputs where the prompt is complete."""
        new_tokens = min(sample.asked_tokens, self._config.clip_tokens)
        budget.charge(tokens, 0 if tokens < missing else new_tokens)

    def _order_queue(self) -> None:
        """Sort the queue as the policy wants it, or keep the prefixes of its first samples in the cache."""
        if not self._pool.caching or not self.waiting:
            return
        if self._config.policy == "lpm" and len(self.waiting) <= MATCHED_AT_MOST:
            self.waiting.sort_by_prefix(self._pool.cache)
        else:
            self.waiting.refresh(self._pool.cache)
