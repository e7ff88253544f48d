"""Text files (CSV, JSON Lines), compressed or not: read once to find blocks of records, then block by block.

A block is a row group. A file that is not compressed is read from any block on. A compressed one is read from
its beginning: what comes before a block is decompressed and thrown away.
"""

from __future__ import annotations

import io
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.fs as pafs

from batchrunner.core.errors import InputError
from batchrunner.input.formats.base import PROBLEM, READ_BUFFER_BYTES, Span, Spans, in_batches

BLOCK_ROWS, BLOCK_BYTES = 8192, 1 << 20
"""A block ends before it has more records or bytes than this, unless a single record has more bytes."""
LONGEST_RECORD_BYTES = 64 << 20
"""Bytes of the longest line, and of the longest record of several lines."""
BOM = b"\xef\xbb\xbf"
"""Mark at the beginning of a UTF-8 file, which some editors write; it is no part of the text."""
OTHER_FORMATS = {
    b"\xff\xfe": ("UTF-16", "write it as UTF-8"),
    b"\xfe\xff": ("UTF-16", "write it as UTF-8"),
    b"PAR1\x15": ("Parquet", "end its name with .parquet"),
    b"ARROW1\0": ("Arrow", "end its name with .arrow"),
    b"\x1f\x8b": ("compressed by gzip", "end its name with .gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "end its name with .zst"),
    b"PK\x03\x04": ("a ZIP archive or a spreadsheet", "unpack it, or save it as CSV"),
}
"""What files are that begin with these bytes, and what to do with one that is named as a text file."""


class TextSource:
    """The bytes of a text file without its compression and its BOM."""

    def __init__(self, fs: pafs.FileSystem, path: str, compression: str | None) -> None:
        """`compression` is the name of pyarrow's codec. Raises InputError, OSError or ArrowException."""
        self._fs = fs
        self.path = path
        self._compression = compression
        with self._open() as source:
            head = source.read(max(map(len, OTHER_FORMATS)))
        for mark, (what, hint) in OTHER_FORMATS.items():
            if head.startswith(mark):
                raise InputError(f"{path}: is {what}", hint=hint)
        self._begin = len(BOM) if head.startswith(BOM) else 0

    def lines(self) -> Lines:
        """Return all lines; raises OSError or ArrowException."""
        source = self._open()
        source.read(self._begin)
        return Lines(io.BufferedReader(source, READ_BUFFER_BYTES), self.path)

    def cursor(self) -> ByteCursor:
        """Open the file to read pieces of it; raises OSError or ArrowException."""
        return ByteCursor(self)

    def open_at(self, offset: int) -> pa.NativeFile:
        """Open the file at a position, which for a compressed file has to be 0."""
        source = self._open()
        if offset or self._begin:
            if self._compression:
                source.read(self._begin + offset)
            else:
                source.seek(self._begin + offset)
        return source

    @property
    def seekable(self) -> bool:
        """Whether reading may begin anywhere."""
        return self._compression is None

    def _open(self) -> pa.NativeFile:
        if self._compression:
            return self._fs.open_input_stream(self.path, compression=self._compression)
        return self._fs.open_input_file(self.path)


class ByteCursor:
    """Reads pieces of a text file. Pieces that follow each other cost least."""

    def __init__(self, source: TextSource) -> None:
        self._source = source
        self._file = source.open_at(0)
        self._at = 0

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, or less at the end of the file."""
        if offset != self._at and (self._source.seekable or offset < self._at):
            self._file.close()
            self._at = offset if self._source.seekable else 0
            self._file = self._source.open_at(self._at)
        while self._at < offset:
            skipped = len(self._file.read(min(offset - self._at, READ_BUFFER_BYTES)))
            if not skipped:
                return b""
            self._at += skipped
        data: bytes = self._file.read(size)
        self._at += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Lines:
    """The lines of a text file as bytes, with their ends; counts them, and takes lines back."""

    def __init__(self, source: io.BufferedIOBase, path: str, first: int = 1) -> None:
        """Take an open file; `first` is the number of its first line, `path` its name in errors."""
        self._source = source
        self._path = path
        self._back: deque[bytes] = deque()
        self.number = first
        """Number of the next line."""
        self.offset = 0
        """Bytes before the next line."""

    def __iter__(self) -> Lines:
        """Return itself."""
        return self

    def __next__(self) -> bytes:
        """Return the next line; raises InputError for one that is too long."""
        line = self._back.popleft() if self._back else self._source.readline(LONGEST_RECORD_BYTES)
        if not line:
            raise StopIteration
        if len(line) == LONGEST_RECORD_BYTES:
            raise InputError(
                f"{self._path}: line {self.number} is longer than {LONGEST_RECORD_BYTES >> 20} MiB"
            )
        self.number += 1
        self.offset += len(line)
        return line

    def take_back(self, lines: Sequence[bytes]) -> None:
        """Return these lines again: they are the last ones that were read."""
        self._back.extendleft(reversed(lines))
        self.number -= len(lines)
        self.offset -= sum(map(len, lines))

    def close(self) -> None:
        """Close the file."""
        self._source.close()


class RecordFormat(Protocol):
    """How lines become records, and records rows."""

    @property
    def schema(self) -> pa.Schema:
        """Columns of the file; known after `skim`."""

    def skim(self, lines: Lines) -> Iterator[None]:
        """Read all records and yield after each one that is a row; raises InputError."""

    def parse(self, lines: Lines, columns: Sequence[str]) -> pa.RecordBatch:
        """Return the records of a block as rows with these columns, and PROBLEM."""


class TextContent:
    """A text file, which was read once to find its blocks."""

    def __init__(self, source: TextSource, records: RecordFormat) -> None:
        """Read the file to its end; raises InputError, OSError or ArrowException."""
        self._source = source
        self.records = records
        self.blocks = _Blocks()
        lines = source.lines()
        try:
            for _ in records.skim(lines):
                self.blocks.add(lines.offset, lines.number)
        finally:
            lines.close()
        self.row_groups = tuple(self.blocks.rows)

    @property
    def schema(self) -> pa.Schema:
        """Columns of the file."""
        return self.records.schema

    def open(self) -> OpenText:
        """Open the file; raises OSError or ArrowException."""
        return OpenText(self, self._source)

    def bytes_of(self, columns: Iterable[str]) -> int:
        """Return the bytes of all columns: those of some are not known."""
        del columns
        return self.blocks.ends[-1] if self.blocks.ends else 0


class _Blocks:
    """The blocks of a text file as spans, of which only three numbers each are kept."""

    def __init__(self) -> None:
        self.rows = array("q")
        self.first_rows = array("q")
        self.first_lines = array("q")
        self.begins = array("q")
        self.ends = array("q")
        self._end, self._line = 0, 1  # of the last record, and of what comes next

    def add(self, end: int, next_line: int) -> None:
        """Add a record, which ends at this offset and before this line."""
        if not self.rows or self.rows[-1] == BLOCK_ROWS or end - self.begins[-1] > BLOCK_BYTES:
            self.first_rows.append(self.first_rows[-1] + self.rows[-1] if self.rows else 0)
            self.first_lines.append(self._line)
            self.begins.append(self._end)
            self.rows.append(0)
            self.ends.append(0)
        self.rows[-1] += 1
        self.ends[-1] = self._end = end
        self._line = next_line

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int, /) -> Span:
        if not 0 <= at < len(self.rows):
            raise IndexError(at)
        size = self.ends[at] - self.begins[at]
        return Span(range(at, at + 1), self.first_rows[at], self.rows[at], size)


class OpenText:
    """A text file that is open for reading."""

    def __init__(self, content: TextContent, source: TextSource) -> None:
        self._content = content
        self._path = source.path
        self._cursor = source.cursor()

    def spans(self, columns: Iterable[str]) -> Spans:
        """Return the blocks."""
        del columns
        return self._content.blocks

    def read(self, span: Span, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a block."""
        blocks, (at,) = self._content.blocks, span.groups
        block = self._cursor.read(blocks.begins[at], span.size)
        lines = Lines(io.BytesIO(block), self._path, blocks.first_lines[at])
        try:
            data = self._content.records.parse(lines, [name for name in columns if name != PROBLEM])
        except InputError as failure:
            raise pa.ArrowInvalid(str(failure)) from None
        if data.num_rows != span.rows:
            raise pa.ArrowInvalid(f"line {blocks.first_lines[at]}: other records than when it was opened")
        yield from in_batches(data.select(list(columns)), span.size)

    def close(self) -> None:
        """Close the file."""
        self._cursor.close()
