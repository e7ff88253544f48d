"""Rows that a task takes lease by lease."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from batchrunner.core.errors import OutputError
from batchrunner.input.sort.decide import OrderDecision
from batchrunner.output.run_dir import cannot_write
from batchrunner.output.task_lock import LOOK_S, SHORTLY_S
from batchrunner.runner.cluster.leases import next_lease
from batchrunner.runner.cluster.takeover import Takeover
from batchrunner.runner.row_source import RowReading, tell_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyroaring import BitMap64

    from batchrunner.core.types import Outcome, Request
    from batchrunner.runner.cluster.leases import Lease, LeasePlan, Leases
    from batchrunner.runner.prepare import PreparedJob

log = logging.getLogger(__name__)

REFRESH_S = 3.0
"""A task looks so often what the others have taken and who they are, as long as it knows of free leases."""


class LeasedRows:
    """Rows that this task takes lease by lease; what dead tasks held is taken over when nothing is free.

    It leaves when it has finished its own and the rest is held by tasks that live: they do it themselves.
    """

    is_shared = True

    def __init__(
        self,
        prepared: PreparedJob,
        leases: Leases,
        plan: LeasePlan,
        sleep: Callable[[float], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sleep` is called while nothing can be taken; once rows are sent, `stop` ends the waiting."""
        self._prepared = prepared
        self._leases = leases
        self._choice = OrderDecision(**plan.choice)
        self._copy = leases.directory / plan.order if plan.order else None
        self._takeover = Takeover(prepared.run_dir, leases, self._tell)
        self._sleep = sleep
        self._clock = clock
        self._looked_at = -REFRESH_S
        self._open: dict[int, tuple[Lease, BitMap64]] = {}  # with what is not in a part yet
        self._lock = (
            threading.Lock()
        )  # of these: the reader, the writer of parts and the run's end are threads
        self._first: Lease | None = None
        self._last: int | None = None
        self._taken = 0
        self._to_read = 0
        self._rows_free = 0
        self._unfinished: Callable[[], int] = lambda: 0
        self._failing_since: float | None = None
        self._stopped = threading.Event()
        self._listener: Callable[..., None] | None = None
        self._untold: list[tuple[str, dict[str, Any]]] = []

    @property
    def total(self) -> int:
        """Rows that were taken, and our share of those that are free."""
        return self._taken + self._share_of_free()

    @property
    def unread(self) -> int:
        """Rows of our leases that are still to be read, and our share of those that are free."""
        return self._to_read + self._share_of_free()

    def has_rows(self) -> bool:
        """Take the first lease and tell whether there was one."""
        self._first = self._take()
        return self._first is not None

    def begin(self, tell: Callable[..., None], unfinished: Callable[[], int]) -> None:
        """Tell of leases and takeovers, those up to now included; with unfinished rows we do not leave."""
        tell_order(self._choice, tell)
        self._unfinished = unfinished
        self._sleep = self._wait
        self._listener, untold = tell, self._untold
        self._untold = []
        for event, values in untold:
            tell(event, **values)

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Take leases, read and render their rows."""
        renderer = self._prepared.renderer
        lease, self._first = self._first or self._take(), None
        if lease is None:  # then the copy may have gone
            return
        with contextlib.closing(
            RowReading(self._prepared, self._copy, self._stopped, leased=True)
        ) as reading:
            while lease is not None:
                for batch in reading.read(lease.rows, lease.places):
                    yield renderer.render(batch)
                    self._to_read -= len(batch.rows)
                lease = self._take(wait=False)
                if lease is None:  # it may last: what has been read is sent first
                    yield []
                    lease = self._take()

    def landed(self, rows: BitMap64) -> None:
        """End the leases of which the last rows are in parts now."""
        with self._lock:
            self._open = {number: (lease, left - rows) for number, (lease, left) in self._open.items()}
            for lease, left in list(self._open.values()):
                if not left:
                    self._end(lease, left)

    def stop(self) -> None:
        """Take no lease any more."""
        self._stopped.set()

    def give_back(self) -> None:
        """End our leases as they are."""
        self.stop()
        with self._lock:
            for lease, left in list(self._open.values()):
                self._end(lease, left)
        if self._copy:
            self._leases.refresh()
            if self._leases.is_done():
                self._copy.unlink(missing_ok=True)

    def _take(self, *, wait: bool = True) -> Lease | None:
        """Take the next lease, once it is known whether there is one for us; without `wait` at once."""
        while not self._stopped.is_set():
            try:
                if self._clock() - self._looked_at > REFRESH_S:
                    self._look()
                has_its_share = self._has_its_share()
                lease = None if has_its_share else self._take_free()
                settled = self._settle() if wait and not lease and not has_its_share else None
            except (OSError, OutputError) as failure:
                self._put_up_with(failure)
                lease, settled = None, None
            else:
                self._failing_since = None
            if lease is not None or not wait or (settled is False and not self._unfinished()):
                return lease
            if not settled:
                self._sleep(SHORTLY_S if self._rows_free else LOOK_S)
        return None

    def _settle(self) -> bool | None:
        """Look again; tell whether something is free now (None: not yet, perhaps)."""
        self._look()
        if self._rows_free:
            return True
        settled = self._takeover.settle()
        if settled:
            self._look()
        return settled

    def _wait(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    def _has_its_share(self) -> bool:
        """Tell whether we have as many of the rows that nobody has finished as the others can have.

        With few rows left, or long ones, one task could take what keeps all of them busy.
        """
        mine = self._unfinished() + self._to_read
        return mine * (1 + self._takeover.living) > self._rows_free + mine

    def _put_up_with(self, failure: OSError | OutputError) -> None:
        """Wait for a disk that takes nothing, but not for ever."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
            log.warning("%s: %s: waiting for the disk", self._leases.directory, failure)
        if now - self._failing_since > self._prepared.job.limits.disk_wait:
            if isinstance(failure, OSError):
                raise cannot_write(self._leases.directory, failure) from None
            raise failure

    def _take_free(self) -> Lease | None:
        """Take a lease that is free as far as we know."""
        while (number := next_lease(self._leases.free(), self._last)) is not None:
            lease = self._leases.take(number)
            if lease is not None:
                return self._hold(lease)
        return None

    def _hold(self, lease: Lease) -> Lease | None:
        with self._lock:
            self._open[lease.number] = lease, lease.rows
            if self._stopped.is_set():
                self._end(lease, lease.rows)
                return None
        self._last = lease.number
        self._taken += len(lease.rows)
        self._to_read += len(lease.rows)
        self._rows_free -= len(lease.rows)
        self._tell("lease", lease=lease.number, turn=lease.turn, rows=len(lease.rows))
        return lease

    def _look(self) -> None:
        self._leases.refresh()
        self._takeover.look()
        self._rows_free = self._leases.rows_free()
        self._looked_at = self._clock()

    def _end(self, lease: Lease, left: BitMap64) -> None:
        self._leases.end(lease, left)
        del self._open[lease.number]
        self._tell("lease_end", lease=lease.number, rows_left=len(left))

    def _share_of_free(self) -> int:
        return -(-self._rows_free // (1 + self._takeover.living))

    def _tell(self, event: str, **values: Any) -> None:
        if self._listener is None:
            self._untold.append((event, values))
        else:
            self._listener(event, **values)
