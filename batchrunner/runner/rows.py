"""Sources of rows: the files of a run, or a program's iterator, read and rendered while others are sent."""

import asyncio
import contextlib
import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
from pyroaring import BitMap64
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_attempt,
    wait_chain,
    wait_fixed,
)

from batchrunner.core.errors import InputError, InputLostError
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Lease, Outcome, Request
from batchrunner.input.dataset import Dataset, RowBatch, RowReader
from batchrunner.input.live_rows import LiveRenderer
from batchrunner.input.sorted_copy import open_order
from batchrunner.input.tables import as_batches, as_mapping, as_rows, batches_of_rows, bytes_of
from batchrunner.runner.prepare import PreparedJob

log = logging.getLogger(__name__)


class TaskRows(ABC):
    """The rows that a task does, in one lease or in several; the dispatcher's `RowSource`."""

    is_shared: bool
    """Whether other tasks could do them, now or later."""

    def __init__(self, prepared: PreparedJob) -> None:
        """Read rows of this input."""
        self._prepared = prepared
        self._stopped = threading.Event()

    @abstractmethod
    def take(self, *, wait: bool) -> Lease | None:
        """Take the next lease; None if there is none, or none at once without `wait`. Blocks."""

    @abstractmethod
    def record_read(self, rows: int) -> None:
        """Record that so many rows of the last lease were read."""

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
        with contextlib.closing(_PatientReader(self._prepared, self._stopped)) as reader:
            while lease is not None:
                for batch in reader.read(lease):
                    yield self._prepared.renderer.render(batch, self._stopped.is_set)
                    self.record_read(len(batch.rows))
                lease = self.take(wait=False)
                if lease is None:
                    yield []
                    lease = self.take(wait=True)


class FixedRows(TaskRows):
    """All rows of a run that one task does, as one lease."""

    is_shared = False

    def __init__(self, prepared: PreparedJob, rows: BitMap64, total: int, copy: Path | None) -> None:
        """`rows` are those to do, of `total` with those that were done before.

        `copy` is the sorted copy of the input in whose order they are sent; None for input order.
        """
        super().__init__(prepared)
        self._copy = copy
        self._lease: Lease | None = Lease(0, 0, rows, None, copy)
        self._uncommitted = rows
        self.total = total
        """Number of rows, those that earlier attempts ended included."""
        self.unread = len(rows)
        """Number of rows still to be read."""

    def take(self, *, wait: bool) -> Lease | None:
        """Take all rows, once."""
        del wait
        lease, self._lease = self._lease, None
        return lease

    def record_read(self, rows: int) -> None:
        """Record that so many rows were read."""
        self.unread -= rows

    def committed(self, rows: BitMap64) -> None:
        """Record rows that are in a part now."""
        self._uncommitted = self._uncommitted - rows

    def give_back(self) -> None:
        """Leave the sorted copy to a later attempt, unless all rows are done."""
        self.stop()
        if self._copy and not self._uncommitted:
            self._copy.unlink(missing_ok=True)


class _PatientReader:
    """Reads rows, and tries again a few times what cannot be read now."""

    def __init__(self, prepared: PreparedJob, stopped: threading.Event) -> None:
        self._prepared = prepared
        self._stopped = stopped
        self._copy: Path | None = None  # what `_order` reads
        self._order: RowReader | None = None

    def read(self, lease: Lease) -> Iterator[RowBatch]:
        """Yield the rows of a lease until the run stops; raises InputLostError or InputChangedError."""
        if lease.copy != self._copy:
            self.close()
        self._copy = lease.copy
        self._order = self._order or self._open()  # a copy that is gone will not come back
        left = lease.rows.copy()
        batches: Iterator[RowBatch] | None = None

        def next_batch() -> RowBatch | None:
            nonlocal batches
            try:
                self._order = self._order or self._open()
                batches = batches or self._order.read(left.copy(), lease.positions)
                return next(batches, None)
            except InputError:
                self.close()
                batches = None
                raise

        while not self._stopped.is_set():
            try:
                batch = self._retrying(next_batch)
            except InputError as failure:
                raise InputLostError(f"{failure}", hint="run the same command again") from None
            if batch is None:
                return
            yield batch
            left -= BitMap64(batch.rows)

    def _open(self) -> RowReader:
        leased = self._copy is not None and self._copy.parent == self._prepared.run_dir.leases
        return open_order(self._prepared, self._copy, leased=leased)

    @property
    def _retrying(self) -> Retrying:
        return Retrying(
            retry=retry_if_exception_type(InputError),
            wait=wait_chain(*map(wait_fixed, TIMING.read_retries)),
            stop=stop_after_attempt(len(TIMING.read_retries) + 1),
            sleep=sleep_using_event(self._stopped),
            before_sleep=_warn,
            reraise=True,
        )

    def close(self) -> None:
        """Close what is open."""
        if self._order is not None:
            self._order.close()
            self._order = None


