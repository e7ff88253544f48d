"""A server in virtual time: a scheduler, the time that its passes take, and gauges as late as real ones."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.engines.simulation.scheduler import (
    Scheduler,
    SchedulerConfig,
    SimulatedRequest,
    StepResult,
)

WAITING = 50
"""Samples that wait behind those that run."""


class PassWork(NamedTuple):
    """The content of some forward passes; all but its tokens have a cost, see `CostModel`."""

    passes: int = 0
    samples: float = 0.0
    """Sum over passes of the samples in them."""
    kv_tokens: float = 0.0
    """Sum over passes of the context tokens that attention reads."""
    prefill_tokens: float = 0.0
    """Prompt tokens that are computed."""
    prefills: int = 0
    """Passes with prompt tokens."""
    tokens: float = 0.0
    """Output tokens."""

    def plus(self, step: StepResult, tokens: int) -> "PassWork":
        """Add a step that put out `tokens`."""
        return PassWork(
            self.passes + step.steps,
            self.samples + step.steps * step.samples,
            self.kv_tokens + step.steps * step.kv_tokens,
            self.prefill_tokens + step.prefill_tokens,
            self.prefills + (step.steps if step.kind == "prefill" else 0),
            self.tokens + tokens,
        )


PARTS = 5
"""Parts of a model."""
MOST_SWEEPS = 20_000
"""Sweeps after which the fit ends, where parts still move."""
RIDGE = 1e-3
"""Weight against large parts when a model is fitted to stretches of passes, which are much alike."""


class CostModel(NamedTuple):
    """Seconds of a forward pass, linear in its content: a cost for each part of `PassWork`, in its order."""

    base_s: float
    """Seconds to read the weights, launch the kernels and run the scheduler."""
    sample_s: float
    """Seconds for each sample: its row in the matrix products, sampling, and the scheduler's bookkeeping."""
    kv_token_s: float
    """Seconds for each context token that attention reads."""
    prefill_token_s: float
    """Seconds for each prompt token that is computed."""
    prefill_base_s: float = 0.0
    """Seconds by which a pass with prompt tokens takes longer than one without, whatever its content: its
    kernels are launched one by one, where a decode pass replays a CUDA graph."""

    def work_s(self, work: PassWork) -> float:
        """Return the seconds of several passes."""
        content = work[:PARTS]  # its tokens, which come last, cost nothing more
        return sum(cost * amount for cost, amount in zip(self, content, strict=True))

    def step_s(self, step: StepResult) -> float:
        """Return the seconds of all passes of a scheduler's step."""
        return self.work_s(PassWork().plus(step, 0))

    def steps_within(self, seconds: float, samples: int, kv_tokens: int) -> int:
        """Return how many decode passes end within `seconds`; each reads `samples` tokens more than the last.

        `kv_tokens` is the context before the first of them. `n` passes take `n · first + growth · n² / 2`.
        """
        growth = self.kv_token_s * samples
        first = self.base_s + self.sample_s * samples + self.kv_token_s * kv_tokens + growth / 2
        return int(
            2 * max(seconds, 0) / max(first + math.sqrt(first**2 + 2 * growth * max(seconds, 0)), 1e-9)
        )


H100_8B = CostModel(base_s=6.0e-3, sample_s=1.6e-5, kv_token_s=4.9e-8, prefill_token_s=2.9e-5)
"""Llama-3.1-8B in bf16 on one H100 SXM: an estimate from data sheets, not a measurement.

The card: 3.35 TB/s of HBM3, 989 TFLOP/s dense bf16 (NVIDIA's H100 data sheet). The model: 8.03e9 parameters,
32 layers, 8 key-value heads of 128 (its config.json).
- base: 16.06 GB of weights / 3.35 TB/s = 4.8 ms, read at four fifths of the peak.
- sample: 2 · 8.03e9 FLOP / 989 TFLOP/s = 16 µs. The weights' read hides it in small batches.
- context token: 2 · 32 · 8 · 128 · 2 B = 131,072 B / 3.35 TB/s = 39 ns, read at four fifths of the peak.
- prefilled token: the sample's 16 µs at 55 % of the peak.
"""


