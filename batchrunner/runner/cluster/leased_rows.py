"""The rows of a task that takes leases; when none is free, it takes over those of dead tasks."""

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from pyroaring import BitMap64
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    wait_fixed,
)

from batchrunner.core.errors import OutputError
from batchrunner.core.types import Lease
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.files import cannot_write
from batchrunner.output.task_holder import POLL_S, SHORT_POLL_S
from batchrunner.runner.cluster.lease_files import LeasePlan
from batchrunner.runner.cluster.leases import Leases, next_lease
from batchrunner.runner.cluster.takeover import Takeover
from batchrunner.runner.prepared_job import PreparedJob
from batchrunner.runner.task_rows import TaskRows

log = logging.getLogger(__name__)

REFRESH_S = 3.0
"""Seconds between two looks at what other tasks have taken, as long as free leases are known."""


class LeasedRows(TaskRows):
    """Rows that a task takes lease by lease.

    The task ends when its own rows are done and living tasks hold all others: they do them themselves.
    """

    is_shared = True

    def __init__(
        self,
        prepared: PreparedJob,
        leases: Leases,
        counts: RowCounts,
        events: EventLog,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Hold no lease yet; `counts` tells how many of the rows taken have ended."""
        super().__init__(prepared)
        self._leases = leases
        self._held = _HeldLeases(leases, events)
        self._takeover = Takeover(prepared, leases, events)
        self._counts = counts
        self._clock = clock
        self._refreshed_at = -REFRESH_S
        self._first: Lease | None = None
        self._last: int | None = None
        self._taken = 0
        self._to_read = 0
        self._rows_free = 0

    @property
    def total(self) -> int:
        """Rows that were taken, and this task's share of the free ones."""
        return self._taken + self._share_of_free()

    @property
    def unread(self) -> int:
        """Rows of this task's leases still to be read, and its share of the free ones."""
        return self._to_read + self._share_of_free()

    def take_first(self, sleep: Callable[[float], None]) -> bool:
        """Take the first lease; tell whether there was one. `sleep` raises if the run is stopped."""
        self._first = self._wait_for_lease(sleep)
        return self._first is not None

    def take(self, *, wait: bool) -> Lease | None:
        """Take the next lease."""
        if self._first is not None:
            lease, self._first = self._first, None
            return lease
        if wait:
            return self._wait_for_lease(sleep_using_event(self._stopped))
        try:
            return None if self._stopped.is_set() else self._try_take()
        except (OSError, OutputError):  # the next call waits for the disk
            return None

    def record_read(self, rows: int) -> None:
        """Record that so many rows were read."""
        self._to_read -= rows

    def committed(self, rows: BitMap64) -> None:
        """End the leases whose last rows are in parts now."""
        self._held.committed(rows)

    def give_back(self) -> None:
        """End all leases as they are."""
        self.stop()
        self._held.end_all()
        if copies := self._leases.planned.copies():
            self._leases.refresh()
            if self._leases.is_done():
                for copy in copies:
                    self._leases.store.remove(copy)

    def newest_plan(self) -> LeasePlan:
        """Return the run's newest plan, which another task may have added. Raises OSError."""
        now = Leases(self._leases.directory, store=self._leases.store)
        now.refresh()
        assert now.plan is not None
        return now.plan

    def held_elsewhere(self) -> tuple[int, int]:
        """Return the number of rows that other living tasks hold, and of those that nobody living holds.

        Rows of plans that came after this task count as held while a living task holds some of that plan.
        """
        now = Leases(self._leases.directory, store=self._leases.store)
        now.refresh()
        dead = {task for task in set(now.held().values()) if self._takeover.is_dead(task)}
        now.refresh()  # a task that has ended meanwhile ended its leases before
        held, free = Counter[bool](), Counter[bool]()  # by whether this task knows the plan
        unheld = 0
        for number, (task, rows) in now.rows_held().items():
            if task == self._prepared.run_dir.task or task in dead:
                unheld += rows
            else:
                held[number < len(self._leases)] += rows
        for number in now.free():
            free[number < len(self._leases)] += now.count_left(number)
        later = free[False] if held[False] else 0
        return held.total() + later, unheld + free.total() - later

    def _wait_for_lease(self, sleep: Callable[[float], None]) -> Lease | None:
        """Take a lease, or wait until it is known that there is none for this task."""
        retrying = self._waiting_for_disk(sleep)
        while not self._stopped.is_set():
            lease, is_over = retrying(self._take_or_settle)
            if lease is not None or is_over:
                return lease
            sleep(SHORT_POLL_S if self._rows_free else POLL_S)
        return None

    def _take_or_settle(self) -> tuple[Lease | None, bool]:
        """Return a lease, and whether there will be none."""
        lease = self._try_take()
        if lease is None and not self._has_its_share():
            settled = self._settle()
            if settled:
                return self._try_take(), False
            return None, settled is False and self._unfinished() == 0
        return lease, False

    def _try_take(self) -> Lease | None:
        """Take a lease that is free as far as is known."""
        if self._clock() - self._refreshed_at > REFRESH_S:
            self._refresh()
        if self._has_its_share():
            return None
        while (number := next_lease(self._leases.free(), self._last)) is not None:
            lease = self._leases.take(number)
            if lease is not None:
                return self._hold(lease)
        return None

    def _hold(self, lease: Lease) -> Lease | None:
        self._held.add(lease)
        if self._stopped.is_set():
            self._held.end(lease)
            return None
        self._last = lease.number
        self._taken += len(lease.rows)
        self._to_read += len(lease.rows)
        self._rows_free -= len(lease.rows)
        return lease

    def _settle(self) -> bool | None:
        """Look again; tell whether something is free now, or None while that is not known."""
        self._refresh()
        if self._rows_free:
            return True
        settled = self._takeover.settle()
        if settled:
            self._refresh()
        return settled

    def _refresh(self) -> None:
        self._leases.refresh()
        self._takeover.poll()
        self._rows_free = self._leases.rows_free()
        self._refreshed_at = self._clock()

    def _has_its_share(self) -> bool:
        """Tell whether this task has as many of the unfinished rows as each of the others can have.

        With few rows left, or slow ones, one task could otherwise take what keeps all of them busy.
        """
        mine = self._unfinished()
        return mine * (1 + self._takeover.living) > self._rows_free + mine

    def _unfinished(self) -> int:
        return self._taken - self._counts.done

    def _share_of_free(self) -> int:
        return -(-self._rows_free // (1 + self._takeover.living))

    def _waiting_for_disk(self, sleep: Callable[[float], None]) -> Retrying:
        return Retrying(
            retry=retry_if_exception_type((OSError, OutputError)),
            wait=wait_fixed(POLL_S),
            stop=stop_after_delay(self._prepared.job.limits.disk_wait),
            sleep=sleep,
            before_sleep=functools.partial(_warn_once, self._leases),
            retry_error_callback=functools.partial(_give_up, self._leases),
        )


class _HeldLeases:
    """The leases that this task holds, with their uncommitted rows.

    The reader, the writer of parts and the end of the run use them from different threads.
    """

    def __init__(self, leases: Leases, events: EventLog) -> None:
        self._leases = leases
        self._events = events
        self._uncommitted: dict[int, tuple[Lease, BitMap64]] = {}
        self._lock = threading.Lock()

    def add(self, lease: Lease) -> None:
        with self._lock:
            self._uncommitted[lease.number] = lease, lease.rows
        self._events.write("lease", lease=lease.number, turn=lease.turn, rows=len(lease.rows))

    def committed(self, rows: BitMap64) -> None:
        with self._lock:
            left_of = {number: (lease, left - rows) for number, (lease, left) in self._uncommitted.items()}
            self._uncommitted = left_of
            for lease, left in list(left_of.values()):
                if not left:
                    self._end(lease, left)

    def end(self, lease: Lease) -> None:
        with self._lock:
            self._end(*self._uncommitted[lease.number])

    def end_all(self) -> None:
        with self._lock:
            for lease, left in list(self._uncommitted.values()):
                self._end(lease, left)

    def _end(self, lease: Lease, left: BitMap64) -> None:
        self._leases.end(lease, left)
        del self._uncommitted[lease.number]
        self._events.write("lease_end", lease=lease.number, rows_left=len(left))


def _warn_once(leases: Leases, state: RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome:
        log.warning("%s: %s: waiting for the disk", leases.directory, state.outcome.exception())


def _give_up(leases: Leases, state: RetryCallState) -> None:
    failure = state.outcome.exception() if state.outcome else None
    if isinstance(failure, OSError):
        raise cannot_write(leases.directory, failure) from None
    assert failure is not None
    raise failure
