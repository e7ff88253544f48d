"""SGLang's scheduler without clock, model or text: prefills, decode passes and retractions of samples.

Source: SGLang 0.5.23, `managers/scheduler.py` (the order of steps), `schedule_policy.py` (admission, the
order of the queue), `schedule_batch.py` (retraction), `scheduler_components/new_token_ratio_tracker.py` and
`mem_cache/prefill_budget.py`.

Not modelled:

- the overlap of a pass with the processing of the last one. In SGLang a sample that stops early decodes once
  more, and its successor starts one pass later;
- policies other than `fcfs`, priorities, mixed chunks, speculation and aborted requests;
- pages of more than one token and sliding windows; of the states of a hybrid model only those of running
  requests count, not those that the prefix cache keeps;
- without a radix cache, the admission of `ignore_eos` requests by simulating their ends
  (`add_one_req_ignore_eos`).
"""

import math
import sys
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

from batchrunner.engines.simulation.radix import CacheNode, RadixCache

INITIAL_RATIO = 0.7
"""`SGLANG_INIT_NEW_TOKEN_RATIO`: the share of `max_new_tokens` that outputs are expected to take at first."""
MINIMAL_RATIO_FACTOR = 0.14
"""`SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR`: the lowest expected share, as a fraction of the first."""
DECAY_STEPS = 600
"""`SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS`: decode steps from the first share to the lowest."""
CLIP_TOKENS = 4096
"""`SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`: most output tokens that the scheduler expects of a request."""
PAGE_TOKENS = 1
"""Tokens of a page, which each admitted sample reserves in addition: the default of flashinfer and fa3."""
MATCHED_AT_MOST = 128
"""`WAITING_QUEUE_PREFIX_MATCH_MAX`: waiting samples whose prefixes are kept in the cache."""
REFRESH_PASSES = 32
"""`WAITING_PREFIX_REFRESH_INTERVAL`: admission passes between two refreshes of waiting prefixes."""
RETRACT_STEPS = 20
"""`SGLANG_RETRACT_DECODE_STEPS`: decode steps for which a retraction tries to make room."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Server flags; the defaults are SGLang's on an 80 GB card."""

    max_running: int
    """`--max-running-requests`."""
    max_total_tokens: int
    """`--max-total-tokens`: the KV pool."""
    context_tokens: int | None = None
    """`--context-length`; None: the pool is the only limit."""
    chunked_prefill_tokens: int | None = 8192
    """`--chunked-prefill-size`; None: prompts are never split."""
    max_prefill_tokens: int = 16_384
    """`--max-prefill-tokens`."""
    conservativeness: float = 1.0
    """`--schedule-conservativeness`."""
    radix_cache: bool = True
    """Whether prefixes are cached; False is `--disable-radix-cache`."""
    clip_tokens: int = CLIP_TOKENS
    """`SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`, an environment variable."""
    decode_interval: int = 0
    """`--prefill-decode-interval`: decode passes between two prefill passes; 0: prefill goes first."""

    state_slots: int | None = None
    """`--max-mamba-cache-size`: the state pool of a hybrid model; None: it has no states."""
    slots_per_request: int = 1
    """State slots of a running request."""

    @property
    def running_by_states(self) -> int | None:
        """Most samples whose states the pool holds; None where they have none."""
        return None if self.state_slots is None else self.state_slots // self.slots_per_request

    @property
    def most_running(self) -> int:
        """Most samples that may run: by the flag, and by the state pool."""
        by_states = self.running_by_states
        return self.max_running if by_states is None else min(self.max_running, by_states)

    @property
    def initial_ratio(self) -> float:
        """The new-token ratio of an idle scheduler."""
        return min(INITIAL_RATIO * self.conservativeness, 1.0)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A sample on its way through a scheduler; submit it once."""

    prompt_tokens: int
    output_tokens: int
    """Output tokens after which it stops by itself, unless `max_new_tokens` truncates it earlier."""
    max_new_tokens: int | None = None
    """Tokens that the request asks for and admission reserves; None: exactly the output."""
    ignore_eos: bool = False
    """Whether the scheduler expects all of `max_new_tokens`, whatever its ratio."""
    prefix: tuple[tuple[Hashable, int], ...] = ()
    """Prefix of the prompt that other samples share, as (name, tokens), for instance
    (("system", 120), ("document 7", 400)). No other sample shares the rest of the prompt."""
    payload: Any = None
    """Data of the caller, which the scheduler does not read."""

    # The scheduler's state of the sample.
    outputs: int = 0
    """Tokens generated when it was last prefilled, retracted or ended."""
    cached_tokens: int = 0
    """Prompt tokens found in the cache at its first prefill, as the server reports them."""
    retractions: int = 0
    aborted: bool = False
    """Whether it ended because the pool had no room for it alone."""
    asked_tokens: int = 0
    """`max_new_tokens`, or fewer if the context or the pool cannot hold them."""
    target_tokens: int = 0
    """Output tokens with which it ends."""
    path: tuple[tuple[Hashable, int], ...] = ()
    """Its context for the radix cache: the shared prefix, and an endless segment of its own."""
    node: CacheNode | None = None
    """The cache node that it has locked."""
    protected_tokens: int = 0
    """Leading tokens of its context that the cache owns."""
    filled_tokens: int = 0
    """Computed tokens of its context, while it is prefilled in chunks."""
    joined: int = 0
    """Its outputs when it began to decode, minus the scheduler's count of decode passes at that time."""

    @property
    def fill_tokens(self) -> int:
        """Context tokens to prefill: the prompt, and the outputs from before a retraction."""
        return self.prompt_tokens + self.outputs


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
        """Tokens of running samples and of locked contexts."""
        return self.tokens - self.available_tokens

    @property
    def available_tokens(self) -> int:
        """Tokens that a sample could get: free ones, and those of unlocked cached contexts."""
        return self.free_tokens + self.cache.evictable_tokens

    def lock_prefix(self, sample: SimulatedRequest) -> tuple[CacheNode, int]:
        """Lock the cached prefix of a context; return its last node and its tokens.

        The last token of the context is always computed, because that generates the first new token.
        """
        node, matched = self.cache.root, 0
        if self.caching:
            node, matched = self.cache.match(sample.path, sample.fill_tokens - 1)
        self.cache.lock(node)
        return node, matched

    def make_room(self, tokens: int) -> bool:
        """Evict cached contexts until `tokens` are free; return whether that succeeded."""
        if self.free_tokens < tokens:
            self.free_tokens += self.cache.evict(tokens - self.free_tokens)
        return self.free_tokens >= tokens

    def checkpoint(self, sample: SimulatedRequest) -> None:
        """Move the computed context into the cache; free the tokens that the cache already has."""
        if not self.caching:
            return
        node, cached_tokens = self.cache.insert(sample.path, sample.filled_tokens)
        self.free_tokens += cached_tokens - sample.protected_tokens
        self.cache.lock(node)
        assert sample.node is not None
        self.cache.unlock(sample.node)
        sample.node, sample.protected_tokens = node, sample.filled_tokens

    def release(self, sample: SimulatedRequest, context_tokens: int, *, keep: bool) -> None:
        """Release a context; with `keep` move it into the cache first, otherwise free its uncached tokens."""
        sample.filled_tokens = context_tokens
        if keep:
            self.checkpoint(sample)
        self.free_tokens += context_tokens - sample.protected_tokens
        assert sample.node is not None
        self.cache.unlock(sample.node)
        sample.node, sample.protected_tokens, sample.filled_tokens = None, 0, 0


