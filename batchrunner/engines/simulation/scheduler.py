"""SGLang's scheduler without clock, model or text: prefills, decode passes and retractions of requests.

Each of the `n` outputs of a prompt is a request of its own here, as in SGLang. The code calls it a sample.

Source: SGLang 0.5.23, `managers/scheduler.py` (the order of steps), `schedule_policy.py` (admission, the
order of the queue), `schedule_batch.py` (retraction), `scheduler_components/new_token_ratio_tracker.py` and
`mem_cache/prefill_budget.py`.

Not modelled:

- the overlap of a pass with the processing of the previous pass. Because of this overlap, a request that
  stops early decodes once more in SGLang, and its successor starts one pass later;
- policies other than `fcfs`, priorities, mixed chunks, speculation and aborted requests;
- pages of more than one token, and sliding windows;
- the states of a hybrid model that the prefix cache keeps. Only those of running requests count;
- without a radix cache, the admission of `ignore_eos` requests by simulating their ends
  (`add_one_req_ignore_eos`).
"""

import math
import sys
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, Literal, NamedTuple

from batchrunner.engines.simulation.radix import CacheNode, RadixCache

INITIAL_RATIO = 0.7
"""`SGLANG_INIT_NEW_TOKEN_RATIO`: initial value of the new-token ratio, the fraction of `max_new_tokens` that
outputs are expected to take."""
MINIMAL_RATIO_FACTOR = 0.14
"""`SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR`: minimum of the new-token ratio, as a fraction of its initial value."""
DECAY_STEPS = 600
"""`SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS`: number of decode passes in which the new-token ratio falls from its
initial value to its minimum."""
CLIP_TOKENS = 4096
"""`SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`: maximum number of output tokens that admission reserves for a
request."""
PAGE_TOKENS = 1
"""Number of tokens in a page of the KV pool: the default of the attention backends flashinfer and fa3. Each
admitted request reserves one page more than its tokens need."""
MATCHED_AT_MOST = 128
"""`WAITING_QUEUE_PREFIX_MATCH_MAX`: maximum number of waiting requests whose prefixes are protected from
early eviction."""
REFRESH_PASSES = 32
"""`WAITING_PREFIX_REFRESH_INTERVAL`: once in this many admission passes, the prefixes of waiting requests are
marked as used."""
RETRACT_STEPS = 20
"""`SGLANG_RETRACT_DECODE_STEPS`: number of decode passes for which a retraction tries to free memory."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Flags of a simulated server. The defaults are SGLang's on an 80 GB GPU."""

    max_running: int
    """`--max-running-requests`: maximum number of requests that run at once."""
    max_total_tokens: int
    """`--max-total-tokens`: number of tokens in the KV pool."""
    context_tokens: int | None = None
    """`--context-length`; None if only the KV pool limits a context."""
    chunked_prefill_tokens: int | None = 8192
    """`--chunked-prefill-size`; None if prompts are never split."""
    max_prefill_tokens: int = 16_384
    """`--max-prefill-tokens`: maximum number of prompt tokens in a prefill pass."""
    conservativeness: float = 1.0
    """`--schedule-conservativeness`: multiplies the initial new-token ratio."""
    radix_cache: bool = True
    """Whether prefixes are cached; False is `--disable-radix-cache`."""
    clip_tokens: int = CLIP_TOKENS
    """Value of the environment variable `SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`; see CLIP_TOKENS."""
    decode_interval: int = 0
    """`--prefill-decode-interval`: minimum number of decode passes between two prefill passes. With 0,
    prefill passes always go first."""
    state_slots: int | None = None
    """`--max-mamba-cache-size`: slots in the state pool of a hybrid model; None for a model without
    states."""
    slots_per_request: int = 1
    """Number of state slots that a running request takes."""

    @property
    def running_by_states(self) -> int | None:
        """Number of requests whose states fit into the state pool; None for a model without states."""
        return None if self.state_slots is None else self.state_slots // self.slots_per_request

    @property
    def most_running(self) -> int:
        """Maximum number of running requests: the lower of `max_running` and the limit of the state pool."""
        by_states = self.running_by_states
        return self.max_running if by_states is None else min(self.max_running, by_states)

    @property
    def initial_ratio(self) -> float:
        """New-token ratio of an idle scheduler; see `Scheduler.ratio`."""
        return min(INITIAL_RATIO * self.conservativeness, 1.0)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A simulated request and its state in the scheduler. It can be submitted only once."""

    prompt_tokens: int
    output_tokens: int
    """Number of output tokens after which the request stops, unless `max_new_tokens` truncates it earlier."""
    max_new_tokens: int | None = None
    """Maximum number of output tokens, which admission reserves; None means `output_tokens`."""
    ignore_eos: bool = False
    """Whether the output is expected to take all of `max_new_tokens`, regardless of the new-token ratio."""
    prefix: tuple[tuple[Hashable, int], ...] = ()
    """Prefix of the prompt that other requests share, as (name, tokens), for instance (("system", 120),
    ("document 7", 400)). No other request shares the rest of the prompt."""
    payload: Any = None
    """Data of the caller, which the scheduler never reads."""

    # The scheduler sets all fields from here on.
    outputs: int = 0
    """Number of output tokens at the last prefill, the last retraction or the end of the request."""
    cached_tokens: int = 0
    """Number of prompt tokens that hit the prefix cache at the first prefill, as a server reports it."""
    retractions: int = 0
    """Number of times that the request was retracted because the KV pool was full."""
    aborted: bool = False
    """Whether the request ended because the KV pool had no room for it, even alone."""
    asked_tokens: int = 0
    """`max_new_tokens`, or fewer if the context or the KV pool cannot hold that many."""
    target_tokens: int = 0
    """Number of output tokens with which the request ends."""
    path: tuple[tuple[Hashable, int], ...] = ()
    """Context of the request in the prefix cache: the shared prefix, and an endless segment that only this
    request has."""
    node: CacheNode | None = None
    """Cache node that the request has locked; None while the request waits in the queue."""
    protected_tokens: int = 0
    """Number of tokens at the start of the context that the prefix cache owns."""
    filled_tokens: int = 0
    """Number of context tokens that are computed, while the prompt is prefilled in chunks."""
    output_offset: int = 0
    """Number to add to the scheduler's total of decode passes to get the number of output tokens. It is set
    when the request begins to decode."""

    @property
    def fill_tokens(self) -> int:
        """Number of context tokens to prefill: the prompt, and the outputs from before a retraction."""
        return self.prompt_tokens + self.outputs


class KvPool:
    """The KV pool of one server, with its prefix cache. It only counts tokens."""

    def __init__(self, tokens: int, *, caching: bool) -> None:
        """`tokens` is the size of the pool. Without `caching`, a context is freed when its request leaves."""
        self.tokens = tokens
        self.caching = caching
        self.cache = RadixCache()
        self.free_tokens = tokens
        """Number of free tokens in the pool."""

    @property
    def used_tokens(self) -> int:
        """Number of tokens of running requests and of locked contexts."""
        return self.tokens - self.available_tokens

    @property
    def available_tokens(self) -> int:
        """Number of tokens that can be allocated: free ones, and those of unlocked cached contexts."""
        return self.free_tokens + self.cache.evictable_tokens

    def lock_prefix(self, sample: SimulatedRequest) -> tuple[CacheNode, int]:
        """Lock the cached prefix of a request's context; return the prefix's last node and its tokens.

        The last token of the context is never taken from the cache, because computing it generates the next
        token.
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
        """Move the computed context of a request into the prefix cache."""
        if not self.caching:
            return
        node, cached_tokens = self.cache.insert(sample.path, sample.filled_tokens)
        # Another request may have cached some of these tokens meanwhile, so the copies of this request are
        # freed.
        self.free_tokens += cached_tokens - sample.protected_tokens
        # The new lock comes before the old one is released, so that nothing in between can be evicted.
        self.cache.lock(node)
        assert sample.node is not None
        self.cache.unlock(sample.node)
        sample.node, sample.protected_tokens = node, sample.filled_tokens

    def release(self, sample: SimulatedRequest, context_tokens: int, *, keep: bool) -> None:
        """Release the context of a request that leaves. With `keep`, the prefix cache keeps the context."""
        sample.filled_tokens = context_tokens
        if keep:
            self.checkpoint(sample)
        # The prefix cache owns the protected tokens, so they are not freed here.
        self.free_tokens += context_tokens - sample.protected_tokens
        assert sample.node is not None
        self.cache.unlock(sample.node)
        sample.node, sample.protected_tokens, sample.filled_tokens = None, 0, 0


