"""Where a start's rows come from: they are its own, or it takes them lease by lease."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from batchrunner.claim import LOOK_S, SHORTLY_S
from batchrunner.dataset import Reader
from batchrunner.leases import next_lease
from batchrunner.storage import cannot_write
from batchrunner.takeover import Takeover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyroaring import BitMap64

    from batchrunner.leases import Lease, Leases
    from batchrunner.prepare import Prepared
    from batchrunner.records import Outcome, Request

log = logging.getLogger(__name__)

REFRESH_S = 3.0
"""A task looks so often what the others have taken and who they are, as long as it knows of free leases."""


class Source(Protocol):
    """The rows that a start is to do."""

    @property
    def total(self) -> int:
        """How many they are, those included that earlier starts have done."""

    @property
    def unread(self) -> int:
        """How many are still to be read; with leases, about how many will be."""

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read and render them, a bounded batch at a time; blocks."""

    def landed(self, rows: BitMap64) -> None:
        """Take note of rows that are in a part; blocks."""

    def begin(self, tell: Callable[..., None], unfinished: Callable[[], int]) -> None:
        """Take note of whom to tell of events (name, values), and who counts unfinished rows."""

    def stop(self) -> None:
        """End `batches` soon, also where it waits."""

    def give_back(self) -> None:
        """Let others have what was not done; everything that was done has landed. Blocks."""


class OwnRows:
    """Rows that nobody else does."""

    def __init__(self, prepared: Prepared, todo: BitMap64, total: int) -> None:
        self._prepared = prepared
        self._todo = todo
        self.total = total
        self.unread = len(todo)

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read and render them."""
        for batch in self._prepared.batches(self._todo):
            yield batch
            self.unread -= len(batch)

    def landed(self, rows: BitMap64) -> None:
        """Do nothing."""

    def begin(self, tell: Callable[..., None], unfinished: Callable[[], int]) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing: it never waits."""

    def give_back(self) -> None:
        """Do nothing: a later start finds them in the input."""


class LeasedRows:
    """Rows that this task takes lease by lease; what dead tasks held is taken over when nothing is free.

    It leaves when it has finished its own and the rest is held by tasks that live: they do it themselves.
    """

    def __init__(
        self, prepared: Prepared, leases: Leases, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._prepared = prepared
        self._leases = leases
        self._takeover = Takeover(prepared.run_dir, leases, self._tell)
        self._clock = clock
        self._looked_at = -REFRESH_S
        self._open: dict[int, BitMap64] = {}  # what is not in a part yet of each lease that we hold
        self._first: Lease | None = None
        self._last: int | None = None
        self._taken = 0
        self._to_read = 0
        self._rows_free = 0
        self._unfinished: Callable[[], int] = lambda: 0
        self._failing_since: float | None = None
        self._lock = threading.Lock()  # the reader, the writer of parts and the run's end are three threads
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
        self._unfinished = unfinished
        self._listener, untold = tell, self._untold
        self._untold = []
        for event, values in untold:
            tell(event, **values)

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Take leases, read and render their rows."""
        renderer = self._prepared.renderer
        with contextlib.closing(Reader(self._prepared.dataset, renderer.columns)) as reader:
            lease, self._first = self._first or self._take(), None
            while lease is not None:
                for batch in reader.read(lease.rows):
                    yield renderer.render(batch)
                    self._to_read -= len(batch.rows)
                lease = self._take()

    def landed(self, rows: BitMap64) -> None:
        """End the leases of which the last rows are in parts now."""
        with self._lock:
            for number in list(self._open):
                self._open[number] -= rows
                if not self._open[number]:
                    self._end(number)

    def stop(self) -> None:
        """Take no lease any more."""
        self._stopped.set()

    def give_back(self) -> None:
        """End our leases as they are."""
        self.stop()
        with self._lock:
            for number in list(self._open):
                self._end(number)

    def _take(self) -> Lease | None:
        """Take the next lease, as soon as it is known whether there is one for us."""
        while not self._stopped.is_set():
            try:
                with self._lock:
                    has_its_share = self._has_its_share()
                    lease = None if has_its_share else self._take_free()
                    settled = None if lease or has_its_share else self._takeover.settle()
            except OSError as failure:
                self._put_up_with(failure)
                lease, settled = None, None
            else:
                self._failing_since = None
            if lease is not None or (settled is False and not self._unfinished()):
                return lease
            if not settled:
                self._stopped.wait(SHORTLY_S if self._rows_free else LOOK_S)
        return None

    def _has_its_share(self) -> bool:
        """Tell whether we have as many of the rows that nobody has finished as the others can have.

        With few rows left, or long ones, one task could take what keeps all of them busy.
        """
        mine = self._unfinished() + self._to_read
        return mine * (1 + self._takeover.living) > self._rows_free + mine and self._looks_fresh()

    def _looks_fresh(self) -> bool:
        """Look again what is free and who lives, where that was long ago; tell that it was not."""
        fresh = self._clock() - self._looked_at <= REFRESH_S
        if not fresh:
            self._refresh()
        return fresh

    def _put_up_with(self, failure: OSError) -> None:
        """Wait for a disk that takes nothing, but not for ever."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
            log.warning("%s: %s: waiting for the disk", self._leases.directory, failure.strerror)
        if now - self._failing_since > self._prepared.job.limits.disk_wait:
            raise cannot_write(self._leases.directory, failure) from None

    def _take_free(self) -> Lease | None:
        self._looks_fresh()
        lease = self._take_known()
        if lease is None:
            self._refresh()
            lease = self._take_known()
        return lease

    def _take_known(self) -> Lease | None:
        while (number := next_lease(self._leases.free(), self._last)) is not None:
            lease = self._leases.take(number)
            if lease is not None:
                self._last = number
                self._open[number] = lease.rows.copy()
                self._taken += len(lease.rows)
                self._rows_free -= len(lease.rows)
                self._to_read += len(lease.rows)
                self._tell("lease", lease=number, turn=lease.turn, rows=len(lease.rows))
                return lease
        return None

    def _refresh(self) -> None:
        self._leases.refresh()
        self._takeover.look()
        self._rows_free = self._leases.rows_free()
        self._looked_at = self._clock()

    def _end(self, number: int) -> None:
        left = self._open[number]
        self._leases.end(number, left)
        del self._open[number]
        self._tell("lease_end", lease=number, rows_left=len(left))

    def _share_of_free(self) -> int:
        return -(-self._rows_free // (1 + self._takeover.living))

    def _tell(self, event: str, **values: Any) -> None:
        if self._listener is None:
            self._untold.append((event, values))
        else:
            self._listener(event, **values)
