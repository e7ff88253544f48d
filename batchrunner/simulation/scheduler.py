"""SGLang's scheduler without clock, model or tokens: who is prefilled, who decodes, who has to go back.

Read from SGLang 0.5.23: `managers/scheduler.py` (the order of things), `schedule_policy.py` (admission, the
queue's order), `schedule_batch.py` (retraction), `scheduler_components/new_token_ratio_tracker.py` and
`mem_cache/prefill_budget.py`.

Not modelled: the overlap of a pass with the handling of the one before, which lets a sample that stops early
decode once more and brings in its successor a pass later; pages of more than one token; mixed chunks;
priorities; sliding windows and Mamba states; speculation; and, with the radix cache off, the admission of
`ignore_eos` requests by a simulation of their ends (`add_one_req_ignore_eos`).
"""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from batchrunner.simulation.budget import PAGE_TOKENS, Budget
from batchrunner.simulation.radix import RadixCache
from batchrunner.simulation.running import CLIP_TOKENS, RunningBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.simulation.sample import SimulatedRequest

INITIAL_RATIO = 0.7
"""`SGLANG_INIT_NEW_TOKEN_RATIO`: the share of `max_new_tokens` that outputs are expected to take at first."""
MINIMAL_RATIO_FACTOR = 0.14
"""`SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR`: what that share decays to, as a part of it."""
DECAY_STEPS = 600
"""`SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS`: decode steps from the first share to the last."""
RETRACT_STEPS = 20
"""`SGLANG_RETRACT_DECODE_STEPS`: steps ahead for which a retraction makes room, where it can."""
MATCHED_AT_MOST = 128
"""`WAITING_QUEUE_PREFIX_MATCH_MAX`: a longer queue is served first come, first served under `lpm` too."""
REFRESH_PASSES = 32
"""`WAITING_PREFIX_REFRESH_INTERVAL`: admission passes between two refreshes of what waiting samples share."""
SHORT_MATCH_TOKENS = 32
"""`IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD` and `…_DEPRIORITIZE_THRESHOLD`, which are the same."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The flags of the server that decide; defaults are SGLang's on an 80 GB card."""

    max_running: int
    """`--max-running-requests`."""
    max_total_tokens: int
    """`--max-total-tokens`: the KV pool."""
    context_tokens: int | None = None
    """`--context-length`; None: the pool is the only limit."""
    chunked_prefill_tokens: int | None = 8192
    """`--chunked-prefill-size`; None: prompts are never cut."""
    max_prefill_tokens: int = 16_384
    """`--max-prefill-tokens`."""
    policy: Literal["fcfs", "lpm"] = "fcfs"
    """`--schedule-policy`."""
    conservativeness: float = 1.0
    """`--schedule-conservativeness`."""
    radix_cache: bool = True
    """False: `--disable-radix-cache`."""

    @property
    def initial_ratio(self) -> float:
        """The new-token ratio of an idle scheduler."""
        return min(INITIAL_RATIO * self.conservativeness, 1.0)

    @property
    def minimal_ratio(self) -> float:
        """The new-token ratio after many steps without a retraction."""
        return min(self.initial_ratio * MINIMAL_RATIO_FACTOR, 1.0)


class StepResult(NamedTuple):
    """One prefill pass, or one or more decode passes that differ in nothing but a token each."""

    kind: Literal["prefill", "decode"]
    steps: int
    """Forward passes; more than one only when decoding."""
    running: int
    """Samples that decode (`#running-req` in the log); in a prefill, those that wait for it meanwhile."""
    admitted: int
    """Samples that are prefilled in this pass."""
    prefill_tokens: int
    """Tokens that the pass computes in a prefill."""
    cached_tokens: int
    """Tokens that newly admitted samples found in the cache."""
    kv_tokens: float
    """Context that attention reads in a pass, on average over the passes."""
    queue: int
    used_tokens: int
    """Of the pool during the last pass, without what could be evicted."""
    retracted: int
    finished: Sequence[SimulatedRequest]
    """Ended with the last pass: `finished`, `aborted` or `dropped`, as their state says."""


