"""Parquet files as one sequence of rows, read a bounded batch at a time.

The ordinal of a row (`row` in the results) counts from 0 over the files in order of their paths. It needs no
ID column, and is the same in every attempt.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt
from pyroaring import BitMap64

from batchrunner.core.errors import InputError
from batchrunner.core.types import InputFile
from batchrunner.input.columns_read import unknown_column
from batchrunner.input.files import find_files, first_line, hive_partitions, partition_types

BATCH_ROWS = 256
"""Most rows in a batch."""
BATCH_BYTES = 8 << 20
"""Approximate most bytes in a batch, unless a single row has more."""
READ_BUFFER_BYTES = 1 << 20
"""Bytes of the buffers through which column chunks are streamed, instead of being loaded whole."""
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 16 << 10
"""A digest reads this many blocks of this many bytes; a file of up to their sum (1 MiB) is read whole."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Some of the rows that were asked for."""

    rows: list[int]
    """Ordinals."""
    data: pa.RecordBatch
    """Columns of these rows, in the same order."""


class Dataset:
    """The Parquet files of a job's input."""

    def __init__(self, path: str | Sequence[str], run: Path | None = None) -> None:
        """Find the files, without those in the run directory `run`, and read their footers.

        Raises InputError where a file is missing, unreadable or not Parquet.
        """
        self._fs, paths = find_files([path] if isinstance(path, str) else path, run)
        with ThreadPoolExecutor(max_workers=8) as pool:
            footers = list(pool.map(self._footer, paths))
        starts = [0, *accumulate(metadata.num_rows for metadata, _, _ in footers)]
        self._bytes = Counter[str]()
        for metadata, _, _ in footers:
            for group in range(metadata.num_row_groups):
                self._bytes.update(_leaves(metadata.row_group(group)))
        self.total_rows = starts[-1]
        self.files = [
            InputFile(
                path=name,
                first_row=start,
                row_groups=tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)),
                partitions=hive_partitions(name),
                digest=digest,
            )
            for name, start, (metadata, _, digest) in zip(paths, starts, footers, strict=False)
        ]
        self._schemas = [schema for _, schema, _ in footers]
        stored = {name for schema in self._schemas for name in schema.names}
        in_paths = partition_types([file.partitions for file in self.files])
        # some writers also store a partition column, and any directory name may contain "="
        self.partition_types = {name: kind for name, kind in in_paths.items() if name not in stored}
        self.schema = pa.schema(
            [*self._schemas[0], *(pa.field(*item) for item in self.partition_types.items())]
        )

    def row_group_ends(self) -> list[int]:
        """Return the ordinal after the last row of each row group, over all files."""
        return list(accumulate(rows for file in self.files for rows in file.row_groups))

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column; `where` names the job's key in errors.

        Raises InputError where a file lacks the column or has it twice, where files disagree on its type, or
        where Arrow cannot select rows of its type.
        """
        if name not in self.schema.names:
            raise InputError(f"{where}: {unknown_column(name, self.schema.names)}")
        field = self.schema.field(self.schema.names.index(name))
        if name in self.partition_types:
            return field
        for file, schema in zip(self.files, self._schemas, strict=True):
            found = schema.get_all_field_indices(name)
            if not found:
                raise InputError(
                    f"{file.path}: has no column {name!r}, which {self.files[0].path} has: "
                    f"files of one input need the columns that the job uses"
                )
            if len(found) > 1:
                raise InputError(f"{file.path}: has {len(found)} columns {name!r}: {where} can mean one only")
            if schema.field(found[0]).type != field.type:
                raise InputError(
                    f"{file.path}: column {name!r} is {schema.field(found[0]).type}, "
                    f"but {field.type} in {self.files[0].path}: write both with one type"
                )
        try:
            pa.nulls(0, field.type).take(pa.nulls(0, pa.int64()))
        except pa.ArrowException:
            raise InputError(
                f"{where}: column {name!r} has a type that Arrow cannot pick rows of: {field.type}"
            ) from None
        return field

    def bytes_of(self, columns: Iterable[str]) -> int:
        """Return the uncompressed bytes of these columns over all files."""
        return _bytes_of(columns, self._bytes)

    def read(self, wanted: BitMap64, columns: Sequence[str]) -> Iterator[RowBatch]:
        """Yield the wanted rows in input order with these columns, a bounded batch at a time.

        Row groups without a wanted row are not read. Raises InputError where a file cannot be read.
        """
        with contextlib.closing(DatasetReader(self, columns)) as reader:
            yield from reader.read(wanted)

    def open_group(
        self, file: InputFile, group: int, columns: Sequence[str]
    ) -> tuple[pq.ParquetFile, Iterator[pa.RecordBatch]]:
        """Open a row group; return the open file, for the caller to close, and a stream of its batches.

        The batches have those of the columns that are stored in the file. Raises OSError or ArrowException.
        """
        parquet = pq.ParquetFile(
            self._fs.open_input_file(file.path), pre_buffer=False, buffer_size=READ_BUFFER_BYTES
        )
        metadata = parquet.metadata.row_group(group)
        batches = parquet.iter_batches(
            batch_size=batch_rows(metadata.num_rows, _bytes_of(columns, _leaves(metadata))),
            row_groups=[group],
            columns=[name for name in columns if name not in self.partition_types],
            use_threads=False,
        )
        return parquet, map(_normalize, batches)

    def with_partitions(self, batch: RowBatch, file: InputFile, columns: Sequence[str]) -> RowBatch:
        """Return the batch with those of the columns added that are partition columns of the file's path."""
        missing = [name for name in columns if name in self.partition_types]
        if not missing:
            return batch
        data = batch.data
        for name in missing:
            value = pa.scalar(file.partitions[name]).cast(self.partition_types[name])
            data = data.append_column(name, pa.repeat(value, data.num_rows))
        return RowBatch(batch.rows, data)

    def _footer(self, path: str) -> tuple[pq.FileMetaData, pa.Schema, str]:
        try:
            info = self._fs.get_file_info(path)
            if info.size == 0:
                raise InputError(f"{path}: is empty (0 bytes): not a Parquet file")
            with self._fs.open_input_file(path) as source:
                digest = _digest(source, info.size)
                source.seek(0)
                parquet = pq.ParquetFile(source)
                return parquet.metadata, _normalized(parquet.schema_arrow), digest
        except (OSError, pa.ArrowException) as failure:
            raise InputError(f"{path}: not a readable Parquet file: {first_line(failure)}") from None


