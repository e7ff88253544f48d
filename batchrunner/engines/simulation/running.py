"""The samples that decode together, as running sums: a step costs the same however many there are."""

import heapq

from batchrunner.engines.simulation.config import CLIP_TOKENS
from batchrunner.engines.simulation.sample import SimulatedRequest


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