def fit_spans(spans: Sequence[tuple[PassWork, float]]) -> CostModel | None:
    """Fit a model without negative parts to the work and the seconds of stretches of passes.

    Parts that the stretches cannot tell apart share what they cost together, so the model is good for work
    that is not too unlike theirs. None where there are fewer stretches than parts.

    The sum of squares is the least: each part is set to its best value beside the others, again and again,
    which converges, as no part may be negative.
    """
    if len(spans) < PARTS:
        return None
    columns = range(PARTS)
    products = [[sum(work[i] * work[j] for work, _ in spans) for j in columns] for i in columns]
    sums = [sum(work[i] * seconds for work, seconds in spans) for i in columns]
    parts = [0.0] * PARTS
    for _ in range(MOST_SWEEPS):
        before = [*parts]
        for i in columns:
            others = sum(products[i][j] * parts[j] for j in columns if j != i)
            parts[i] = max(0.0, (sums[i] - others) / ((1 + RIDGE) * products[i][i] or 1.0))
        if all(map(math.isclose, parts, before)):
            break
    return CostModel(*parts)


INTERVAL_STEPS = 15
"""Decode passes between two updates of the gauges, which are updated at each prefill too: SGLang's default
of `--load-snapshot-publish-interval` for `/v1/loads`."""


class EndedRequest(NamedTuple):
    """A sample that left the replica, with the time in seconds."""

    at_s: float
    sample: SimulatedRequest


class Replica:
    """One server with one scheduler on a virtual clock that the caller moves.

    What is submitted to the scheduler takes effect at its next pass: move the clock to that time first.
    """

    def __init__(
        self, config: SchedulerConfig, cost: CostModel, name: str = "simulated", route: str = "engine"
    ) -> None:
        self.scheduler = Scheduler(config)
        self._cost = cost
        self._name, self._route = name, route
        self._unpublished_steps = 0
        self._told = 0  # retractions that loads have told
        self._free_at_s = 0.0  # when the current pass ends
        self._ended: list[EndedRequest] = []  # with the current pass
        self.load = self._load_of(0, 0, 0)
        """The load that the server last published. Samples that ended with the pass before count as running,
        as in SGLang; samples in a prefill neither run nor wait."""
        self._next_load = self.load  # published with the current pass

    @property
    def busy(self) -> bool:
        """Whether a sample waits or runs, or something is still to be reported."""
        return bool(self.scheduler.in_flight or self._ended or self.load.has_work or self.load.used_tokens)

    def advance(self, until_s: float) -> list[EndedRequest]:
        """Let the clock run to a finite time; return the samples that ended by then, in order.

        A pass that has begun by then continues; its results are reported once the clock reaches its end.
        """
        ended: list[EndedRequest] = []
        while self._free_at_s <= until_s:
            ended += self._ended
            self._ended, self.load = [], self._next_load
            if self._free_at_s == until_s or not self._step(until_s):
                break
        return ended

    def _step(self, until_s: float) -> bool:
        """Run passes that end by that time, or one that ends after it; return False when idle."""
        scheduler = self.scheduler
        left_s = until_s - self._free_at_s
        within = self._cost.steps_within(left_s, scheduler.running, scheduler.context_tokens)
        step = scheduler.step(max(1, min(within, INTERVAL_STEPS - self._unpublished_steps)))
        if step is None:
            self.load = self._next_load = self._load_of(0, 0, 0)
            self._free_at_s = until_s
            return False
        self._free_at_s += self._cost.step_s(step)
        self._ended = [EndedRequest(self._free_at_s, sample) for sample in step.finished]
        passes = 0 if step.kind == "prefill" else self._unpublished_steps + step.steps
        self._unpublished_steps = passes % INTERVAL_STEPS
        if step.steps and not self._unpublished_steps:
            self._next_load = self._load_of(step.running, step.queue, step.used_tokens)
        return True

    def _load_of(self, running: int, queue: int, used_tokens: int) -> SchedulerLoad:
        config = self.scheduler.config
        before, self._told = self._told, self.scheduler.retractions
        return SchedulerLoad(
            self._name, "simulated", running, queue, used_tokens / config.max_total_tokens, used_tokens,
            config.max_total_tokens, config.max_running, self._route, self._free_at_s,
            retracted=self._told - before,
        )  # fmt: skip
