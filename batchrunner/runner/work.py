"""Finds the rows that a start of a run has to send, from the stored results, and sorts them."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyroaring import BitMap64

from batchrunner.input.order import OrderDecision
from batchrunner.input.sorted_copy import find_sorted_copy, prepare_order
from batchrunner.job.spec import Job
from batchrunner.output.counts import RowCounts
from batchrunner.output.discard import check_nobody_works, discard_failed_rows, discard_run, hold_own_task
from batchrunner.output.events import EventLog
from batchrunner.output.files import refresh_listing, writing
from batchrunner.output.parts import recover
from batchrunner.output.resume import DoneRows, done_by_all, read_done
from batchrunner.output.task_lock import TaskLock
from batchrunner.runner.control import Control
from batchrunner.runner.plan import Discard, RunState, StartOptions, plan_run
from batchrunner.runner.prepare import PreparedJob, check_resumes, leave, new_task, prepare
from batchrunner.runner.rows import FixedRows, TaskRows

if TYPE_CHECKING:
    from batchrunner.output.turns import TurnStore
    from batchrunner.runner.reuse import Reuse


@dataclass(kw_only=True)
class Work:
    """The rows that a start of a run sends, and facts about the run's other rows."""

    rows: TaskRows
    rows_of_run: int
    """Rows of the whole run, over all workers."""
    order: OrderDecision
    counts: RowCounts
    """Counts of the rows that this start finishes, including rows that got another run's answers."""
    done_before: DoneRows = field(default_factory=DoneRows)
    """Rows that this worker finished at earlier starts."""
    rows_of_others: int = 0
    """Number of rows that other living workers will do, if they hold all remaining rows."""
    discard: Discard = "nothing"
    """Results to discard before the first new result is written."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do: no row to send, and no run to discard."""
        return not self.rows.unread and self.discard != "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFinder:
    """Finds the rows that a start of a run sends. The caller holds the worker's lock. Methods block."""

    prepared: PreparedJob
    start: StartOptions
    lock: TaskLock
    control: Control
    events: EventLog
    turns: TurnStore | None
    """Store of the answers of multi-turn rollouts; None if the job has none."""

    def check(self, model: str | None, weights: str | None = None) -> Reuse | None:
        """Raise a BatchrunError if this start must be refused. No file is changed.

        If the job reuses another run's answers (`output.reuse`), return the `Reuse` object. With --join,
        return None, because only the worker that plans the run creates it. The engine's `model` and the
        version of its `weights` are compared with those of the stored results if they are known.
        """
        prepared, run_dir = self.prepared, self.prepared.run_dir
        reuse = None
        if prepared.job.output.reuse is not None and not self.start.join:
            from batchrunner.runner.reuse import Reuse  # noqa: PLC0415 - only for such jobs

            reuse = Reuse(prepared, self.control, model, weights)
        # `writing` turns an OSError into a StorageError.
        with writing(run_dir.path):
            # Another machine may have written files that an NFS client does not list yet.
            for directory in (run_dir.path, run_dir.tasks, run_dir.parts, run_dir.leases):
                refresh_listing(directory)
            if self.start.fresh:
                check_nobody_works(run_dir, self.control.sleep)
            else:
                check_resumes(prepared, model, weights)
        return reuse

    def find(self, model: str | None, weights: str | None = None) -> Work:
        """Check this start, recover the rows of an interrupted one, and plan the rows to send.

        `model` and `weights` are as in `check`. Raises InputError, OutputError, ResumeError or StorageError.
        """
        reuse = self.check(model, weights)
        with writing(self.prepared.run_dir.path):
            return self._find_shared() if self.start.join else self._find_alone(reuse)

    def _find_alone(self, reuse: Reuse | None) -> Work:
        """Find the rows of a run with one worker. `reuse` provides answers of another run."""
        prepared, run_dir = self.prepared, self.prepared.run_dir
        stored = DoneRows()  # with --fresh, no stored row counts
        if not self.start.fresh:
            recover(run_dir, self.lock, prepared.results_schema)
            stored = read_done(run_dir)
        plan = plan_run(self.start, RunState.of(prepared.selected(self.control.check), stored))
        # With --retry-failed, the failed rows of earlier starts are sent again, so they are no longer done.
        done_before = stored.without_failed() if plan.discard == "failed rows" else stored
        discard, counts = plan.discard, RowCounts()
        if reuse is not None and plan.missing:
            # `take` stores answers, so the old results are discarded before the first of them.
            reused = reuse.take(
                run_dir,
                self.lock,
                plan.selected,
                plan.missing,
                before_first=lambda: self.discard_outdated(plan.discard),
            )
            plan, counts = plan.with_reused(reused), reuse.counts
            if reused:
                discard = "nothing"  # `before_first` has already discarded the old results
        # An earlier start may have left a copy of the rows in the order of their prompts.
        directory = run_dir.task_directory
        copy, order = find_sorted_copy(prepared, plan.rows, directory) or prepare_order(
            prepared, plan.rows, directory, writer=self.lock.token, check_stop=self.control.check
        )
        return Work(
            rows=FixedRows(prepared, plan.rows, total=plan.total, copy=copy, turns=self.turns),
            rows_of_run=len(plan.selected),
            order=order,
            counts=counts,
            done_before=done_before,
            discard=discard,
        )

    def _find_shared(self) -> Work:
        """Find the rows of one worker of a shared run: wait for its first part of the rows, and take it.

        If other workers hold all unfinished rows, the result has no row to send.
        """
        from batchrunner.runner.join import join  # noqa: PLC0415 - only where workers share a run

        counts = RowCounts()
        rows, rows_of_run, order = join(
            self.prepared,
            self.start,
            self.control,
            lock=self.lock,
            counts=counts,
            events=self.events,
            turns=self.turns,
        )
        if rows.take_first(self.control.sleep):
            return Work(rows=rows, rows_of_run=rows_of_run, order=order, counts=counts)
        # This worker gets no row, so it only reports the rows of others and those that are done. The rows of
        # others are counted first, because they may finish rows in between. A row may then count twice, but
        # none is missing.
        rows_of_others, _ = rows.held_elsewhere()
        return Work(
            rows=FixedRows(self.prepared, BitMap64(), total=rows_of_run),
            rows_of_run=rows_of_run,
            order=order,
            counts=counts,
            done_before=done_by_all(self.prepared.run_dir),
            rows_of_others=rows_of_others,
        )

    def discard_outdated(self, results: Discard) -> None:
        """Delete the `results` that the plan discards, and the merged dataset, which is now outdated.

        Raises TaskHeldError, TaskLockLostError or StorageError.
        """
        run_dir = self.prepared.run_dir
        if results == "run":
            discard_run(run_dir, self.lock, self.control.sleep)
        elif results == "failed rows":
            discard_failed_rows(run_dir, self.lock)
        with writing(run_dir.merged):
            self.lock.verify()
            run_dir.discard_merged()


def plan_failed_rows(job: Job) -> None:
    """Plan that failed rows are sent again, before the workers of a shared run start.

    Raises BatchrunError.
    """
    from batchrunner.runner.join import join  # noqa: PLC0415 - only where workers share a run

    # Join as a worker, only long enough to write the plan.
    prepared = prepare(job, new_task())
    start = StartOptions(join=True, retry_failed=True)
    with contextlib.ExitStack() as stack:
        stack.callback(leave, prepared)
        lock = stack.enter_context(hold_own_task(prepared.run_dir, time.sleep))
        events = EventLog(prepared.run_dir.events)
        # Once `join` returns, the plan is on disk. The workers take the rows.
        rows, *_ = join(prepared, start, Control(), lock=lock, counts=RowCounts(), events=events)
        rows.give_back()
