"""The rows of a run's files, in one lease or in several, read and rendered while others are sent."""

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
    """The rows that a worker does, in one lease or in several; the dispatcher's `RowSource`."""

    is_shared: bool
    """Whether other workers could do them, now or later."""

    def __init__(self, prepared: PreparedJob, turns: TurnStore | None = None) -> None:
        """Read rows of this input; `turns` stores the turns of rollouts."""
        self._prepared = prepared
        self._turns = turns
        self._stopped = threading.Event()
        self._to_read = 0
        """Rows of the leases that were taken, still to be read."""
        self._reader: DatasetReader | SortedCopy | None = None
        self._read_copy: Path | None = None
        """The sorted copy that the reader reads; None for the input itself."""
        self.kind = prepared.renderer.kind
        """The kind of all prompts; None where they may be of any."""
        self.names: Sequence[str] = prepared.dataset.schema.names
        """Names of the columns."""

    @property
    @abstractmethod
    def total(self) -> int:
        """Number of rows, those that earlier attempts ended included; with leases an estimate."""

    @property
    @abstractmethod
    def unread(self) -> int:
        """Number of rows still to be read; with leases an estimate."""

    @abstractmethod
    def take(self, *, wait: bool) -> Lease | None:
        """Take the next lease; None if there is none, or none at once without `wait`. Blocks."""

    @abstractmethod
    def give_back(self) -> None:
        """Leave the rows that were not done to other workers. Blocks, and may raise OSError."""

    def committed(self, rows: BitMap64) -> None:
        """Note rows that are in a part, and so need no journal or input any more.

        Called in a thread; it may block and raise OSError.
        """
        if self._turns is not None:
            self._turns.ended(rows)

    def newest_plan(self) -> LeasePlan | None:
        """Return the newest plan of a run that workers share; None where this worker is alone."""
        return None

    def held_elsewhere(self) -> tuple[int, int]:
        """Return the number of rows that living workers do, and of those that nobody does."""
        return 0, 0

    def stop(self) -> None:
        """End `batches` soon, also while it waits."""
        self._stopped.set()

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read and render rows, a bounded batch at a time; blocks.

        An empty batch asks to send what was read so far, since the next lease may take a while. Raises
        InputLostError, InputChangedError, StorageError.
        """
        lease = self.take(wait=True)
        if lease is None:  # then the sorted copy may be gone
            return
        try:
            while lease is not None:
                if self._turns is not None:
                    self._turns.load(lease)
                for batch in self._read(lease):
                    digests: list[bytes | None] = [None] * len(batch.rows)
                    yield self._prepared.renderer.render(batch, self._stopped.is_set, digests)
                    self._to_read -= len(batch.rows)
                lease = self.take(wait=False)
                if lease is None:
                    yield []
                    lease = self.take(wait=True)
        finally:
            self._close()

    def _read(self, lease: Lease) -> Iterator[RowBatch]:
        """Yield the rows of a lease until the run stops; what cannot be read now is tried again a few times.

        Raises InputLostError or InputChangedError.
        """
        if lease.copy != self._read_copy:
            self._close()
        self._read_copy = lease.copy
        self._reader = self._reader or self._open()  # a copy that is gone will not come back
        unread = lease.rows.copy()
        batches: Iterator[RowBatch] | None = None
        pauses_s = iter(TIMING.read_retries)
        while not self._stopped.is_set():
            try:
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
            pauses_s = iter(TIMING.read_retries)
            yield batch
            unread -= BitMap64(batch.rows)

    def _open(self) -> DatasetReader | SortedCopy:
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
        """Do `rows`, of `total` with those that were done before; `turns` stores the turns of rollouts.

        `copy` is the sorted copy of the input in whose order they are sent; None for input order.
        """
        super().__init__(prepared, turns)
        self._lease: Lease | None = Lease(number=0, turn=0, rows=rows, positions=None, copy=copy)
        self._total = total
        self._to_read = len(rows)

    @property
    def total(self) -> int:
        """Number of rows, those that earlier attempts ended included."""
        return self._total

    @property
    def unread(self) -> int:
        """Number of rows still to be read."""
        return self._to_read

    def take(self, *, wait: bool) -> Lease | None:
        """Take all rows, once."""
        del wait
        lease, self._lease = self._lease, None
        return lease

    def give_back(self) -> None:
        """Take no more rows."""
        self.stop()
