"""What the answers of a run bring besides their text: the job's wishes, and what comes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchrunner.core.hooks.functions import ColumnKind
from batchrunner.core.hooks.pool import HookPool
from batchrunner.core.types import AskedColumns
from batchrunner.job.output import ANSWER_COLUMNS, OF_TOKENS, REASONING
from batchrunner.job.python_functions import PARSE
from batchrunner.job.spec import Job

BY_ITSELF = {REASONING}
"""Columns that a run has without being asked for them; it keeps them in later starts."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The columns of a run's results beyond those of every result, and the rows that hold them."""

    columns: tuple[str, ...]
    """Keys of ANSWER_COLUMNS, in their order."""
    samples: int = 1
    """Outputs of a row (`sampling.n`)."""
    explode: bool = False
    """Whether each output is a row of the results."""
    top_logprobs: int = 1
    parsed: tuple[tuple[str, ColumnKind], ...] = ()
    """Columns that the job's Python function `parse` makes, with their types; they come last."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns beyond those of every result, in order."""
        return (*self.columns, *(name for name, _ in self.parsed))

    @property
    def asks(self) -> AskedColumns | None:
        """What each request asks for; None for nothing."""
        names = frozenset(self.columns)
        if not names:
            return None
        return AskedColumns(names, self.top_logprobs, not names.isdisjoint({*OF_TOKENS, "output_ids"}))


def plan_answers(
    job: Job, earlier: Sequence[str] | None = None, functions: HookPool | None = None
) -> AnswerPlan:
    """Return the plan of a run, whose earlier starts had these columns; None for a run that begins anew.

    `functions` are the job's Python functions.
    """
    parsed = functions.facts[PARSE].columns if functions and PARSE in functions.facts else ()
    names = {*job.output.asked}
    if earlier is not None:
        names |= BY_ITSELF.intersection(earlier)
    elif job.prompt.is_chat:
        names.add(REASONING)
    names -= {job.input.rename.get(name, name) for name in job.input.columns}
    names -= {name for name, _ in parsed}
    return AnswerPlan(
        tuple(name for name in ANSWER_COLUMNS if name in names),
        job.sampling.n,
        job.output.explode,
        job.output.top_logprobs,
        parsed,
    )
