"""SGLang's scheduler without clock, model or text: which samples are prefilled, decoded and retracted.

Source: SGLang 0.5.23, `managers/scheduler.py` (the order of steps), `schedule_policy.py` (admission, the
order of the queue), `schedule_batch.py` (retraction), `scheduler_components/new_token_ratio_tracker.py` and
`mem_cache/prefill_budget.py`.

Not modelled: the overlap of a pass with the processing of the last one, by which a sample that stops early
decodes once more and its successor starts one pass later; pages of more than one token; priorities; sliding
windows and Mamba states; speculation; and, with the radix cache off, the admission of `ignore_eos` requests
by a simulation of their ends (`add_one_req_ignore_eos`).
"""

import heapq
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

from batchrunner.engines.simulation.admission import PAGE_TOKENS, Admission, KvPool
from batchrunner.engines.simulation.request import CLIP_TOKENS, SchedulerConfig, SimulatedRequest


class RemainingTokens:
    """The sum over samples of min(tokens still allowed, clip), which falls as they decode."""

    __slots__ = ("_base", "_clip_tokens", "_clipped", "_due", "_serial", "_unclipped")

    def __init__(self, clip_tokens: int) -> None:
        self._clip_tokens = clip_tokens
        self._base = 0  # sum over samples that are not clipped of (tokens allowed - outputs + tick)
        self._unclipped = 0
        self._clipped = 0
        # (tick from which it is not clipped, serial number, sample)
        self._due: list[tuple[int, int, SimulatedRequest]] = []
        self._serial = 0

    def add(self, sample: SimulatedRequest, tick: int) -> None:
        """Count a sample that joined, or whose remaining tokens fell to the clip."""
        base = sample.asked_tokens - sample.outputs_base
        sample.clipped = base - tick > self._clip_tokens
        if sample.clipped:
            self._clipped += 1
            self._serial += 1
            heapq.heappush(self._due, (base - self._clip_tokens, self._serial, sample))
        else:
            self._unclipped += 1
            self._base += base

    def remove(self, sample: SimulatedRequest) -> None:
        """Undo `add`."""
        if sample.clipped:
            sample.clipped = False
            self._clipped -= 1
        else:
            self._unclipped -= 1
            self._base -= sample.asked_tokens - sample.outputs_base

    def tokens(self, tick: int) -> int:
        """Return the sum after `tick` decode steps."""
        while self._due and self._due[0][0] <= tick:
            due, _, sample = heapq.heappop(self._due)
            if sample.clipped and sample.asked_tokens - sample.outputs_base - self._clip_tokens == due:
                self.remove(sample)
                self.add(sample, tick)
        return self._base - tick * self._unclipped + self._clip_tokens * self._clipped