@dataclass(slots=True)
class PrefillBudget:
    """Numbers of tokens that a prefill pass may still take."""

    input_tokens: int
    """Number of tokens that `--max-prefill-tokens` still allows in this pass."""
    chunk_tokens: int
    """Number of tokens that `--chunked-prefill-size` still allows in this pass."""
    expected_tokens: float
    """Number of further KV pool tokens that running and admitted requests are expected to take."""


class Refusal(Enum):
    """Reason why the first request in the queue is not admitted; `AddReqResult` in SGLang."""

    NO_ROOM = "no room"
    """The KV pool has no room for the request and its expected output."""
    LATER = "later"
    """The request does not fit into the rest of this prefill pass."""


class StepResult(NamedTuple):
    """One prefill pass, or several decode passes during which no request enters or leaves."""

    kind: Literal["prefill", "decode"]
    steps: int
    """Number of forward passes; 1 for a prefill."""
    running: int
    """Number of decoding requests (`#running-req` in the log). They generate no token in a prefill pass."""
    queue: int
    """Number of waiting requests."""
    used_tokens: int
    """Number of tokens of the KV pool in use during the last pass, without tokens that could be evicted."""
    kv_tokens: float
    """Mean number of context tokens that attention reads in a pass."""
    finished: Sequence[SimulatedRequest]
    """Requests that ended with the last pass, or that were aborted (`SimulatedRequest.aborted`)."""
    admitted: int = 0
    """Number of requests in a prefill pass."""
    prefill_tokens: int = 0
    """Number of prompt tokens that a prefill pass computes."""

    @property
    def samples(self) -> int:
        """Number of requests in a pass."""
        return self.admitted if self.kind == "prefill" else self.running


