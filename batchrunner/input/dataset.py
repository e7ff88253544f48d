"""The input files as one sequence of rows, read a bounded batch at a time.

The ordinal of a row (`row` in the results) counts from 0 over the files in order of their paths. A row has
the same ordinal in every attempt, so the input needs no ID column.
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
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt
from pyroaring import BitMap64

from batchrunner.core.errors import BatchrunError, InputError, first_line
from batchrunner.core.processes import thread_pool
from batchrunner.core.types import RowRef
from batchrunner.input.common_types import common_type
from batchrunner.input.files import (
    SourceFile,
    find_files,
    partition_types,
    size_of,
    without_commit,
)
from batchrunner.input.parquet_copy import (
    PROBLEM,
    UNFIT,
    common_schema,
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
"""Number of files that are opened in parallel. Opening a file on a network file system is mostly waiting."""
BATCH_ROWS, BATCH_BYTES = 256, 8 << 20
"""Maximum number of rows in a batch, and its approximate maximum size in bytes."""
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
    """Rows that are read together."""

    rows: list[int]
    """Ordinals of the rows."""
    data: pa.RecordBatch
    """Columns of these rows, in the same order."""


class ColumnSource(Protocol):
    """Rows with columns: a dataset, or the rows of a program."""

    @property
    def schema(self) -> pa.Schema:
        """All columns."""

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column; raises InputError, naming `where`, if it cannot be used."""

    def directory_of(self, row: int) -> str | None:
        """Return the directory of the file that has the row with this ordinal; None if there is none."""


def usable_columns(source: ColumnSource) -> dict[str, pa.DataType]:
    """Return the types of the columns that a job can use, in order."""
    types = {}
    for name in source.schema.names:
        with contextlib.suppress(BatchrunError):  # its type differs between files, for example
            types[name] = source.field(name, where="a job").type
    return types


