"""Joins a run that several tasks do: the first task plans it, the others find the plan."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

from pyroaring import BitMap64

from batchrunner.core.errors import ResumeError, TaskHeldError
from batchrunner.core.timing import TIMING
from batchrunner.input.job_input import cut_into_leases
from batchrunner.input.order import OrderDecision
from batchrunner.input.sorted_copy import SortedCopy, prepare_order, remove_sorted_copies
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.files import writing
from batchrunner.output.holding import hold_task
from batchrunner.output.parts import recover
from batchrunner.output.resume import done_by_all, drop_failed, read_done
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import check_same_run, fingerprint, raise_total
from batchrunner.output.task_holder import POLL_S
from batchrunner.output.task_lock import TaskLock
from batchrunner.output.watching import is_task_held
from batchrunner.runner.cluster.lease_files import LeasePlan
from batchrunner.runner.cluster.leased_rows import LeasedRows
from batchrunner.runner.cluster.leases import Leases
from batchrunner.runner.control import Sleeper
from batchrunner.runner.prepared_job import PreparedJob

log = logging.getLogger(__name__)


def join(
    prepared: PreparedJob, sleeper: Sleeper, counts: RowCounts, events: EventLog, *, retry_failed: bool
) -> tuple[LeasedRows, int, OrderDecision]:
    """Return the rows that this task will take, the number of rows of the whole run, and their order.

    The first task makes the plan. A task that finds files added or a larger limit adds a plan of the new
    rows, whatever has become of the others. After the end of all plans the next task that comes makes another
    one: of failed rows that are to be tried again, of rows whose part was moved away. `sleeper` sleeps while
    another task makes a plan. Raises InputError, OutputError or ResumeError.
    """
    run_dir = prepared.run_dir
    leases = Leases(run_dir.leases, run_dir.task, run_dir.store)
    with writing(run_dir.leases):
        leases.refresh()
        if not leases.is_done():
            _leave_out_done_alone(prepared, leases, sleeper)
        if retry_failed and not leases.is_done():
            raise ResumeError(
                f"{run_dir.name}: --retry-failed: other tasks are still at it, or died at it",
                hint="wait for their end, or run --join without --retry-failed first",
            )
        plan = partial(_plan, prepared, leases, sleeper, retry_failed=retry_failed)
        while leases.is_done() or _is_behind(leases, prepared):
            known = len(leases.planned.plans)
            _in_turn(prepared, leases, sleeper, plan)
            if len(leases.planned.plans) == known:  # there was nothing to add
                break
    assert leases.plan is not None
    _check_plan(leases, prepared)
    leases.join()
    rows = LeasedRows(prepared, leases, counts, events)
    return rows, leases.plan.rows_total, OrderDecision(**leases.plan.choice)


def _check_plan(leases: Leases, prepared: PreparedJob) -> None:
    """Raise ResumeError where the newest plan is one of another run."""
    if leases.plan is not None:
        new = fingerprint(prepared.job, prepared.dataset.files, "")
        check_same_run(leases.plan.fingerprint, new, prepared.run_dir.name, model_known=False)


def _is_behind(leases: Leases, prepared: PreparedJob) -> bool:
    """Tell whether this task's input has files, or its limit has rows, that no plan has.

    Raises ResumeError where the newest plan is one of another run.
    """
    if leases.plan is None:
        return True
    _check_plan(leases, prepared)
    known = leases.plan.fingerprint
    more_files = len(prepared.dataset.files) > len(known["files"])
    return more_files or known["limit"] != prepared.job.input.limit


def _leave_out_done_alone(prepared: PreparedJob, leases: Leases, sleeper: Sleeper) -> None:
    """Take rows out of the plan that an attempt without `--join` has done since.

    That is possible if all tasks of the plan failed to start. Such an attempt that begins now is refused.
    """
    main = prepared.run_dir.of_task()
    # a task that makes a plan holds this lock for a moment
    if main.journals() or is_task_held(main) is not False:
        _in_turn(prepared, leases, sleeper, partial(_recover, prepared, sleeper))
    leases.leave_out(read_done(main).rows)


def _recover(prepared: PreparedJob, sleeper: Sleeper) -> None:
    """Recover what the task of a run that nobody joined left half done; raises TaskHeldError if it works."""
    main = prepared.run_dir.of_task()
    with hold_task(main, sleeper.sleep) as lock:
        recover(main, lock, prepared.results_schema)


def _in_turn(prepared: PreparedJob, leases: Leases, sleeper: Sleeper, do: Callable[[], None]) -> None:
    """Call `do` while no other task does so; skip it if another task makes a plan meanwhile."""
    known = len(leases.planned.plans)
    is_logged = False
    while len(leases.planned.plans) == known:
        with ExitStack() as stack:
            try:
                stack.enter_context(hold_task(prepared.run_dir, sleeper.sleep, directory=leases.directory))
            except TaskHeldError as held:
                if not is_logged:
                    log.info("another task makes the plan: %s", held)
                is_logged = True
                sleeper.sleep(POLL_S)
                leases.refresh()
                continue
            leases.refresh()
            do()
            return


def _plan(prepared: PreparedJob, leases: Leases, sleeper: Sleeper, *, retry_failed: bool) -> None:
    is_done = leases.is_done()
    if not (is_done or _is_behind(leases, prepared)):  # another task was faster
        return
    main = prepared.run_dir.of_task()
    with hold_task(main, sleeper.sleep) as lock:  # no attempt without --join may be at work
        recover(main, lock, prepared.results_schema)
        done = _done_by_all(main, leases if is_done else None, sleeper)
        if retry_failed:
            for task in main.all_tasks():
                drop_failed(task)
            done = _done_by_all(main, None, sleeper)
        selected = prepared.selected(sleeper.check)
        rows = selected - done
        if not is_done:  # what is planned is done by others, or taken over from them
            rows -= leases.planned.rows()
        if rows or _is_behind(leases, prepared):
            _add_plan(prepared, leases, rows, selected, lock, sleeper, is_first=is_done)
        else:
            leases.remove_copies()


def _add_plan(
    prepared: PreparedJob,
    leases: Leases,
    rows: BitMap64,
    selected: BitMap64,
    lock: TaskLock,
    sleeper: Sleeper,
    *,
    is_first: bool,
) -> None:
    """Write a plan of these rows, of all that are `selected`; `is_first` says that no other is at work."""
    run_dir = prepared.run_dir
    remove_sorted_copies(run_dir.of_task().task_directory)
    if is_first:
        leases.remove_copies()
    path, choice = prepare_order(prepared, rows, leases.directory, lock.token, sleeper.check, replace=False)
    if path:
        leases.store.publish(path)
        cuts, name = SortedCopy(path).group_starts, path.name
    else:
        cuts, name = cut_into_leases(rows, prepared.dataset.row_group_ends()), None
    new = fingerprint(prepared.job, prepared.dataset.files, "")
    leases.make_plan(LeasePlan(rows, cuts, len(selected), new, name, asdict(choice)))
    raise_total(run_dir, len(selected), new)


def _done_by_all(run_dir: RunDir, leases: Leases | None, sleeper: Sleeper) -> BitMap64:
    """Return the rows in all parts; parts that another host has just written may take a while to appear."""
    expected = leases.plan.rows_total if leases is not None and leases.plan is not None else 0
    waited_s = 0.0
    while True:
        done = done_by_all(run_dir).rows
        if len(done) >= expected or waited_s > TIMING.parts_appear:
            return done
        if not waited_s:
            log.warning(
                "%s: %d rows were done that are in no part: waiting %.0f s for another host's to be seen",
                run_dir.parts, expected - len(done), TIMING.parts_appear,
            )  # fmt: skip
        sleeper.sleep(POLL_S)
        waited_s += POLL_S