@dataclass(slots=True)
class PrefillBudget:
    """The remaining limits of a prefill pass."""

    input_tokens: int
    """Remaining tokens of `--max-prefill-tokens`."""
    chunk_tokens: int
    """Remaining tokens of `--chunked-prefill-size`."""
    expected_tokens: float
    """Further tokens of the pool that running and admitted samples are expected to take."""


class StepResult(NamedTuple):
    """One prefill pass, or several decode passes that each only give every sample one more token."""

    kind: Literal["prefill", "decode"]
    steps: int
    """Number of forward passes; 1 for a prefill."""
    running: int
    """Decoding samples (`#running-req` in the log); during a prefill they wait for its end."""
    queue: int
    """Waiting samples."""
    used_tokens: int
    """Tokens of the pool in use during the last pass, without those that could be evicted."""
    kv_tokens: float
    """Mean number of context tokens that attention reads in a pass."""
    finished: Sequence[SimulatedRequest]
    """Samples that ended with the last pass; see `SimulatedRequest.aborted`."""
    admitted: int = 0
    """Samples of a prefill pass."""
    prefill_tokens: int = 0
    """Prompt tokens that a prefill pass computes."""

    @property
    def samples(self) -> int:
        """Number of samples in a pass."""
        return self.admitted if self.kind == "prefill" else self.running


