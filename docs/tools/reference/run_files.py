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

Columns of the Parquet files in `RUN/parts` and `RUN/merged`. The columns that `input.columns` copies
stand after `row`, with the types and names of the input, or the names that `input.rename` gives. With
`sampling.n` above 1 the columns `output`, `finish_reason` and `completion_tokens` are lists, with one
value for each output. Of a batch file (`batchrun batch`) there is a last column `response`,
a string: the body of the endpoint's answer, as JSON.

Where the answers are invented (`engine.kind: simulated`), the file's metadata has `simulated: true`."""

ASKED = """## Columns on demand

Those that `output.columns` names stand after all others, in this order: see
[whole answers](../how-to/whole-answers.md). With `sampling.n` above 1 each value is a list with one for each
output, but for `prompt_logprobs`."""

ROLLOUTS = """## Rows of `prompt.rollout`

They have these columns, and those that [the function](../how-to/rollouts.md) returns, which replace others of
their names."""
OF_TASKS = """## Columns of other tasks

A job whose `task` is not `generate` has no columns `output`, `finish_reason` and `completion_tokens`. Its own
stand after all others."""


def result_columns() -> str:
    """Return the page on the columns of the results."""
    kinds = schema_of_run(pa.schema([]), AnswerPlan(columns=()))
    head = ["column", "type", "meaning"]
    always = table(
        head,
        ([f"`{name}`", type_name(kinds.field(name).type), text] for name, text in RESULT_COLUMNS.items()),
    )
    asked = table(
        head, ([f"`{name}`", str(ANSWER_TYPES[name]), text] for name, text in ANSWER_COLUMNS.items())
    )
    rollouts = table(
        head, ([f"`{name}`", str(ANSWER_TYPES[name]), text] for name, text in ROLLOUT_COLUMNS.items())
    )
    tasks = {f"`{name}`": kind() for name, kind in TASKS.items()}
    tasks = {**tasks, f"`{ChoiceTask.name}` with `prompt.choices`": ChoiceTask()}
    own = table(["task", *head], (row for name, task in tasks.items() for row in _own_columns(name, task)))
    parts = [RESULTS, always, ASKED, asked, ROLLOUTS, rollouts, OF_TASKS, own]
    return "\n\n".join(parts)


def _own_columns(name: str, task: ForwardTask) -> list[list[str]]:
    """Return the columns of a task, with their types and meanings."""
    kinds = schema_of_run(pa.schema([]), AnswerPlan(columns=(), parsed=(*task.columns,), task=task))
    return [
        [name, f"`{column}`", type_name(kinds.field(column).type), task.meanings[column]]
        for column, _ in task.columns
    ]
