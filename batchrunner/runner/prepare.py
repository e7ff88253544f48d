"""Checks a job without an engine: its input, templates and output directory, and earlier starts."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.errors import BatchrunError, Faults, InputError, OutputError, ResumeError
from batchrunner.core.files import is_below, read_json
from batchrunner.engines.http.connections import raise_file_limit
from batchrunner.input.dataset import Dataset, rows_of
from batchrunner.input.files import join_paths, names_run
from batchrunner.input.job_input import JobInput
from batchrunner.input.render import Renderer
from batchrunner.input.request_bodies import URL
from batchrunner.input.sorted_copy import remove_sorted_copies
from batchrunner.job.answers import AnswerPlan, plan_answers
from batchrunner.job.arrow_types import arrow_type, type_name
from batchrunner.job.output import REQUEST_DIGEST, StorageSpec
from batchrunner.job.prompt import BatchPrompts, BatchRules
from batchrunner.job.python_functions import open_functions
from batchrunner.job.spec import Job
from batchrunner.job.tasks import GENERATE, TASK_OF_ENDPOINT, TaskName
from batchrunner.output.columns import schema_of_run
from batchrunner.output.liveness import holders_of
from batchrunner.output.run_dir import MAIN_TASK, SEGMENT, TUNE, RunDir, look_at_run, open_run
from batchrunner.output.run_json import (
    DISCARD,
    check_same_run,
    fingerprint,
    holds_run,
    known_fields,
    read_run_json,
)

log = logging.getLogger(__name__)


def new_task() -> str:
    """Return a new name for a worker: host, Slurm's job, task and restart (if any), random digits."""
    job = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID")
    index = os.environ.get("SLURM_ARRAY_TASK_ID")
    restart = os.environ.get("SLURM_RESTART_COUNT")
    words = ["join", socket.gethostname(), job, index and f"t{index}", restart and f"r{restart}"]
    words.append(secrets.token_hex(3))
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", word) for word in words if word)


@dataclass(frozen=True, slots=True)
class PreparedJob(JobInput):
    """A job whose input, templates and output directory were checked, before anything is sent or written."""

    run_dir: RunDir
    answers: AnswerPlan

    @property
    def joins(self) -> bool:
        """Whether this worker shares the run with other workers (`--join`)."""
        return self.run_dir.task != MAIN_TASK

    @property
    def model_task(self) -> TaskName:
        """Task that the model must be able to do. For a batch file, its first readable request decides."""
        if not self.job.prompt.is_batch:
            return self.job.task
        for batch in self.dataset.read(BitMap64(range(self.dataset.total_rows)), [URL]):
            for row in rows_of(batch, [URL]):
                if not isinstance(row, str):
                    return TASK_OF_ENDPOINT[row[URL]]
        return GENERATE

    @property
    def results_schema(self) -> pa.Schema:
        """Schema of the result files (Parquet), with the digests of requests."""
        schema = schema_of_run(self.renderer.carried_schema, self.answers)
        return schema.append(pa.field(REQUEST_DIGEST, pa.binary()))

    def fingerprint(self, model: str) -> dict[str, Any]:
        """Return the facts that all starts of a run must have in common.

        The types of the result columns are among them, because a merge cannot unite columns of two types. A
        copied input column has its common type over all input files. `model` is "" if it must not be
        compared.
        """
        functions = self.functions.facts.values() if self.functions is not None else ()
        computed = {name: type_name(arrow_type(kind)) for facts in functions for name, kind in facts.columns}
        carried = {field.name: type_name(field.type) for field in self.renderer.carried_schema}
        return {**fingerprint(self.job, self.dataset.facts(), model), "columns": carried | computed}

    @property
    def code_digests(self) -> dict[str, str]:
        """Digests of the code of the job's Python functions, by the field that names them."""
        functions = self.functions.facts.values() if self.functions is not None else ()
        return {facts.where: facts.code_digest for facts in functions if facts.code_digest is not None}

    def close(self) -> None:
        """End the processes of the Python functions."""
        if self.functions is not None:
            self.functions.close()


RESULT_DIRECTORIES = {"parts", "merged"}
"""Names of the directories of a run that may be the input of another run."""