class RunningBatch:
    """The samples that decode, in the order in which they joined; `tick` counts the decode steps.

    A sample that joined with `o` outputs at tick `t` has `o - t + tick` now, so a step, which gives each
    sample one token, changes no sum.
    """

    def __init__(self, clip_tokens: int = CLIP_TOKENS) -> None:
        self.tick = 0
        self.samples: dict[SimulatedRequest, None] = {}
        self._outputs_base = 0
        self._context_base = 0
        self.asked_tokens = 0
        """Sum of the samples' `max_new_tokens`."""
        self._remaining = (RemainingTokens(clip_tokens), RemainingTokens(clip_tokens))  # by ignore_eos
        self._ends: list[tuple[int, int, SimulatedRequest]] = []  # (tick, serial number, sample)
        self._serial = 0

    @property
    def context_tokens(self) -> int:
        """Tokens that attention reads: a shared prefix counts once for each of its samples."""
        return self._context_base + self.tick * len(self.samples)

    @property
    def output_tokens(self) -> int:
        """Tokens that the running samples have generated."""
        return self._outputs_base + self.tick * len(self.samples)

    def outputs_of(self, sample: SimulatedRequest) -> int:
        """Tokens that one running sample has generated."""
        return sample.outputs_base + self.tick

    def context_of(self, sample: SimulatedRequest) -> int:
        """Tokens of one running sample that the pool holds: its context without the last output."""
        return sample.context_base + self.tick

    def expected_tokens(self, ratio: float) -> float:
        """Return how many more tokens of the pool the scheduler expects the batch to take."""
        estimated, fixed = self._remaining
        return estimated.tokens(self.tick) * ratio + fixed.tokens(self.tick)

    def join(self, sample: SimulatedRequest) -> None:
        """Add a sample whose prefill generated a token, the last of `sample.outputs`."""
        tick = self.tick
        sample.outputs_base = sample.outputs - tick
        sample.context_base = sample.fill_tokens - 1 - tick
        self.samples[sample] = None
        self._outputs_base += sample.outputs_base
        self._context_base += sample.context_base
        self.asked_tokens += sample.asked_tokens
        self._remaining[sample.ignore_eos].add(sample, tick)
        self._end_at(sample, sample.target_tokens)

    def leave(self, sample: SimulatedRequest) -> None:
        """Remove a sample; its outputs are counted."""
        del self.samples[sample]
        self._outputs_base -= sample.outputs_base
        self._context_base -= sample.context_base
        self.asked_tokens -= sample.asked_tokens
        self._remaining[sample.ignore_eos].remove(sample)
        sample.outputs = sample.outputs_base + self.tick
        if not self.samples:
            self._ends.clear()

    def end_next(self, sample: SimulatedRequest) -> None:
        """Let a running sample end with the next step, as an aborted request does."""
        self._end_at(sample, self.outputs_of(sample) + 1)

    def steps_to_end(self) -> int:
        """Decode steps until the first sample ends."""
        while not self._is_end(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.tick

    def advance(self, steps: int) -> list[SimulatedRequest]:
        """Give each sample `steps` tokens; return those that are complete, which are still in the batch."""
        self.tick += steps
        ended = []
        while self._ends and self._ends[0][0] <= self.tick:
            entry = heapq.heappop(self._ends)
            if self._is_end(entry):
                ended.append(entry[2])
        return ended

    def retraction_order(self) -> list[SimulatedRequest]:
        """Return all samples; the last is retracted first: shortest output, longest prompt, youngest."""
        return sorted(self.samples, key=lambda s: (-s.outputs_base, s.prompt_tokens))

    def _end_at(self, sample: SimulatedRequest, outputs: int) -> None:
        sample.target_tokens = outputs
        self._serial += 1
        sample.end_serial = self._serial
        heapq.heappush(self._ends, (outputs - sample.outputs_base, self._serial, sample))

    def _is_end(self, entry: tuple[int, int, SimulatedRequest]) -> bool:
        """Tell whether an entry is current: its sample was neither retracted nor set to end earlier."""
        _, serial, sample = entry
        return serial == sample.end_serial and sample in self.samples


class PrefillCadence:
    """Counts the decode passes that are still owed; `_should_defer_prefill` in `managers/scheduler.py`."""

    def __init__(self, interval: int, least_samples: int) -> None:
        """`interval` passes are owed after each prefill; below `least_samples` running ones, none."""
        self._interval = interval
        self._least_samples = least_samples
        self.decodes_left = 0
        """Decode passes that are still owed."""

    def defers_prefill(self, running: int) -> bool:
        """Tell whether the next pass decodes whoever waits, and count it.

        With nothing to decode the server's loop turns without a pass until none is owed.
        """
        if not self.decodes_left:
            return False
        if running < max(self._least_samples, 1):
            self.decodes_left = 0
            return False
        self.decodes_left -= 1
        return True

    def decoded(self, passes: int) -> None:
        """Count decode passes beyond the one that `defers_prefill` counted."""
        self.decodes_left = max(self.decodes_left - passes, 0)

    def begin(self) -> None:
        """Owe the decode passes that follow a prefill."""
        self.decodes_left = self._interval


RETRACT_STEPS = 20
"""`SGLANG_RETRACT_DECODE_STEPS`: steps ahead for which a retraction makes room, where it can."""


class StepResult(NamedTuple):
    """One prefill pass, or decode passes in which nothing changes but one more token for each sample."""

    kind: Literal["prefill", "decode"]
    steps: int
    """Number of forward passes; more than one only when decoding."""
    running: int
    """Samples that decode (`#running-req` in the log); in a prefill, those that wait for it to end."""
    admitted: int
    """Samples that are prefilled in this pass."""
    prefill_tokens: int
    """Tokens that the pass computes in a prefill."""
    cached_tokens: int
    """Tokens that newly admitted samples found in the cache."""
    kv_tokens: float
    """Context tokens that attention reads in a pass, on average over the passes."""
    queue: int
    used_tokens: int
    """Tokens of the pool in use during the last pass, without those that could be evicted."""
    retracted: int
    finished: Sequence[SimulatedRequest]
    """Samples that ended with the last pass; their state is `finished`, `aborted` or `dropped`."""
    decoded: int = 0
    """Samples that got their next token in a prefill pass, with mixed chunks."""


class Scheduler:
    """One SGLang scheduler: submit samples, call `step`, read the counts.

    A step costs O(ended + admitted), however many samples run; only retractions cost more.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.ratio = config.initial_ratio
        """Share of their remaining `max_new_tokens` that running samples are expected to use."""
        self.retractions = 0
        self.prefill_passes = 0
        self.decode_passes = 0
        self.prefilled_tokens = 0
        self.generated_tokens = 0
        self.pool = KvPool(config.max_total_tokens, caching=config.radix_cache)
        self._admission = Admission(config, self.pool)
        self._cadence = PrefillCadence(config.decode_interval, config.decode_interval_samples)
        self._batch = RunningBatch(config.clip_tokens)

    @property
    def running(self) -> int:
        """Samples that decode."""
        return len(self._batch.samples)

    @property
    def passes(self) -> int:
        """Forward passes so far."""
        return self.prefill_passes + self.decode_passes

    @property
    def queue(self) -> int:
        """Samples that wait for their prefill."""
        return len(self._admission.waiting)

    @property
    def cached_tokens(self) -> int:
        """Tokens that all admitted samples found in the cache."""
        return self._admission.cached_tokens

    @property
    def in_flight(self) -> int:
        """Samples that were submitted and have not ended."""
        return self.queue + self.running + (self._admission.chunked is not None)

    @property
    def context_tokens(self) -> int:
        """Context tokens of all running samples, without the token that each gets in the next decode pass."""
        return self._batch.context_tokens

    def submit(self, sample: SimulatedRequest) -> None:
        """Put a new sample at the end of the queue.

        Raises ValueError where the prompt cannot fit, which the server refuses too. A sample that asks for
        more tokens than the context or the pool holds gets what they hold (`init_req_max_new_tokens`).
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
        # even a request for no token is prefilled, which generates one
        sample.target_tokens = max(1, min(sample.output_tokens, sample.asked_tokens))
        self._admission.waiting.append(sample)

    def drop(self, sample: SimulatedRequest) -> None:
        """Abort a sample: a waiting one leaves at once, a running one with the next pass."""
        if sample.state == "waiting":
            self._admission.waiting.drop(sample)
        elif sample.state == "chunked":
            self._admission.chunked = None
            self.pool.release(sample, sample.filled_tokens, keep=False)
            sample.state = "dropped"
        elif sample.state == "running" and not sample.dropping:
            self._batch.end_next(sample)
            sample.dropping = True

    def step(self, limit: int = sys.maxsize) -> StepResult | None:
        """Run the next forward pass, or up to `limit` decode passes in which nothing else happens.

        Return None when there is nothing to do. The next step takes account of what is submitted meanwhile.
        """
        if self._cadence.defers_prefill(self.running):
            return self._decode(limit)
        cached_before = self.cached_tokens
        admitted = self._admission.take(self.running, self._batch.expected_tokens(self.ratio))
        if admitted:
            return self._prefill(admitted, self.cached_tokens - cached_before)
        if self._batch.samples:
            return self._decode(limit)
        return None

    def _prefill(self, admitted: list[tuple[SimulatedRequest, int]], cached_tokens: int) -> StepResult:
        running = len(self._batch.samples)
        prefill_tokens = sum(tokens for _, tokens in admitted)
        assert self.pool.make_room(prefill_tokens), "admission took in more than the pool can hold"
        self.pool.free_tokens -= prefill_tokens
        used_tokens, kv_tokens = self.pool.used_tokens, 0
        decoded = running if self.config.mixes and self.pool.make_room(running) else 0
        finished: list[SimulatedRequest] = []
        if decoded:
            kv_tokens += self._batch.context_tokens + decoded
            finished += self._advance(1)
        for sample, tokens in admitted:
            sample.filled_tokens += tokens
            kv_tokens += sample.filled_tokens
            self.pool.checkpoint(sample)
            if sample is self._admission.chunked:
                continue
            sample.state = "running"
            sample.outputs += 1
            self.generated_tokens += 1
            if sample.outputs >= sample.target_tokens:
                self._end(sample, sample.filled_tokens)
                finished.append(sample)
            else:
                self._batch.join(sample)
        if finished or decoded or self._admission.chunked is not None:
            # fewer samples join than were in the pass, which SGLang takes for a batch that shrank; a pass
            # with decodes leaves a batch of its own, of which nothing is known
            self._admission.full = False
        self._cadence.begin()
        self.prefill_passes += 1
        self.prefilled_tokens += prefill_tokens
        self._reset_when_idle()
        return StepResult(
            "prefill", 1, running, len(admitted), prefill_tokens, cached_tokens,
            kv_tokens, self.queue, used_tokens, 0, finished, decoded,
        )  # fmt: skip

    def _decode(self, limit: int) -> StepResult:
        batch = self._batch
        retracted = 0
        finished: list[SimulatedRequest] = []
        if self.pool.make_room(len(batch.samples)):
            room_steps = self.pool.available_tokens // len(batch.samples)
            steps = min(limit, batch.steps_to_end(), room_steps)
            if self._admission.chunked is not None or (self.queue and not self._admission.full):
                steps = min(steps, 1 + self._cadence.decodes_left)  # the next pass may admit
            self.ratio = max(self.ratio - self.config.ratio_decay * steps, self.config.minimal_ratio)
        else:
            retracted, finished = self._retract()
            self._admission.full = False
            steps = 1 if batch.samples else 0
        running = len(batch.samples)
        self.pool.make_room(steps * running)
        kv_tokens = batch.context_tokens + running * (steps + 1) / 2
        used_tokens = self.pool.used_tokens + steps * running
        ended = self._advance(steps)
        if ended:
            self._admission.full = False
        self._cadence.decoded(steps - 1)
        self.decode_passes += steps
        self._reset_when_idle()
        return StepResult(
            "decode", steps, running, 0, 0, 0, kv_tokens, self.queue, used_tokens, retracted, finished + ended
        )

    def _advance(self, steps: int) -> list[SimulatedRequest]:
        """Give each running sample `steps` tokens, for which there is room; return those that ended."""
        self.pool.free_tokens -= steps * len(self._batch.samples)
        self.generated_tokens += steps * len(self._batch.samples)
        ended = self._batch.advance(steps)
        for sample in ended:
            context_tokens = self._batch.context_of(sample)
            self._batch.leave(sample)
            self._end(sample, context_tokens)
        return ended

    def _retract(self) -> tuple[int, list[SimulatedRequest]]:
        """Retract samples until the next step fits; return their number, and the samples that ended by it."""
        batch = self._batch
        kept = batch.retraction_order()
        retracted = 0
        ended = []
        while len(kept) > 1 and (not retracted or not self.pool.make_room(len(kept))):
            sample = kept.pop()
            self._send_back(sample, len(kept))
            retracted += 1
            if sample.over:
                ended.append(sample)
        if len(kept) == 1 and not self.pool.make_room(1):
            last = kept.pop()
            context_tokens = batch.context_of(last)
            batch.leave(last)
            self.pool.release(last, context_tokens, keep=False)
            last.state = "aborted"
            ended.append(last)
        ahead_tokens = batch.output_tokens + RETRACT_STEPS * len(batch.samples)
        self.ratio = min(1.0, ahead_tokens / (batch.asked_tokens + 1))
        self.retractions += retracted
        return retracted, ended

    def _send_back(self, sample: SimulatedRequest, kept: int) -> None:
        """Free the context of a running sample and put it, with its outputs, at the end of the queue."""
        context_tokens = self._batch.context_of(sample)
        self._batch.leave(sample)
        self.pool.release(sample, context_tokens, keep=False)
        self.pool.make_room(kept * RETRACT_STEPS)
        sample.retractions += 1
        if sample.dropping:
            sample.state = "dropped"
            return
        self._admission.waiting.append(sample)

    def _end(self, sample: SimulatedRequest, context_tokens: int) -> None:
        self.pool.release(sample, context_tokens, keep=True)
        sample.state = "dropped" if sample.dropping else "finished"

    def _reset_when_idle(self) -> None:
        """Reset the ratio when nothing is left to do, as SGLang does."""
        if not self._batch.samples and self._admission.chunked is None and not self.queue:
            self.ratio = self.config.initial_ratio
