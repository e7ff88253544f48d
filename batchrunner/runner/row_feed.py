"""Rows on their way from a program's iterator to a stream's run: read ahead a little, and no further."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Generator
from contextlib import suppress
from typing import Any, TypeAlias

import pyarrow as pa

from batchrunner.core.timing import TIMING
from batchrunner.input.tables import as_batches, as_mapping, as_rows, bytes_of

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
