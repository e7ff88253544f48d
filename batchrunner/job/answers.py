"""What the answers of a run bring besides their text, and when they are good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchrunner.core.types import CHECK, PARSE, ROLLOUT, AskedColumns, ColumnKind, Completion, ForwardTask
from batchrunner.job.output import (
    ANSWER_COLUMNS,
    OF_TOKENS,
    PARSED,
    REASONING,
    RESPONSE,
    RETURNED,
    ROLLOUT_COLUMNS,
    TOOL_CALLS,
)
from batchrunner.job.sampling import FromColumn
from batchrunner.job.spec import TRIES, Job, OnLength

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The columns of a run's results beyond those of every result, their rows, and the checks of answers."""

    columns: tuple[str, ...]
    """Keys of ANSWER_COLUMNS, in their order, or RESPONSE."""
    samples: int = 1
    """Outputs of a row (`sampling.n`)."""
    top_logprobs: int = 1
    parsed: tuple[tuple[str, ColumnKind], ...] = ()
    """Columns that the job's Python function `parse` makes, with their types; they come last."""
    checks_json: bool = False
    """Whether an answer must be JSON, and satisfy the schema where there is one."""
    schema: dict[str, Any] | None = None
    """JSON Schema of all answers."""
    schema_by_row: bool = False
    """Whether each row has its own."""
    on_length: OnLength = "keep"
    """What becomes of an answer that was truncated at `max_new_tokens`."""
    tries: int = 1
    """Most answers of a row that are checked."""
    checks: bool = False
    """Whether answers are looked at."""
    asked: frozenset[str] | None = None
    """What the answers of a rollout bring of ANSWER_COLUMNS; None where rows are requests."""
    task: ForwardTask | None = None
    """The task, if it is one without decoding, whose columns are then `parsed`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns beyond those of every result, in order."""
        return (*self.columns, *(name for name, _ in self.parsed))

    @property
    def asks(self) -> AskedColumns | None:
        """What each request asks for; None for nothing."""
        names = ({*self.columns} if self.asked is None else {*self.asked}) - {PARSED, RESPONSE}
        if not names:
            return None
        of_tokens = not names.isdisjoint({*OF_TOKENS, "output_ids"})
        return AskedColumns(
            frozenset(names), self.top_logprobs, of_tokens, only_reasoning=names == {REASONING}
        )


def plan_answers(job: Job, functions: HookPool | None = None) -> AnswerPlan:
    """Return the plan of a run; `functions` are the job's Python functions."""
    if (task := job.forward) is not None:
        return AnswerPlan((), parsed=task.columns, task=task)
    if job.prompt.is_batch:
        return AnswerPlan((RESPONSE,))
    of_rollouts = job.prompt.rollout is not None
    maker = ROLLOUT if of_rollouts else PARSE
    parsed = functions.facts[maker].columns if functions and maker in functions.facts else ()
    given, wanted = job.sampling.json_schema, job.accept.json_
    schema = next((each for each in (wanted, given) if isinstance(each, dict)), None)
    has_schema = given is not None or schema is not None
    checks_json = has_schema if wanted is None else bool(wanted)
    names = {*job.output.asked}
    names |= {REASONING} if job.prompt.is_chat else set()
    names |= {PARSED} if has_schema else set()
    names |= {TOOL_CALLS} if job.prompt.tools is not None else set()
    schema_by_row, asked = isinstance(given, FromColumn) and schema is None, None
    if of_rollouts:  # each request may have a schema of its own
        checks_json, schema_by_row = wanted is not False, not isinstance(wanted, dict)
        schema = None if schema_by_row else schema
        asked = frozenset({*job.output.asked, REASONING, TOOL_CALLS})
        names = {*ROLLOUT_COLUMNS} - ({RETURNED} if parsed else set())
    names -= {*job.input.carried_names}
    names -= {name for name, _ in parsed}
    may_have_schema = has_schema or of_rollouts
    on_length = job.on_length or ("fail" if checks_json and may_have_schema else "keep")
    return AnswerPlan(
        tuple(name for name in (*ANSWER_COLUMNS, *ROLLOUT_COLUMNS) if name in names),
        job.sampling.n,
        job.output.top_logprobs,
        parsed,
        checks_json,
        schema,
        schema_by_row,
        on_length,
        (job.accept.tries or TRIES) if job.has_check else 1,
        checks_json
        or job.accept.has_condition
        or on_length != "keep"
        or PARSED in names
        or job.sampling.regex is not None,
        asked,
    )


def of_sample(complaint: str, number: int, completion: Completion) -> str:
    """Return a complaint about sample `number` of an answer; it names the sample where there are several."""
    return complaint if len(completion.texts) == 1 else f"sample {number}: {complaint}"


def takes_row(functions: HookPool | None) -> bool:
    """Tell whether a job's function is called with an answer and its row."""
    facts = functions.facts if functions is not None else {}
    return any(facts[where].takes_row for where in (PARSE, CHECK) if where in facts)


def judges_by_row(functions: HookPool | None) -> bool:
    """Tell whether a job's function may judge the same answer to equal rows in different ways."""
    return functions is not None and CHECK in functions.facts and functions.facts[CHECK].takes_row