class RowReader(Protocol):
    """Reads rows in the order in which they are sent: DatasetReader in input order, SortedCopy in its own.

    A position is the index of a row in that order, counted from 0; in input order it is the ordinal.
    """

    def read(self, rows: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield the rows, a bounded batch at a time; raises InputError.

        All of them lie at these positions; None means anywhere.
        """

    def close(self) -> None:
        """Close open files."""


class DatasetReader:
    """Reads rows of a dataset repeatedly, and continues in the open row group where the next rows lie ahead.

    So small consecutive ranges are decoded only once.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[str]) -> None:
        self._dataset = dataset
        self._columns = columns
        self._parquet: pq.ParquetFile | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._group: tuple[str, int] | None = None
        self._start = 0  # ordinal of the first row in `_data`
        self._data: pa.RecordBatch | None = None  # the batch that was decoded last

    def read(self, wanted: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield the wanted rows in input order, as `Dataset.read` does; `positions` are not needed."""
        del positions
        for file in self._dataset.files:
            if not wanted.range_cardinality(file.first_row, file.first_row + file.rows):
                continue
            try:
                start = file.first_row
                for group, rows in enumerate(file.row_groups):
                    if in_group := wanted & BitMap64(range(start, start + rows)):
                        yield from self._read_group(file, group, start, in_group)
                    start += rows
            # IndexError: the file was replaced by one with fewer row groups
            except (OSError, IndexError, pa.ArrowException) as failure:
                raise InputError(f"{file.path}: cannot be read: {first_line(failure)}") from None

    def close(self) -> None:
        """Close the open file."""
        self._group = None
        if self._parquet is not None:
            self._parquet.close()

    def _read_group(self, file: InputFile, group: int, start: int, wanted: BitMap64) -> Iterator[RowBatch]:
        last = wanted.max()
        if self._group != (file.path, group) or wanted.min() < self._start:
            self.close()
            self._parquet, self._batches = self._dataset.open_group(file, group, self._columns)
            self._start, self._data = start, self._next()
            self._group = file.path, group
        while True:
            assert self._data is not None
            batch = _pick(self._start, self._data, wanted)
            if batch:
                yield self._dataset.with_partitions(batch, file, self._columns)
            if last < self._start + self._data.num_rows:
                return
            self._start += self._data.num_rows
            self._data = self._next()

    def _next(self) -> pa.RecordBatch:
        for data in self._batches:
            return data
        raise pa.ArrowInvalid("it has fewer rows than its footer says")


def _leaves(group: pq.RowGroupMetaData) -> dict[str, int]:
    """Return the uncompressed bytes of each leaf column, by its path (`column.field.element`)."""
    chunks = map(group.column, range(group.num_columns))
    return {chunk.path_in_schema: chunk.total_uncompressed_size for chunk in chunks}


def _bytes_of(columns: Iterable[str], leaves: Mapping[str, int]) -> int:
    tops = tuple(f"{name}." for name in columns)
    return sum(size for leaf, size in leaves.items() if f"{leaf}.".startswith(tops))


def batch_rows(rows: int, size: int) -> int:
    """Return the rows per batch for a row group of `rows` rows and `size` bytes."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def _normalize(data: pa.RecordBatch) -> pa.RecordBatch:
    schema = _normalized(data.schema)
    return data if data.schema.equals(schema) else data.cast(schema)


def _normalized(schema: pa.Schema) -> pa.Schema:
    """Return the schema with all fields nullable, and with types that Arrow can select and sort.

    Files of one input may differ in which fields are nullable. `string_view` cannot be sorted yet.
    """
    return pa.schema([_normalized_field(field) for field in schema])


_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def _normalized_field(field: pa.Field[Any]) -> pa.Field[Any]:
    return field.with_type(_normalized_type(field.type)).with_nullable(True)


def _normalized_type(kind: pa.DataType) -> pa.DataType:
    if pt.is_list(kind):
        return pa.list_(_normalized_field(kind.value_field))
    if pt.is_large_list(kind):
        return pa.large_list(_normalized_field(kind.value_field))
    if pt.is_fixed_size_list(kind):
        return pa.list_(_normalized_field(kind.value_field), kind.list_size)
    if pt.is_map(kind):
        key = _normalized_field(kind.key_field).with_nullable(False)  # as Arrow requires of a map
        return pa.map_(key, _normalized_field(kind.item_field), kind.keys_sorted)
    if pt.is_struct(kind):
        return pa.struct([_normalized_field(field) for field in kind])
    return _VIEWS.get(kind, kind)


def _pick(start: int, data: pa.RecordBatch, wanted: BitMap64) -> RowBatch | None:
    rows = list(wanted & BitMap64(range(start, start + data.num_rows)))
    if not rows:
        return None
    if len(rows) == data.num_rows:
        return RowBatch(rows, data)
    return RowBatch(rows, data.take(pa.array([row - start for row in rows])))


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
