"""How much work steady time is: passes and tokens of a server whose queue is never empty.

A schedule is a matter of steps, not of seconds: what it costs on another machine is a sum of products.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

from batchrunner.engines.simulation.config import DECAY_STEPS, SchedulerConfig
from batchrunner.engines.simulation.sample import SimulatedRequest
from batchrunner.engines.simulation.scheduler import Scheduler, StepResult

WAITING = 50
"""Samples that wait behind those that run."""
GENERATIONS = 2
"""Generations that are counted, after one that warms up; a generation is as many samples as run at once."""
FEWEST_ENDS = 500
"""Samples that end in steady time at least: fewer are too few lengths to stand for all."""
PREFIX = "shared"


class RowLengths(NamedTuple):
    """A row as the scheduler sees it, in tokens."""

    prompt: int
    cached: int
    """Tokens of the prompt that the cache had."""
    output: int
    asked: int
    """`max_new_tokens`."""
    fixed: bool = False
    """Whether it ignores the end of the text (`ignore_eos`)."""


class PassWork(NamedTuple):
    """The content of some forward passes."""

    decodes: int = 0
    prefills: int = 0
    samples: float = 0.0
    """Sum over passes of the samples in them."""
    kv_tokens: float = 0.0
    """Sum over passes of the context tokens that attention reads."""
    prefill_tokens: float = 0.0
    """Prompt tokens that are computed."""
    tokens: float = 0.0
    """Output tokens."""

    def plus(self, step: StepResult, tokens: int) -> "PassWork":
        """Add a step that put out `tokens`."""
        is_prefill = step.kind == "prefill"
        samples = step.admitted + step.decoded if is_prefill else step.running
        return PassWork(
            self.decodes + (0 if is_prefill else step.steps),
            self.prefills + (step.steps if is_prefill else 0),
            self.samples + step.steps * samples,
            self.kv_tokens + step.steps * step.kv_tokens,
            self.prefill_tokens + step.prefill_tokens,
            self.tokens + tokens,
        )


def steady_work(config: SchedulerConfig, rows: Sequence[RowLengths]) -> PassWork:
    """Return the work of steady time, with the rows sent again and again.

    It begins once a generation has ended and the scheduler's new-token ratio has had the passes to fall.
    Raises ValueError where a row does not fit into the pool.
    """
    scheduler = Scheduler(config)
    coming = cycle(rows)
    work = PassWork()
    peak = ended = 0
    end: int | None = None
    while end is None or ended < end:
        while scheduler.queue < WAITING:
            scheduler.submit(_sample(next(coming)))
        before = scheduler.generated_tokens
        step = scheduler.step()
        assert step is not None, "samples wait"
        ended += len(step.finished)
        peak = max(peak, scheduler.running)
        if end is not None:
            work = work.plus(step, scheduler.generated_tokens - before)
        elif ended >= peak > 0 and scheduler.passes >= DECAY_STEPS:
            end = ended + max(GENERATIONS * peak, FEWEST_ENDS)
    return work


def _sample(row: RowLengths) -> SimulatedRequest:
    prefix = ((PREFIX, row.cached),) if row.cached else ()
    return SimulatedRequest(row.prompt, row.output, row.asked, ignore_eos=row.fixed, prefix=prefix)
