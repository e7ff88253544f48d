"""The order in which rows are sent: that of the input, or that of a copy which was sorted for the run.

A place is where a row stands in an order, counted from 0: in the input's its ordinal.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.core.errors import InputError
from batchrunner.core.row_set import from_column
from batchrunner.input.dataset import READ_BUFFER_BYTES, Reader, RowBatch, batch_rows
from batchrunner.input.files import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from batchrunner.input.dataset import Dataset

ABOUT = b"batchrunner"
"""The key of a copy's Parquet metadata under which it says what it is."""


class Order(Protocol):
    """Rows, one after the other."""

    def read(self, rows: BitMap64, places: range | None = None) -> Iterator[RowBatch]:
        """Yield rows, all of which stand at these places (None: somewhere), a bounded batch at a time.

        Raises InputError.
        """

    def close(self) -> None:
        """Close what is open."""


class InputOrder:
    """The rows as they stand in the input."""

    def __init__(self, dataset: Dataset, columns: Sequence[str]) -> None:
        self._reader = Reader(dataset, columns)

    def read(self, rows: BitMap64, places: range | None = None) -> Iterator[RowBatch]:
        """Yield the rows in the order of the input."""
        del places
        return self._reader.read(rows)

    def close(self) -> None:
        """Close the open file."""
        self._reader.close()


class SortedCopy:
    """Rows in another order, written once: the columns that the job needs, and last the ordinals.

    Its row groups hold rows that begin alike together; where a range of places is asked for, that is some
    row groups.
    """

    def __init__(self, path: Path, *, leased: bool = False) -> None:
        """Open it; raises InputError where it is not there, or torn. `leased`: it lies with leases of it."""
        self._path = path
        try:
            self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER_BYTES)
            self.about: dict[str, Any] = orjson.loads(self._file.schema_arrow.metadata[ABOUT])
        except (OSError, pa.ArrowException, KeyError, TypeError, orjson.JSONDecodeError):
            again = "run the command again: they are sorted anew"
            if leased:
                again = (
                    f"once no task is at work, delete {path.parent} and run --join again: done rows are kept"
                )
            raise InputError(
                f"{path}: the rows in the order of this run are missing or damaged: "
                f"put the file back, or {again}"
            ) from None
        groups = range(self._file.num_row_groups)
        counts = [self._file.metadata.row_group(group).num_rows for group in groups]
        self.begins = [0, *accumulate(counts)]
        """Where its row groups begin, and its end."""

    @property
    def places(self) -> range:
        """All places."""
        return range(self.begins[-1])

    def rows(self, places: range) -> BitMap64:
        """Return the ordinals of the rows at these places."""
        found = BitMap64()
        for group in self._groups(places):
            found |= self._rows_of(group)
        return found

    def read(self, rows: BitMap64, places: range | None = None) -> Iterator[RowBatch]:
        """Yield the rows in the order of the copy."""
        try:
            for group in self._groups(places or self.places):
                if not rows.isdisjoint(self._rows_of(group)):
                    yield from self._read_group(group, rows)
        except (OSError, pa.ArrowException) as failure:
            raise InputError(f"{self._path}: cannot be read: {first_line(failure)}") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _groups(self, places: range) -> range:
        return range(bisect_left(self.begins, places.start), bisect_left(self.begins, places.stop))

    def _rows_of(self, group: int) -> BitMap64:
        names = self._file.schema_arrow.names[-1:]
        return from_column(self._file.read_row_group(group, names, use_threads=False).column(0))

    def _read_group(self, group: int, wanted: BitMap64) -> Iterator[RowBatch]:
        metadata = self._file.metadata.row_group(group)
        size = batch_rows(metadata.num_rows, metadata.total_byte_size)
        for data in self._file.iter_batches(size, [group], use_threads=False):
            *_, ordinals = data.columns
            rows = ordinals.to_pylist()
            kept = [at for at, row in enumerate(rows) if row in wanted]
            if kept:
                columns = data.select(data.schema.names[:-1])
                picked = columns if len(kept) == len(rows) else columns.take(pa.array(kept))
                yield RowBatch([rows[at] for at in kept], picked)