def prepare(
    job: Job, task: str = MAIN_TASK, *, fresh: bool = False, keeps_copies: bool = False
) -> PreparedJob:
    """Check everything that can be checked without an engine, for the worker named `task`.

    With `fresh`, an earlier run in the output directory is ignored. With `keeps_copies`, Parquet copies of
    input files are made in the run directory, and stay there. The caller closes the result. Raises JobError,
    InputError, OutputError or EngineStartError, each with a message of one line.
    """
    raise_file_limit()
    run_dir = open_run(job.output.path, task, job.storage)
    try:
        run = run_dir.store.input_place or run_dir.path.resolve()
    except (OSError, RuntimeError, ValueError) as failure:  # such as circular links, or a null byte
        raise OutputError(f"output.path {str(run_dir.path)!r}: {failure}") from None
    run_dir.check_writable()
    parents = () if run_dir.store.uri else run.parents
    other_run = next((directory for directory in parents if holds_run(directory)), None)
    # The trials of `batchrun tune` are runs in the directory of the tuned run.
    if other_run and run.relative_to(other_run).parts[0] != TUNE:
        raise OutputError(
            f"output.path {run_dir.path}: lies in the directory of the run {other_run}",
            hint="give another directory",
        )
    if task != MAIN_TASK:
        run_dir.store.check_sharing()
    functions = None
    try:
        dataset = _open_dataset(job, run_dir, run, run_dir.copies if keeps_copies else None)
        functions = open_functions(job)
        answers = plan_answers(job, functions)
        faults = Faults()  # collects all faults, to show them in one message
        if answers.checks:
            from batchrunner.dispatch.checks import AnswerConditions  # noqa: PLC0415 - only for such jobs

            with faults.collect():  # made only for the errors of its constructor
                AnswerConditions(job, answers, dataset.schema.names)
        with faults.collect():
            renderer = Renderer(job, dataset, answers, functions)
        faults.raise_all()
        dataset.log_notes(renderer.columns)
        before = None if fresh else _fingerprint_of(run_dir)
        if before is not None:  # files may have grown since the earlier start
            dataset.record_growth(before["files"])
        elif job.output.reuse is not None:
            # The answers of the other run can be reused only if the fields of the prompts are in the same
            # order.
            before = _fingerprint_of(look_at_run(job.output.reuse, job.storage))
        job, renderer = _with_field_order(job, renderer, dataset, answers, before=before)
    except BaseException:  # a refused job leaves no copies and no processes behind
        drop_copies(run_dir)
        if functions is not None:
            functions.close()
        raise
    return PreparedJob(
        job=job,
        dataset=dataset,
        renderer=renderer,
        functions=functions,
        run_dir=run_dir,
        answers=answers,
    )


def _with_field_order(
    job: Job,
    renderer: Renderer,
    dataset: Dataset,
    answers: AnswerPlan,
    *,
    before: Mapping[str, Any] | None,
) -> tuple[Job, Renderer]:
    """Return the job with `prompt.fields` in the order in which the run writes them, and the job's renderer.

    The order is that of the earlier start whose fingerprint is `before`. Without an earlier start, a sample
    of the input decides. Raises InputError.
    """
    fields = job.prompt.fields
    if fields is None or fields.order == "written" or len(fields.columns) == 1:
        return job, renderer
    # Without the order of an earlier start for the same fields, decide on an order now.
    columns = known_fields(before) if before else None
    if columns is None or {*columns} != {*fields.columns}:
        from batchrunner.input.fields import decide_fields  # noqa: PLC0415 - only for such prompts

        columns = decide_fields(dataset, fields.columns)
        log.info("prompt.fields: %s", ", ".join(columns))
    prompt = job.prompt.model_copy(update={"fields": fields.model_copy(update={"columns": columns})})
    job = job.model_copy(update={"prompt": prompt})
    return job, Renderer(job, dataset, answers, None)


def _fingerprint_of(run_dir: RunDir) -> Mapping[str, Any] | None:
    """Return the fingerprint of a run from run.json, or else from the newest plan of its workers.

    While engines start, a shared run has a plan but no run.json. Return None if it has neither.
    """
    if run_dir.is_being_discarded():
        return None
    old = read_run_json(run_dir)
    if old is not None:
        return cast("Mapping[str, Any]", old["fingerprint"])
    if not run_dir.store.names(run_dir.leases):
        return None
    from batchrunner.runner.leases import Leases  # noqa: PLC0415 - only where workers share a run

    leases = Leases(run_dir.leases, store=run_dir.store)
    leases.refresh()
    return leases.plan.fingerprint if leases.plan else None


def drop_copies(run_dir: RunDir, *, is_done: bool = False) -> None:
    """Delete the Parquet copies of the input if the run is done, or if no worker has begun the run.

    The copies stay while another worker is running. A worker that starts later makes missing copies again.
    Errors are ignored, because copies that stay do no harm.
    """
    with contextlib.suppress(OSError, BatchrunError):
        if run_dir.run_json.exists() and not is_done:
            return
        if run_dir.copies.exists():
            # If the run is done, the caller may still hold its own lock. Before a run, every lock belongs to
            # another process.
            possible_users = run_dir.other_tasks() if is_done else run_dir.all_tasks()
            if _is_held(possible_users):
                return
        shutil.rmtree(run_dir.copies, ignore_errors=True)
        # `rmdir` removes only an empty directory, that of a run that has not begun.
        run_dir.path.rmdir()


