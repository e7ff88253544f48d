"""The rows of a stream, rendered as they come: from a program's iterator, or from files."""

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.errors import InputError
from batchrunner.core.types import Outcome, Request
from batchrunner.input.dataset import Dataset
from batchrunner.input.live_rows import LiveRenderer
from batchrunner.input.tables import batches_of_rows
from batchrunner.runner.row_feed import RowBuffer


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