def _warn(state: RetryCallState) -> None:
    failure = state.outcome.exception() if state.outcome else None
    pause_s = state.next_action.sleep if state.next_action else 0.0
    log.warning("%s: tried again in %.0f s", failure, pause_s)


MOST_ROWS, MOST_BYTES = 256, 16 << 20
"""Rows that are read ahead, and the bytes of their texts; also the rows that are rendered together."""

Piece: TypeAlias = dict[str, Any] | pa.RecordBatch
"""A row, or a batch of rows."""


class RowBuffer:
    """Rows between the thread or task that reads them and the thread that renders them. Thread-safe."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[Piece, int]] = deque()  # with their bytes
        self._rows = 0
        self._bytes = 0
        self._ended = False
        self._stopped = False
        self._changed = threading.Condition()
        self.failure: BaseException | None = None
        """What the program's iterator raised."""

    @property
    def stopped(self) -> bool:
        """Whether no more rows are wanted."""
        return self._stopped

    def comes_soon(self) -> bool:
        """Tell whether `take` would return within `TIMING.more_rows`. Blocks as long."""
        with self._changed:
            return self._changed.wait_for(self._can_take, TIMING.more_rows)

    def offer(self, piece: Piece) -> bool:
        """Add a piece if there is room; tell whether it was added, or is not wanted any more."""
        with self._changed:
            return self._stopped or self._offer(piece)

    def put(self, piece: Piece) -> bool:
        """Add a piece once there is room; tell whether more are wanted. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._offer(piece))
            return not self._stopped

    def wait_for_room(self) -> None:
        """Wait until a piece can be added. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._has_room)

    def take(self) -> list[dict[str, Any]] | pa.RecordBatch | None:
        """Take the rows that are there, or one batch; waits for the first. None at the end. Blocks."""
        with self._changed:
            self._changed.wait_for(self._can_take)
            if self._stopped or not self._pieces:
                return None
            rows: list[dict[str, Any]] = []
            while self._pieces:
                piece, size = self._pieces[0]
                if isinstance(piece, pa.RecordBatch) and rows:
                    break
                self._pieces.popleft()
                self._bytes -= size
                if isinstance(piece, pa.RecordBatch):
                    self._rows -= piece.num_rows
                    self._changed.notify_all()
                    return piece
                self._rows -= 1
                rows.append(piece)
            self._changed.notify_all()
            return rows

    def end(self, failure: BaseException | None = None) -> None:
        """Record that no more rows come, because of `failure` if there is one."""
        with self._changed:
            self._ended = True
            self.failure = failure
            self._changed.notify_all()

    def stop(self) -> None:
        """Record that no more rows are wanted."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _can_take(self) -> bool:
        return bool(self._pieces) or self._ended or self._stopped

    @property
    def _has_room(self) -> bool:
        return self._rows < MOST_ROWS and self._bytes < MOST_BYTES

    def _offer(self, piece: Piece) -> bool:
        if not self._has_room:
            return False
        size = bytes_of(piece) if isinstance(piece, dict) else piece.nbytes
        self._pieces.append((piece, size))
        self._rows += 1 if isinstance(piece, dict) else piece.num_rows
        self._bytes += size
        self._changed.notify_all()
        return True


class Reader(ABC):
    """Reads a program's iterator into a buffer."""

    def __init__(self, buffer: RowBuffer) -> None:
        self.buffer = buffer

    @abstractmethod
    def start(self) -> None:
        """Begin to read."""

    @abstractmethod
    async def close(self) -> None:
        """End soon; an iterator that is blocked is not waited for."""


class ThreadReader(Reader):
    """Reads an iterator in a thread of its own, since it may block."""

    def __init__(self, data: object, buffer: RowBuffer) -> None:
        super().__init__(buffer)
        self._data = data
        self._thread = threading.Thread(target=self._read, name="batchrunner rows", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    async def close(self) -> None:
        """End soon; an iterator that is blocked is not waited for."""
        self.buffer.stop()
        await asyncio.to_thread(self._thread.join, TIMING.iterator_end)

    def _read(self) -> None:
        failure: BaseException | None = None
        pieces = _pieces_of(self._data)
        try:
            for piece in pieces:
                if not self.buffer.put(piece):
                    break
        except BaseException as raised:  # noqa: BLE001 - it is raised again in the program's own thread
            failure = raised
        self.buffer.end(failure)
        with suppress(Exception):  # what it raises while it is closed concerns nobody
            pieces.close()


class TaskReader(Reader):
    """Reads an asynchronous iterator in a task of the program's event loop."""

    def __init__(self, data: AsyncIterable[Any], buffer: RowBuffer) -> None:
        super().__init__(buffer)
        self._data = data
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._read(), name="batchrunner rows")

    async def close(self) -> None:
        """End the iterator."""
        self.buffer.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        rows: AsyncIterator[Any] = aiter(self._data)
        number = 0
        try:
            async for row in rows:
                mapping = dict(as_mapping(row, number))
                while not self.buffer.offer(mapping):
                    await asyncio.to_thread(self.buffer.wait_for_room)
                if self.buffer.stopped:
                    break
                number += 1
        except BaseException as raised:
            self.buffer.end(raised)
            if isinstance(raised, asyncio.CancelledError) and self.buffer.stopped:
                raise
        else:
            self.buffer.end()
        finally:
            if hasattr(rows, "aclose"):
                with suppress(Exception):
                    await rows.aclose()


