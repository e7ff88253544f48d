"""Files as one sequence of rows, read a bounded batch at a time.

The ordinal of a row (`row` in the results) counts from 0 over the files in order of their paths. It needs no
ID column, and is the same in every attempt.
"""

import contextlib
import functools
import logging
import shutil
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt
from pyroaring import BitMap64

from batchrunner.core.errors import BatchrunError, InputError
from batchrunner.core.processes import thread_pool
from batchrunner.core.types import RowRef
from batchrunner.input.common_types import common_type
from batchrunner.input.files import (
    SourceFile,
    find_files,
    partition_types,
    results_of,
    size_of,
    without_commit,
)
from batchrunner.input.parquet_copy import (
    PROBLEM,
    UNFIT,
    common_schema,
    first_line,
    fitted,
    fitted_values,
    normalized,
    not_for_parquet,
    stored_schema,
)
from batchrunner.input.templates import unknown_column
from batchrunner.job.arrow_types import type_name
from batchrunner.job.output import StorageSpec
from batchrunner.job.spec import InputSpec
from batchrunner.output.arrow_arrays import UNREADABLE, arrow_array, shown_values

log = logging.getLogger(__name__)

READERS = 8
"""Files that are looked at at once. On a network file system most of the time is waiting."""
BATCH_ROWS, BATCH_BYTES = 256, 8 << 20
"""Most rows and bytes of a batch."""
Row = dict[str, Any]
"""Values of a row by column."""


def is_list(kind: pa.DataType) -> bool:
    """Tell whether a column holds lists."""
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def is_ids(kind: pa.DataType) -> bool:
    """Tell whether a column holds lists of integers."""
    return is_list(kind) and pt.is_integer(kind.value_type)


def is_bytes(kind: pa.DataType) -> bool:
    """Tell whether a column holds bytes."""
    plain = kind.value_type if pt.is_dictionary(kind) else kind
    return plain in {pa.binary(), pa.large_binary()} or pt.is_fixed_size_binary(plain)


def holds_bytes(kind: pa.DataType) -> bool:
    """Tell whether a column holds bytes, or lists or structs with them."""
    return is_bytes(kind) or any(holds_bytes(kind.field(at).type) for at in range(kind.num_fields))


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Some of the rows that were asked for."""

    rows: list[int]
    """Ordinals."""
    data: pa.RecordBatch
    """Columns of these rows, in the same order."""


class ColumnSource(Protocol):
    """What has columns: a data set, or the rows of a program."""

    @property
    def schema(self) -> pa.Schema:
        """All columns."""

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column; raises InputError, naming `where`, if it cannot be used."""

    def directory_of(self, row: int) -> str | None:
        """Return the directory of the file that has the row with this ordinal; None where there is none."""


def usable_columns(source: ColumnSource) -> dict[str, pa.DataType]:
    """Return the types of the columns that a job can use, in order."""
    found = {}
    for name in source.schema.names:
        with contextlib.suppress(BatchrunError):  # files disagree on it, or it stands twice
            found[name] = source.field(name, where="a job").type
    return found


