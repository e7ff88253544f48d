"""Workers that share a run with `--join`.

The first worker divides the rows into leases. Each worker takes one lease after another, including those of
dead workers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

from pyroaring import BitMap64

from batchrunner.core.errors import (
    OutputError,
    StorageError,
    TaskHeldError,
    TaskLockLostError,
)
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Lease
from batchrunner.engines.registry import model_of
from batchrunner.input.job_input import cut_into_leases
from batchrunner.input.order import OrderDecision
from batchrunner.input.sorted_copy import SortedCopy, prepare_order, remove_sorted_copies
from batchrunner.output.away import AwayWait
from batchrunner.output.beacons import Beacon, BeaconWatch
from batchrunner.output.counts import RowCounts
from batchrunner.output.discard import discard_failed_rows
from batchrunner.output.events import EventLog
from batchrunner.output.files import writing
from batchrunner.output.liveness import POLL_S, SHORT_POLL_S
from batchrunner.output.parts import recover
from batchrunner.output.resume import DoneRows, done_by_all, read_done
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import check_same_run, raise_total
from batchrunner.output.task_lock import TaskLock, hold_task
from batchrunner.runner.control import Control
from batchrunner.runner.leases import LeasePlan, Leases, lease_name, next_lease
from batchrunner.runner.plan import RunState, StartOptions, check_retry, has_grown, plan_run
from batchrunner.runner.prepare import PreparedJob
from batchrunner.runner.reuse import Reuse
from batchrunner.runner.rows import TaskRows

if TYPE_CHECKING:
    from batchrunner.output.turns import TurnStore

log = logging.getLogger(__name__)


REFRESH_S = 3.0
"""Minimum seconds between two listings of the lease files, while this worker knows of free leases (rows that
no worker has taken)."""
WORKERS_PER_LISTING = 10.0
"""The pause between two listings of the lease files is the number of workers divided by this, in seconds. So
up to 200 workers list the files ten times a second in all."""
LONGEST_PAUSE_S = 20.0
"""Maximum seconds between two listings of the lease files. With 1,000 workers, the file server gets 50
listings a second."""


class LeasedRows(TaskRows):
    """The rows of one worker of a shared run, which it takes in parts (leases).

    The worker ends when its own rows are done and other living workers hold all unfinished rows.
    """

    is_shared = True

    def __init__(
        self,
        prepared: PreparedJob,
        leases: Leases,
        *,
        lock: TaskLock,
        counts: RowCounts,
        events: EventLog,
        turns: TurnStore | None = None,
    ) -> None:
        """Create the reader, which holds no lease until `take` or `take_first` is called.

        `lock` is the worker's own lock. `counts` are the counts of the rows that this worker has finished.
        """
        super().__init__(prepared, turns)
        self._leases = leases
        self._events = events
        self._uncommitted: dict[int, tuple[Lease, BitMap64]] = {}
        """The leases that this worker holds, by number, each with its rows that are not in the result files
        yet."""
        # The reader, the writer of part files and the end of the run use `_uncommitted` in different threads.
        self._lock = threading.Lock()
        self._beacon = Beacon(leases.directory, prepared.run_dir.task, lock.holder, leases.store)
        """Shows other workers that this worker holds leases."""
        lock.beacon = self._beacon
        self._others = BeaconWatch(prepared.run_dir)
        """Watches the other workers that hold leases."""
        self._counts = counts
        self._refreshed_at = -REFRESH_S
        """Time at which the lease files were last read, on the monotonic clock."""
        self._first_lease: Lease | None = None
        """Lease that `take_first` took. The next call of `take` returns it."""
        self._last_number: int | None = None
        """Number of the lease that this worker took last."""
        self._taken = 0
        """Number of rows in all leases that this worker has taken."""
        self._rows_free = 0
        """Number of rows in free leases when the lease files were last read."""

    @property
    def total(self) -> int:
        """Number of rows that this worker has taken, plus its share of the free rows."""
        return self._taken + self._share_of_free()

    @property
    def unread(self) -> int:
        """Number of unread rows in this worker's leases, plus its share of the free rows."""
        return self._to_read + self._share_of_free()

    def take_first(self, sleep: Callable[[float], object]) -> bool:
        """Take the first lease, and return whether there was one. `sleep` raises if the run is stopped."""
        self._first_lease = self._wait_for_lease(sleep)
        return self._first_lease is not None

    def take(self, *, wait: bool) -> Lease | None:
        """Take the next lease; return None if no lease is free. With `wait`, wait until a lease is free."""
        if self._first_lease is not None:
            lease, self._first_lease = self._first_lease, None
            return lease
        if wait:
            return self._wait_for_lease(self._stopped.wait)
        if self._stopped.is_set():
            return None
        try:
            self._refresh_if_old()
            return None if self._has_its_share() else self._take_free()
        except (OSError, OutputError):  # a later call with `wait` waits for the disk
            return None

    def committed(self, rows: BitMap64) -> None:
        """End the leases whose rows are all stored now; `rows` are those of a new file of results."""
        super().committed(rows)
        with self._lock:
            for number, (lease, uncommitted) in list(self._uncommitted.items()):
                remaining = uncommitted - rows
                self._uncommitted[number] = lease, remaining
                if not remaining:
                    self._end(number)

    def give_back(self) -> None:
        """End all leases of this worker, so that other workers can take their unfinished rows.

        If all rows of the run are done, delete the sorted copies of the input.
        """
        self.stop()
        with self._lock:
            for number in list(self._uncommitted):
                self._end(number)
        if copies := self._leases.copies():
            self._leases.refresh()
            if self._leases.is_done():
                for copy in copies:
                    self._leases.store.remove(copy)

    def newest_plan(self) -> LeasePlan | None:
        """Return the run's newest plan, which another worker may have added. Raises OSError."""
        return self._look().plan

    def held_elsewhere(self) -> tuple[int, int]:
        """Return how many remaining rows living workers will do, and how many nobody will do.

        One of the two numbers is 0. If any living worker holds a lease, it does all remaining rows, because
        it takes over from dead workers.
        """
        leases = self._look()
        self._look_at_others(leases)
        # A worker that exited meanwhile ended its leases first, so they are read again.
        leases.refresh()
        remaining = leases.rows_left()
        # `_workers` counts this worker too.
        return (remaining, 0) if self._workers() > 1 else (0, remaining)

    def _look(self) -> Leases:
        """Read the leases of all plans anew.

        `self._leases` lacks the plans that were added after this worker joined.
        """
        leases = Leases(self._leases.directory, store=self._leases.store)
        leases.refresh()
        return leases

    def _wait_for_lease(self, sleep: Callable[[float], object]) -> Lease | None:
        """Wait for a lease and take it. Return None once no lease will become free, or if the run stops."""
        wait = AwayWait(self._prepared.job.limits.disk_wait)
        while not self._stopped.is_set():
            try:
                with writing(self._leases.directory):
                    lease, is_over = self._look_for_lease()
            except (OutputError, StorageError) as failure:  # the disk or store may be available again soon
                if not wait.may_go_on(f"{failure}: waiting for the disk (limits.disk_wait)"):
                    raise
            else:
                wait.end()
                if lease is not None or is_over:
                    return lease
            # Other workers may take the free rows now, but this worker may soon get some of them.
            sleep(SHORT_POLL_S if self._rows_free else self._pause_before_look())
        return None

    def _look_for_lease(self) -> tuple[Lease | None, bool]:
        """Try to take a free lease; if there is none, take over the leases of dead workers first.

        Return the lease or None, and whether to stop looking, because no lease will become free any more.
        """
        self._refresh_if_old()
        if self._has_its_share():  # leave the free leases to other workers for now
            return None, False
        lease = self._take_free()
        if lease is not None:
            return lease, False
        self._refresh()
        if not self._rows_free and self._others.dead:
            for task in self._others.dead:
                self._take_over(task)
            self._refresh()
        lease = self._take_free()
        # A lease may still become free while a worker that holds one may be dead. While this worker has
        # unfinished rows, it stays in any case, so it can look again later.
        is_over = not self._rows_free and self._others.all_run and not self._unfinished()
        return lease, is_over

    def _take_free(self) -> Lease | None:
        """Take a lease that no worker held when the lease files were last read; None if there is none.

        The worker's beacon file shows others that it holds leases.
        """
        while (number := next_lease(self._leases.free(), self._last_number)) is not None:
            # Without the lock, the end of another lease could delete the beacon file too early.
            with self._lock:
                self._beacon.light()
                lease = self._leases.take(number)
                if lease is not None:
                    self._uncommitted[lease.number] = lease, lease.rows
                self._update_beacon()
            if lease is not None:
                return self._hold(lease)
        return None

    def _hold(self, lease: Lease) -> Lease | None:
        """Record a lease that was just taken, and return it.

        If the run has stopped, give the lease back, and return None.
        """
        self._events.write("lease", lease=lease.number, turn=lease.turn, rows=len(lease.rows))
        if self._stopped.is_set():
            with self._lock:
                self._end(lease.number)
            return None
        self._last_number = lease.number
        self._taken += len(lease.rows)
        self._to_read += len(lease.rows)
        self._rows_free -= len(lease.rows)
        return lease

    def _end(self, number: int) -> None:
        """End a lease, so that its uncommitted rows become free. The caller holds `_lock`."""
        lease, uncommitted = self._uncommitted[number]
        self._leases.end(lease, uncommitted)
        del self._uncommitted[number]
        self._events.write("lease_end", lease=number, rows_left=len(uncommitted))
        self._update_beacon()

    def _update_beacon(self) -> None:
        """Show in this worker's beacon which leases it holds, or delete the beacon if it holds no lease.

        The caller holds `_lock`.
        """
        self._beacon.show([lease_name(lease.number, lease.turn) for lease, _ in self._uncommitted.values()])
        if not self._uncommitted:
            self._beacon.put_out()

    def _refresh(self) -> None:
        """Read which leases are free, which workers hold the others, and which of these workers live."""
        self._look_at_others(self._leases)
        self._rows_free = self._leases.rows_free()
        self._refreshed_at = time.monotonic()

    def _refresh_if_old(self) -> None:
        """Call `_refresh`, unless the lease files were read a moment ago."""
        if time.monotonic() - self._refreshed_at > max(REFRESH_S, self._pause_s()):
            self._refresh()

    def _look_at_others(self, leases: Leases) -> None:
        """Read the lease files, and find out which other workers hold leases and whether they live."""
        self._others.look(leases.refresh())
        if not self._others and leases.held_count() > len(self._uncommitted):
            self._others.look_without_beacons(set(leases.held().values()) - {self._prepared.run_dir.task})

    def _pause_s(self) -> float:
        """Return the pause between two listings of the lease files, in seconds.

        The pause grows with the number of workers.
        """
        return min(max(POLL_S, len(self._others) / WORKERS_PER_LISTING), LONGEST_PAUSE_S)

    def _pause_before_look(self) -> float:
        """Return the seconds that a worker without a lease waits before it lists the lease files again."""
        # The small addition makes sure that a dead worker is known as dead at the next look.
        verdict_due_s = self._others.seconds_to_verdict() + SHORT_POLL_S
        return min(self._pause_s(), verdict_due_s)

    def _take_over(self, task: str) -> None:
        """Recover the journals of a dead worker, and end its leases. Raises OSError or OutputError."""
        dead = self._prepared.run_dir.of_task(task)
        try:
            with hold_task(dead, _refuse_to_wait, dead_owner=self._others.owner_content(task)) as lock:
                recover(dead, lock, self._prepared.results_schema)
                # The dead worker, or one that took over from it, may have ended some of the leases.
                self._leases.refresh()
                stored = read_done(dead).rows
                held = self._leases.held_by(task, held_by_others=self._others.leases_except(task))
                unfinished = [(lease, lease.rows - stored) for lease in held]
                # Only the worker that holds the lock may end the leases.
                lock.verify()
                for lease, rows in unfinished:
                    self._leases.end(lease, rows)
                self._others.remove(task)
        except (TaskHeldError, TaskLockLostError):
            # Another worker has taken over from the dead worker, or is about to.
            return
        dead.store.discard_copy(task)
        if unfinished:
            rows_left = sum(len(rows) for _, rows in unfinished)
            log.warning("took over from %s, which died: %d rows were unfinished", task, rows_left)
            numbers = [lease.number for lease, _ in unfinished]
            self._events.write("takeover", task=task, leases=numbers, rows_left=rows_left)

    def _has_its_share(self) -> bool:
        """Return whether this worker must leave the free rows to the other workers for now.

        This is so if it has more than an equal part of the rows: its unfinished rows and the free rows,
        divided by the number of workers. Otherwise one worker could take all of the last rows, and the others
        would be idle.
        """
        unfinished = self._unfinished()
        return unfinished * self._workers() > self._rows_free + unfinished

    def _unfinished(self) -> int:
        """Return the number of rows that this worker has taken and not finished."""
        return self._taken - self._counts.done

    def _share_of_free(self) -> int:
        """Return the number of free rows per worker, rounded up."""
        return -(-self._rows_free // self._workers())

    def _workers(self) -> int:
        """Return the number of workers that share the rows: this worker, and others that may be alive."""
        return 1 + len(self._others) - len(self._others.dead)


def _refuse_to_wait(_: float) -> None:
    """Raise TaskHeldError instead of sleeping: another worker is already taking over."""
    raise TaskHeldError("the lock of a dead worker is not waited for")


def join(
    prepared: PreparedJob,
    start: StartOptions,
    control: Control,
    *,
    lock: TaskLock,
    counts: RowCounts,
    events: EventLog,
    turns: TurnStore | None = None,
) -> tuple[LeasedRows, int, OrderDecision]:
    """Return the rows that this worker will take, the number of rows of the whole run, and their order.

    The first worker makes the plan. A worker that finds new files or a larger limit adds a plan of the new
    rows, whether or not the other plans have ended. Once all plans have ended, the next worker plans the
    failed rows to retry, and the rows whose part file was moved away. While another worker makes a plan, this
    function waits, unless `control` stops the run. `lock` is the lock that this worker holds on its task,
    `counts` are the counts of the rows that this worker has finished, and `turns` stores the answers of
    rollouts. Raises InputError, OutputError or ResumeError.
    """
    run_dir = prepared.run_dir
    leases = Leases(run_dir.leases, run_dir.task, run_dir.store)
    with writing(run_dir.leases):
        leases.refresh()
        check_retry(start, run_dir.name, is_leased=not leases.is_done())
        is_logged = False
        while leases.is_done() or _is_behind(leases, prepared):
            with ExitStack() as stack:
                try:
                    stack.enter_context(hold_task(run_dir, control.sleep, directory=leases.directory))
                except TaskHeldError:
                    if not is_logged:
                        log.info("waiting for another worker, which is planning the run")
                    is_logged = True
                    control.sleep(POLL_S)
                    leases.refresh()
                    continue
                leases.refresh()  # another worker may just have made a plan
                plans_before = len(leases.plans)
                _plan(prepared, start, leases, control)
                if len(leases.plans) == plans_before:
                    # No plan was written, because every row is in a plan already.
                    break
    assert leases.plan is not None
    _check_plan(leases, prepared)
    leases.join()
    rows = LeasedRows(prepared, leases, lock=lock, counts=counts, events=events, turns=turns)
    return rows, leases.plan.rows_total, OrderDecision(**leases.plan.choice)


def _check_plan(leases: Leases, prepared: PreparedJob) -> None:
    """Raise ResumeError if the newest plan belongs to another run."""
    if leases.plan is not None:
        check_same_run(leases.plan.fingerprint, prepared.fingerprint(""), prepared.run_dir.name)


def _is_behind(leases: Leases, prepared: PreparedJob) -> bool:
    """Return whether there is no plan, or the newest plan lacks rows that this worker's input has.

    Raises ResumeError if the newest plan belongs to another run.
    """
    if leases.plan is None:
        return True
    _check_plan(leases, prepared)
    return has_grown(
        leases.plan.fingerprint,
        rows_of_files=prepared.dataset.total_rows,
        limit=prepared.job.input.limit,
    )


def _plan(prepared: PreparedJob, start: StartOptions, leases: Leases, control: Control) -> None:
    """Write a plan for the pending rows that no plan has yet.

    If all plans have ended, plan all rows without a result. The caller holds the lock of the leases'
    directory.
    """
    is_done = leases.is_done()
    if not (is_done or _is_behind(leases, prepared)):  # another worker has just planned these rows
        return
    # The check is repeated, because another worker may have made a plan since the caller's check.
    check_retry(start, prepared.run_dir.name, is_leased=not is_done)
    main = prepared.run_dir.of_task()
    with hold_task(main, control.sleep) as lock:  # no run without --join may start meanwhile
        recover(main, lock, prepared.results_schema)
        # If all plans have ended, each of their rows has a result. A result that is not visible yet would be
        # planned again.
        expected_rows = leases.plan.rows_total if leases.plan and is_done else 0
        stored = _stored_by_all(main, expected_rows, control)
        leased = None if is_done else leases.rows()
        plan = plan_run(start, RunState.of(prepared.selected(control.check), stored, leased))
        if plan.discard == "failed rows":
            for task in main.all_tasks():
                discard_failed_rows(task, lock)
        if prepared.job.output.reuse is not None and plan.missing:
            reuse = Reuse(prepared, control, model_of(prepared.job.engine))
            plan = plan.with_reused(reuse.take(main, lock, plan.selected, plan.missing))
        rows = plan.rows
        # A plan without rows is still needed if it records a larger limit or more input files.
        is_needed = rows or _is_behind(leases, prepared)
        # Another process may have taken over the lock. Then nothing may be deleted or written any more.
        lock.verify()
        if is_done:
            leases.remove_copies()
        if not is_needed:
            return
        remove_sorted_copies(main.task_directory)
        path, choice = prepare_order(
            prepared,
            rows,
            leases.directory,
            writer=lock.token,
            check_stop=control.check,
            remove_earlier=False,  # workers may still read earlier sorted copies
        )
        if path:  # a sorted copy of the input sets the order of sending
            leases.store.publish(path)
            cuts, name = SortedCopy(path).group_starts, path.name
        else:
            cuts, name = cut_into_leases(rows, prepared.dataset.total_rows), None
        fingerprint = prepared.fingerprint("")
        leases.make_plan(
            LeasePlan(
                rows=rows,
                cuts=cuts,
                rows_total=len(plan.selected),
                fingerprint=fingerprint,
                order=name,
                choice=asdict(choice),
            )
        )
        raise_total(prepared.run_dir, len(plan.selected), fingerprint, prepared.code_digests)


def _stored_by_all(run_dir: RunDir, expected: int, control: Control) -> DoneRows:
    """Return the rows in the part files of all workers.

    Wait while fewer than `expected` rows are visible, because NFS may show files of another host late.
    """
    waited_s = 0.0
    while True:
        stored = done_by_all(run_dir)
        if len(stored) >= expected or waited_s > TIMING.parts_appear:
            return stored
        if not waited_s:
            log.warning(
                "%s: %d finished rows are in no part file: waiting %.0f s for the files of another host",
                run_dir.parts, expected - len(stored), TIMING.parts_appear,
            )  # fmt: skip
        control.sleep(POLL_S)
        waited_s += POLL_S
