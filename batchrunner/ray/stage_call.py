"""One call of a stage: its arguments, as they travel to the actors."""

from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from batchrunner.core.errors import InputError, JobError
from batchrunner.input.columns_read import unknown_column
from batchrunner.input.live_rows import LiveRenderer
from batchrunner.job.answers import AnswerPlan, plan_answers
from batchrunner.job.call import GenerateCall, LibraryCall, TaskCall
from batchrunner.job.spec import Job
from batchrunner.job.tasks import GENERATE, TaskName
from batchrunner.output.columns import schema_of_run, with_vectors


def result_names(plan: AnswerPlan) -> list[str]:
    """Return the names of the columns of the results, but `row`."""
    return [name for name in with_vectors(schema_of_run(pa.schema([]), plan, {})).names if name != "row"]


@dataclass(frozen=True, slots=True)
class StageCall:
    """A call of the library for the rows of a data set, and what becomes of their columns."""

    call: LibraryCall
    columns: list[str] | None = None
    """Columns that the rows keep; None for all."""
    prefix: str = ""
    """What the names of the result columns begin with."""

    @property
    def task(self) -> TaskName:
        """The task of its job."""
        return self.call.task if isinstance(self.call, TaskCall) else GENERATE

    def job(self, columns: pa.Schema, directory: Path) -> Job:
        """Return the job on rows of these columns; raises JobError or InputError."""
        call = self.call
        if isinstance(call, GenerateCall) and call.parse is not None:  # the function may ask for the row
            call = replace(call, columns=columns.names if self.columns is None else self.columns)
        return call.job(columns, [str(directory)], directory)

    def check(self, columns: pa.Schema) -> None:
        """Raise JobError or InputError where the call does not fit rows of these columns.

        What takes a Python function is not tried: that runs where the rows are.
        """
        job = self.job(columns, Path("rows"))
        if job.prompt.python is None:
            LiveRenderer(job, columns)
        self.check_names(columns, plan_answers(job))

    def check_names(self, columns: pa.Schema, plan: AnswerPlan) -> None:
        """Raise JobError where a column that the rows keep is missing, or has the name of one of the results.

        `plan` tells the columns of the results.
        """
        kept = columns.names if self.columns is None else self.columns
        for name in kept:
            if name not in columns.names:
                unknown, hint = unknown_column("columns", name, columns.names)
                raise InputError(unknown, hint=hint)
        results = {f"{self.prefix}{name}" for name in result_names(plan)}
        if both := [name for name in kept if name in results]:
            raise JobError(
                f"the data set has a column {both[0]!r}, and so do the results",
                hint='give a prefix for the names of the results, such as prefix="answer_"',
                mark=";",
            )
