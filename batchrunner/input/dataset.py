"""Files as one sequence of rows, read a bounded batch at a time.

The ordinal of a row (`row` in the results) counts from 0 over the files in order of their paths. It needs no
ID column, and is the same in every attempt.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from pathlib import Path

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.errors import BatchrunError, InputError
from batchrunner.core.processes import thread_pool
from batchrunner.core.types import InputFile
from batchrunner.input.columns_read import unknown_column
from batchrunner.input.files import find_files, first_line, hive_partitions, partition_types
from batchrunner.input.formats.base import PROBLEM, OpenContent, Span, Spans
from batchrunner.input.formats.batch_lines import BatchHow
from batchrunner.input.formats.json_lines import JsonLinesRecords, have_one_schema
from batchrunner.input.formats.parquet import FooterBudget
from batchrunner.input.formats.text import TextContent
from batchrunner.input.hub_files import without_commit
from batchrunner.input.row_reader import RowBatch
from batchrunner.input.schemas import normalize, normalized, not_for_parquet
from batchrunner.input.source_file import SourceFile
from batchrunner.job.output import StorageSpec
from batchrunner.output.arrow_arrays import arrow_array, arrow_scalar

READERS = 8
"""Files that are looked at at once. On a network file system most of the time is waiting."""
SIZED_FILES = 32
"""Files from whose footers the size of a column over all files is estimated."""


class Dataset:
    """The files of a job's input."""

    def __init__(
        self,
        path: str | Sequence[str],
        run: Path | None = None,
        types: Mapping[str, str] | None = None,
        batch: BatchHow | None = None,
        storage: StorageSpec | None = None,
    ) -> None:
        """Find the files, without those in the run directory `run`, their columns and row groups.

        `types` are those of `input.types`, `batch` is `prompt.batch`, `storage` says how object stores are
        reached. Raises InputError where a file is missing or unreadable.
        """
        self._find = functools.partial(find_files, [path] if isinstance(path, str) else path, run, storage)
        fs, paths = self._find()
        if batch is not None and len(paths) > 1:
            raise InputError(
                f"these are {len(paths)} batch files, {paths[0]} and {paths[1]} among them",
                hint="give one: a custom_id is unique in its file only",
            )
        shared = repeat(FooterBudget()), repeat(types), repeat(batch)
        with thread_pool(READERS) as pool:
            self._sources = list(pool.map(SourceFile, repeat(fs), paths, *shared))
        have_one_schema(list(_json_lines(self._sources)))
        self._starts = [0, *accumulate(source.rows for source in self._sources)]
        self.total_rows = self._starts[-1]
        self.files = [
            InputFile(
                path=source.path,
                first_row=start,
                row_groups=source.row_groups,
                partitions=hive_partitions(source.path),
                digest=source.digest,
            )
            for source, start in zip(self._sources, self._starts, strict=False)
        ]
        self._schemas = dict(_distinct_schemas(self._sources))
        stored = {name for schema in self._schemas.values() for name in schema.names}
        in_paths = partition_types([file.partitions for file in self.files])
        # some writers also store a partition column, and any directory name may contain "="
        self.partition_types = {name: kind for name, kind in in_paths.items() if name not in stored}
        self.problems = (PROBLEM,) if any(source.is_text for source in self._sources) else ()
        """Columns that say why a record cannot be read; every reader of rows has to look at them."""
        _check_types(types or {}, self._sources)
        first = next(iter(self._schemas.values()))
        self.schema = pa.schema([*first, *(pa.field(*item) for item in self.partition_types.items())])

    def row_group_ends(self) -> list[int]:
        """Return the ordinal after the last row of each row group, over all files."""
        return list(accumulate(rows for file in self.files for rows in file.row_groups))

    def check_unchanged(self) -> None:
        """Raise InputChangedError where a file has other content now than when it was found."""
        with thread_pool(READERS) as pool:
            list(pool.map(SourceFile.check_unchanged, self._sources))

    def added_files(self) -> list[str]:
        """Return the files that `input.path` names now and did not name before."""
        with contextlib.suppress(InputError):
            known = {without_commit(source.path) for source in self._sources}
            return [path for path in self._find()[1] if without_commit(path) not in known]
        return []

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column; `where` names the job's key in errors.

        Raises InputError where a file lacks the column or has it twice, where files disagree on its type, or
        where Arrow cannot select rows of its type or Parquet cannot hold it.
        """
        if name not in self.schema.names:
            unknown, hint = unknown_column(where, name, self.schema.names)
            raise InputError(unknown, hint=hint)
        field = self.schema.field(self.schema.names.index(name))
        if name in self.partition_types:
            return field
        for path, schema in self._schemas.items():
            found = schema.get_all_field_indices(name)
            if not found:
                raise InputError(
                    f"{path}: has no column {name!r}, which {self.files[0].path} has: "
                    f"files of one input need the columns that the job uses"
                )
            if len(found) > 1:
                raise InputError(f"{path}: has {len(found)} columns {name!r}: {where} can mean one only")
            if schema.field(found[0]).type != field.type:
                raise InputError(
                    f"{path}: column {name!r} is {schema.field(found[0]).type}, "
                    f"but {field.type} in {self.files[0].path}",
                    hint=f"write both with one type{self._or_types()}",
                )
        try:
            pa.nulls(0, field.type).take(pa.nulls(0, pa.int64()))
        except pa.ArrowException:
            raise InputError(
                f"{where}: column {name!r} has a type that Arrow cannot pick rows of: {field.type}"
            ) from None
        if problem := not_for_parquet(field.type):
            raise InputError(f"{where}: column {name!r} has a type that Parquet cannot hold: {problem}")
        return field

    def directory_of(self, row: int) -> str | None:
        """Return the directory of the file that has this row; None for a file that is not on this machine."""
        at = bisect_right(self._starts, row) - 1
        source = self._sources[max(0, min(at, len(self._sources) - 1))]
        return str(Path(source.path).absolute().parent) if source.is_local else None

    def type_of(self, name: str) -> pa.DataType:
        """Return the type of a column, also of one of `problems`."""
        return pa.string() if name in self.problems else self.schema.field(name).type

    def bytes_of(self, columns: Iterable[str]) -> int:
        """Return the uncompressed bytes of these columns over all files, estimated where these are many."""
        names = list(columns)
        sampled = self._sources[:: -(-len(self._sources) // SIZED_FILES)]
        rows = sum(source.rows for source in sampled)
        return sum(source.bytes_of(names) for source in sampled) * self.total_rows // max(rows, 1)

    def read(self, wanted: BitMap64, columns: Sequence[str]) -> Iterator[RowBatch]:
        """Yield the wanted rows in input order with these columns, a bounded batch at a time.

        Row groups without a wanted row are not read. Raises InputError where a file cannot be read.
        """
        with contextlib.closing(DatasetReader(self, columns)) as reader:
            yield from reader.read(wanted)

    def sources_of(self, wanted: BitMap64) -> Iterator[tuple[SourceFile, InputFile]]:
        """Yield the files that have wanted rows, in order."""
        if not wanted:
            return
        first = bisect_right(self._starts, wanted.min()) - 1
        for number in range(first, bisect_right(self._starts, wanted.max())):
            if wanted.range_cardinality(self._starts[number], self._starts[number + 1]):
                yield self._sources[number], self.files[number]

    def open_span(self, content: OpenContent, span: Span, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a span of an open file, with these columns, which are stored in it.

        Raises OSError or ArrowException.
        """
        return map(normalize, content.read(span, columns))

    def stored(self, source: SourceFile, columns: Iterable[str]) -> list[str]:
        """Return those of the columns that are stored in a file."""
        made = {*self.partition_types, *(() if source.is_text else self.problems)}
        return [name for name in columns if name not in made]

    def with_partitions(self, batch: RowBatch, file: InputFile, columns: Sequence[str]) -> RowBatch:
        """Return the batch with those of the columns added that are not stored in the file.

        These are partition columns of its path, and PROBLEM in a file whose records are never wrong.
        """
        data = batch.data
        for name in columns:
            if name in self.partition_types:
                value = arrow_scalar(file.partitions[name], pa.string()).cast(self.partition_types[name])
                data = data.append_column(name, pa.repeat(value, data.num_rows))
            elif name in self.problems and name not in data.schema.names:
                data = data.append_column(name, pa.nulls(data.num_rows, pa.string()))
        return RowBatch(batch.rows, data)

    def _or_types(self) -> str:
        return ", or give its type in input.types" if self.problems else ""


