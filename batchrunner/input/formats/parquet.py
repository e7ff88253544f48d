"""Parquet files: row groups, of which small ones are read together."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from batchrunner.input.formats.base import READ_BUFFER_BYTES, SPAN_BYTES, SPAN_ROWS, Span, Spans, batch_rows

KEPT_FOOTER_BYTES = 8 << 20
"""Bytes of Parquet footers, over all files, that stay in memory; others are parsed at each opening."""


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


class ParquetContent:
    """A Parquet file, described by its footer."""

    def __init__(self, fs: pafs.FileSystem, path: str, source: pa.NativeFile, budget: FooterBudget) -> None:
        """Read the footer of the open file; raises OSError or ArrowException."""
        self._fs, self._path = fs, path
        parquet = pq.ParquetFile(source)
        footer = parquet.metadata
        self.schema: pa.Schema = parquet.schema_arrow
        self.row_groups = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
        self._footer = footer if budget.takes(footer) else None

    def open(self) -> OpenParquet:
        """Open the file; raises OSError or ArrowException."""
        return OpenParquet(self._fs.open_input_file(self._path), self._footer)

    def bytes_of(self, columns: Iterable[str]) -> int:
        """Return the uncompressed bytes of these columns; raises OSError or ArrowException."""
        return sum(span.size for span in spans(self._footer or self.open().footer, columns))


class OpenParquet:
    """An open Parquet file."""

    def __init__(self, source: pa.NativeFile, footer: pq.FileMetaData | None) -> None:
        """Take the file and its footer, which is read where it is None."""
        self._parquet = pq.ParquetFile(
            source, metadata=footer, pre_buffer=False, buffer_size=READ_BUFFER_BYTES
        )
        self.footer: pq.FileMetaData = self._parquet.metadata

    def spans(self, columns: Iterable[str]) -> Spans:
        """Return the row groups as spans."""
        return list(spans(self.footer, columns))

    def read(self, span: Span, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a span."""
        yield from self._parquet.iter_batches(
            batch_size=batch_rows(span.rows, span.size),
            row_groups=list(span.groups),
            columns=list(columns),
            use_threads=False,
        )

    def close(self) -> None:
        """Close the file."""
        self._parquet.close(force=True)


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
