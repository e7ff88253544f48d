"""Arrow IPC files and streams (`.arrow`, `.feather`, `.ipc`): each record batch is a row group.

A file is read from any record batch on; a stream, or a compressed file, from its beginning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import pyarrow as pa
import pyarrow.types as pt

from batchrunner.input.formats.base import Span, Spans, in_batches

MAGIC, FEATHER_1 = b"ARROW1", b"FEA1"
"""First bytes of an IPC file, and of a file of Feather's first version, which is another format."""
PADDED_MAGIC_BYTES = 8
"""Bytes before the stream of record batches in an IPC file."""
ALL: tuple[int, ...] = ()
"""Numbers of columns that stand for all columns, as IpcReadOptions has them."""


class ArrowContent:
    """An Arrow file or stream."""

    def __init__(self, opener: Callable[[], pa.NativeFile], size: int, *, seekable: bool) -> None:
        """Count the rows of each record batch; raises OSError or ArrowException.

        `seekable` says that what `opener` opens can be read at any place; `size` is the file's, in bytes.
        """
        self._opener, self._size = opener, size
        with opener() as source:
            head = source.read(len(MAGIC))
        if head.startswith(FEATHER_1):
            raise pa.ArrowInvalid("it is of Feather's version 1: write it as version 2")
        self._is_file = head == MAGIC
        self._seekable = seekable and self._is_file
        with contextlib.closing(_BatchReader(opener, ALL, is_file=self._is_file, seekable=False)) as reader:
            self.schema = reader.schema
        numbers = [n for n, field in enumerate(self.schema) if pt.is_primitive(field.type)]
        with contextlib.closing(
            self._reader(numbers[:1] or [0])
        ) as reader:  # the column with the fewest bytes to read
            self.row_groups = tuple(reader.counts())

    def open(self) -> OpenArrow:
        """Open the file; it is opened when it is read first."""
        return OpenArrow(self)

    def bytes_of(self, columns: Iterable[str]) -> int:
        """Return the size of the file, whatever the columns: nothing in it tells more."""
        del columns
        return self._size

    def reader_of(self, columns: Sequence[str]) -> _BatchReader:
        """Open the file to read these columns; raises OSError or ArrowException."""
        return self._reader([self.schema.get_field_index(name) for name in columns])

    def spans(self) -> list[Span]:
        """Return each record batch that has rows as a span."""
        per_row = self._size // max(1, sum(self.row_groups))
        starts = accumulate(self.row_groups, initial=0)
        return [
            Span(range(group, group + 1), start, rows, rows * per_row)
            for group, (start, rows) in enumerate(zip(starts, self.row_groups, strict=False))
            if rows
        ]

    def _reader(self, fields: Sequence[int]) -> _BatchReader:
        return _BatchReader(self._opener, fields, is_file=self._is_file, seekable=self._seekable)


class OpenArrow:
    """An Arrow file that is read, from one record batch to a later one where it can."""

    def __init__(self, content: ArrowContent) -> None:
        self._content = content
        self._reader: _BatchReader | None = None
        self._columns: list[str] = []

    def spans(self, columns: Iterable[str]) -> Spans:
        """Return the record batches as spans."""
        del columns
        return self._content.spans()

    def read(self, span: Span, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a record batch; a batch without columns where none are asked for."""
        (group,) = span.groups
        if self._reader is None or self._columns != list(columns) or not self._reader.can_read(group):
            self.close()
            self._columns = list(columns)
            self._reader = self._content.reader_of(self._columns)
        data = self._reader.take(group)
        yield from in_batches(data.select(self._columns), data.nbytes)

    def close(self) -> None:
        """Close the file."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _BatchReader:
    """Reads record batches by number: any, or of a stream only later and later ones."""

    def __init__(
        self, opener: Callable[[], pa.NativeFile], fields: Sequence[int], *, is_file: bool, seekable: bool
    ) -> None:
        self._source = opener()
        self._seekable = seekable
        self._next = 0
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=list(fields))
        if seekable:
            self._reader = pa.ipc.open_file(self._source, options=options)
        else:
            if is_file:
                self._source.read(PADDED_MAGIC_BYTES)
            self._reader = pa.ipc.open_stream(self._source, options=options)
        self.schema: pa.Schema = self._reader.schema

    def can_read(self, group: int) -> bool:
        """Return whether this record batch can be read without opening the file again."""
        return self._seekable or group >= self._next

    def take(self, group: int) -> pa.RecordBatch:
        """Return a record batch; raises OSError or ArrowException."""
        if self._seekable:
            return self._reader.get_batch(group)
        try:
            for _ in range(self._next, group):
                self._reader.read_next_batch()
            self._next = group + 1
            return self._reader.read_next_batch()
        except StopIteration:
            raise pa.ArrowInvalid("it ends before its last record batch") from None

    def counts(self) -> Iterator[int]:
        """Yield the rows of each record batch from the first one."""
        if self._seekable:
            for group in range(self._reader.num_record_batches):
                yield self._reader.get_batch(group).num_rows
            return
        for data in self._reader:
            yield data.num_rows

    def close(self) -> None:
        """Close the file."""
        self._source.close()