def leave(prepared: PreparedJob) -> None:
    """Close the job, and delete its copies of files that no later start needs."""
    run_dir = prepared.run_dir
    is_done = read_json(run_dir.report_json).get("rows_left") == 0
    drop_copies(run_dir, is_done=is_done)
    if is_done:
        with contextlib.suppress(OSError):  # files that stay do no harm
            remove_sorted_copies(run_dir.task_directory)
            for path in run_dir.tasks.glob(f"*/{SEGMENT}*"):  # answers of rollouts that a dead worker stored
                path.unlink(missing_ok=True)
    prepared.close()
    # A worker with --join gets a new name at each start. So its working copy (local files of a run in an
    # object store) is needed only for its journals.
    if prepared.joins and not any(run_dir.task_directory.glob("journal-*")):
        run_dir.store.discard_copy(run_dir.task)


def _is_held(tasks: list[RunDir]) -> bool:
    """Return whether a process runs as one of these workers. Its engine may still be starting."""
    return any(holders_of([(task, None) for task in tasks], watch=False))


def _open_dataset(job: Job, run_dir: RunDir, run: Path, copies: Path | None) -> Dataset:
    """Open the input. Raises OutputError if the input contains results of this run, whose path is `run`."""
    paths = with_merged_results(job.input.path, run=run, storage=job.storage)
    prompt = job.prompt
    batch_rules = None
    if isinstance(prompt, BatchPrompts):
        batch_rules = BatchRules(allows_repeated=prompt.allows_repeated, endpoint=prompt.endpoint)
    dataset = Dataset(job.input, run, job.storage, copies, paths=paths, batch_rules=batch_rules)
    if not dataset.total_rows:
        raise InputError(f"{join_paths(job.input.path)}: no rows in {len(dataset.files)} file(s)")
    _refuse_results(job.input.path, dataset)
    for file in dataset.files:
        # Only paths on a disk can have links. Paths in an object store are used unchanged.
        real = file.path if run_dir.store.input_place else os.path.realpath(file.path)
        if is_below(real, run):
            raise OutputError(
                f"output.path {run_dir.name}: the input file {file.path} lies in this directory",
                hint="give another directory",
            )
    return dataset


def with_merged_results(
    paths: str | Sequence[str], *, run: Path | None = None, storage: StorageSpec | None = None
) -> list[str]:
    """Return the paths of input files, with the merged results of a run in place of its directory.

    `run` is the run that reads the input; its own directory is not replaced. Raises InputError if a run in
    `paths` is not done, and the errors of merging.
    """
    storage = storage or StorageSpec()
    input_paths = []
    for path in [paths] if isinstance(paths, str) else paths:
        is_other_run = run != Path(path).resolve() and names_run(path, storage)
        input_paths.append(_merged_directory(path, storage) if is_other_run else path)
    return input_paths


def _merged_directory(path: str, storage: StorageSpec) -> str:
    """Merge the results of a run if they are not merged yet; return the directory of the merged results."""
    from batchrunner.output.merge import merge_finished_run  # noqa: PLC0415 - only for such an input

    merge_finished_run(look_at_run(path, storage), path)
    return f"{path}/merged"


def _refuse_results(path: str | list[str], dataset: Dataset) -> None:
    """Raise InputError if a directory or a pattern matches results of other runs by accident.

    Results are allowed if a path itself names a result directory: `out/run/parts`, `out/*/merged/*.parquet`.
    """
    paths = [path] if isinstance(path, str) else path
    if any({*Path(text).absolute().parts} & RESULT_DIRECTORIES for text in paths):
        return
    for directory in sorted({Path(file.path).parent for file in dataset.files}):
        run = directory.parent
        if run in map(Path, paths):  # the path of a run stands for its merged results
            continue
        if directory.name in RESULT_DIRECTORIES and holds_run(run):
            raise InputError(
                f"{join_paths(path)}: also matches files of the run {run}, in {directory}",
                hint=f"give a path that does not match them, or {run} to use its results",
            )


def check_resumes(prepared: PreparedJob, model: str | None, weights: str | None = None) -> None:
    """Raise ResumeError if the output path has another run, or results without a run.json.

    The `model` and the version of its `weights` are compared if they are known.
    """
    run_dir = prepared.run_dir
    old = read_run_json(run_dir)
    # A run of one worker may go on with --join. A run with --join must go on with it, because other workers
    # may still do some of its rows.
    if not prepared.joins and run_dir.store.names(run_dir.leases):
        raise ResumeError(
            f"{run_dir.name}: this run was started with --join: add --join, or use another output.path"
        )
    if old is None:
        if run_dir.all_parts() or run_dir.journals():
            raise ResumeError(
                f"{run_dir.name} has results but no run.json",
                hint=f"use another output.path, or discard the results with {DISCARD}",
            )
        return
    # Versions of the weights are compared only if both are known. If one is unknown, the old version is used
    # for both.
    old_weights = old["engine"].get("weights")
    new_weights = weights if old_weights and weights else old_weights
    check_same_run(
        {**old["fingerprint"], "weight_version": old_weights},
        {**prepared.fingerprint(model or ""), "weight_version": new_weights},
        run_dir.name,
    )