class Scheduler:
    """One SGLang scheduler: submit requests, call `step`, read the counts.

    A decode pass gives each running request one token. So the number of output tokens of a request is the
    total of decode passes plus a constant, `output_offset`, which is set when the request begins to decode.
    As long as no request enters or leaves, a pass only increments the total, and leaves the requests alone.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.ratio = config.initial_ratio
        """New-token ratio: fraction of the remaining `max_new_tokens` that outputs are expected to take."""
        self.retractions = 0
        self.prefill_passes = 0
        self.decode_passes = 0
        self.prefilled_tokens = 0
        """Number of prompt tokens computed in all prefill passes."""
        self.cached_tokens = 0
        """Number of prompt tokens of all admitted requests that hit the prefix cache."""
        self.context_tokens = 0
        """Number of context tokens of all running requests, without the token that each gets in the next
        decode pass. A shared prefix counts once for each of its requests."""
        self.pool = KvPool(config.max_total_tokens, caching=config.radix_cache)
        self.waiting: deque[SimulatedRequest] = deque()
        """Queue of requests; the first is admitted next."""
        self.decoding: dict[SimulatedRequest, int] = {}
        """Decoding requests, oldest first, each with the value of `_passes` at which it ends."""
        self.chunked: SimulatedRequest | None = None
        """The request whose prompt is prefilled in chunks over several passes; None if there is none."""
        self._most_running = config.most_running
        self._passes = 0
        """Total of decode passes so far, from which each request's number of output tokens is computed; see
        `SimulatedRequest.output_offset`."""
        self._is_full = False
        """Whether admission waits until the running batch shrinks: SGLang's `batch_is_full`."""
        self._admission_passes = 0
        """Number of admission passes so far; see REFRESH_PASSES."""
        self._decodes_before_prefill = 0
        """Number of decode passes that must still precede the next prefill pass; see `decode_interval`."""

    @property
    def running(self) -> int:
        """Number of decoding requests."""
        return len(self.decoding)

    @property
    def queue(self) -> int:
        """Number of requests that wait for their prefill."""
        return len(self.waiting)

    @property
    def in_flight(self) -> int:
        """Number of submitted requests that have not ended."""
        return self.queue + self.running + (self.chunked is not None)

    def submit(self, sample: SimulatedRequest) -> None:
        """Append a new request to the queue.

        If it asks for more tokens than the context or the pool can hold, it gets as many as fit, as in
        SGLang's `init_req_max_new_tokens`. Raises ValueError if the prompt is too long.
        """
        longest_context = min(self.config.max_total_tokens, self.config.context_tokens or sys.maxsize)
        # As in SGLang, one page and one token of the longest context stay free.
        room_tokens = longest_context - PAGE_TOKENS - 1 - sample.prompt_tokens
        if room_tokens < 1:
            raise ValueError(f"the prompt ({sample.prompt_tokens} tokens) is too long for the scheduler")
        most_tokens = sample.output_tokens if sample.max_new_tokens is None else sample.max_new_tokens
        sample.asked_tokens = min(most_tokens, room_tokens)
        # A request for no token is prefilled too, and a prefill generates one token.
        sample.target_tokens = max(1, min(sample.output_tokens, sample.asked_tokens))
        # The last segment is the rest of the context, which no other request shares.
        sample.path = (*sample.prefix, (sample, sys.maxsize))
        self.waiting.append(sample)

    def step(self, limit: int = sys.maxsize) -> StepResult | None:
        """Run the next forward pass, or up to `limit` decode passes between which nothing changes.

        Return None if there is no work. Requests that are submitted later take part in the next step.
        """
        if self._decodes_before_prefill and self.running:
            return self._decode(limit)
        # Without running requests, there is nothing to decode before the prefill.
        self._decodes_before_prefill = 0
        if admitted := self._admit_waiting():
            return self._prefill(admitted)
        return self._decode(limit) if self.decoding else None

    def outputs_of(self, sample: SimulatedRequest) -> int:
        """Return the number of tokens that a running request has generated."""
        return sample.output_offset + self._passes

    def context_of(self, sample: SimulatedRequest) -> int:
        """Return the number of pool tokens of a running request: its context without the last output."""
        return sample.prompt_tokens + self.outputs_of(sample) - 1

    def expected_tokens(self) -> float:
        """Return the number of further pool tokens that running requests are expected to take.

        A request may still generate the rest of its `asked_tokens`; at most `clip_tokens` of them count. It
        is expected to generate the fraction `ratio` of this number, or all of it with `ignore_eos`.
        """
        clip, passes = self.config.clip_tokens, self._passes
        estimated = fixed = 0
        for sample in self.decoding:
            tokens = sample.asked_tokens - sample.output_offset - passes
            if tokens > clip:  # noqa: PLR1730 - min() takes twice as long, for each sample in each pass
                tokens = clip
            if sample.ignore_eos:
                fixed += tokens
            else:
                estimated += tokens
        return estimated * self.ratio + fixed

    def _admit_waiting(self) -> list[tuple[SimulatedRequest, int]]:
        """Return the requests of the next prefill pass, each with its number of tokens in the pass.

        Their cached prefixes are locked. The list is empty if no prefill pass is possible.
        """
        if not self._may_admit():
            return []
        config, pool = self.config, self.pool
        self._refresh_prefixes()
        chunk_tokens = sys.maxsize if config.chunked_prefill_tokens is None else config.chunked_prefill_tokens
        budget = PrefillBudget(
            input_tokens=config.max_prefill_tokens,
            chunk_tokens=chunk_tokens,
            expected_tokens=self.expected_tokens(),
        )
        admitted: list[tuple[SimulatedRequest, int]] = []
        if self.chunked is not None:
            admitted.append((self.chunked, self._next_chunk(self.chunked, budget)))
        while self.waiting and not self._is_full:
            has_pool_room = pool.available_tokens > budget.expected_tokens
            is_pass_full = budget.input_tokens <= 0 or budget.chunk_tokens <= 0
            # If the pool is full too, `_admit` refuses the request for that reason, as in SGLang.
            if is_pass_full and has_pool_room:
                break
            if self.running + len(admitted) >= self._most_running:
                self._is_full = True
                break
            tokens = self._admit(self.waiting[0], budget, is_first=not admitted)
            if tokens is Refusal.NO_ROOM:
                # An empty batch cannot shrink, so it never counts as full.
                self._is_full = self.running > 0 or bool(admitted)
                break
            if tokens is Refusal.LATER:
                break
            admitted.append((self.waiting.popleft(), tokens))
            self._is_full = pool.available_tokens <= budget.expected_tokens
        return admitted

    def _may_admit(self) -> bool:
        """Tell whether to try an admission. If one has failed, the running batch must shrink first."""
        if not self.decoding:
            self._is_full = False
        if self.chunked is not None:
            # The next chunk of a split prompt goes first, even if the batch is full. Without a free token,
            # the chunk waits until running requests end or are retracted; a real server would run out of
            # memory.
            return self.pool.available_tokens > 0
        if self.queue > 0 and self.running >= self._most_running:
            self._is_full = True
        return self.queue > 0 and not self._is_full

    def _admit(self, sample: SimulatedRequest, budget: PrefillBudget, *, is_first: bool) -> int | Refusal:
        """Admit the first request of the queue; return its number of tokens in this pass.

        `is_first` tells that the pass has admitted no request yet. If the request is refused, return the
        reason.
        """
        # The prefix is locked before the tests, because locked tokens do not count as available.
        node, matched = self.pool.lock_prefix(sample)
        uncached = sample.fill_tokens - matched
        new_tokens = min(max(sample.asked_tokens - sample.outputs, 0), self.config.clip_tokens)
        room_tokens = self.pool.available_tokens - budget.expected_tokens
        refusal = None
        # As in SGLang, one page more than the request needs is reserved, and one token must remain free.
        if uncached + new_tokens + PAGE_TOKENS >= room_tokens:
            refusal = Refusal.NO_ROOM
        elif self.config.chunked_prefill_tokens is None and not is_first and uncached >= budget.input_tokens:
            # A prompt that is never split must fit into the rest of the pass, or have a pass to itself.
            refusal = Refusal.LATER
        if refusal is not None:
            self.pool.cache.unlock(node)
            return refusal
        tokens = min(uncached, budget.chunk_tokens)
        if tokens < uncached:
            # The next passes prefill the rest of this prompt before they admit other requests.
            self.chunked = sample
        self._charge(budget, sample, tokens, uncached)
        sample.node = node
        # Before the pass, only the cached prefix is computed, and it belongs to the prefix cache.
        sample.protected_tokens = sample.filled_tokens = matched
        # A server reports the cache hits of the first admission, so a later one does not change the count.
        if not sample.retractions:
            sample.cached_tokens = matched
        self.cached_tokens += matched
        return tokens

    def _next_chunk(self, sample: SimulatedRequest, budget: PrefillBudget) -> int:
        """Continue a prompt that did not fit into one pass; return the number of its tokens in this pass.

        The prompt continues even if running samples are expected to take the whole pool.
        """
        uncomputed = sample.fill_tokens - sample.filled_tokens
        free_tokens = self.pool.available_tokens
        # At least one token is computed, because empty chunks would never finish the prompt.
        chunk_limit = max(budget.chunk_tokens, 1)
        room_tokens = math.floor(free_tokens - budget.expected_tokens)
        if room_tokens > 0:
            chunk_limit = min(chunk_limit, room_tokens)
        tokens = min(uncomputed, free_tokens, chunk_limit)
        if tokens == uncomputed:
            self.chunked = None
        self._charge(budget, sample, tokens, uncomputed)
        return tokens

    def _charge(self, budget: PrefillBudget, sample: SimulatedRequest, tokens: int, uncomputed: int) -> None:
        """Subtract `tokens` of an admitted request from the budget of this pass.

        `uncomputed` is the number of tokens that were still to compute. If `tokens` equals it, the prompt is
        complete, and the expected output is subtracted too.
        """
        new_tokens = min(sample.asked_tokens, self.config.clip_tokens) if tokens == uncomputed else 0
        budget.expected_tokens += tokens + PAGE_TOKENS + new_tokens
        budget.input_tokens -= tokens
        budget.chunk_tokens -= tokens

    def _refresh_prefixes(self) -> None:
        """Mark the cached prefixes of the first waiting requests as used, so that they are evicted last.

        As in SGLang, only one call in REFRESH_PASSES does so.
        """
        if not self.pool.caching or not self.waiting:
            return
        if self._admission_passes % REFRESH_PASSES == 0:
            # The order is reversed, so that the prefix of the first request in the queue is evicted last.
            for sample in reversed(list(islice(self.waiting, MATCHED_AT_MOST))):
                self.pool.cache.match(sample.path, sample.fill_tokens)
        self._admission_passes += 1

    def _prefill(self, admitted: list[tuple[SimulatedRequest, int]]) -> StepResult:
        """Run a prefill pass of admitted requests, each with its number of tokens in the pass."""
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
                # The prompt is unfinished, and more chunks follow.
                continue
            # The pass that computes the last prompt token also generates an output token.
            sample.outputs += 1
            if sample.outputs >= sample.target_tokens:
                self.pool.release(sample, sample.filled_tokens, keep=True)
                finished.append(sample)
            else:
                sample.output_offset = sample.outputs - self._passes
                self.decoding[sample] = sample.target_tokens - sample.output_offset
                self.context_tokens += self.context_of(sample)
        if finished or self.chunked is not None:
            # A request that has ended, or whose prompt is unfinished, does not decode. So the batch has
            # shrunk, and admission is tried again, as in SGLang.
            self._is_full = False
        self._decodes_before_prefill = self.config.decode_interval
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
        """Run up to `limit` decode passes: until a request ends, one may be admitted, or the pool is full.

        If the pool has no room for a single pass, requests are retracted first.
        """
        finished: list[SimulatedRequest] = []
        if self.pool.make_room(self.running):
            steps_to_first_end = min(self.decoding.values()) - self._passes
            steps_to_full_pool = self.pool.available_tokens // self.running
            steps = min(limit, steps_to_first_end, steps_to_full_pool)
            may_admit = self.chunked is not None or (self.waiting and not self._is_full)
            if may_admit:
                # Stop before the first pass at which a prefill may be tried.
                steps = min(steps, max(self._decodes_before_prefill, 1))
            self._lower_ratio(steps)
        else:
            # A retraction makes the batch smaller, so admission may be tried again.
            finished = self._retract()
            self._is_full = False
            steps = 1 if self.decoding else 0
        running = self.running
        self.pool.make_room(steps * running)
        # Each pass adds one token to every context, so the mean is that at the middle of the passes.
        kv_tokens = self.context_tokens + running * (steps + 1) / 2
        used_tokens = self.pool.used_tokens + steps * running
        if ended := self._advance(steps):
            self._is_full = False
            finished += ended
        self._decodes_before_prefill = max(self._decodes_before_prefill - steps, 0)
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

    def _lower_ratio(self, steps: int) -> None:
        """Lower the new-token ratio for each of `steps` decode passes, down to its minimum."""
        initial_ratio = self.config.initial_ratio
        lowest_ratio = initial_ratio * MINIMAL_RATIO_FACTOR
        decay = steps * (initial_ratio - lowest_ratio) / DECAY_STEPS
        self.ratio = max(self.ratio - decay, lowest_ratio)

    def _advance(self, steps: int) -> list[SimulatedRequest]:
        """Give each running request `steps` tokens; return those that end. The pool must have room."""
        tokens = steps * self.running
        self.pool.free_tokens -= tokens
        self.context_tokens += tokens
        self._passes += steps
        ended = [sample for sample, last_pass in self.decoding.items() if last_pass <= self._passes]
        for sample in ended:
            self.pool.release(sample, self._leave(sample), keep=True)
        return ended

    def _leave(self, sample: SimulatedRequest) -> int:
        """Remove a request from the decoding ones; return the number of tokens in its context."""
        context_tokens = self.context_of(sample)
        del self.decoding[sample]
        self.context_tokens -= context_tokens
        sample.outputs = self.outputs_of(sample)
        return context_tokens

    def _retract(self) -> list[SimulatedRequest]:
        """Retract requests until the next decode pass fits into the pool, like SGLang's `retract_decode`.

        The request with the shortest output goes first; of several, the one with the longest prompt, then the
        youngest. Its context is freed, and it goes to the end of the queue with its outputs. If a single
        request does not fit, it is aborted. Return the aborted requests.
        """
        # The last one in this list is retracted first. A larger offset means more outputs.
        running = sorted(self.decoding, key=lambda sample: (-sample.output_offset, sample.prompt_tokens))
        while len(running) > 1:
            sample = running.pop()
            self.pool.release(sample, self._leave(sample), keep=False)
            sample.retractions += 1
            self.retractions += 1
            self.waiting.append(sample)
            # Try to free memory for RETRACT_STEPS passes, but stop retracting once one pass fits.
            self.pool.make_room(len(running) * RETRACT_STEPS)
            if self.pool.make_room(len(running)):
                break
        aborted = []
        if len(running) == 1 and not self.pool.make_room(1):
            single_sample = running.pop()
            self.pool.release(single_sample, self._leave(single_sample), keep=False)
            single_sample.aborted = True
            aborted.append(single_sample)
        # The outputs proved longer than expected. The new ratio is the fraction of `max_new_tokens` that the
        # remaining requests will have used after RETRACT_STEPS more passes. As in SGLang, 1 is added to avoid
        # a division by 0.
        outputs = sum(self.outputs_of(sample) + RETRACT_STEPS for sample in running)
        self.ratio = min(1.0, outputs / (sum(sample.asked_tokens for sample in running) + 1))
        return aborted

    def _reset_when_idle(self) -> None:
        """Reset the new-token ratio if no request is in flight, as SGLang does."""
        if not self.in_flight:
            self.ratio = self.config.initial_ratio
