"""What a start has before it: the rows that it is to do, and those that were done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyroaring import BitMap64

from batchrunner.core.errors import ResumeError
from batchrunner.input.sort.decide import OrderDecision
from batchrunner.input.sort.plan import arrange, arranged_before
from batchrunner.output.parts import tidy
from batchrunner.output.resume import DoneRows, done_by_all, rows_of_others
from batchrunner.output.run_dir import see_anew, writing
from batchrunner.output.task_lock import LOOK_S, HolderWatch, hold_task
from batchrunner.runner.cluster.join import join
from batchrunner.runner.cluster.shard import JoinTask, Shard
from batchrunner.runner.prepare import find_done
from batchrunner.runner.row_source import OwnRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchrunner.dispatch.source import Source
    from batchrunner.output.run_dir import RunDir
    from batchrunner.output.task_lock import TaskLock
    from batchrunner.runner.prepare import PreparedJob


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start's work."""

    source: Source
    done: DoneRows
    """What earlier starts of this task did."""
    rows_of_run: int


def begin(
    prepared: PreparedJob,
    claim: TaskLock,
    model: str | None,
    sleep: Callable[[float], None],
    *,
    fresh: bool,
    retry_failed: bool,
) -> Attempt:
    """Find out what is to be done, and clear up after the start before; `claim` is held.

    Raises InputError, OutputError, ResumeError or StorageError.
    """
    run_dir = prepared.run_dir
    with writing(run_dir.path):
        for directory in (run_dir.path, run_dir.tasks, run_dir.parts, run_dir.leases):
            see_anew(directory)
        if isinstance(prepared.part, JoinTask):
            find_done(prepared, model)
            leased, rows_of_run = join(prepared, sleep, retry_failed=retry_failed)
            if leased.has_rows():
                return Attempt(leased, DoneRows(), rows_of_run)
            nothing = OwnRows(
                prepared, BitMap64(), rows_of_run, None, OrderDecision("input", "nothing is free")
            )
            return Attempt(nothing, done_by_all(run_dir), rows_of_run)
        done, by_others = DoneRows(), BitMap64()
        if fresh:
            check_nobody_works(run_dir, sleep)
        else:
            done = find_done(prepared, model, without_failed=retry_failed)
            if isinstance(prepared.part, Shard):
                _check_shares(prepared, sleep)
            tidy(run_dir, claim)
            by_others = rows_of_others(run_dir)
        selected = prepared.selected(lambda: sleep(0))
        todo = prepared.share_of(selected) - by_others
        total = len(todo | done.rows)
        todo -= done.rows
        place = run_dir.task_directory
        arranged = arranged_before(prepared, todo, place) or arrange(
            prepared, todo, place, claim.token, lambda: sleep(0)
        )
        return Attempt(OwnRows(prepared, todo, total, *arranged), done, len(selected))


def _check_shares(prepared: PreparedJob, sleep: Callable[[float], None]) -> None:
    """Raise ResumeError where a task is at work that found other files: its share may overlap with ours.

    Each looks at the others once its own name says what it found: of two, one at least sees the other.
    """
    run_dir, rows = prepared.run_dir, prepared.dataset.total_rows
    others = {
        task.task: HolderWatch(task.task_directory)
        for task in run_dir.all_tasks()
        if task.task != run_dir.task
    }
    while others:
        for task, watch in list(others.items()):
            lives = watch.look()
            theirs = watch.holder.rows if watch.holder else 0
            if lives is False or theirs in {0, rows}:
                del others[task]
            elif lives:
                raise ResumeError(
                    f"{run_dir.path}: files were added: the input has {rows} rows, and {theirs} for {task}, "
                    "which is still at work: wait for its end"
                )
        if others:  # on other machines: time tells whether they live
            sleep(LOOK_S)


def check_nobody_works(run_dir: RunDir, sleep: Callable[[float], None]) -> None:
    """Raise HeldError where another task is at work: what it writes may not be discarded."""
    for task in run_dir.all_tasks():
        if task.task != run_dir.task:
            with hold_task(task, sleep):
                pass