class Scheduler:
    """One SGLang scheduler: submit samples, call `step`, read the counts.

    A decode pass gives each running sample one token. So a sample's outputs are the number of decode passes
    plus its constant `joined`, and most passes change only that number.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.ratio = config.initial_ratio
        """Share of the remaining `max_new_tokens` that running samples are expected to use."""
        self.retractions = 0
        self.prefill_passes = 0
        self.decode_passes = 0
        self.prefilled_tokens = 0
        self.cached_tokens = 0
        """Prefix cache hits of all admitted samples, in tokens."""
        self.context_tokens = 0
        """Context tokens of all running samples, without the token that each gets in the next decode pass. A
        shared prefix counts once for each of its samples."""
        self.pool = KvPool(config.max_total_tokens, caching=config.radix_cache)
        self.waiting: deque[SimulatedRequest] = deque()
        self.decoding: dict[SimulatedRequest, int] = {}
        """Decoding samples in the order in which they joined, each with the decode pass that ends it."""
        self.chunked: SimulatedRequest | None = None
        """The sample whose prompt is prefilled over several passes."""
        self._most_running = config.most_running
        self._tokens_each = 0  # number of decode passes, each of which gives one token to each sample
        self._full = False  # no admission is tried until the running batch shrinks
        self._refreshes = 0
        self._owed = 0  # decode passes before the next prefill

    @property
    def running(self) -> int:
        """Number of decoding samples."""
        return len(self.decoding)

    @property
    def queue(self) -> int:
        """Number of samples that wait for their prefill."""
        return len(self.waiting)

    @property
    def in_flight(self) -> int:
        """Number of submitted samples that have not ended."""
        return self.queue + self.running + (self.chunked is not None)

    def submit(self, sample: SimulatedRequest) -> None:
        """Append a new sample to the queue.

        A sample that asks for more tokens than the context or the pool holds gets as many as fit
        (`init_req_max_new_tokens`). Raises ValueError for a prompt that the server would refuse as too long.
        """
        longest = min(self.config.max_total_tokens, self.config.context_tokens or sys.maxsize)
        room_tokens = longest - PAGE_TOKENS - 1 - sample.prompt_tokens
        if room_tokens < 1:
            raise ValueError(f"the prompt ({sample.prompt_tokens} tokens) is too long for the scheduler")
        most_tokens = sample.output_tokens if sample.max_new_tokens is None else sample.max_new_tokens
        sample.asked_tokens = min(most_tokens, room_tokens)
        # Even a request for no token is prefilled, and the prefill generates one token.
        sample.target_tokens = max(1, min(sample.output_tokens, sample.asked_tokens))
        sample.path = (*sample.prefix, (sample, sys.maxsize))
        self.waiting.append(sample)

    def step(self, limit: int = sys.maxsize) -> StepResult | None:
        """Run the next forward pass, or up to `limit` decode passes between which nothing changes.

        Return None if there is nothing to do. Samples that are submitted later take part in the next step.
        """
        if self._owed and self.running:
            return self._decode(limit)
        self._owed = 0
        if admitted := self._admit_waiting():
            return self._prefill(admitted)
        return self._decode(limit) if self.decoding else None

    def outputs_of(self, sample: SimulatedRequest) -> int:
        """Return the tokens that a running sample has generated."""
        return sample.joined + self._tokens_each

    def context_of(self, sample: SimulatedRequest) -> int:
        """Return the pool tokens of a running sample: its context without the last output."""
        return sample.prompt_tokens + self.outputs_of(sample) - 1

    def expected_tokens(self) -> float:
        """Return the further tokens of the pool that the running samples are expected to take."""
        clip, passes = self.config.clip_tokens, self._tokens_each
        estimated = fixed = 0
        for sample in self.decoding:
            tokens = sample.asked_tokens - sample.joined - passes
            if tokens > clip:  # noqa: PLR1730 - min() takes twice as long, for each sample in each pass
                tokens = clip
            if sample.ignore_eos:
                fixed += tokens
            else:
                estimated += tokens
        return estimated * self.ratio + fixed

    def _admit_waiting(self) -> list[tuple[SimulatedRequest, int]]:
        """Select the samples of a prefill pass, with their tokens in it, and lock their cached prefixes."""
        if not self._may_admit():
            return []
        config, pool = self.config, self.pool
        self._refresh_prefixes()
        chunk_tokens = sys.maxsize if config.chunked_prefill_tokens is None else config.chunked_prefill_tokens
        budget = PrefillBudget(config.max_prefill_tokens, chunk_tokens, self.expected_tokens())
        admitted: list[tuple[SimulatedRequest, int]] = []
        if self.chunked is not None:
            admitted.append((self.chunked, self._next_chunk(self.chunked, budget)))
        while self.waiting and not self._full:
            is_spent = budget.input_tokens <= 0 or budget.chunk_tokens <= 0
            if is_spent and pool.available_tokens > budget.expected_tokens:
                break
            self._full = self.running + len(admitted) >= self._most_running
            if self._full:
                break
            tokens = self._admit(self.waiting[0], budget, first=not admitted)
            if tokens is None:
                self._full = self.running > 0 or bool(admitted)
            if not tokens:
                break
            admitted.append((self.waiting.popleft(), tokens))
            self._full = pool.available_tokens <= budget.expected_tokens
        return admitted

    def _may_admit(self) -> bool:
        """Tell whether to try an admission; after a failed one, only once the batch has shrunk."""
        if not self.decoding:
            self._full = False
        if self.chunked is not None:
            # A real server without a token would run out of memory; here the others decode or are retracted.
            return self.pool.available_tokens > 0
        self._full = self._full or (self.queue > 0 and self.running >= self._most_running)
        return self.queue > 0 and not self._full

    def _admit(self, sample: SimulatedRequest, budget: PrefillBudget, *, first: bool) -> int | None:
        """Admit the head of the queue; return its tokens in this pass.

        0 means that it has to wait for another pass, None that the pool has no room for it.
        """
        node, matched = self.pool.lock_prefix(sample)  # now, because locked tokens are not available
        uncached = sample.fill_tokens - matched
        new_tokens = min(max(sample.asked_tokens - sample.outputs, 0), self.config.clip_tokens)
        is_never_split = self.config.chunked_prefill_tokens is None
        tokens: int | None
        if uncached + new_tokens + PAGE_TOKENS >= self.pool.available_tokens - budget.expected_tokens:
            tokens = None
        elif is_never_split and not first and uncached >= budget.input_tokens:
            tokens = 0
        else:
            tokens = min(uncached, budget.chunk_tokens)
        if not tokens:
            self.pool.cache.unlock(node)
            return tokens
        if tokens < uncached:
            self.chunked = sample
        self._charge(budget, sample, tokens, uncached)
        sample.node, sample.protected_tokens, sample.filled_tokens = node, matched, matched
        if not sample.retractions:
            sample.cached_tokens = matched
        self.cached_tokens += matched
        return tokens

    def _next_chunk(self, sample: SimulatedRequest, budget: PrefillBudget) -> int:
        """Continue the prompt that did not fit into one pass; return its tokens in this pass.

        It continues even if running samples are expected to take the whole pool.
        """
        uncomputed = sample.fill_tokens - sample.filled_tokens
        free_tokens = self.pool.available_tokens
        limit = max(budget.chunk_tokens, 1)
        room_tokens = math.floor(free_tokens - budget.expected_tokens)
        if room_tokens > 0:
            limit = min(limit, room_tokens)
        tokens = min(uncomputed, free_tokens, limit)
        if tokens == uncomputed:
            self.chunked = None
        self._charge(budget, sample, tokens, uncomputed)
        return tokens

    def _charge(self, budget: PrefillBudget, sample: SimulatedRequest, tokens: int, uncomputed: int) -> None:
        """Charge an admitted sample to the budget; the last chunk of its prompt adds its expected outputs."""
        new_tokens = min(sample.asked_tokens, self.config.clip_tokens) if tokens == uncomputed else 0
        budget.expected_tokens += tokens + PAGE_TOKENS + new_tokens
        budget.input_tokens -= tokens
        budget.chunk_tokens -= tokens

    def _refresh_prefixes(self) -> None:
        """Touch the cached prefixes of the first waiting samples, so that they are evicted last."""
        if not self.pool.caching or not self.waiting:
            return
        if self._refreshes % REFRESH_PASSES == 0:
            for sample in reversed(list(islice(self.waiting, MATCHED_AT_MOST))):  # the head comes last
                self.pool.cache.match(sample.path, sample.fill_tokens)
        self._refreshes += 1

    def _prefill(self, admitted: list[tuple[SimulatedRequest, int]]) -> StepResult:
        running = self.running
        prefill_tokens = sum(tokens for _, tokens in admitted)
        assert self.pool.make_room(prefill_tokens), "admission took in more than the pool can hold"
        self.pool.free_tokens -= prefill_tokens
        used_tokens, kv_tokens = self.pool.used_tokens, 0
        finished: list[SimulatedRequest] = []
        for sample, tokens in admitted:
            sample.filled_tokens += tokens
            kv_tokens += sample.filled_tokens
            self.pool.checkpoint(sample)
            if sample is self.chunked:
                continue
            sample.outputs += 1
            if sample.outputs >= sample.target_tokens:
                self.pool.release(sample, sample.filled_tokens, keep=True)
                finished.append(sample)
            else:
                sample.joined = sample.outputs - self._tokens_each
                self.decoding[sample] = sample.target_tokens - sample.joined
                self.context_tokens += self.context_of(sample)
        if finished or self.chunked is not None:
            # Fewer samples begin to decode than were in the pass. To SGLang the batch has shrunk.
            self._full = False
        self._owed = self.config.decode_interval
        self.prefill_passes += 1
        self.prefilled_tokens += prefill_tokens
        self._reset_when_idle()
        return StepResult(
            kind="prefill",
            steps=1,
            running=running,
            queue=self.queue,
            used_tokens=used_tokens,
            kv_tokens=kv_tokens,
            finished=finished,
            admitted=len(admitted),
            prefill_tokens=prefill_tokens,
        )

    def _decode(self, limit: int) -> StepResult:
        config = self.config
        finished: list[SimulatedRequest] = []
        if self.pool.make_room(self.running):
            room_steps = self.pool.available_tokens // self.running
            steps = min(limit, min(self.decoding.values()) - self._tokens_each, room_steps)
            if self.chunked is not None or (self.waiting and not self._full):
                steps = min(steps, max(self._owed, 1))  # the next pass may admit
            lowest = config.initial_ratio * MINIMAL_RATIO_FACTOR
            self.ratio = max(self.ratio - steps * (config.initial_ratio - lowest) / DECAY_STEPS, lowest)
        else:
            finished = self._retract()
            self._full = False
            steps = 1 if self.decoding else 0
        running = self.running
        self.pool.make_room(steps * running)
        kv_tokens = self.context_tokens + running * (steps + 1) / 2
        used_tokens = self.pool.used_tokens + steps * running
        if at_end := self._advance(steps):
            self._full = False
            finished += at_end
        self._owed = max(self._owed - steps, 0)
        self.decode_passes += steps
        self._reset_when_idle()
        return StepResult(
            kind="decode",
            steps=steps,
            running=running,
            queue=self.queue,
            used_tokens=used_tokens,
            kv_tokens=kv_tokens,
            finished=finished,
        )

    def _advance(self, steps: int) -> list[SimulatedRequest]:
        """Give each running sample `steps` tokens; return the samples that end. The pool must have room."""
        tokens = steps * self.running
        self.pool.free_tokens -= tokens
        self.context_tokens += tokens
        self._tokens_each += steps
        at_end = [sample for sample, end in self.decoding.items() if end <= self._tokens_each]
        for sample in at_end:
            self.pool.release(sample, self._leave(sample), keep=True)
        return at_end

    def _leave(self, sample: SimulatedRequest) -> int:
        """Remove a sample from the decoding ones; return the tokens of its context."""
        context_tokens = self.context_of(sample)
        del self.decoding[sample]
        self.context_tokens -= context_tokens
        sample.outputs = self.outputs_of(sample)
        return context_tokens

    def _retract(self) -> list[SimulatedRequest]:
        """Retract samples until the next step fits; return those that were aborted.

        The sample with the shortest output goes first; among equals that with the longest prompt, then the
        youngest. Its context is freed, and it goes to the end of the queue with its outputs.
        """
        running = sorted(self.decoding, key=lambda sample: (-sample.joined, sample.prompt_tokens))
        aborted = []
        has_retracted = False
        while len(running) > 1 and not (has_retracted and self.pool.make_room(len(running))):
            sample = running.pop()
            self.pool.release(sample, self._leave(sample), keep=False)
            self.pool.make_room(len(running) * RETRACT_STEPS)
            sample.retractions += 1
            self.retractions += 1
            has_retracted = True
            self.waiting.append(sample)
        if len(running) == 1 and not self.pool.make_room(1):
            last = running.pop()
            self.pool.release(last, self._leave(last), keep=False)
            last.aborted = True
            aborted.append(last)
        outputs = sum(self.outputs_of(sample) + RETRACT_STEPS for sample in running)
        self.ratio = min(1.0, outputs / (sum(sample.asked_tokens for sample in running) + 1))
        return aborted

    def _reset_when_idle(self) -> None:
        """Reset the ratio when no sample is in flight, as SGLang does."""
        if not self.in_flight:
            self.ratio = self.config.initial_ratio