class DatasetReader:
    """Reads rows of a dataset repeatedly. A file stays open, and so its footer is parsed once.

    Where the next rows lie ahead in the span that was read last, it continues there. So small consecutive
    ranges are decoded only once.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[str]) -> None:
        self._dataset = dataset
        self._columns = columns
        self._source: SourceFile | None = None  # the open file
        self._stored: list[str] = []  # the columns that are in it
        self._content: OpenContent | None = None
        self._spans: Spans = []  # of the open file
        self._span: Span | None = None  # the one that was read last
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._start = 0  # ordinal of the first row in `_data`
        self._data: pa.RecordBatch | None = None  # the batch that was decoded last

    def read(self, wanted: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield the wanted rows in input order, as `Dataset.read` does; `positions` are not needed.

        Raises InputError where a file cannot be read, InputChangedError where it is not the same any more.
        """
        del positions
        for source, file in self._dataset.sources_of(wanted):
            try:
                for batch in self._read_file(source, file, wanted):
                    yield self._dataset.with_partitions(batch, file, self._columns)
            except BatchrunError:
                raise
            except source.read_errors as failure:
                source.check_unchanged()
                raise InputError(f"{file.path}: cannot be read: {first_line(failure)}") from None

    def close(self) -> None:
        """Close the open file."""
        self._source = self._span = None
        if self._content is not None:
            self._content.close()
            self._content = None

    def _read_file(self, source: SourceFile, file: InputFile, wanted: BitMap64) -> Iterator[RowBatch]:
        if self._source is not source:
            self.close()
            self._stored = self._dataset.stored(source, self._columns)
            self._content = source.open()
            self._spans = self._content.spans(self._stored)
            self._source = source
        in_file = wanted & BitMap64(range(file.first_row, file.first_row + source.rows))
        first = bisect_right(self._spans, in_file.min() - file.first_row, key=_first_row) - 1
        last = bisect_right(self._spans, in_file.max() - file.first_row, key=_first_row)
        for span in map(self._spans.__getitem__, range(first, last)):
            start = file.first_row + span.first_row
            if in_span := in_file & BitMap64(range(start, start + span.rows)):
                yield from self._read_span(source, span, start, in_span)

    def _read_span(self, source: SourceFile, span: Span, start: int, wanted: BitMap64) -> Iterator[RowBatch]:
        last = wanted.max()
        if self._span != span or wanted.min() < self._start:
            assert self._content is not None
            self._span = None
            source.check_before_reading()
            self._batches = self._dataset.open_span(self._content, span, self._stored)
            self._start, self._data = start, self._next(source)
            self._span = span
        while True:
            assert self._data is not None
            batch = _pick(self._start, self._data, wanted)
            if batch:
                yield batch
            if last < self._start + self._data.num_rows:
                return
            self._start += self._data.num_rows
            self._data = self._next(source)

    def _next(self, source: SourceFile) -> pa.RecordBatch:
        """Return the next batch of the span, which was read from the right file."""
        for data in self._batches:
            if source.is_local:  # a store would be asked over the network
                source.check_unchanged()
            return data
        raise pa.ArrowInvalid("it has fewer rows than its footer says")


