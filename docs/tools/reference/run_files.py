"""The page on the result columns of a run."""

import re

import pyarrow as pa

from batchrunner.core.types import ForwardTask
from batchrunner.job.answers import AnswerPlan
from batchrunner.job.arrow_types import type_name
from batchrunner.job.output import ANSWER_COLUMNS, RESULT_COLUMNS, ROLLOUT_COLUMNS
from batchrunner.job.tasks import TASKS, ChoiceTask
from batchrunner.output.columns import ANSWER_TYPES, schema_of_run
from docs.tools.reference.markdown import named

RESULTS = """# Result columns

These are the columns of the Parquet files in `RUN/parts` and `RUN/merged`. The columns of `input.columns`
come after `row`. With `sampling.n` above 1, `output`, `finish_reason` and `completion_tokens` are lists.
Results of a batch file have a last column `response`, the endpoint's whole answer as JSON. Results of the
simulated engine have `simulated: true` in the file's metadata."""

ASKED = """## Columns on demand

`output.columns` adds these columns [after all others](../how-to/whole-answers.md). With `sampling.n` above
1, all except `prompt_logprobs` are lists. A copied input column replaces an always-present column of the
same name.

*tokens* is a list of `{id: int32, token: string, logprob: float}`, *calls* one of
`{id, type, function: {name, arguments}}`, all strings."""

ROLLOUTS = """## Rows of `prompt.rollout`

Such rows also have the columns that [the function](../how-to/rollouts.md) returns. These replace result
columns of the same name."""
OF_TASKS = """## Columns of other tasks

These columns come after all others, and are null in failed rows. There is no `output`, `finish_reason` or
`completion_tokens`."""


def result_columns() -> str:
    """Return the page on the columns of the results."""
    kinds = schema_of_run(pa.schema([]), AnswerPlan(columns=()))
    always = named(
        (f"`{name}` ({_named(kinds.field(name).type)})", text) for name, text in RESULT_COLUMNS.items()
    )
    on_demand = named(
        (f"`{name}` ({_named(ANSWER_TYPES[name])})", text) for name, text in ANSWER_COLUMNS.items()
    )
    rollouts = named(
        (f"`{name}` ({_named(ANSWER_TYPES[name])})", text) for name, text in ROLLOUT_COLUMNS.items()
    )
    tasks = {f"`{name}`": kind() for name, kind in TASKS.items()}
    tasks = {**tasks, f"`{ChoiceTask.name}` with `prompt.choices`": ChoiceTask()}
    of_tasks = named(column for name, task in tasks.items() for column in _own_columns(name, task))
    parts = [RESULTS, always, ASKED, on_demand, ROLLOUTS, rollouts, OF_TASKS, of_tasks]
    return "\n\n".join(parts)


def _named(kind: pa.DataType) -> str:
    """Return an Arrow type, with the names of the page for the long ones."""
    name_of_type = type_name(kind)
    for column, name in {"logprobs": "*tokens*", "tool_calls": "*calls*"}.items():
        name_of_type = name_of_type.replace(type_name(ANSWER_TYPES[column]), name)
    return re.sub(r"^list<item: (.*)>$", r"list of \1", name_of_type)


def _own_columns(name: str, task: ForwardTask) -> list[tuple[str, str]]:
    """Return the columns of a task, with their types and meanings."""
    kinds = schema_of_run(pa.schema([]), AnswerPlan(columns=(), parsed=(*task.columns,), task=task))
    return [
        (f"`{column}` of {name} ({_named(kinds.field(column).type)})", task.meanings[column])
        for column, _ in task.columns
    ]
