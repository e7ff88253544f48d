"""Derives from a job the result columns of its answers and the checks that answers must pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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


LEAST_ROOM = 2048
"""With `on_repetition: auto`, an answer is watched if its `max_new_tokens` is at least this number.

A repetition takes 500 tokens until it is certain, and a shorter answer has little to save. Jobs that keep the
default `max_new_tokens` of 1,024, and jobs with short answers, are sent without any events.
"""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Additional result columns of a run, and the checks of its answers."""

    columns: tuple[str, ...]
    """Names of the additional columns, in the order of ANSWER_COLUMNS and ROLLOUT_COLUMNS.

    For a batch file, the only one is RESPONSE.
    """
    samples: int = 1
    """Number of completions of a row (`sampling.n`)."""
    top_logprobs: int = 1
    """Number of tokens for each position in the column `top_logprobs`."""
    parsed: tuple[tuple[str, ColumnKind], ...] = ()
    """Names and types of the columns that come after `columns`.

    They come from the job's task, or from its Python function `parse` or `prompt.rollout`.
    """
    checks_json: bool = False
    """Whether an answer must be JSON, and satisfy its JSON Schema if it has one."""
    schema: dict[str, Any] | None = None
    """JSON Schema of all answers; None if there is none, or if each row has its own."""
    schema_by_row: bool = False
    """Whether each row, or each request of a rollout, may have its own JSON Schema."""
    on_length: OnLength = "keep"
    """What happens to an answer that was truncated at `max_new_tokens`."""
    on_repetition: OnRepetition = "keep"
    """What happens to an answer that repeats itself without end. `keep` for tasks and batch files."""
    tries: int = 1
    """Maximum number of answers of a row until one passes the checks."""
    checks: bool = False
    """Whether answers are checked at all."""
    asked: frozenset[str] | None = None
    """Columns of ANSWER_COLUMNS that each answer within a rollout has; None without `prompt.rollout`."""
    task: ForwardTask | None = None
    """Task without decoding, such as `embed`; None if the model generates text."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all additional columns, in the order of the results."""
        return (*self.columns, *(name for name, _ in self.parsed))

    @property
    def asks(self) -> AskedColumns | None:
        """Columns that each request asks the engine for; None if there are none."""
        # For rollouts, `asked` has the columns of each answer, and `columns` those of the whole row.
        names = {*self.columns} if self.asked is None else {*self.asked}
        # These two are made from the answer itself, so the engine need not return them.
        names -= {PARSED, RESPONSE}
        if not names:
            return None
        return AskedColumns(
            names=frozenset(names),
            top_logprobs=self.top_logprobs,
            of_tokens=not names.isdisjoint({*OF_TOKENS, "output_ids"}),
            only_reasoning=names == {REASONING},
        )


def plan_answers(job: Job, functions: HookPool | None = None) -> AnswerPlan:
    """Return the result columns and checks of a job's answers.

    `functions` are the job's Python functions after loading. Without them, their columns are missing.
    """
    if (task := job.forward) is not None:
        return AnswerPlan(columns=(), parsed=task.columns, task=task)
    if job.prompt.is_batch:
        return AnswerPlan(columns=(RESPONSE,))

    is_rollout = job.prompt.rollout is not None
    function = ROLLOUT if is_rollout else PARSE
    parsed: tuple[tuple[str, ColumnKind], ...] = ()
    if functions is not None and function in functions.facts:
        parsed = functions.facts[function].columns
    json = _json_rule(job)
    has_schema = json.schema_origin != "none"
    # A truncated answer cannot satisfy a schema, so it fails unless the job says otherwise.
    on_length = job.on_length or ("fail" if json.is_checked and has_schema else "keep")

    names = _rollout_columns(parsed) if is_rollout else _answer_columns(job, has_schema=has_schema)
    # Columns copied from the input, and those of the Python function, replace additional columns of the same
    # name.
    names -= {*job.input.carried_names}
    names -= {name for name, _ in parsed}
    # An answer is examined if anything can reject it, or to fill the column `parsed`.
    checks = (
        json.is_checked
        or job.accept.has_condition
        or on_length != "keep"
        or job.on_repetition == "fail"
        or PARSED in names
        or job.sampling.regex is not None
    )
    return AnswerPlan(
        columns=tuple(name for name in (*ANSWER_COLUMNS, *ROLLOUT_COLUMNS) if name in names),
        samples=job.sampling.n,
        top_logprobs=job.output.top_logprobs,
        parsed=parsed,
        checks_json=json.is_checked,
        schema=json.schema,
        schema_by_row=json.schema_origin == "row",
        on_length=on_length,
        on_repetition=job.on_repetition,
        tries=(job.accept.tries or TRIES) if job.has_check else 1,
        checks=checks,
        asked=frozenset({*job.output.asked, REASONING, TOOL_CALLS}) if is_rollout else None,
    )


class _JsonRule(NamedTuple):
    """Whether the answers of a job must be JSON, and where their JSON Schema comes from."""

    is_checked: bool
    schema_origin: Literal["none", "job", "row"]
    """Whether the JSON Schema comes from the job, or from the answer's row (or request of a rollout)."""
    schema: dict[str, Any] | None
    """JSON Schema of all answers; None unless it comes from the job."""


def _json_rule(job: Job) -> _JsonRule:
    """Derive from `accept.json` and `sampling.json_schema` how the JSON of answers is checked."""
    accept_json, sampling_schema = job.accept.json_, job.sampling.json_schema
    schema_origin: Literal["none", "job", "row"] = "none"
    schema = None
    if isinstance(accept_json, dict):
        schema_origin, schema = "job", accept_json
    elif job.prompt.rollout is not None or isinstance(sampling_schema, FromColumn):
        # A rollout may pass a schema with each request, and a column may have a schema for each row.
        schema_origin = "row"
    elif isinstance(sampling_schema, dict):
        schema_origin, schema = "job", sampling_schema
    is_checked = accept_json is not False
    # Without `accept.json`, JSON is only checked against a schema of the row or of the job.
    if accept_json is None:
        is_checked = schema_origin != "none"
    return _JsonRule(is_checked=is_checked, schema_origin=schema_origin, schema=schema)


def _answer_columns(job: Job, *, has_schema: bool) -> set[str]:
    """Return the columns of ANSWER_COLUMNS that the job asks for, or that its prompt or JSON Schema adds."""
    names = {*job.output.asked}
    if job.prompt.is_chat:
        names.add(REASONING)
    if has_schema:
        names.add(PARSED)
    if job.prompt.tools is not None:
        names.add(TOOL_CALLS)
    return names


def _rollout_columns(parsed: tuple[tuple[str, ColumnKind], ...]) -> set[str]:
    """Return the additional columns of a rollout; `parsed` are the columns that its function declares.

    If it declares none, the column RETURNED has the value that it returned.
    """
    return {*ROLLOUT_COLUMNS} - ({RETURNED} if parsed else set())


def of_sample(complaint: str, number: int, completion: Completion) -> str:
    """Return a complaint about a completion, with the completion's `number` if the row has several."""
    return complaint if len(completion.texts) == 1 else f"sample {number}: {complaint}"


def takes_row(functions: HookPool | None) -> bool:
    """Tell whether the job's `parse` or `accept.python` takes the row as a second argument."""
    facts = functions.facts if functions is not None else {}
    return any(facts[where].takes_row for where in (PARSE, CHECK) if where in facts)


def judges_by_row(functions: HookPool | None) -> bool:
    """Tell whether `accept.python` gets the row, so that it may judge equal answers differently."""
    return functions is not None and CHECK in functions.facts and functions.facts[CHECK].takes_row
