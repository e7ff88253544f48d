"""Reads the rows of a run's input files, and builds their prompts while earlier rows are sent.

A worker gets its rows in leases (parts of the rows). A run with one worker is a single lease.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyroaring import BitMap64

from batchrunner.core.errors import InputError, InputLostError
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Lease, Outcome, Request
from batchrunner.input.dataset import DatasetReader, RowBatch
from batchrunner.input.sorted_copy import SortedCopy
from batchrunner.runner.prepare import PreparedJob

if TYPE_CHECKING:
    from batchrunner.output.turns import TurnStore
    from batchrunner.runner.leases import LeasePlan

log = logging.getLogger(__name__)


class TaskRows(ABC):
    """The rows that a worker has to do. It gets them in one or several parts (leases)."""

    is_shared: bool
    """Whether other workers may do some of the run's rows, now or later."""

    def __init__(self, prepared: PreparedJob, turns: TurnStore | None = None) -> None:
        """Read the rows from the input of `prepared`; `turns` stores the answers of multi-turn rollouts."""
        self._prepared = prepared
        self._turns = turns
        self._stopped = threading.Event()
        self._to_read = 0
        """Number of unread rows in the leases that this worker has taken."""
        self._reader: DatasetReader | SortedCopy | None = None
        self._read_copy: Path | None = None
        """The sorted copy of the input that is being read; None for the input itself."""
        self.kind = prepared.renderer.kind
        """Kind of all prompts; None if their kinds may differ."""
        self.names: Sequence[str] = prepared.dataset.schema.names

    @property
    @abstractmethod
    def total(self) -> int:
        """Number of rows of this worker, including rows that it finished at earlier starts.

        An estimate if several workers share the run.
        """

    @property
    @abstractmethod
    def unread(self) -> int:
        """Number of rows that have not been read yet; an estimate if workers share the run."""

    @abstractmethod
    def take(self, *, wait: bool) -> Lease | None:
        """Take the next lease; return None if there is none.

        With `wait`, wait until a lease is free. Blocks.
        """

    @abstractmethod
    def give_back(self) -> None:
        """Leave the unfinished rows of this worker to other workers. Blocks, and may raise OSError."""

    def committed(self, rows: BitMap64) -> None:
        """Record that rows are in a part file (results in Parquet), so their stored rollouts can be deleted.

        Called in a thread. May block and raise OSError.
        """
        if self._turns is not None:
            self._turns.ended(rows)

    def newest_plan(self) -> LeasePlan | None:
        """Return the newest plan of a shared run; None if this worker does the run alone."""
        return None

    def held_elsewhere(self) -> tuple[int, int]:
        """Return how many rows other living workers will do, and how many nobody will do."""
        return 0, 0

    def stop(self) -> None:
        """Make `batches` end soon, even while it waits for a lease."""
        self._stopped.set()

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read rows, build their prompts, and yield a bounded batch of requests at a time. Blocks.

        An empty batch means that the next rows may take a while, so the rows read so far should be sent now.
        Raises InputLostError, InputChangedError or StorageError.
        """
        lease = self.take(wait=True)
        if lease is None:
            return
        try:
            while lease is not None:
                if self._turns is not None:
                    self._turns.load(lease)
                for batch in self._read(lease):
                    # `Reorderer` fills in the digests of the requests later.
                    digests: list[bytes | None] = [None] * len(batch.rows)
                    yield self._prepared.renderer.render(batch, self._stopped.is_set, digests)
                    self._to_read -= len(batch.rows)
                lease = self.take(wait=False)
                if lease is None:
                    # The next lease may take a while. An empty batch makes the feeder send the rows that were
                    # read so far.
                    yield []
                    lease = self.take(wait=True)
        finally:
            self._close()

    def _read(self, lease: Lease) -> Iterator[RowBatch]:
        """Yield the rows of a lease until the run stops.

        Repeat a read that fails, after longer and longer pauses.

        Raises InputLostError or InputChangedError.
        """
        if lease.copy != self._read_copy:  # the open reader reads another file than this lease needs
            self._close()
        self._read_copy = lease.copy
        # The first opening is outside the loop, which repeats what fails: a deleted sorted copy does not
        # come back.
        self._reader = self._reader or self._open()
        unread = lease.rows.copy()
        batches: Iterator[RowBatch] | None = None
        pauses_s = iter(TIMING.read_retries)
        while not self._stopped.is_set():
            try:
                # After an error, the file is opened again, and read from the first row not yet yielded.
                self._reader = self._reader or self._open()
                batches = batches or self._reader.read(unread.copy(), lease.positions)
                batch = next(batches, None)
            except InputError as failure:
                self._close()
                batches = None
                pause_s = next(pauses_s, None)
                if pause_s is None:
                    raise InputLostError(f"{failure}", hint="run the same command again") from None
                log.warning("%s: tried again in %.0f s", failure, pause_s)
                self._stopped.wait(pause_s)
                continue
            if batch is None:
                return
            pauses_s = iter(TIMING.read_retries)  # after a success, all retries are available again
            yield batch
            unread -= BitMap64(batch.rows)

    def _open(self) -> DatasetReader | SortedCopy:
        """Open the sorted copy of the input if the lease uses one, else the input itself."""
        if self._read_copy is not None:
            return SortedCopy(self._read_copy)
        return DatasetReader(self._prepared.dataset, self._prepared.renderer.columns)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class FixedRows(TaskRows):
    """All rows of a run that one worker does, as one lease."""

    is_shared = False

    def __init__(
        self,
        prepared: PreparedJob,
        rows: BitMap64,
        *,
        total: int,
        copy: Path | None = None,
        turns: TurnStore | None = None,
    ) -> None:
        """Take the `rows` to send; `total` also counts the rows that were finished before.

        `copy` is the sorted copy of the input in whose order the rows are sent; None for input order. `turns`
        stores the answers of multi-turn rollouts.
        """
        super().__init__(prepared, turns)
        self._lease: Lease | None = Lease(number=0, turn=0, rows=rows, positions=None, copy=copy)
        self._total = total
        self._to_read = len(rows)

    @property
    def total(self) -> int:
        """Number of rows, including rows that were finished at earlier starts."""
        return self._total

    @property
    def unread(self) -> int:
        """Number of rows that have not been read yet."""
        return self._to_read

    def take(self, *, wait: bool) -> Lease | None:
        """Take the lease with all rows. Later calls return None."""
        del wait  # there is only one lease
        lease, self._lease = self._lease, None
        return lease

    def give_back(self) -> None:
        """Take no more rows."""
        self.stop()
