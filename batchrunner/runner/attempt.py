"""Work out which rows remain, which earlier attempts ended, and in which order they are sent."""

from dataclasses import dataclass

from pyroaring import BitMap64

from batchrunner.input.order import OrderDecision
from batchrunner.input.sorted_copy import find_sorted_copy, prepare_order
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.files import refresh_listing, writing
from batchrunner.output.holding import hold_task
from batchrunner.output.parts import recover
from batchrunner.output.resume import DoneRows, done_by_all
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import TaskLock
from batchrunner.runner.cluster.join import join
from batchrunner.runner.cluster.leased_rows import LeasedRows
from batchrunner.runner.control import Sleeper
from batchrunner.runner.prepare import find_done
from batchrunner.runner.prepared_job import PreparedJob
from batchrunner.runner.task_rows import FixedRows


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a task: what it has to do, and what is done."""

    rows: FixedRows | LeasedRows
    done: DoneRows
    """Rows that earlier attempts of this task ended."""
    rows_of_run: int
    """Rows of the whole run, over all tasks."""
    order: OrderDecision
    rows_of_others: int = 0
    """Rows that other living tasks held when this attempt found nothing to do."""


def plan_attempt(
    prepared: PreparedJob,
    lock: TaskLock,
    model: str | None,
    sleeper: Sleeper,
    counts: RowCounts,
    events: EventLog,
    *,
    fresh: bool,
    retry_failed: bool,
) -> Attempt:
    """Find the rows that this attempt does, and recover what the attempt before left half done.

    `lock` is held on the task; `counts` and `events` are those of this attempt. Raises InputError,
    OutputError, ResumeError or StorageError.
    """
    run_dir = prepared.run_dir
    with writing(run_dir.path):
        for directory in (run_dir.path, run_dir.tasks, run_dir.parts, run_dir.leases):
            refresh_listing(directory)
        if prepared.joins:
            find_done(prepared, model)
            return _plan_joined(prepared, sleeper, counts, events, retry_failed=retry_failed)
        done = DoneRows()
        if fresh:
            check_nobody_works(run_dir, sleeper)
        else:
            done = find_done(prepared, model, without_failed=retry_failed)
            recover(run_dir, lock, prepared.results_schema)
        selected = prepared.selected(sleeper.check)
        todo = selected - done.rows
        place = run_dir.task_directory
        copy, order = find_sorted_copy(prepared, todo, place) or prepare_order(
            prepared, todo, place, lock.token, sleeper.check
        )
        return Attempt(FixedRows(prepared, todo, len(selected | done.rows), copy), done, len(selected), order)


def _plan_joined(
    prepared: PreparedJob, sleeper: Sleeper, counts: RowCounts, events: EventLog, *, retry_failed: bool
) -> Attempt:
    rows, rows_of_run, order = join(prepared, sleeper, counts, events, retry_failed=retry_failed)
    if rows.take_first(sleeper.sleep):
        return Attempt(rows, DoneRows(), rows_of_run, order)
    nothing = FixedRows(prepared, BitMap64(), rows_of_run, None)
    held, _ = rows.held_elsewhere()  # before the done rows are counted: what is held may end meanwhile
    return Attempt(nothing, done_by_all(prepared.run_dir), rows_of_run, order, held)


def check_nobody_works(run_dir: RunDir, sleeper: Sleeper) -> None:
    """Raise TaskHeldError if another task is at work: what it writes may not be discarded."""
    for task in run_dir.other_tasks():
        with hold_task(task, sleeper.sleep):
            pass
