"""The page on the result columns of a run."""

import pyarrow as pa

from batchrunner.core.types import ForwardTask
from batchrunner.job.answers import AnswerPlan
from batchrunner.job.arrow_types import type_name
from batchrunner.job.output import ANSWER_COLUMNS, RESULT_COLUMNS, ROLLOUT_COLUMNS
from batchrunner.job.tasks import TASKS, ChoiceTask
from batchrunner.output.columns import ANSWER_TYPES, schema_of_run
from docs.tools.reference.markdown import table

RESULTS = """# Result columns

Columns of the Parquet files in `RUN/parts` and `RUN/merged`. Those that `input.columns` copies stand after
`row`. With `sampling.n` above 1, `output`, `finish_reason` and `completion_tokens` are lists. A batch file
(`batchrun batch`) has a last column `response`: the whole answer of the endpoint, as JSON. Made-up answers
(`engine.kind: simulated`) have `simulated: true` in the file's metadata."""

ASKED = """## Columns on demand

`output.columns` adds them after all others: see [whole answers](../how-to/whole-answers.md). With
`sampling.n` above 1 each is a list with a value for each output, but for `prompt_logprobs`. A carried column
of the same name takes the place of one that is always there.

*tokens* is a list of `{id: int32, token: string, logprob: float}`, *calls* one of
`{id, type, function: {name, arguments}}`, all strings."""

ROLLOUTS = """## Rows of `prompt.rollout`

Besides these they have the columns that [the function](../how-to/rollouts.md) returns, which replace others
of their names."""
OF_TASKS = """## Columns of other tasks

They stand after all others, and are null where a row failed. `output`, `finish_reason` and
`completion_tokens` are missing."""


def result_columns() -> str:
    """Return the page on the columns of the results."""
    kinds = schema_of_run(pa.schema([]), AnswerPlan(columns=()))
    head = ["column", "type", "meaning"]
    always = table(
        head,
        ([f"`{name}`", type_name(kinds.field(name).type), text] for name, text in RESULT_COLUMNS.items()),
    )
    asked = table(
        head, ([f"`{name}`", _named(ANSWER_TYPES[name]), text] for name, text in ANSWER_COLUMNS.items())
    )
    rollouts = table(
        head, ([f"`{name}`", str(ANSWER_TYPES[name]), text] for name, text in ROLLOUT_COLUMNS.items())
    )
    tasks = {f"`{name}`": kind() for name, kind in TASKS.items()}
    tasks = {**tasks, f"`{ChoiceTask.name}` with `prompt.choices`": ChoiceTask()}
    own = table(["task", *head], (row for name, task in tasks.items() for row in _own_columns(name, task)))
    parts = [RESULTS, always, ASKED, asked, ROLLOUTS, rollouts, OF_TASKS, own]
    return "\n\n".join(parts)


def _named(kind: pa.DataType) -> str:
    """Return an Arrow type, with the names of the page for the long ones."""
    long = {str(ANSWER_TYPES["logprobs"]): "tokens", str(ANSWER_TYPES["tool_calls"]): "calls"}
    return next(
        (str(kind).replace(told, f"*{name}*") for told, name in long.items() if told in str(kind)), str(kind)
    )


def _own_columns(name: str, task: ForwardTask) -> list[list[str]]:
    """Return the columns of a task, with their types and meanings."""
    kinds = schema_of_run(pa.schema([]), AnswerPlan(columns=(), parsed=(*task.columns,), task=task))
    return [
        [name, f"`{column}`", type_name(kinds.field(column).type), task.meanings[column]]
        for column, _ in task.columns
    ]
