"""A sorted copy of rows: a Parquet file that holds them in the order in which they are sent.

It has the columns that the job reads, and last the ordinals. Its metadata says which order and which run it
belongs to (`about`). A position is the index of a row in the copy, counted from 0.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.core.errors import InputError
from batchrunner.core.types import rows_of_column
from batchrunner.input.dataset import RowBatch, batch_rows
from batchrunner.input.files import first_line
from batchrunner.input.source_file import READ_BUFFER_BYTES
from batchrunner.output.arrow_arrays import arrow_array

_ABOUT = b"batchrunner"
"""Key of `about` in the Parquet metadata."""


class SortedCopy:
    """Reads a sorted copy. Its row groups keep rows with a common prefix together."""

    def __init__(self, path: Path, *, leased: bool = False) -> None:
        """Open the file; raises InputError where it is missing or damaged.

        `leased` says that it lies in the run's directory of leases, for the text of the error.
        """
        self._path = path
        try:
            self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER_BYTES)
            self.about: dict[str, Any] = orjson.loads(self._file.schema_arrow.metadata[_ABOUT])
        except (OSError, pa.ArrowException, KeyError, TypeError, orjson.JSONDecodeError):
            again = "run the command again: they are sorted again"
            if leased:
                again = (
                    f"once no task is at work, delete {path.parent} and run --join again: done rows are kept"
                )
            raise InputError(
                f"{path}: the rows in the order of this run are missing or damaged",
                hint=f"put the file back, or {again}",
            ) from None
        groups = range(self._file.num_row_groups)
        counts = [self._file.metadata.row_group(group).num_rows for group in groups]
        self.group_starts = [0, *accumulate(counts)]
        """Position of the first row of each row group, and the number of rows."""

    @property
    def positions(self) -> range:
        """All positions."""
        return range(self.group_starts[-1])

    def rows(self, positions: range) -> BitMap64:
        """Return the ordinals of the rows at these positions, which must be whole row groups."""
        found = BitMap64()
        for group in self._groups(positions):
            found |= self._rows_of(group)
        return found

    def read(self, rows: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield the rows in the order of the copy, as `RowReader.read` does."""
        try:
            for group in self._groups(positions or self.positions):
                if not rows.isdisjoint(self._rows_of(group)):
                    yield from self._read_group(group, rows)
        except (OSError, pa.ArrowException) as failure:
            raise InputError(f"{self._path}: cannot be read: {first_line(failure)}") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _groups(self, positions: range) -> range:
        starts = self.group_starts
        return range(bisect_left(starts, positions.start), bisect_left(starts, positions.stop))

    def _rows_of(self, group: int) -> BitMap64:
        names = self._file.schema_arrow.names[-1:]
        return rows_of_column(self._file.read_row_group(group, names, use_threads=False).column(0))

    def _read_group(self, group: int, wanted: BitMap64) -> Iterator[RowBatch]:
        metadata = self._file.metadata.row_group(group)
        size = batch_rows(metadata.num_rows, metadata.total_byte_size)
        for data in self._file.iter_batches(size, [group], use_threads=False):
            *_, ordinals = data.columns
            rows = ordinals.to_pylist()
            kept = [at for at, row in enumerate(rows) if row in wanted]
            if kept:
                columns = data.select(data.schema.names[:-1])
                picked = columns if len(kept) == len(rows) else columns.take(arrow_array(kept, pa.int64()))
                yield RowBatch([rows[at] for at in kept], picked)


def write_copy(
    tables: Iterable[pa.Table], group_sizes: Iterable[int], path: Path, about: dict[str, Any]
) -> None:
    """Write tables, whose last column is the ordinal, as a sorted copy. Raises OSError.

    `group_sizes` are the rows of each row group; every table holds whole row groups. `about` names the
    `order` and the run's `fingerprint`.
    """
    sizes = iter(group_sizes)
    with ExitStack() as stack:
        writer = None
        for table in tables:
            rows = table.replace_schema_metadata({_ABOUT: orjson.dumps(about)})
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(path, rows.schema, compression="zstd"))
            start = 0
            while start < rows.num_rows:
                size = next(sizes)
                writer.write_table(rows.slice(start, size), row_group_size=size)
                start += size
