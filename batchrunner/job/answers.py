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
    """Result columns that a run has in addition to those of every run, and the checks of its answers."""

    columns: tuple[str, ...]
    """Names of additional columns: keys of ANSWER_COLUMNS and ROLLOUT_COLUMNS in their order, or only
    RESPONSE for a batch file."""
    samples: int = 1
    """Number of completions of a row (`sampling.n`)."""
    top_logprobs: int = 1
    """Number of tokens for each position in the column `top_logprobs`."""
    parsed: tuple[tuple[str, ColumnKind], ...] = ()
    """Names and types of the columns that the job's Python function or its `task` adds after `columns`.

    The function is `parse` or `prompt.rollout`.
    """
    checks_json: bool = False
    """Whether an answer must be JSON, and satisfy its JSON Schema if it has one."""
    schema: dict[str, Any] | None = None
    """JSON Schema of all answers; None if answers have no schema, or if each row has its own."""
    schema_by_row: bool = False
    """Whether each row, or each request of a rollout, may have a JSON Schema of its own."""
    on_length: OnLength = "keep"
    """Treatment of an answer that was truncated at `max_new_tokens`."""
    on_repetition: OnRepetition = "keep"
    """Treatment of an answer that repeats itself without end. `keep` for tasks and batch files."""
    tries: int = 1
    """Maximum number of answers that a row may get until an answer passes the checks."""
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
        # In a run of rollouts, `asked` has the columns of each answer, and `columns` those of the whole row.
        names = {*self.columns} if self.asked is None else {*self.asked}
        # These two columns are made from the answer itself, so the engine need not return them.
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
    """Return the answer plan of a job.

    `functions` are the job's Python functions after loading. Without them the plan lacks their columns.
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
    # Carried columns and the columns of the Python function replace additional columns of the same name.
    names -= {*job.input.carried_names}
    names -= {name for name, _ in parsed}
    # An answer must be examined if anything can reject it, and also to fill the column `parsed`.
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
    """Whether an answer must be JSON."""
    schema_origin: Literal["none", "job", "row"]
    """Where the JSON Schema of an answer comes from: the job, or the answer's row (or request of a
    rollout)."""
    schema: dict[str, Any] | None
    """JSON Schema of all answers; None unless it comes from the job."""


def _json_rule(job: Job) -> _JsonRule:
    """Derive from `accept.json` and `sampling.json_schema` whether and how the JSON of answers is checked."""
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
    if accept_json is None:  # Without `accept.json`, only a schema of the row or of the job is checked.
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
    """Return the additional columns of a rollout. `parsed` are the columns that its function declares.

    If the function declares none, the column RETURNED holds the value that it returned.
    """
    return {*ROLLOUT_COLUMNS} - ({RETURNED} if parsed else set())


def of_sample(complaint: str, number: int, completion: Completion) -> str:
    """Return a complaint about one of a row's completions, with its `number` if the row has several."""
    return complaint if len(completion.texts) == 1 else f"sample {number}: {complaint}"


def takes_row(functions: HookPool | None) -> bool:
    """Tell whether `parse` or `accept.python` of the job has the row as a second argument."""
    facts = functions.facts if functions is not None else {}
    return any(facts[where].takes_row for where in (PARSE, CHECK) if where in facts)


def judges_by_row(functions: HookPool | None) -> bool:
    """Tell whether `accept.python` may judge equal answers to equal requests differently, by their rows."""
    return functions is not None and CHECK in functions.facts and functions.facts[CHECK].takes_row