class Dataset:
    """The files of a job's input."""

    def __init__(
        self,
        source: InputSpec,
        run: Path | None = None,
        storage: StorageSpec | None = None,
        copies: Path | None = None,
        *,
        paths: Sequence[str] | None = None,
        is_batch: bool = False,
    ) -> None:
        """Find the files, except those in the run directory `run`, and read their columns and row groups.

        `paths` replaces `source.path`. `storage` says how object stores are reached. With `is_batch`, the
        input is one batch file. `copies` is the directory for the Parquet copies of files in other formats;
        the default is a temporary directory, which is deleted with this object. Raises InputError if a file
        is missing or unreadable.
        """
        if paths is None:
            paths = [source.path] if isinstance(source.path, str) else source.path
        self._find = functools.partial(find_files, paths, run, storage)
        self.files = self._open_files(source, copies, is_batch=is_batch)
        _unify_json_lines(self.files)
        self._starts = [0, *accumulate(file.rows for file in self.files)]
        self.total_rows = self._starts[-1]
        for file, start in zip(self.files, self._starts, strict=False):
            file.begin_at(start)

        in_paths = partition_types([file.partitions for file in self.files])
        self._paths_by_schema: dict[pa.Schema, str] = {}  # path of the first file with each schema
        for file in self.files:
            partitions = [pa.field(*item) for item in in_paths.items() if item[0] not in file.schema.names]
            self._paths_by_schema.setdefault(pa.schema([*file.schema, *partitions]), file.path)
        self._conflicts: dict[str, str] = {}  # columns without a common type, and why
        self.schema = self._common_schema()
        """All columns. A column without a common type has its type in the first file that has the column."""
        self.partition_types = {name: self.schema.field(name).type for name in in_paths}
        """Types of the Hive partition columns. If a file lacks such a column, its path gives the value."""
        self.has_text_files = any(file.is_text for file in self.files)
        """Whether a file is CSV or JSON Lines, whose column types come from values or `input.types`."""
        has_problems = any(file.has_problems for file in self.files)
        # a value of one file may not fit the common type of all files
        self._problem_columns = [PROBLEM] if has_problems or len(self._paths_by_schema) > 1 else []
        self._check_text_options(source)

    def _open_files(self, source: InputSpec, copies: Path | None, *, is_batch: bool) -> list[SourceFile]:
        fs, names = self._find()
        if is_batch and len(names) > 1:
            raise InputError(
                f"the input has {len(names)} batch files, such as {names[0]} and {names[1]}",
                hint="give one file: a custom_id is unique only within its file",
            )
        if copies is None:
            copies = Path(tempfile.mkdtemp(prefix="batchrunner-copies-"))
            weakref.finalize(self, shutil.rmtree, copies, ignore_errors=True)
        open_file = functools.partial(SourceFile, fs, copies=copies, source=source, is_batch=is_batch)
        with thread_pool(READERS) as pool:
            return list(pool.map(open_file, names))

    def _check_text_options(self, source: InputSpec) -> None:
        """Raise InputError for a text option that applies to no file or column of the input."""
        text_files = [file for file in self.files if file.is_text]
        columns = dict.fromkeys(name for file in text_files for name in file.schema.names)
        for name in source.types:
            if not text_files:
                raise InputError("input.types: is for CSV and JSON Lines, and the input has no such file")
            if name not in columns:
                raise unknown_column(InputError, "input.types", name, columns)
        if not any(file.format.kind == "CSV" for file in text_files):
            for name in {"delimiter", "encoding"} & source.model_fields_set:
                raise InputError(f"input.{name}: is for CSV, and the input has no such file")

    def _common_schema(self) -> pa.Schema:
        """Return the columns of all files with their common types; add those without one to `_conflicts`."""
        types: dict[str, pa.DataType] = {}
        first_paths: dict[str, str] = {}
        for schema, path in self._paths_by_schema.items():
            for field in schema:
                earlier = types.setdefault(field.name, field.type)
                first_path = first_paths.setdefault(field.name, path)
                common = common_type(earlier, field.type)
                if common is not None:
                    types[field.name] = common
                elif field.name not in self._conflicts:
                    self._conflicts[field.name] = (
                        f"{path}: column {field.name!r} is {type_name(field.type)}, "
                        f"but {type_name(earlier)} in {first_path}"
                    )
        return normalized(pa.schema(list(types.items())))

    def facts(self) -> list[dict[str, Any]]:
        """Return the facts by which a resumed run recognizes its files."""
        return [file.facts() for file in self.files]

    def recognize(self, earlier_facts: Sequence[Mapping[str, Any]]) -> None:
        """Let the file that was the last one in an earlier attempt record whether it has grown since.

        `earlier_facts` are the `facts()` of that attempt. Only the last file may grow: rows appended to
        another file would change the ordinals of all later rows.
        """
        if len(earlier_facts) <= len(self.files):
            self.files[len(earlier_facts) - 1].recognize(earlier_facts[-1])

    def row_group_ends(self) -> list[int]:
        """Return the ordinal after the last row of each row group, over all files."""
        return [end for file in self.files for end in file.starts[1:]]

    def check_unchanged(self) -> None:
        """Raise InputChangedError if a file has other content now than when it was opened."""
        with thread_pool(READERS) as pool:
            list(pool.map(SourceFile.check_unchanged, self.files))

    def added_files(self) -> list[str]:
        """Return the files that have grown, and files that are new in `input.path`."""
        paths = [file.path for file in self.files if file.has_grown]
        with contextlib.suppress(InputError):
            opened = {without_commit(file.path) for file in self.files}
            paths += (path for path in self._find()[1] if without_commit(path) not in opened)
        return paths

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column; `where` names the job's key in errors.

        Raises InputError if a file has the column twice, if no type holds the values of all files, or if
        Parquet cannot hold its type. The column is null in a file that lacks it.
        """
        if name not in self.schema.names:
            raise unknown_column(InputError, where, name, self.schema.names)
        for schema, path in self._paths_by_schema.items():
            times = len(schema.get_all_field_indices(name))
            if times > 1:
                raise InputError(
                    f"{where}: {path} has {times} columns {name!r}",
                    hint="a column that the job uses must have a unique name",
                )
        if name in self._conflicts:
            hint = "write the column with the same type in all files"
            if self.has_text_files:
                hint += ", or give its type in input.types"
            raise InputError(self._conflicts[name], hint=hint)
        field = self.schema.field(name)
        if problem := not_for_parquet(field.type):
            raise InputError(f"{where}: column {name!r} has a type that Parquet cannot hold: {problem}")
        return field

    def notes(self) -> list[str]:
        """Return sentences for users that say which records fail, and why columns became JSON text."""
        return [note for file in self.files for note in file.notes]

    def log_notes(self, columns: Iterable[str]) -> None:
        """Log the notes on records, and for each of these columns the first file that lacks it."""
        for note in self.notes():
            log.warning("%s", note)
        for name in columns:
            for schema, path in self._paths_by_schema.items():
                if name not in schema.names:
                    log.warning("%s: has no column %r: the column is null for its rows", path, name)
                    break

    def directory_of(self, row: int) -> str | None:
        """Return the directory of the file with this row; None for a file that is not on this machine."""
        (file,) = self.files_of(BitMap64([row]))
        return str(Path(file.path).absolute().parent) if file.is_local else None

    def schema_of(self, columns: Iterable[str]) -> pa.Schema:
        """Return the schema in which these columns are read; ends with PROBLEM if rows may be unreadable."""
        fields = [pa.field(name, self.schema.field(name).type) for name in columns]
        return pa.schema([*fields, *(pa.field(name, pa.string()) for name in self._problem_columns)])

    def read(self, rows: BitMap64, columns: Sequence[str]) -> Iterator[RowBatch]:
        """Yield the wanted rows in input order with these columns, a bounded batch at a time.

        Row groups without a wanted row are not read. Raises InputError if a file cannot be read.
        """
        with contextlib.closing(DatasetReader(self, columns)) as reader:
            yield from reader.read(rows)

    def files_of(self, rows: BitMap64) -> list[SourceFile]:
        """Return the files that have wanted rows, in order."""
        if not rows:
            return []
        first, end = (bisect_right(self._starts, row) for row in (rows.min(), rows.max()))
        return [
            file
            for file in self.files[first - 1 : end]
            if rows.range_cardinality(file.starts[0], file.starts[-1])
        ]


class DatasetReader:
    """Reads rows of a dataset in input order. A file stays open, so its footer is parsed once.

    If the next rows lie ahead in the current row group, reading continues there. So a row group is decoded
    once, even if it is read in many small ranges.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[str]) -> None:
        self._dataset = dataset
        self._schema = dataset.schema_of(columns)
        self._file: SourceFile | None = None  # the open file
        self._content: pq.ParquetFile | None = None
        self._stored: list[str] = []  # columns that are read from it
        self._group: int | None = None  # the row group that was read last
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._start = 0  # ordinal of the first row in `_data`
        self._data: pa.RecordBatch | None = None  # the batch that was decoded last

    def read(self, rows: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield the wanted rows in input order, as `Dataset.read` does.

        `positions` is unused: only the reader of a sorted copy needs it. Raises InputError if a file cannot
        be read, InputChangedError if its content has changed.
        """
        del positions
        for file in self._dataset.files_of(rows):
            try:
                for batch in self._read_file(file, rows):
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

    def _read_file(self, file: SourceFile, rows: BitMap64) -> Iterator[RowBatch]:
        if self._file is not file:
            self.close()
            self._content = file.open()
            self._stored = [name for name in self._schema.names if name in self._content.schema_arrow.names]
            self._file = file
        starts = file.starts
        first, last = max(rows.min(), starts[0]), min(rows.max(), starts[-1] - 1)
        for group in range(bisect_right(starts, first) - 1, bisect_right(starts, last)):
            group_rows = range(*starts[group : group + 2])
            if in_group := rows & BitMap64(group_rows):
                yield from self._read_group(file, group, group_rows, in_group)

    def _read_group(
        self, file: SourceFile, group: int, group_rows: range, rows: BitMap64
    ) -> Iterator[RowBatch]:
        if self._group != group or rows.min() < self._start:
            assert self._content is not None
            self._group = None
            size = size_of(self._content.metadata, self._stored, group)
            self._batches = self._content.iter_batches(
                batch_size=batch_rows(len(group_rows), size),
                row_groups=[group],
                columns=self._stored,
                use_threads=False,
            )
            self._start, self._data = group_rows.start, self._next(file, group_rows.start)
            self._group = group
        while True:
            assert self._data is not None
            end = self._start + self._data.num_rows
            rows_here = list(rows & BitMap64(range(self._start, end)))
            if len(rows_here) == self._data.num_rows:
                yield RowBatch(rows_here, self._data)
            elif rows_here:
                indices = arrow_array([row - self._start for row in rows_here], pa.int64())
                yield RowBatch(rows_here, self._data.take(indices))
            if rows.max() < end:
                return
            self._start, self._data = end, self._next(file, end)

    def _next(self, file: SourceFile, start: int) -> pa.RecordBatch:
        """Return the next batch of the row group, converted to the schema; `start` is its first ordinal.

        Raises InputChangedError if the file was replaced before the batch was read.
        """
        for data in self._batches:
            file.check_after_reading()
            try:
                return fitted(data, self._schema)
            except UNFIT:
                return self._with_misfits(data, file, start - file.starts[0])
        raise pa.ArrowInvalid("it has fewer rows than its footer says")

    def _with_misfits(self, data: pa.RecordBatch, file: SourceFile, first: int) -> pa.RecordBatch:
        """Return a batch converted to the schema, whose types some of the values do not fit.

        Such a value becomes null, and PROBLEM describes the first one of each row. `first` is the index in
        the file of the batch's first row.
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
            of_records = columns[PROBLEM].to_pylist()
            problems = [stored or misfit for stored, misfit in zip(of_records, problems, strict=True)]
            columns[PROBLEM] = arrow_array(problems, pa.string())
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=self._schema)

    def _with_partitions(self, data: pa.RecordBatch, file: SourceFile) -> pa.RecordBatch:
        """Return a batch with the partition columns filled in from the file's path."""
        for at, field in enumerate(data.schema):
            if field.name in self._dataset.partition_types and field.name not in self._stored:
                value = pa.scalar(file.partitions[field.name], pa.string()).cast(field.type)
                data = data.set_column(at, field, pa.repeat(value, data.num_rows))
        return data