def make_reader(data: object, buffer: RowBuffer) -> Reader:
    """Return what reads the data."""
    if isinstance(data, AsyncIterable):
        return TaskReader(data, buffer)
    return ThreadReader(data, buffer)


def _pieces_of(data: object) -> Generator[Piece]:
    """Yield an iterable's rows one by one, as soon as they come, and a table's in small batches."""
    if (batches := as_batches(data)) is not None:
        for batch in batches:
            for at in range(0, max(1, batch.num_rows), MOST_ROWS):
                yield batch.slice(at, MOST_ROWS)
        return
    rows = iter(as_rows(data))
    try:
        for number, row in enumerate(rows):
            yield dict(as_mapping(row, number))  # the program may use its mapping again
    finally:
        if isinstance(rows, Generator):
            rows.close()


class FailedRow(NamedTuple):
    """A row that cannot be sent."""

    error: str


def take_batches(buffer: RowBuffer, first: int) -> list[pa.RecordBatch | FailedRow] | None:
    """Wait for rows and return them as batches; `first` is the number of the first one. None at the end.

    Rows whose values do not fit into columns together are batches of their own.
    """
    taken = buffer.take()
    if taken is None or isinstance(taken, pa.RecordBatch):
        return None if taken is None else [taken]
    try:
        return list(batches_of_rows(taken, first))
    except InputError as failure:
        if len(taken) == 1:
            return [FailedRow(str(failure))]
    pieces: list[pa.RecordBatch | FailedRow] = []
    for number, row in enumerate(taken, first):
        try:
            pieces += batches_of_rows([row], number)
        except InputError as failure:
            pieces.append(FailedRow(str(failure)))
    return pieces


class StreamRows(ABC):
    """The dispatcher's `RowSource` of a stream; its rows are sent in their order, some 500 at a time."""

    is_shared = True
    """Rows are ordered in small windows, so that they are sent, and read, only a little ahead."""

    def __init__(self, renderer: LiveRenderer, total: int) -> None:
        """`total` is the number of rows; 0 where nobody knows it."""
        self._renderer = renderer
        self.total = total
        self._read = 0
        self._ended = False
        self._stopped = threading.Event()

    @property
    def names(self) -> list[str]:
        """Names of the columns of the first rows."""
        return self._renderer.names

    @property
    def unread(self) -> int:
        """Number of rows still to be read; a large number where nobody knows it."""
        if self._ended:
            return 0
        return max(0, self.total - self._read) if self.total else sys.maxsize >> 1

    def stop(self) -> None:
        """End `batches` soon."""
        self._stopped.set()

    @abstractmethod
    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read and render rows; an empty batch asks to send what was read so far."""

    def _rendered(self, data: pa.RecordBatch) -> list[Request | Outcome]:
        return self._renderer.render(self._next(data.num_rows), data, self._stopped.is_set)

    def _next(self, rows: int) -> range:
        self._read += rows
        return range(self._read - rows, self._read)


class FileRows(StreamRows):
    """The rows of files."""

    def __init__(self, renderer: LiveRenderer, dataset: Dataset) -> None:
        super().__init__(renderer, dataset.total_rows)
        self._dataset = dataset

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read and render rows. Raises InputError where a file cannot be read."""
        for batch in self._dataset.read(BitMap64(range(self.total)), self._renderer.columns):
            if self._stopped.is_set():
                break
            yield self._rendered(batch.data)
        self._ended = True


class LiveRows(StreamRows):
    """The rows of a program's iterator."""

    def __init__(
        self,
        renderer: LiveRenderer,
        buffer: RowBuffer,
        first: list[pa.RecordBatch | FailedRow],
        total: int,
    ) -> None:
        """`first` was taken from the buffer before."""
        super().__init__(renderer, total)
        self._buffer = buffer
        self._first = first

    def stop(self) -> None:
        """End `batches` soon, also while it waits."""
        super().stop()
        self._buffer.stop()

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Render what is in the buffer, and wait for more. What the iterator raises is in the buffer."""
        pieces: list[pa.RecordBatch | FailedRow] | None = self._first
        self._first = []
        while pieces is not None:
            for piece in pieces:
                if isinstance(piece, FailedRow):
                    yield self._renderer.failed(self._next(1), piece.error)
                else:
                    yield self._rendered(piece)
            if not self._buffer.comes_soon():
                yield []
            pieces = take_batches(self._buffer, self._read)
        self._ended = True