class Dataset:
    """The files of a job's input."""

    def __init__(
        self,
        source: InputSpec,
        run: Path | None = None,
        storage: StorageSpec | None = None,
        copies: Path | None = None,
        *,
        is_batch: bool = False,
    ) -> None:
        """Find the files, without those in the run directory `run`, their columns and row groups.

        `storage` says how object stores are reached, and a batch file has requests on its lines. Parquet
        copies of files of other formats are in the directory `copies`, by default in one that is deleted with
        this object. Raises InputError where a file is missing or unreadable.
        """
        given = [source.path] if isinstance(source.path, str) else source.path
        given = [
            path if run == Path(path).resolve() else results_of(path, storage or StorageSpec())
            for path in given
        ]
        self._find = functools.partial(find_files, given, run, storage)
        fs, paths = self._find()
        if is_batch and len(paths) > 1:
            raise InputError(
                f"these are {len(paths)} batch files, {paths[0]} and {paths[1]} among them",
                hint="give one: a custom_id is unique in its file only",
            )
        if copies is None:
            copies = Path(tempfile.mkdtemp(prefix="batchrunner-copies-"))
            weakref.finalize(self, shutil.rmtree, copies, ignore_errors=True)
        with thread_pool(READERS) as pool:
            shared = repeat(copies), repeat(source), repeat(is_batch)
            self.files = list(pool.map(SourceFile, repeat(fs), paths, *shared))
        _unify_json_lines(self.files)
        self._starts = [0, *accumulate(source.rows for source in self.files)]
        self.total_rows = self._starts[-1]
        for file, start in zip(self.files, self._starts, strict=False):
            file.begin_at(start)
        in_paths = partition_types([file.partitions for file in self.files])
        self._paths_by_schema: dict[pa.Schema, str] = {}  # of the first file that has a schema
        for file in self.files:
            in_path = [pa.field(*item) for item in in_paths.items() if item[0] not in file.schema.names]
            self._paths_by_schema.setdefault(pa.schema([*file.schema, *in_path]), file.path)
        self._unlike: dict[str, str] = {}  # why a column has no type that holds the values of all files
        self.schema = self._common_schema()
        """All columns. One whose types have nothing in common has that of the first file."""
        self.partition_types = {name: self.schema.field(name).type for name in in_paths}
        """Types of columns whose values stand in the paths of files that do not have them."""
        texts = [file for file in self.files if file.is_text]
        self.has_text_files = bool(texts)
        """Whether the types of columns come from values, or from `input.types`."""
        has_problems = any(file.has_problems for file in self.files)
        # a value of one file may not fit into the type that holds those of all
        self._problems = [PROBLEM] if has_problems or len(self._paths_by_schema) > 1 else []
        known = dict.fromkeys(name for file in texts for name in file.schema.names)
        for name in source.types:
            if not texts:
                raise InputError("input.types: is for CSV and JSON Lines, and the input has no such file")
            if name not in known:
                raise unknown_column(InputError, "input.types", name, known)
        if not any(file.format.kind == "CSV" for file in texts):
            for name in {"delimiter", "encoding"} & source.model_fields_set:
                raise InputError(f"input.{name}: is for CSV, and the input has no such file")

    def _common_schema(self) -> pa.Schema:
        """Return the columns of all files, with types that hold the values of all; note where none does."""
        kinds: dict[str, pa.DataType] = {}
        first_paths: dict[str, str] = {}
        for schema, path in self._paths_by_schema.items():
            for field in schema:
                known = kinds.setdefault(field.name, field.type)
                first_path = first_paths.setdefault(field.name, path)
                kind = common_type(known, field.type)
                if kind is not None:
                    kinds[field.name] = kind
                else:
                    self._unlike.setdefault(
                        field.name,
                        f"{path}: column {field.name!r} is {type_name(field.type)}, "
                        f"but {type_name(known)} in {first_path}",
                    )
        return normalized(pa.schema(list(kinds.items())))

    def facts(self) -> list[dict[str, Any]]:
        """Return what a resumed run recognises its files by."""
        return [file.facts() for file in self.files]

    def recognize(self, known: Sequence[Mapping[str, Any]]) -> None:
        """Find out whether the last of the files that a run knew, by their `facts`, has only grown since.

        Rows appended to another one would change the ordinals of all that come after it.
        """
        if len(known) <= len(self.files):
            self.files[len(known) - 1].recognize(known[-1])

    def row_group_ends(self) -> list[int]:
        """Return the ordinal after the last row of each row group, over all files."""
        return [end for file in self.files for end in file.starts[1:]]

    def check_unchanged(self) -> None:
        """Raise InputChangedError where a file has other content now than when it was found."""
        with thread_pool(READERS) as pool:
            list(pool.map(SourceFile.check_unchanged, self.files))

    def added_files(self) -> list[str]:
        """Return the files that have grown, and those that `input.path` names now and did not before."""
        found = [source.path for source in self.files if source.has_grown]
        with contextlib.suppress(InputError):
            known = {without_commit(source.path) for source in self.files}
            found += (path for path in self._find()[1] if without_commit(path) not in known)
        return found

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column; `where` names the job's key in errors.

        Raises InputError where a file has the column twice, where no type holds the values of all files, or
        where Parquet cannot hold its type. In a file that lacks the column it is null.
        """
        if name not in self.schema.names:
            raise unknown_column(InputError, where, name, self.schema.names)
        for schema, path in self._paths_by_schema.items():
            times = len(schema.get_all_field_indices(name))
            if times > 1:
                raise InputError(
                    f"{where}: {path} has {times} columns {name!r}",
                    hint="a column that the job uses has a name of its own",
                )
        if name in self._unlike:
            raise InputError(
                self._unlike[name],
                hint="write both with one type"
                + (", or give its type in input.types" if self.has_text_files else ""),
            )
        field = self.schema.field(name)
        if problem := not_for_parquet(field.type):
            raise InputError(f"{where}: column {name!r} has a type that Parquet cannot hold: {problem}")
        return field

    def notes(self) -> list[str]:
        """Return what a person should know of the records: which fail, and why a column is text."""
        return [note for file in self.files for note in file.notes]

    def log_notes(self, columns: Iterable[str]) -> None:
        """Log the notes on records, and which of these columns a file lacks."""
        for note in self.notes():
            log.warning("%s", note)
        for name in columns:
            lacking = [path for schema, path in self._paths_by_schema.items() if name not in schema.names]
            if lacking:
                log.warning("%s: has no column %r: it is null there", lacking[0], name)

    def directory_of(self, row: int) -> str | None:
        """Return the directory of the file that has this row; None for a file that is not on this machine."""
        (file,) = self.files_of(BitMap64([row]))
        return str(Path(file.path).absolute().parent) if file.is_local else None

    def schema_of(self, columns: Iterable[str]) -> pa.Schema:
        """Return the schema in which these columns are read, with PROBLEM last where there are problems."""
        fields = [pa.field(name, self.schema.field(name).type) for name in columns]
        return pa.schema([*fields, *(pa.field(name, pa.string()) for name in self._problems)])

    def read(self, wanted: BitMap64, columns: Sequence[str]) -> Iterator[RowBatch]:
        """Yield the wanted rows in input order with these columns, a bounded batch at a time.

        Row groups without a wanted row are not read. Raises InputError where a file cannot be read.
        """
        with contextlib.closing(DatasetReader(self, columns)) as reader:
            yield from reader.read(wanted)

    def files_of(self, wanted: BitMap64) -> list[SourceFile]:
        """Return the files that have wanted rows, in order."""
        if not wanted:
            return []
        first, end = (bisect_right(self._starts, row) for row in (wanted.min(), wanted.max()))
        return [
            file
            for file in self.files[first - 1 : end]
            if wanted.range_cardinality(file.starts[0], file.starts[-1])
        ]


class DatasetReader:
    """Reads rows of a dataset in input order. A file stays open, and so its footer is parsed once.

    Where the next rows lie ahead in the row group that was read last, it continues there. So small
    consecutive ranges are decoded only once.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[str]) -> None:
        self._dataset = dataset
        self._schema = dataset.schema_of(columns)
        self._file: SourceFile | None = None  # the open file
        self._content: pq.ParquetFile | None = None
        self._stored: list[str] = []  # columns that are read of it
        self._group: int | None = None  # the row group that was read last
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._start = 0  # ordinal of the first row in `_data`
        self._data: pa.RecordBatch | None = None  # the batch that was decoded last

    def read(self, wanted: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield the wanted rows in input order, as `Dataset.read` does; `positions` are not needed.

        Raises InputError where a file cannot be read, InputChangedError where it is not the same any more.
        """
        del positions
        for file in self._dataset.files_of(wanted):
            try:
                for batch in self._read_file(file, wanted):
                    yield RowBatch(batch.rows, self._with_partitions(batch.data, file))
            except BatchrunError:
                raise
            except file.read_errors as failure:
                file.check_unchanged()
                raise InputError(f"{file.path}: cannot be read: {first_line(failure)}") from None

    def close(self) -> None:
        """Close the open file."""
        self._file = self._group = None
        if self._content is not None:
            self._content.close(force=True)
            self._content = None

    def _read_file(self, file: SourceFile, wanted: BitMap64) -> Iterator[RowBatch]:
        if self._file is not file:
            self.close()
            self._content = file.open()
            self._stored = [name for name in self._schema.names if name in self._content.schema_arrow.names]
            self._file = file
        starts = file.starts
        first, last = max(wanted.min(), starts[0]), min(wanted.max(), starts[-1] - 1)
        for group in range(bisect_right(starts, first) - 1, bisect_right(starts, last)):
            rows = range(*starts[group : group + 2])
            if in_group := wanted & BitMap64(rows):
                yield from self._read_group(file, group, rows, in_group)

    def _read_group(self, file: SourceFile, group: int, rows: range, wanted: BitMap64) -> Iterator[RowBatch]:
        if self._group != group or wanted.min() < self._start:
            assert self._content is not None
            self._group = None
            size = size_of(self._content.metadata, self._stored, group)
            self._batches = self._content.iter_batches(
                batch_size=batch_rows(len(rows), size),
                row_groups=[group],
                columns=self._stored,
                use_threads=False,
            )
            self._start, self._data = rows.start, self._next(file, rows.start)
            self._group = group
        while True:
            assert self._data is not None
            end = self._start + self._data.num_rows
            picked = list(wanted & BitMap64(range(self._start, end)))
            if len(picked) == self._data.num_rows:
                yield RowBatch(picked, self._data)
            elif picked:
                places = arrow_array([row - self._start for row in picked], pa.int64())
                yield RowBatch(picked, self._data.take(places))
            if wanted.max() < end:
                return
            self._start, self._data = end, self._next(file, end)

    def _next(self, file: SourceFile, start: int) -> pa.RecordBatch:
        """Return the next batch of the row group, which was read from the right file, in its schema.

        `start` is the ordinal of its first row.
        """
        for data in self._batches:
            file.check_after_reading()
            try:
                return fitted(data, self._schema)
            except UNFIT:
                return self._with_misfits(data, file, start - file.starts[0])
        raise pa.ArrowInvalid("it has fewer rows than its footer says")

    def _with_misfits(self, data: pa.RecordBatch, file: SourceFile, first: int) -> pa.RecordBatch:
        """Return a batch in the schema; a row with a value that does not fit says so in PROBLEM.

        `first` is the number of its first row in the file.
        """
        problems: list[str | None] = [None] * data.num_rows
        columns = {}
        for field in self._schema:
            if field.name not in data.schema.names:
                columns[field.name] = pa.nulls(data.num_rows, field.type)
                continue
            columns[field.name], misfits = fitted_values(data.column(field.name), field.type)
            for at, why in misfits.items():
                problems[at] = problems[at] or f"{file.path}: row {first + at}: column {field.name!r}: {why}"
        if PROBLEM in columns:
            earlier = columns[PROBLEM].to_pylist()
            problems = [before or now for before, now in zip(earlier, problems, strict=True)]
            columns[PROBLEM] = arrow_array(problems, pa.string())
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=self._schema)

    def _with_partitions(self, data: pa.RecordBatch, file: SourceFile) -> pa.RecordBatch:
        """Return a batch with the values of the columns that stand in the file's path."""
        for at, field in enumerate(data.schema):
            if field.name in self._dataset.partition_types and field.name not in self._stored:
                value = pa.scalar(file.partitions[field.name], pa.string()).cast(field.type)
                data = data.set_column(at, field, pa.repeat(value, data.num_rows))
        return data


def batch_rows(rows: int, size: int) -> int:
    """Return the rows per batch for a row group of `rows` rows and `size` bytes."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def rows_of(batch: RowBatch, names: Sequence[str]) -> list[Row | str]:
    """Return the rows of a batch as Python values of these columns, or why a row cannot be read."""
    wrong: dict[int, str] = {}
    if PROBLEM in batch.data.schema.names:
        wrong = {at: why for at, why in enumerate(batch.data.column(PROBLEM).to_pylist()) if why}
    columns = []
    for name in names:
        values, unreadable = values_of(batch.data.column(name))
        columns.append(values)
        wrong = {at: f"column {name!r}: {why}" for at, why in unreadable.items()} | wrong
    rows: list[Row | str] = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    rows = rows or [{} for _ in batch.rows]
    for at, why in wrong.items():
        rows[at] = why
    return rows


def values_of(column: pa.Array) -> tuple[list[Any], dict[int, str]]:
    """Return a column as Python values, and by place why Python cannot represent one, which is None there."""
    kind = column.type
    try:
        if (pt.is_list(kind) or pt.is_large_list(kind)) and pt.is_integer(kind.value_type):
            ends = _integers(column.offsets)
            inner = column.values.slice(ends[0], ends[-1] - ends[0])
            if not column.null_count and not inner.null_count:  # token ids: much faster than `to_pylist`
                numbers = _integers(inner)
                return [numbers[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)], {}
        return list(column.to_pylist()), {}
    except UNREADABLE:
        pass
    found: list[Any] = []
    unreadable = {}
    for at, item in enumerate(column):
        try:
            found.append(item.as_py())
        except UNREADABLE as failure:
            found.append(None)
            is_zone = "zoneinfo" in str(failure)  # all that Arrow says is that this module must be installed
            why = f"its time zone is in no database here ({kind})" if is_zone else failure
            unreadable[at] = f"unreadable value: {why}"
    return found, unreadable


def carried_of(ref: RowRef) -> dict[str, Any]:
    """Return the carried columns of a row, with what shows a value that Python cannot represent."""
    row = ref.carried.slice(ref.position, 1)
    return {name: shown_values(row.column(at))[0] for at, name in enumerate(row.schema.names)}


def _integers(column: pa.Array) -> list[int]:
    """Return a column of integers without nulls; raises ArrowInvalid for one that is too large."""
    numbers = column.cast(pa.int64())
    data, first = memoryview(numbers.buffers()[1] or b""), numbers.offset
    return data[first * 8 : (first + len(numbers)) * 8].cast("q").tolist()


def _unify_json_lines(sources: Iterable[SourceFile]) -> None:
    """Give JSON Lines files of one input the columns of all, since a key may be missing in a whole file."""
    found = [source for source in sources if source.format.kind == "JSON Lines"]
    if found:
        schema = stored_schema(common_schema([source.schema for source in found]))
        for source in found:
            source.schema = schema
