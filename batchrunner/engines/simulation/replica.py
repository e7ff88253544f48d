"""A server in virtual time: a scheduler, the duration of its passes, and its load samples.

Load samples are published as often, and as late, as SGLang publishes them at `/v1/loads`.
"""

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


class PassWork(NamedTuple):
    """The work of one or more forward passes. Each field but `tokens` has a coefficient in CostModel."""

    passes: int = 0
    samples: float = 0.0
    """Number of requests in the batch, summed over the passes."""
    kv_tokens: float = 0.0
    """Number of context tokens that attention reads, summed over the passes."""
    prefill_tokens: float = 0.0
    """Number of prompt tokens that the passes compute."""
    prefills: int = 0
    """Number of prefill passes."""
    tokens: float = 0.0
    """Number of output tokens that the passes generate."""

    def plus(self, step: StepResult, tokens: int) -> "PassWork":
        """Return the sum of this work and the work of a scheduler step that generated `tokens`."""
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
"""Maximum number of sweeps over all coefficients in a fit that does not converge."""
RIDGE = 1e-3
"""Weight of the penalty for large coefficients in a fit. Measured passes do similar work, so without a
penalty the coefficients would be almost arbitrary."""


class CostModel(NamedTuple):
    """Duration of a forward pass: the sum over the fields of PassWork, each times a coefficient."""

    base_s: float
    """Seconds of every pass: reading the weights, launching the kernels, running the scheduler."""
    sample_s: float
    """Seconds for each request in the batch: its row in the matrix products, sampling, bookkeeping."""
    kv_token_s: float
    """Seconds for each context token that attention reads."""
    prefill_token_s: float
    """Seconds for each computed prompt token."""
    prefill_base_s: float = 0.0
    """Additional seconds of a prefill pass, whatever its size. Its kernels are launched one by one, whereas a
    decode pass replays a CUDA graph."""

    def work_s(self, work: PassWork) -> float:
        """Return the seconds that the passes of `work` take."""
        # The last field of `work` is the number of output tokens, which have no cost of their own.
        amounts = work[:PARTS]
        return sum(cost * amount for cost, amount in zip(self, amounts, strict=True))

    def step_s(self, step: StepResult) -> float:
        """Return the seconds of all passes of a scheduler's step."""
        return self.work_s(PassWork().plus(step, 0))

    def steps_within(self, seconds: float, samples: int, kv_tokens: int) -> int:
        """Return the number of decode passes that end within `seconds`.

        `kv_tokens` is the number of context tokens before the first pass. Each pass adds a token to the
        context of each of the `samples`. So `n` passes take `n · first_s + growth_s · n² / 2` seconds. This
        equation is solved for `n`.
        """
        seconds = max(seconds, 0)
        growth_s = self.kv_token_s * samples
        first_s = self.base_s + self.sample_s * samples + self.kv_token_s * kv_tokens + growth_s / 2
        # This form of the solution does not subtract nearly equal numbers, and holds without growth too.
        divisor = first_s + math.sqrt(first_s**2 + 2 * growth_s * seconds)
        # The divisor is 0 if passes take no time.
        return int(2 * seconds / max(divisor, 1e-9))


H100_8B = CostModel(base_s=6.0e-3, sample_s=1.6e-5, kv_token_s=4.9e-8, prefill_token_s=2.9e-5)
"""Cost model of Llama-3.1-8B in bf16 on one H100 SXM: an estimate from data sheets, not a measurement.

The GPU has 3.35 TB/s of HBM3 and 989 TFLOP/s of dense bf16 (NVIDIA's H100 data sheet). The model has 8.03e9
parameters, 32 layers, and 8 key-value heads of 128 (its config.json).
- Base: 16.06 GB of weights / 3.35 TB/s = 4.8 ms at peak bandwidth. At 80 % of the peak: 6.0 ms.
- Sample: 2 · 8.03e9 FLOP / 989 TFLOP/s = 16 µs at peak compute. In small batches, the time to read the
  weights hides this time.
- Context token: 2 · 32 · 8 · 128 · 2 B = 131,072 B / 3.35 TB/s = 39 ns at peak bandwidth. At 80 % of the
  peak: 49 ns.
- Prefilled token: the 16 µs of a sample at 55 % of the peak compute: 29 µs.
"""


