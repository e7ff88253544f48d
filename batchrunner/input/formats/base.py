"""What all file formats share: a file's content as row groups, which are read in spans."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

READ_BUFFER_BYTES = 1 << 20
"""Bytes of the buffers through which a file is streamed, instead of being loaded whole."""
SPAN_ROWS, SPAN_BYTES = 256, 8 << 20
"""Most rows and bytes of row groups that are read together, and of a batch."""
PROBLEM = "\0problem"
"""Column of a text file that says why a record cannot be read; null where it can. No file has such a name."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive row groups of a file that are read together."""

    groups: range
    first_row: int
    """Index in the file of the first row."""
    rows: int
    size: int
    """Uncompressed bytes of the columns that are read."""


class Spans(Protocol):
    """The spans of a file, in order, which may be made when they are asked for."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __getitem__(self, at: int, /) -> Span:
        """Return the span with this index."""


class OpenContent(Protocol):
    """A file that is open for reading. All methods may raise OSError or ArrowException."""

    def spans(self, columns: Iterable[str]) -> Spans:
        """Return the spans of the file, in order."""

    def read(self, span: Span, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a span with these columns, a bounded batch at a time."""

    def close(self) -> None:
        """Close the file."""


class Content(Protocol):
    """What is known of a file's content, in any format."""

    @property
    def schema(self) -> pa.Schema:
        """Columns as the file has them, without PROBLEM."""

    @property
    def row_groups(self) -> tuple[int, ...]:
        """Rows in each row group."""

    def open(self) -> OpenContent:
        """Open the file; raises OSError or ArrowException."""

    def bytes_of(self, columns: Iterable[str]) -> int:
        """Return the approximate uncompressed bytes of these columns; raises OSError or ArrowException."""


def batch_rows(rows: int, size: int) -> int:
    """Return the rows per batch for a row group of `rows` rows and `size` bytes."""
    return max(1, min(SPAN_ROWS, SPAN_BYTES * rows // max(size, 1)))


def in_batches(data: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch of `size` bytes in bounded batches."""
    step = batch_rows(data.num_rows, size)
    for start in range(0, data.num_rows, step):
        yield data.slice(start, step)
