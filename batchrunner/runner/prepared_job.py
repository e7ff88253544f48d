"""A job that was checked, with all that its run needs but an engine."""

import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.errors import JobError
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.types import EMBEDDINGS_PATH
from batchrunner.input.dataset import rows_of
from batchrunner.input.job_input import JobInput
from batchrunner.input.request_bodies import URL
from batchrunner.job.answers import AnswerPlan
from batchrunner.job.python_functions import judges_by_row
from batchrunner.job.tasks import EMBED, GENERATE, TaskName
from batchrunner.output.columns import RunSchema, schema_of_run, with_vectors
from batchrunner.output.resume import schema_of_results
from batchrunner.output.run_dir import MAIN_TASK, RunDir


def new_task() -> str:
    """Return a new name for a task that joins a run, in this process."""
    return task_name(socket.gethostname(), secrets.token_hex(3), os.environ)


def task_name(host: str, token: str, environ: Mapping[str, str]) -> str:
    """Name a task by its host and, under Slurm, by job, array task and restart; `token` makes it unique."""
    job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID")
    index = environ.get("SLURM_ARRAY_TASK_ID")
    restart = environ.get("SLURM_RESTART_COUNT")
    parts = ["join", host, job, index and f"t{index}", restart and f"r{restart}", token]
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part) for part in parts if part)


def other_task(opened_for: TaskName, task: TaskName) -> JobError:
    """Return the error for a job whose task is not that which an engine was opened for."""
    return JobError(
        f"engine: it was opened for task {opened_for}, and the job's is {task}",
        hint=f'open it with open_engine(…, task="{task}")',
    )


@dataclass(frozen=True, slots=True)
class PreparedJob(JobInput):
    """A job whose input, templates and output directory were checked; nothing was sent or written."""

    run_dir: RunDir
    answers: AnswerPlan
    functions: HookPool | None = None
    """The job's Python functions; None where it has none."""

    @property
    def joins(self) -> bool:
        """Whether this task takes leases of a run that it shares with others (`--join`)."""
        return self.run_dir.task != MAIN_TASK

    @property
    def dedupes(self) -> bool:
        """Whether equal rows at temperature 0 share an answer; not where they may need unlike ones."""
        return self.job.dedupe and not judges_by_row(self.functions)

    @property
    def model_task(self) -> TaskName:
        """What the model must be able to do; for a batch file the requests say it."""
        if self.job.prompt.batch is None:
            return self.job.task
        for batch in self.dataset.read(BitMap64(range(self.dataset.total_rows)), [URL]):
            for row in rows_of(batch, [URL]):
                if row[URL] is not None:
                    return EMBED if row[URL] == EMBEDDINGS_PATH else GENERATE
        return GENERATE

    @property
    def columns(self) -> list[str]:
        """Columns of the results, in order, also those of vectors that no row may have."""
        return list(with_vectors(schema_of_run(self.renderer.carried_schema, self.answers, {})).names)

    @property
    def results_schema(self) -> pa.Schema | None:
        """Schema of the results of a run in an object store; None for one on a disk, which needs it nowhere.

        Raises OSError.
        """
        if not self.run_dir.store.uri:
            return None
        new = RunSchema(self.renderer.carried_schema, self.answers, {})
        return schema_of_results(self.run_dir, new.schema.names) or new.schema

    def check_engine_task(self, opened_for: TaskName | None) -> None:
        """Raise JobError where the model must do another task than that which its engine was opened for."""
        if opened_for is not None and (task := self.model_task) != opened_for:
            raise other_task(opened_for, task)

    def close(self) -> None:
        """End the processes of the Python functions."""
        if self.functions is not None:
            self.functions.close()