class Scheduler:
    """One SGLang scheduler: submit samples, step, look at the gauges.

    A step costs O(ended + admitted) and no more, however many samples run, but for retractions.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.ratio = config.initial_ratio
        """Share of their remaining `max_new_tokens` that running samples are expected to use."""
        self.queue = 0
        self.retractions = 0
        self.prefill_passes = 0
        self.decode_passes = 0
        self.prefilled_tokens = 0
        self.cached_tokens = 0
        self._available_tokens = config.max_total_tokens
        self._cache = RadixCache()
        self._batch = RunningBatch()
        self._waiting: deque[SimulatedRequest] = deque()
        self._chunked: SimulatedRequest | None = None
        self._full = False  # no admission is tried until the batch shrinks
        self._caching = config.radix_cache
        self._refreshes = 0
        self._pass_cached_tokens = 0
        self._decay = (config.initial_ratio - config.minimal_ratio) / DECAY_STEPS

    @property
    def running(self) -> int:
        """Samples that decode."""
        return len(self._batch.samples)

    @property
    def in_flight(self) -> int:
        """Samples that were submitted and are not over."""
        return self.queue + self.running + (self._chunked is not None)

    @property
    def available_tokens(self) -> int:
        """Tokens of the pool that hold nothing."""
        return self._available_tokens

    @property
    def evictable_tokens(self) -> int:
        """Tokens of the pool that hold a cache nobody uses now."""
        return self._cache.evictable_tokens

    @property
    def used_tokens(self) -> int:
        """Tokens of the pool that hold something needed."""
        return self.config.max_total_tokens - self._available_tokens - self._cache.evictable_tokens

    @property
    def token_usage(self) -> float:
        """The used share of the pool."""
        return self.used_tokens / self.config.max_total_tokens

    @property
    def context_tokens(self) -> int:
        """Context of all running samples: what attention reads in the next decode pass but one token each."""
        return self._batch.context_tokens

    def submit(self, sample: SimulatedRequest) -> None:
        """Put a new sample at the end of the queue.

        Raises ValueError where the prompt cannot fit, as the server refuses it. A sample that asks for
        more tokens than the context or the pool can hold gets what they hold (`init_req_max_new_tokens`).
        """
        if sample.state != "new":
            raise ValueError("a sample is submitted once")
        pool, context = self.config.max_total_tokens, self.config.context_tokens
        room_tokens = pool - PAGE_TOKENS - 1 - sample.prompt_tokens
        longest = min(pool - 1, context - 1 if context else pool)
        room_tokens = min(room_tokens, longest - sample.prompt_tokens - 1)
        if room_tokens < 1:
            raise ValueError(f"the prompt ({sample.prompt_tokens} tokens) is too long for the scheduler")
        asked = sample.output_tokens if sample.max_new_tokens is None else sample.max_new_tokens
        sample.asked_tokens = min(asked, room_tokens)
        # even a request for no token is prefilled, which puts one out
        sample.target_tokens = max(1, min(sample.output_tokens, sample.asked_tokens))
        own_tokens = sample.prompt_tokens - sum(tokens for _, tokens in sample.prefix)
        sample.path = (*sample.prefix, (sample, own_tokens))
        sample.state = "waiting"
        self._waiting.append(sample)
        self.queue += 1

    def drop(self, sample: SimulatedRequest) -> None:
        """Abort a sample: a waiting one goes at once, a running one with the next pass."""
        if sample.state == "waiting":
            sample.state = "dropped"  # the queue skips it when it gets there
            self.queue -= 1
            if not self.queue:
                self._waiting.clear()
        elif sample.state == "chunked":
            self._chunked = None
            self._release(sample, sample.filled_tokens, keep=False)
            sample.state = "dropped"
        elif sample.state == "running" and not sample.dropping:
            self._batch.end_next(sample)
            sample.dropping = True

    def step(self, limit: int = sys.maxsize) -> StepResult | None:
        """Run the next forward pass, or up to `limit` decode passes in which nothing else happens.

        None: there is nothing to do. What is submitted meanwhile is seen by the next step.
        """
        admitted = self._admit()
        if admitted:
            return self._prefill(admitted)
        if self._batch.samples:
            return self._decode(limit)
        return None

    def _free_tokens(self) -> int:
        """Tokens of the pool that could be had: empty, or holding a cache nobody uses."""
        return self._available_tokens + self._cache.evictable_tokens

    def _admit(self) -> list[tuple[SimulatedRequest, int]]:
        """Choose what is prefilled now, with how many tokens; each holds a lock on its cached prefix."""
        running, config = len(self._batch.samples), self.config
        if not self._may_admit(running):
            return []
        self._order_queue()
        expected_tokens = self._batch.expected_tokens(self.ratio)
        budget = Budget(config.max_prefill_tokens, config.chunked_prefill_tokens, expected_tokens)
        admitted: list[tuple[SimulatedRequest, int]] = []
        if self._chunked is not None:
            admitted.append(self._next_chunk(self._chunked, budget))
        while self._may_add(budget, running + len(admitted)):
            tokens = self._try(self._head(), budget, first=not admitted)
            if tokens is None:
                self._full = running > 0 or bool(admitted)
            if not tokens:
                break
            admitted.append((self._waiting.popleft(), tokens))
            self.queue -= 1
            if self._free_tokens() <= budget.expected_tokens:
                self._full = True
        return admitted

    def _may_admit(self, running: int) -> bool:
        """Tell whether an admission pass makes sense: after one that failed, only once the batch shrank."""
        if not running:
            self._full = False
        if self._chunked is not None:
            return True
        if self._full or not self.queue:
            return False
        self._full = running >= self.config.max_running
        return not self._full

    def _may_add(self, budget: Budget, seats: int) -> bool:
        """Tell whether the pass may look at the head of the queue."""
        if not self.queue or self._full:
            return False
        if budget.spent and self._free_tokens() > budget.expected_tokens:
            return False
        self._full = seats >= self.config.max_running
        return not self._full

    def _head(self) -> SimulatedRequest:
        """Return the first sample that waits, without the dropped ones before it."""
        while self._waiting[0].state != "waiting":
            self._waiting.popleft()
        return self._waiting[0]

    def _try(self, sample: SimulatedRequest, budget: Budget, *, first: bool) -> int | None:
        """Admit the head of the queue; return its tokens in this pass. 0: not in this one; None: no room."""
        cache = self._cache
        fill_tokens = sample.fill_tokens
        # the last token is always computed: it puts out the first new one
        node, matched = cache.match(sample.path, fill_tokens - 1) if self._caching else (cache.root, 0)
        cache.lock(node)  # before the room is counted: what it needs cannot be evicted for it
        missing = fill_tokens - matched
        new_tokens = min(max(sample.asked_tokens - sample.outputs, 0), CLIP_TOKENS)
        tokens: int | None
        if missing + new_tokens + PAGE_TOKENS >= self._free_tokens() - budget.expected_tokens:
            tokens = None
        elif budget.chunk_tokens is None and not first and missing >= budget.input_tokens:
            tokens = 0
        else:
            tokens = budget.cut(missing)
        if not tokens:
            cache.unlock(node)
            return tokens
        if tokens < missing:
            self._chunked = sample
            sample.state = "chunked"
        budget.charge(tokens, 0 if tokens < missing else min(sample.asked_tokens, CLIP_TOKENS))
        sample.node, sample.protected_tokens, sample.filled_tokens = node, matched, matched
        if not sample.prefilled:
            sample.prefilled = True
            sample.cached_tokens = matched
        self.cached_tokens += matched
        self._pass_cached_tokens += matched
        return tokens

    def _next_chunk(self, sample: SimulatedRequest, budget: Budget) -> tuple[SimulatedRequest, int]:
        """Go on with the prompt that did not fit into one pass."""
        missing = sample.fill_tokens - sample.filled_tokens
        tokens = budget.cut_next_chunk(missing, self._free_tokens())
        if tokens == missing:
            self._chunked = None
        budget.charge(tokens, 0 if tokens < missing else min(sample.asked_tokens, CLIP_TOKENS))
        return sample, tokens

    def _order_queue(self) -> None:
        """Sort the queue as the policy wants it, or refresh what the first of it share with the cache."""
        if not self._caching or not self.queue:
            return
        if self.config.policy == "lpm" and self.queue <= MATCHED_AT_MOST:
            self._sort_by_prefix()
            return
        refresh = self._refreshes % REFRESH_PASSES == 0
        self._refreshes += 1
        if refresh:
            first = list(islice((s for s in self._waiting if s.state == "waiting"), MATCHED_AT_MOST))
            for sample in reversed(first):  # so that the head is the most recent
                self._cache.match(sample.path, sample.fill_tokens)

    def _sort_by_prefix(self) -> None:
        """Longest cached prefix first; last, those whose prefix another one of the queue will bring in."""
        others = RadixCache()
        ranked = []
        for sample in self._waiting:
            if sample.state != "waiting":
                continue
            matched = self._cache.match(sample.path, sample.fill_tokens)[1]
            rank = float(-min(matched, sample.fill_tokens - 1))
            if matched <= SHORT_MATCH_TOKENS and sample.prefix:
                if others.match(sample.path, sample.fill_tokens)[1] >= SHORT_MATCH_TOKENS:
                    rank = math.inf
                else:
                    others.insert(sample.path, sample.fill_tokens)
            ranked.append((rank, sample))
        ranked.sort(key=lambda pair: pair[0])
        self._waiting = deque(sample for _, sample in ranked)

    # forward passes

    def _prefill(self, admitted: list[tuple[SimulatedRequest, int]]) -> StepResult:
        running = len(self._batch.samples)
        prefill_tokens = sum(tokens for _, tokens in admitted)
        assert self._make_room(prefill_tokens), "admission took in more than the pool can hold"
        self._available_tokens -= prefill_tokens
        used_tokens, kv_tokens = self.used_tokens, 0
        finished = []
        for sample, tokens in admitted:
            sample.filled_tokens += tokens
            kv_tokens += sample.filled_tokens
            self._checkpoint(sample)
            if sample is self._chunked:
                continue
            sample.state = "running"
            sample.outputs += 1
            if sample.outputs >= sample.target_tokens:
                self._end(sample, sample.filled_tokens)
                finished.append(sample)
            else:
                self._batch.join(sample)
        if finished or self._chunked is not None:
            self._full = (
                False  # fewer samples join than were prefilled: SGLang takes it for a batch that shrank
            )
        self.prefill_passes += 1
        self.prefilled_tokens += prefill_tokens
        cached_tokens, self._pass_cached_tokens = self._pass_cached_tokens, 0
        self._rest()
        return StepResult(
            "prefill", 1, running, len(admitted), prefill_tokens, cached_tokens,
            kv_tokens, self.queue, used_tokens, 0, finished,
        )  # fmt: skip

    def _decode(self, limit: int) -> StepResult:
        batch = self._batch
        retracted = 0
        finished: list[SimulatedRequest] = []
        if self._make_room(len(batch.samples)):
            room_steps = self._free_tokens() // len(batch.samples)
            steps = min(limit, batch.steps_to_end(), room_steps)
            if self.queue and not self._full:
                steps = 1  # the next pass may admit
            self.ratio = max(self.ratio - self._decay * steps, self.config.minimal_ratio)
        else:
            retracted, finished = self._retract()
            self._full = False
            steps = 1 if batch.samples else 0
        running = len(batch.samples)
        self._make_room(steps * running)
        self._available_tokens -= steps * running
        kv_tokens = batch.context_tokens + running * (steps + 1) / 2
        ended = batch.advance(steps)
        used_tokens = self.used_tokens
        for sample in ended:
            context_tokens = batch.context_of(sample)
            batch.leave(sample)
            self._end(sample, context_tokens)
        if ended:
            self._full = False
        self.decode_passes += steps
        self._rest()
        return StepResult(
            "decode", steps, running, 0, 0, 0, kv_tokens, self.queue, used_tokens, retracted, finished + ended
        )

    def _retract(self) -> tuple[int, list[SimulatedRequest]]:
        """Send samples back until the next step fits; return how many, and who ended so."""
        batch = self._batch
        kept = batch.victims()
        retracted = 0
        ended = []
        while len(kept) > 1 and (not retracted or not self._make_room(len(kept))):
            victim = kept.pop()
            self._send_back(victim, len(kept))
            retracted += 1
            if victim.over:
                ended.append(victim)
        if len(kept) == 1 and not self._make_room(1):
            last = kept.pop()
            context_tokens = batch.context_of(last)
            batch.leave(last)
            self._release(last, context_tokens, keep=False)
            last.state = "aborted"
            ended.append(last)
        ahead_tokens = batch.output_tokens + RETRACT_STEPS * len(batch.samples)
        self.ratio = min(1.0, ahead_tokens / (batch.asked_tokens + 1))
        self.retractions += retracted
        return retracted, ended

    def _send_back(self, sample: SimulatedRequest, kept: int) -> None:
        """Free what a running sample holds and put it at the end of the queue, with its outputs."""
        context_tokens = self._batch.context_of(sample)
        self._batch.leave(sample)
        self._release(sample, context_tokens, keep=False)
        self._make_room(kept * RETRACT_STEPS)
        sample.retractions += 1
        if sample.dropping:
            sample.state = "dropped"
            return
        own_tokens = sample.prompt_tokens - sum(tokens for _, tokens in sample.prefix)
        sample.path = (*sample.prefix, (sample, own_tokens + sample.outputs))
        sample.state = "waiting"
        self._waiting.append(sample)
        self.queue += 1

    # the pool

    def _make_room(self, tokens: int) -> bool:
        """Evict until the pool has room for so many tokens; tell whether it has."""
        if self._available_tokens < tokens:
            self._available_tokens += self._cache.evict(tokens - self._available_tokens)
        return self._available_tokens >= tokens

    def _checkpoint(self, sample: SimulatedRequest) -> None:
        """Give the computed context to the cache; what another sample brought in before is freed."""
        if not self._caching:
            return
        node, known_tokens = self._cache.insert(sample.path, sample.filled_tokens)
        self._available_tokens += known_tokens - sample.protected_tokens
        self._cache.lock(node)
        if sample.node is not None:
            self._cache.unlock(sample.node)
        sample.node, sample.protected_tokens = node, sample.filled_tokens

    def _end(self, sample: SimulatedRequest, context_tokens: int) -> None:
        self._release(sample, context_tokens, keep=True)
        sample.state = "dropped" if sample.dropping else "finished"

    def _release(self, sample: SimulatedRequest, context_tokens: int, *, keep: bool) -> None:
        """Let go of the context; `keep` leaves all of it to the cache, else what it has not is freed."""
        own_tokens = context_tokens - sample.protected_tokens
        if keep and self._caching and sample.node is not None:
            if own_tokens:
                prefix_tokens = sum(tokens for _, tokens in sample.prefix)
                key = (sample, sample.protected_tokens - prefix_tokens)
                self._cache.extend(sample.node, key, own_tokens)
        else:
            self._available_tokens += own_tokens
        if sample.node is not None:
            self._cache.unlock(sample.node)
            sample.node = None
        sample.protected_tokens = sample.filled_tokens = 0

    def _rest(self) -> None:
        """Do what an idle scheduler does: the ratio starts anew."""
        if not self._batch.samples and self._chunked is None and not self.queue:
            self.ratio = self.config.initial_ratio
