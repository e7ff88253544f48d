"""Columns of answers besides their text, and the checks of answers."""

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
from batchrunner.job.spec import TRIES, Job, OnLength, OnRepetition

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The columns that a run adds to the result columns that every run has, and the checks of its answers."""

    columns: tuple[str, ...]
    """Keys of ANSWER_COLUMNS, in their order, or RESPONSE."""
    samples: int = 1
    """Completions of a row (`sampling.n`)."""
    top_logprobs: int = 1
    parsed: tuple[tuple[str, ColumnKind], ...] = ()
    """Columns that the job's Python function `parse` returns, with their types; they come last."""
    checks_json: bool = False
    """Whether an answer must be JSON, and satisfy the schema if there is one."""
    schema: dict[str, Any] | None = None
    """JSON Schema of all answers; None if there is none, or rows have schemas of their own."""
    schema_by_row: bool = False
    """Whether each row has a schema of its own."""
    on_length: OnLength = "keep"
    """What happens to an answer that was truncated at `max_new_tokens`."""
    on_repetition: OnRepetition = "keep"
    """What happens to an answer that repeats itself without end."""
    tries: int = 1
    """Maximum number of answers that a row may have until one passes the checks."""
    checks: bool = False
    """Whether answers are checked at all."""
    asked: frozenset[str] | None = None
    """Columns of ANSWER_COLUMNS that each answer to a rollout has; None if rows are requests."""
    task: ForwardTask | None = None
    """The task, if it is one without decoding; its columns are `parsed`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that this run adds to the result columns that every run has, in order."""
        return (*self.columns, *(name for name, _ in self.parsed))

    @property
    def asks(self) -> AskedColumns | None:
        """Columns that each request asks the engine for; None if there are none."""
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
        return AnswerPlan(columns=(), parsed=task.columns, task=task)
    if job.prompt.is_batch:
        return AnswerPlan(columns=(RESPONSE,))

    is_rollout = job.prompt.rollout is not None
    function = ROLLOUT if is_rollout else PARSE
    parsed = functions.facts[function].columns if functions and function in functions.facts else ()

    sampling_schema, accept_schema = job.sampling.json_schema, job.accept.json_
    dict_schemas = [schema for schema in (accept_schema, sampling_schema) if isinstance(schema, dict)]
    schema = dict_schemas[0] if dict_schemas else None
    has_schema = sampling_schema is not None or schema is not None
    checks_json = has_schema if accept_schema is None else bool(accept_schema)
    schema_by_row = isinstance(sampling_schema, FromColumn) and schema is None
    if is_rollout:  # each request of a rollout may have its own schema
        checks_json = accept_schema is not False
        schema_by_row = not isinstance(accept_schema, dict)
        schema = None if schema_by_row else schema
        has_schema = True

    on_length = job.on_length or ("fail" if checks_json and has_schema else "keep")
    names = _rollout_columns(parsed) if is_rollout else _answer_columns(job, has_schema=has_schema)
    names -= {*job.input.carried_names, *(name for name, _ in parsed)}
    return AnswerPlan(
        columns=tuple(name for name in (*ANSWER_COLUMNS, *ROLLOUT_COLUMNS) if name in names),
        samples=job.sampling.n,
        top_logprobs=job.output.top_logprobs,
        parsed=parsed,
        checks_json=checks_json,
        schema=schema,
        schema_by_row=schema_by_row,
        on_length=on_length,
        on_repetition=job.on_repetition,
        tries=(job.accept.tries or TRIES) if job.has_check else 1,
        checks=checks_json
        or job.accept.has_condition
        or on_length != "keep"
        or job.on_repetition == "fail"
        or PARSED in names
        or job.sampling.regex is not None,
        asked=frozenset({*job.output.asked, REASONING, TOOL_CALLS}) if is_rollout else None,
    )


def _answer_columns(job: Job, *, has_schema: bool) -> set[str]:
    """Return the columns of ANSWER_COLUMNS that a job asks for, or that its prompt or schema adds."""
    names = {*job.output.asked}
    if job.prompt.is_chat:
        names.add(REASONING)
    if has_schema:
        names.add(PARSED)
    if job.prompt.tools is not None:
        names.add(TOOL_CALLS)
    return names


def _rollout_columns(parsed: tuple[tuple[str, ColumnKind], ...]) -> set[str]:
    """Return the columns of a rollout; without declared columns, the returned value is one column."""
    return {*ROLLOUT_COLUMNS} - ({RETURNED} if parsed else set())


def of_sample(complaint: str, number: int, completion: Completion) -> str:
    """Return a complaint about completion `number` of a row; it names the number if the row has several."""
    return complaint if len(completion.texts) == 1 else f"sample {number}: {complaint}"


def takes_row(functions: HookPool | None) -> bool:
    """Tell whether a Python function of the job is called with the row besides the answer."""
    facts = functions.facts if functions is not None else {}
    return any(facts[where].takes_row for where in (PARSE, CHECK) if where in facts)


def judges_by_row(functions: HookPool | None) -> bool:
    """Tell whether a Python function of the job may judge equal answers to equal rows differently."""
    return functions is not None and CHECK in functions.facts and functions.facts[CHECK].takes_row
