"""What is checked and read before an engine is needed: the input, the templates, what earlier starts did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchrunner.core.errors import InputError, OutputError, ResumeError
from batchrunner.core.row_set import between
from batchrunner.input.dataset import Dataset
from batchrunner.input.files import shown
from batchrunner.input.job_input import JobInput
from batchrunner.input.render import Renderer
from batchrunner.output.resume import (
    DISCARD,
    DoneRows,
    check_same_run,
    fingerprint,
    read_done,
    read_run_json,
    schema_of_results,
)
from batchrunner.output.run_dir import MAIN_TASK, RunDir
from batchrunner.output.task_lock import TaskLock
from batchrunner.runner.cluster.shard import Shard, parted

if TYPE_CHECKING:
    from pyroaring import BitMap64

    from batchrunner.job.spec import Job
    from batchrunner.runner.cluster.shard import JoinTask


@dataclass(frozen=True, slots=True)
class PreparedJob(JobInput):
    """A job whose input, templates and output directory were checked; nothing was sent or written."""

    run_dir: RunDir
    part: Shard | JoinTask | None = None

    def share_of(self, selected: BitMap64) -> BitMap64:
        """Return those of the selected rows that this task is to do."""
        if not isinstance(self.part, Shard):
            return selected.copy()
        rows = self.part.rows(self.dataset.total_rows, self.dataset.row_group_ends())
        return between(selected, rows.start, rows.stop)


def prepare(job: Job, part: Shard | JoinTask | None = None) -> PreparedJob:
    """Check everything that can be checked without an engine, for one task of several or for all.

    Raises JobError, InputError or OutputError, each one clear line.
    """
    run_dir = RunDir(job.output.path, part.task if part else MAIN_TASK)
    dataset = _apart_from(run_dir, job.input.path)
    if not dataset.total_rows:
        raise InputError(f"{shown(job.input.path)}: no rows in {len(dataset.files)} Parquet file(s)")
    renderer = Renderer(dataset, job.input, job.prompt, job.sampling)
    run_dir.check_writable()
    return PreparedJob(job, dataset, renderer, run_dir, part)


def _apart_from(run_dir: RunDir, path: str | list[str]) -> Dataset:
    """Open the input without the run's own results: the next start would read them as new rows."""
    try:
        run = run_dir.path.resolve()
    except ValueError as failure:
        raise OutputError(f"output.path {str(run_dir.path)!r}: {failure}") from None
    dataset = Dataset(path, run)
    for file in dataset.files:
        if run in Path(file.path).resolve().parents:
            raise OutputError(
                f"output.path {run_dir.path}: the input file {file.path} lies in it: give another directory"
            )
    return dataset


def _check_parting(run_dir: RunDir, *, begun: bool) -> None:
    """Refuse a start that parts the rows in another way than those before: some would be done twice.

    A run in one piece may be joined: whoever makes the plan waits for its end, and leaves out what it did.
    Those count that are at it now and, once it has `begun`, that came as far as to take rows: others failed
    to start.
    """
    mine = parted(run_dir.task)
    for other in run_dir.all_tasks():
        theirs = parted(other.task)
        counts = TaskLock(other.task_directory).is_held() is not False or (
            begun and (other.events.exists() or other.own_parts() or other.journals())
        )
        if theirs != mine and (theirs, mine) != ("", "--join") and counts:
            raise ResumeError(
                f"{run_dir.path}: this run is done with {theirs or 'neither --shard nor --join'}: "
                "do so too, or take another output.path"
            )


def find_done(prepared: PreparedJob, model: str | None, *, without_failed: bool = False) -> DoneRows:
    """Read what earlier starts of this run did; raises ResumeError as `check_resumes` does."""
    if not check_resumes(prepared, model):
        return DoneRows()
    return read_done(prepared.run_dir, without_failed=without_failed)


def check_resumes(prepared: PreparedJob, model: str | None) -> bool:
    """Tell whether the run was started before; `model` None leaves the model out of the comparison.

    Raises ResumeError where the output path holds another run, or parts of nobody knows what.
    """
    run_dir = prepared.run_dir
    old = read_run_json(run_dir)
    _check_parting(run_dir, begun=old is not None)
    if old is None:
        if run_dir.all_parts() or run_dir.journals():
            raise ResumeError(
                f"{run_dir.path} has results but no run.json: take another output.path, or {DISCARD}"
            )
        return False
    new = fingerprint(prepared.job, prepared.dataset.files, model or "")
    check_same_run(old["fingerprint"], new, run_dir.path, model_known=model is not None)
    _check_partitions(prepared)
    return True


def _check_partitions(prepared: PreparedJob) -> None:
    """Refuse files that give a carried column of the paths another type: no merge takes both."""
    carried = zip(prepared.job.input.columns, prepared.renderer.carried_schema, strict=True)
    in_paths = [(name, field) for name, field in carried if name in prepared.dataset.partition_types]
    before = schema_of_results(prepared.run_dir) if in_paths else None
    for name, field in in_paths:
        if before and field.name in before.names and (kind := before.field(field.name).type) != field.type:
            raise ResumeError(
                f"{prepared.run_dir.path}: the column {name!r}, which stands in the paths, was {kind} in the "
                f"results so far, and the files added make it {field.type}: name their directories alike, "
                f"take another output.path, or discard what is there with {DISCARD}"
            )