def fit_spans(spans: Sequence[tuple[PassWork, float]]) -> CostModel | None:
    """Fit a cost model to measured passes, by non-negative least squares with a ridge penalty.

    Each span has the work of some passes and the seconds that they took. If the spans cannot tell two
    coefficients apart, their common cost is divided between them. So the model is valid only for similar
    work. Return None if there are fewer spans than coefficients.

    The method is coordinate descent: each coefficient in turn is set to its best value for the present values
    of the others, until no coefficient changes.
    """
    if len(spans) < PARTS:
        return None
    columns = range(PARTS)
    # The normal equations: `products` times the coefficients equals `sums`.
    products = [[sum(work[i] * work[j] for work, _ in spans) for j in columns] for i in columns]
    sums = [sum(work[i] * seconds for work, seconds in spans) for i in columns]
    coefficients = [0.0] * PARTS
    for _ in range(MOST_SWEEPS):
        previous = [*coefficients]
        for i in columns:
            explained = sum(products[i][j] * coefficients[j] for j in columns if j != i)
            # Without any work of this kind, this is 0 / 1, so the coefficient becomes 0.
            divisor = (1 + RIDGE) * products[i][i] or 1.0
            coefficients[i] = max(0.0, (sums[i] - explained) / divisor)
        if all(map(math.isclose, coefficients, previous)):
            break
    return CostModel(*coefficients)


INTERVAL_STEPS = 15
"""Number of decode passes between two load samples: SGLang's default of `--load-snapshot-publish-interval`
for `/v1/loads`. Each prefill pass publishes a load sample too."""


class EndedRequest(NamedTuple):
    """A request that has left the replica."""

    at_s: float
    """Time at which the request left, in seconds of the replica's clock."""
    sample: SimulatedRequest


class Replica:
    """A server with one scheduler on a virtual clock, which the caller advances.

    A submitted request takes part from the scheduler's next pass on. So advance the clock before you submit
    it.
    """

    def __init__(
        self, config: SchedulerConfig, cost: CostModel, name: str = "simulated", route: str = "engine"
    ) -> None:
        self.scheduler = Scheduler(config)
        self._cost = cost
        self._name, self._route = name, route
        self._unpublished_steps = 0
        """Number of decode passes since the last load sample."""
        self._reported_retractions = 0
        """Number of retractions that load samples have reported."""
        self._free_at_s = 0.0
        """Time in seconds at which the running passes end. Their results are computed when they begin."""
        self._ended: list[EndedRequest] = []
        """Requests that leave when the running passes end."""
        self.load = self._load_of(running=0, queue=0, used_tokens=0)
        """The last load sample. As in SGLang, requests that ended with the pass before it still count as
        running, and requests in a prefill pass count neither as running nor as waiting."""
        self._next_load = self.load
        """Load sample that is published when the running passes end."""

    @property
    def busy(self) -> bool:
        """Whether there is a request that has not been returned, or the last load sample shows work."""
        return bool(self.scheduler.in_flight or self._ended or self.load.has_work or self.load.used_tokens)

    def advance(self, until_s: float) -> list[EndedRequest]:
        """Advance the clock to a finite time; return the requests that have ended by then, in order of time.

        A pass that ends later continues. Its results are returned once the clock reaches its end.
        """
        ended: list[EndedRequest] = []
        while self._free_at_s <= until_s:
            # The running passes have ended. Their results were computed in advance, and are returned now.
            ended += self._ended
            self._ended, self.load = [], self._next_load
            # A pass does not begin at exactly `until_s`, because the caller may still submit requests for it.
            if self._free_at_s == until_s:
                break
            has_work = self._step(until_s)
            if not has_work:
                break
        return ended

    def _step(self, until_s: float) -> bool:
        """Begin passes that end by `until_s`, or one pass that ends later; return False if there is no work.

        The results of the passes are computed in advance, and kept until the clock reaches their end.
        """
        scheduler = self.scheduler
        steps_in_time = self._cost.steps_within(
            until_s - self._free_at_s, scheduler.running, scheduler.context_tokens
        )
        steps_to_next_load = INTERVAL_STEPS - self._unpublished_steps
        # At least one pass runs, even if it ends after `until_s`.
        step = scheduler.step(max(1, min(steps_in_time, steps_to_next_load)))
        if step is None:
            # Without work, a load sample with no requests is published at once.
            self.load = self._next_load = self._load_of(running=0, queue=0, used_tokens=0)
            self._free_at_s = until_s
            return False
        self._free_at_s += self._cost.step_s(step)
        self._ended = [EndedRequest(self._free_at_s, sample) for sample in step.finished]
        # A load sample is published after each prefill pass, and after every INTERVAL_STEPS decode passes.
        passes = 0 if step.kind == "prefill" else self._unpublished_steps + step.steps
        self._unpublished_steps = passes % INTERVAL_STEPS
        # A step that only aborts requests has no passes, and publishes nothing.
        if step.steps and not self._unpublished_steps:
            self._next_load = self._load_of(
                running=step.running, queue=step.queue, used_tokens=step.used_tokens
            )
        return True

    def _load_of(self, *, running: int, queue: int, used_tokens: int) -> SchedulerLoad:
        """Return a load sample, with the retractions since the previous load sample."""
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
