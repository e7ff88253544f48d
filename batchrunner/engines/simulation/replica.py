"""A server in virtual time: a scheduler, the duration of its passes, load samples as late as SGLang's."""

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
"""Number of waiting samples behind the running ones."""


class PassWork(NamedTuple):
    """The work of some forward passes. Each field but `tokens` has a cost in `CostModel`."""

    passes: int = 0
    samples: float = 0.0
    """Number of samples, summed over the passes."""
    kv_tokens: float = 0.0
    """Context tokens that attention reads, summed over the passes."""
    prefill_tokens: float = 0.0
    """Computed prompt tokens."""
    prefills: int = 0
    """Passes with prompt tokens."""
    tokens: float = 0.0
    """Output tokens."""

    def plus(self, step: StepResult, tokens: int) -> "PassWork":
        """Add a step that has generated `tokens`."""
        return PassWork(
            passes=self.passes + step.steps,
            samples=self.samples + step.steps * step.samples,
            kv_tokens=self.kv_tokens + step.steps * step.kv_tokens,
            prefill_tokens=self.prefill_tokens + step.prefill_tokens,
            prefills=self.prefills + (step.steps if step.kind == "prefill" else 0),
            tokens=self.tokens + tokens,
        )


PARTS = 5
"""Number of coefficients of a cost model."""
MOST_SWEEPS = 20_000
"""Most sweeps of a fit over the coefficients, if they do not converge."""
RIDGE = 1e-3
"""Weight of a penalty for large coefficients: stretches of passes are too similar for a plain fit."""


class CostModel(NamedTuple):
    """Duration of a forward pass, linear in its work: one coefficient for each field of `PassWork`."""

    base_s: float
    """Seconds to read the weights, launch the kernels and run the scheduler."""
    sample_s: float
    """Seconds for each sample: its row in the matrix products, sampling, and the scheduler's bookkeeping."""
    kv_token_s: float
    """Seconds for each context token that attention reads."""
    prefill_token_s: float
    """Seconds for each computed prompt token."""
    prefill_base_s: float = 0.0
    """Additional seconds of a pass with prompt tokens, whatever its work: its kernels are launched one by
    one, while a decode pass replays a CUDA graph."""

    def work_s(self, work: PassWork) -> float:
        """Return the seconds of several passes."""
        amounts = work[:PARTS]  # without the output tokens, which cost nothing more
        return sum(cost * amount for cost, amount in zip(self, amounts, strict=True))

    def step_s(self, step: StepResult) -> float:
        """Return the seconds of all passes of a scheduler's step."""
        return self.work_s(PassWork().plus(step, 0))

    def steps_within(self, seconds: float, samples: int, kv_tokens: int) -> int:
        """Return the number of decode passes that end within `seconds`.

        `kv_tokens` is the context before the first pass; each pass adds `samples` tokens to it. So `n` passes
        take `n · first + growth · n² / 2`.
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
    """Fit a cost model to stretches of passes, given as work and seconds, by non-negative least squares.

    Coefficients that the stretches do not distinguish share their common cost, so the model is valid for
    similar work only. None if there are fewer stretches than coefficients.

    The method is coordinate descent: each coefficient in turn is set to its best value beside the others.
    """
    if len(spans) < PARTS:
        return None
    columns = range(PARTS)
    products = [[sum(work[i] * work[j] for work, _ in spans) for j in columns] for i in columns]
    sums = [sum(work[i] * seconds for work, seconds in spans) for i in columns]
    coefficients = [0.0] * PARTS
    for _ in range(MOST_SWEEPS):
        last = [*coefficients]
        for i in columns:
            explained = sum(products[i][j] * coefficients[j] for j in columns if j != i)
            coefficients[i] = max(0.0, (sums[i] - explained) / ((1 + RIDGE) * products[i][i] or 1.0))
        if all(map(math.isclose, coefficients, last)):
            break
    return CostModel(*coefficients)


INTERVAL_STEPS = 15
"""Decode passes between two load samples; a prefill also makes one. This is SGLang's default of
`--load-snapshot-publish-interval` for `/v1/loads`."""


class EndedRequest(NamedTuple):
    """A sample that has left the replica, and when, in seconds."""

    at_s: float
    sample: SimulatedRequest


class Replica:
    """A server with one scheduler on a virtual clock, which the caller advances.

    Samples take effect at the scheduler's next pass, so advance the clock before you submit them.
    """

    def __init__(
        self, config: SchedulerConfig, cost: CostModel, name: str = "simulated", route: str = "engine"
    ) -> None:
        self.scheduler = Scheduler(config)
        self._cost = cost
        self._name, self._route = name, route
        self._unpublished_steps = 0
        self._reported_retractions = 0
        self._free_at_s = 0.0  # when the current pass ends
        self._ended: list[EndedRequest] = []  # at the end of the current pass
        self.load = self._load_of(0, 0, 0)
        """The last load sample. As in SGLang, samples that ended with the pass before count as running, and
        samples in a prefill neither run nor wait."""
        self._next_load = self.load  # published at the end of the current pass

    @property
    def busy(self) -> bool:
        """Whether a sample waits or runs, or its end is still to be reported."""
        return bool(self.scheduler.in_flight or self._ended or self.load.has_work or self.load.used_tokens)

    def advance(self, until_s: float) -> list[EndedRequest]:
        """Advance the clock to a finite time; return the samples that have ended by then, in order.

        A pass that has begun by then continues. Its results are reported when the clock reaches its end.
        """
        results: list[EndedRequest] = []
        while self._free_at_s <= until_s:
            results += self._ended
            self._ended, self.load = [], self._next_load
            if self._free_at_s == until_s or not self._step(until_s):
                break
        return results

    def _step(self, until_s: float) -> bool:
        """Run the passes that end by that time, or one that ends after it; return False if idle."""
        scheduler = self.scheduler
        steps = self._cost.steps_within(
            until_s - self._free_at_s, scheduler.running, scheduler.context_tokens
        )
        step = scheduler.step(max(1, min(steps, INTERVAL_STEPS - self._unpublished_steps)))
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
        config, retractions = self.scheduler.config, self.scheduler.retractions
        retracted = retractions - self._reported_retractions
        self._reported_retractions = retractions
        return SchedulerLoad(
            scheduler=self._name,
            source="simulated",
            running=running,
            queue=queue,
            token_usage=used_tokens / config.max_total_tokens,
            used_tokens=used_tokens,
            max_total_tokens=config.max_total_tokens,
            max_running=config.most_running,
            route=self._route,
            taken_at=self._free_at_s,
            retracted=retracted,
            state_usage=running / config.running_by_states if config.running_by_states else 0.0,
        )
