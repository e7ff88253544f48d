"""Which waiting samples the next prefill pass takes in: the admission of SGLang's scheduler."""

from batchrunner.simulation.budget import PAGE_TOKENS, PrefillBudget
from batchrunner.simulation.config import SchedulerConfig
from batchrunner.simulation.kv_pool import KvPool
from batchrunner.simulation.running import CLIP_TOKENS
from batchrunner.simulation.sample import SimulatedRequest
from batchrunner.simulation.waiting_queue import MATCHED_AT_MOST, WaitingQueue


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
        self._order_queue()
        budget = PrefillBudget(config.max_prefill_tokens, config.chunked_prefill_tokens, expected_tokens)
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
        new_tokens = min(max(sample.asked_tokens - sample.outputs, 0), CLIP_TOKENS)
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
        budget.charge(tokens, 0 if tokens < missing else min(sample.asked_tokens, CLIP_TOKENS))
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
        budget.charge(tokens, 0 if tokens < missing else min(sample.asked_tokens, CLIP_TOKENS))
        return sample, tokens

    def _order_queue(self) -> None:
        """Sort the queue as the policy wants it, or keep the prefixes of its first samples in the cache."""
        if not self._pool.caching or not self.waiting:
            return
        if self._config.policy == "lpm" and len(self.waiting) <= MATCHED_AT_MOST:
            self.waiting.sort_by_prefix(self._pool.cache)
        else:
            self.waiting.refresh(self._pool.cache)