def _first_row(span: Span) -> int:
    return span.first_row


def _distinct_schemas(sources: Iterable[SourceFile]) -> Iterator[tuple[str, pa.Schema]]:
    """Yield each normalized schema once, with the path of the first file that has it."""
    seen = set()
    for source in sources:
        stored = source.schema.serialize().to_pybytes()
        if stored not in seen:
            seen.add(stored)
            yield source.path, normalized(source.schema)


def _json_lines(sources: Iterable[SourceFile]) -> Iterator[JsonLinesRecords]:
    for source in sources:
        if isinstance(source.content, TextContent) and isinstance(source.content.records, JsonLinesRecords):
            yield source.content.records


def _check_types(types: Mapping[str, str], sources: Iterable[SourceFile]) -> None:
    """Raise InputError where `input.types` names a column that no text file has."""
    texts = [source for source in sources if source.is_text]
    known = dict.fromkeys(name for source in texts for name in source.schema.names)
    for name in types:
        if not texts:
            raise InputError("input.types: is for CSV and JSON Lines, and the input has no such file")
        if name not in known:
            unknown, hint = unknown_column("input.types", name, known)
            raise InputError(unknown, hint=hint)


def _pick(start: int, data: pa.RecordBatch, wanted: BitMap64) -> RowBatch | None:
    rows = list(wanted & BitMap64(range(start, start + data.num_rows)))
    if not rows:
        return None
    if len(rows) == data.num_rows:
        return RowBatch(rows, data)
    return RowBatch(rows, data.take(arrow_array([row - start for row in rows], pa.int64())))