def batch_rows(rows: int, size: int) -> int:
    """Return the rows per batch for a row group of `rows` rows and `size` bytes."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def rows_of(batch: RowBatch, names: Sequence[str]) -> list[Row | str]:
    """Return each row of a batch as a dict of Python values, or as a text that says why it cannot be read."""
    problems: dict[int, str] = {}
    if PROBLEM in batch.data.schema.names:
        texts = enumerate(batch.data.column(PROBLEM).to_pylist())
        problems = {index: problem for index, problem in texts if problem}
    columns = []
    for name in names:
        values, unreadable = values_of(batch.data.column(name))
        columns.append(values)
        for index, problem in unreadable.items():
            problems.setdefault(index, f"column {name!r}: {problem}")
    rows: list[Row | str] = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    rows = rows or [{} for _ in batch.rows]
    for index, problem in problems.items():
        rows[index] = problem
    return rows


def values_of(column: pa.Array) -> tuple[list[Any], dict[int, str]]:
    """Return a column as Python values, and by index the reason for each value that Python cannot represent.

    Such a value becomes None.
    """
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
    values: list[Any] = []
    unreadable = {}
    for index, item in enumerate(column):
        try:
            values.append(item.as_py())
        except UNREADABLE as failure:
            values.append(None)
            reason = str(failure)
            if "zoneinfo" in reason:  # Arrow's text only says that this module must be installed
                reason = f"its time zone is unknown on this machine ({kind})"
            unreadable[index] = f"unreadable value: {reason}"
    return values, unreadable


def carried_of(ref: RowRef) -> dict[str, Any]:
    """Return the carried columns of a row; a value that Python cannot represent is shown as text."""
    row = ref.carried.slice(ref.position, 1)
    return {name: shown_values(row.column(at))[0] for at, name in enumerate(row.schema.names)}


def _integers(column: pa.Array) -> list[int]:
    """Return a column of integers without nulls; raises ArrowInvalid for a number over 64 bits."""
    numbers = column.cast(pa.int64())
    data, first = memoryview(numbers.buffers()[1] or b""), numbers.offset
    return data[first * 8 : (first + len(numbers)) * 8].cast("q").tolist()


def _unify_json_lines(files: Iterable[SourceFile]) -> None:
    """Give the JSON Lines files of an input one schema, since a key may be missing in a whole file."""
    json_files = [file for file in files if file.format.kind == "JSON Lines"]
    if json_files:
        schema = stored_schema(common_schema([file.schema for file in json_files]))
        for file in json_files:
            file.schema = schema
