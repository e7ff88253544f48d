"""One Parquet file of the input: its footer, its digest, and whether it is still the file that was found."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from batchrunner.core.errors import InputChangedError, InputError
from batchrunner.input.files import first_line, read_errors

READ_BUFFER_BYTES = 1 << 20
"""Bytes of the buffers through which column chunks are streamed, instead of being loaded whole."""
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 16 << 10
"""A digest reads this many blocks of this many bytes; a file of up to their sum (1 MiB) is read whole."""
SPAN_ROWS, SPAN_BYTES = 256, 8 << 20
"""Row groups are read together while they have no more rows and bytes than this."""
KEPT_FOOTER_BYTES = 8 << 20
"""Bytes of Parquet footers, over all files, that stay in memory; others are parsed at each opening."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive row groups of a file that are read together."""

    groups: range
    first_row: int
    """Index in the file of the first row."""
    rows: int
    size: int
    """Uncompressed bytes of the columns that are read."""


class FooterBudget:
    """Decides which footers are kept in memory. Files may be read in several threads."""

    def __init__(self, most_bytes: int = KEPT_FOOTER_BYTES) -> None:
        self._left = most_bytes
        self._lock = threading.Lock()

    def takes(self, footer: pq.FileMetaData) -> bool:
        """Tell whether there is room for a footer, which then counts as kept."""
        with self._lock:
            fits: bool = footer.serialized_size <= self._left
            self._left -= footer.serialized_size if fits else 0
        return fits


class SourceFile:
    """A Parquet file, as it was when it was found.

    Another file under its path, or other content in it, is an InputChangedError; the digest decides.
    """

    def __init__(self, fs: pafs.FileSystem, path: str, budget: FooterBudget) -> None:
        """Read the footer; raises InputError where the file is missing, unreadable or not Parquet."""
        self._fs = fs
        self.path = path
        self.is_local = isinstance(fs, pafs.LocalFileSystem)
        """Whether it costs little to look at the file again."""
        self.read_errors = read_errors(fs)
        """What reading it raises, see `files.read_errors`."""
        try:
            self._seen = self._look()
            self._size = self._size_now()
            with fs.open_input_file(path) as source:
                self.digest = _digest(source, self._size)
                source.seek(0)
                parquet = pq.ParquetFile(source)
                footer, self.schema = parquet.metadata, parquet.schema_arrow
        except InputError:
            raise
        except read_errors(fs) as failure:
            raise InputError(f"{path}: not a readable Parquet file: {first_line(failure)}") from None
        self.row_groups = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
        self.rows: int = footer.num_rows
        self._footer = footer if budget.takes(footer) else None

    def open(self) -> pq.ParquetFile:
        """Open the file for reading; raises OSError or ArrowException, or InputChangedError."""
        self.check_unchanged()
        source = self._fs.open_input_file(self.path)
        return pq.ParquetFile(source, metadata=self._footer, pre_buffer=False, buffer_size=READ_BUFFER_BYTES)

    def check_unchanged(self) -> None:
        """Raise InputChangedError where the path has other content now.

        A file that is missing, or cannot be read at present, is not known to have changed.
        """
        try:
            seen = self._look()
            if seen == self._seen:
                return
            size = self._fs.get_file_info(self.path).size
            same = size == self._size and self._digest_now(size) == self.digest
        except read_errors(self._fs):
            return
        if not same:
            raise InputChangedError(
                f"the input file {self.path} changed during the run: put the old file back and run the same "
                "command again, or take another output.path for the new one"
            )
        self._seen = seen  # it was touched, or replaced by a copy of itself

    def bytes_of(self, columns: Iterable[str]) -> int:
        """Return the uncompressed bytes of these columns; raises InputError."""
        try:
            return sum(span.size for span in spans(self._footer or self.open().metadata, columns))
        except InputError:
            raise
        except read_errors(self._fs) as failure:
            raise InputError(f"{self.path}: cannot be read: {first_line(failure)}") from None

    def _look(self) -> tuple[int, ...]:
        """Return what changes whenever the file is replaced or written to; raises OSError."""
        if self.is_local:
            stat = Path(self.path).stat()
            return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        info = self._fs.get_file_info(self.path)
        if info.type == pafs.FileType.NotFound:
            raise FileNotFoundError(self.path)
        return info.size, info.mtime_ns or 0

    def _size_now(self) -> int:
        size: int = self._fs.get_file_info(self.path).size
        if not size:
            raise InputError(f"{self.path}: is empty (0 bytes): not a Parquet file")
        return size

    def _digest_now(self, size: int) -> str:
        with self._fs.open_input_file(self.path) as source:
            return _digest(source, size)


def spans(footer: pq.FileMetaData, columns: Iterable[str]) -> Iterator[Span]:
    """Yield the row groups of a file as spans: a small one goes together with its neighbours."""
    leaves = _leaves(footer, columns)
    begin = first_row = rows = size = 0
    for group in range(footer.num_row_groups):
        found = footer.row_group(group)
        its_size = sum(found.column(leaf).total_uncompressed_size for leaf in leaves)
        if group > begin and (rows + found.num_rows > SPAN_ROWS or size + its_size > SPAN_BYTES):
            yield Span(range(begin, group), first_row, rows, size)
            begin, first_row, rows, size = group, first_row + rows, 0, 0
        rows, size = rows + found.num_rows, size + its_size
    if footer.num_row_groups:
        yield Span(range(begin, footer.num_row_groups), first_row, rows, size)


def _leaves(footer: pq.FileMetaData, columns: Iterable[str]) -> list[int]:
    """Return the numbers of the leaf columns, whose paths are `column.field.element`, of these columns."""
    tops = tuple(f"{name}." for name in columns)
    paths = (footer.schema.column(leaf).path for leaf in range(footer.num_columns))
    return [leaf for leaf, path in enumerate(paths) if f"{path}.".startswith(tops)]


def _digest(source: pa.NativeFile, size: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    if size <= SAMPLE_BLOCKS * SAMPLE_BYTES:
        digest.update(source.read())
    else:
        for block in range(SAMPLE_BLOCKS):
            # evenly spread; the last block is the end of the file, with the footer
            source.seek((size - SAMPLE_BYTES) * block // (SAMPLE_BLOCKS - 1))
            digest.update(source.read(SAMPLE_BYTES))
    return digest.hexdigest()
