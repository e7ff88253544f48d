"""The input files as one sequence of rows, read in batches of limited size.

Rows are numbered from 0, file by file in the order of the paths. This number (the ordinal, `row` in the
results) is the same in every attempt, so the input needs no ID column.
"""

import contextlib
import functools
import logging
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
from batchrunner.job.prompt import BatchRules
from batchrunner.job.spec import InputSpec
from batchrunner.output.arrow_arrays import UNREADABLE, arrow_array, shown_values
from batchrunner.output.files import scratch_directory

log = logging.getLogger(__name__)

READERS = 8
"""Number of files that are opened in parallel: opening a file on a network file system is mostly waiting."""
BATCH_ROWS = 256
"""Maximum number of rows that are read at once."""
BATCH_BYTES = 8 << 20
"""Approximate maximum size in bytes of the rows that are read at once."""
Row = dict[str, Any]
"""Values of a row by column name."""


def is_list(kind: pa.DataType) -> bool:
    """Tell whether a column holds lists."""
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def is_ids(kind: pa.DataType) -> bool:
    """Tell whether a column holds lists of integers, such as token ids."""
    return is_list(kind) and pt.is_integer(kind.value_type)


def is_bytes(kind: pa.DataType) -> bool:
    """Tell whether a column holds bytes."""
    plain = kind.value_type if pt.is_dictionary(kind) else kind
    return plain in {pa.binary(), pa.large_binary()} or pt.is_fixed_size_binary(plain)


def holds_bytes(kind: pa.DataType) -> bool:
    """Tell whether a column holds bytes, also inside lists or structs."""
    return is_bytes(kind) or any(holds_bytes(kind.field(at).type) for at in range(kind.num_fields))


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Batch of rows that are read together."""

    rows: list[int]
    """Numbers of the rows in the whole input, counted from 0."""
    data: pa.RecordBatch
    """Values of the rows, in the order of `rows`."""


class ColumnSource(Protocol):
    """Rows with columns: the input files of a job, or the rows that a program passes."""

    @property
    def schema(self) -> pa.Schema:
        """All columns."""

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column; raise InputError, which begins with `where`, if it is unusable."""

    def directory_of(self, row: int) -> str | None:
        """Return the directory of the file with row number `row`; None if the row is in no local file."""


def usable_columns(source: ColumnSource) -> dict[str, pa.DataType]:
    """Return the names and types of the columns that a job can use, in the order of the input."""
    types = {}
    for name in source.schema.names:
        # A column is unusable, for example, if its type differs between files.
        with contextlib.suppress(BatchrunError):
            types[name] = source.field(name, where="a job").type
    return types


class Dataset:
    """The input files of a job, as one sequence of rows."""

    def __init__(
        self,
        source: InputSpec,
        run: Path | None = None,
        storage: StorageSpec | None = None,
        copies: Path | None = None,
        *,
        paths: Sequence[str] | None = None,
        batch_rules: BatchRules | None = None,
    ) -> None:
        """Find the files, and read their columns and row groups.

        Files in the run directory `run` are skipped. `storage` has the settings of object stores. `copies` is
        the directory for Parquet copies of files in other formats. By default it is a temporary directory,
        which is deleted with this object. `paths` replaces `source.path`. `batch_rules` means that the input
        is one batch file. Raises InputError if a file is missing or unreadable.
        """
        if paths is None:
            paths = [source.path] if isinstance(source.path, str) else source.path
        # Kept for `added_files`, which searches for the files again.
        self._find = functools.partial(find_files, paths, run, storage)
        self.files = self._open_files(source, copies, batch_rules=batch_rules)
        _unify_json_lines(self.files)
        self._starts = [0, *accumulate(file.rows for file in self.files)]
        """Row number at which each file begins. The last element is the number of all rows."""
        self.total_rows = self._starts[-1]
        for file, start in zip(self.files, self._starts[:-1], strict=True):
            file.begin_at(start)

        types_in_paths = partition_types([file.partitions for file in self.files])
        self._paths_by_schema: dict[pa.Schema, str] = {}
        """Distinct schemas of the files, partition columns included, each with the path of its first file."""
        for file in self.files:
            fields = [*file.schema]
            for name, kind in types_in_paths.items():
                if name not in file.schema.names:
                    fields.append(pa.field(name, kind))
            self._paths_by_schema.setdefault(pa.schema(fields), file.path)
        self._conflicts: dict[str, str] = {}
        """Columns for which no type fits the values of all files, each with the reason."""
        self.schema = self._common_schema()
        """All columns. A column in `_conflicts` has its type in the first file."""
        self.partition_types = {name: self.schema.field(name).type for name in types_in_paths}
        """Types of the Hive partition columns, whose values are in the paths of the files."""
        self.has_text_files = any(file.is_text for file in self.files)
        """Whether any file is CSV or JSON Lines.

        Their columns get types from the values or from `input.types`.
        """
        has_problems = any(file.has_problems for file in self.files)
        # If the files have several schemas, a value of one file may not fit the common type of its column.
        self._problem_columns = [PROBLEM] if has_problems or len(self._paths_by_schema) > 1 else []
        self._check_text_options(source)

    def _open_files(
        self, source: InputSpec, copies: Path | None, *, batch_rules: BatchRules | None
    ) -> list[SourceFile]:
        fs, paths = self._find()
        if batch_rules and len(paths) > 1:
            raise InputError(
                f"the input has {len(paths)} batch files, such as {paths[0]} and {paths[1]}",
                hint="give one file: a custom_id is unique only within its file",
            )
        if copies is None:
            copies, delete_copies = scratch_directory("batchrunner-copies-")
            weakref.finalize(self, delete_copies)
        open_file = functools.partial(SourceFile, fs, copies=copies, source=source, batch_rules=batch_rules)
        with thread_pool(READERS) as pool:
            return list(pool.map(open_file, paths))

    def _check_text_options(self, source: InputSpec) -> None:
        """Raise InputError if the job has a CSV or JSON Lines option that applies to no file or column."""
        text_files = [file for file in self.files if file.is_text]
        columns = dict.fromkeys(name for file in text_files for name in file.schema.names)
        for name in source.types:
            if not text_files:
                raise InputError(
                    "input.types: applies to CSV and JSON Lines, and the input has no such file",
                    hint="leave it out",
                )
            if name not in columns:
                raise unknown_column(InputError, "input.types", name, columns)
        if not any(file.format.kind == "CSV" for file in text_files):
            # Defaults are not checked, only options that the job sets.
            for name in {"delimiter", "encoding"} & source.model_fields_set:
                raise InputError(
                    f"input.{name}: applies to CSV, and the input has no such file", hint="leave it out"
                )

    def _common_schema(self) -> pa.Schema:
        """Return the columns of all files with their common types, and fill in `_conflicts`."""
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
        """Return the facts about the files by which a resumed run recognizes its input."""
        return [file.facts() for file in self.files]

    def record_growth(self, earlier_facts: Sequence[Mapping[str, Any]]) -> None:
        """Record whether the file that was the last one at an earlier start of the run has grown since.

        `earlier_facts` is the result of `facts()` at that start. No other file may grow, because rows
        appended to it would change the numbers of all later rows.
        """
        if len(earlier_facts) <= len(self.files):
            last_file_then = self.files[len(earlier_facts) - 1]
            last_file_then.record_growth(earlier_facts[-1])

    def row_group_ends(self) -> list[int]:
        """Return the row number at which each row group of the input ends (exclusive), over all files."""
        return [end for file in self.files for end in file.starts[1:]]

    def check_unchanged(self) -> None:
        """Raise InputChangedError if a file has changed since it was opened."""
        with thread_pool(READERS) as pool:
            list(pool.map(SourceFile.check_unchanged, self.files))

    def added_files(self) -> list[str]:
        """Return the paths of files in `input.path` that have grown or appeared since the run started."""
        paths = [file.path for file in self.files if file.has_grown]
        # It is no error if `input.path` matches no file now, because the run reads the files found at its
        # start.
        with contextlib.suppress(InputError):
            _, present_paths = self._find()
            paths_at_start = {without_commit(file.path) for file in self.files}
            paths += (path for path in present_paths if without_commit(path) not in paths_at_start)
        return paths

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column; errors name the job field `where`.

        Raises InputError if no file has the column, a file has it twice, no type fits the values of all
        files, or Parquet cannot store its type. In files without the column, its values are null.
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
        """Return notes on the files for the user, such as the number of unreadable records."""
        return [note for file in self.files for note in file.notes]

    def log_notes(self, columns: Iterable[str]) -> None:
        """Log the notes on the files. Also log for each of `columns` the first file that lacks it."""
        for note in self.notes():
            log.warning("%s", note)
        for name in columns:
            for schema, path in self._paths_by_schema.items():
                if name not in schema.names:
                    log.warning("%s: has no column %r, so the column is null in its rows", path, name)
                    break

    def directory_of(self, row: int) -> str | None:
        """Return the directory of the file with row number `row`; None if the file is not on this machine."""
        (file,) = self.files_of(BitMap64([row]))
        return str(Path(file.path).absolute().parent) if file.is_local else None

    def schema_of(self, columns: Iterable[str]) -> pa.Schema:
        """Return the schema in which `columns` are read. If rows may fail, the last column is PROBLEM."""
        fields = [pa.field(name, self.schema.field(name).type) for name in columns]
        return pa.schema([*fields, *(pa.field(name, pa.string()) for name in self._problem_columns)])

    def read(self, rows: BitMap64, columns: Sequence[str]) -> Iterator[RowBatch]:
        """Yield these rows in input order, with these columns, in batches of limited size.

        Row groups without any of `rows` are not read. Raises InputError if a file cannot be read.
        """
        with contextlib.closing(DatasetReader(self, columns)) as reader:
            yield from reader.read(rows)

    def files_of(self, rows: BitMap64) -> list[SourceFile]:
        """Return the files that have any of `rows`, in input order."""
        if not rows:
            return []
        first_file = bisect_right(self._starts, rows.min()) - 1
        last_file = bisect_right(self._starts, rows.max()) - 1
        return [
            file
            for file in self.files[first_file : last_file + 1]
            if rows.range_cardinality(file.starts[0], file.starts[-1])
        ]


class DatasetReader:
    """Reads rows of a dataset in input order.

    A file stays open until another file is needed, so its footer is parsed once. The next batch of rows
    usually continues in the current row group, so a row group is decoded once even if it is read in many
    small ranges.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[str]) -> None:
        self._dataset = dataset
        self._schema = dataset.schema_of(columns)
        self._file: SourceFile | None = None
        self._content: pq.ParquetFile | None = None
        self._stored: list[str] = []
        """Columns to read from the open file.

        Partition columns are not among them: their values are in its path.
        """
        self._group: int | None = None
        """Index of the current row group; None before its first batch is decoded."""
        self._batches: Iterator[pa.RecordBatch] = iter(())
        """Remaining batches of the row group, which are decoded one by one."""
        self._start = 0
        """Row number, in the whole input, of the first row in `_data`."""
        self._data: pa.RecordBatch | None = None
        """Batch that was decoded last."""

    def read(self, rows: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield `rows` in input order, as `Dataset.read` does.

        `positions` is ignored; only `SortedCopy.read`, which callers use in the same way, needs it. Raises
        InputError if a file cannot be read, and InputChangedError if its content has changed.
        """
        del positions
        for file in self._dataset.files_of(rows):
            try:
                for batch in self._read_file(file, rows):
                    yield RowBatch(batch.rows, self._with_partitions(batch.data, file))
            except BatchrunError:
                raise
            except file.read_errors as failure:
                # Reading may have failed because the file was changed; then this raises an error that says
                # so.
                file.check_unchanged()
                raise InputError(f"{file.path}: cannot be read: {first_line(failure)}") from None

    def close(self) -> None:
        """Close the open file."""
        self._file = self._group = None
        if self._content is not None:
            self._content.close(force=True)
            self._content = None

    def _read_file(self, file: SourceFile, rows: BitMap64) -> Iterator[RowBatch]:
        """Yield those of `rows` that are in this file, without partition columns."""
        if self._file is not file:
            self.close()
            self._content = file.open()
            self._stored = [name for name in self._schema.names if name in self._content.schema_arrow.names]
            self._file = file
        starts = file.starts
        first_row = max(rows.min(), starts[0])
        last_row = min(rows.max(), starts[-1] - 1)
        first_group = bisect_right(starts, first_row) - 1
        last_group = bisect_right(starts, last_row) - 1
        for group in range(first_group, last_group + 1):
            group_rows = range(starts[group], starts[group + 1])
            rows_in_group = rows & BitMap64(group_rows)
            if rows_in_group:
                # Batches are decoded in order. For a row before the current batch, the row group is decoded
                # again.
                if self._group != group or rows_in_group.min() < self._start:
                    self._begin_group(file, group, group_rows)
                yield from self._rows_in_group(file, rows_in_group)

    def _begin_group(self, file: SourceFile, group: int, group_rows: range) -> None:
        """Decode the first batch of a row group; `group_rows` are the numbers of its rows in the input."""
        assert self._content is not None
        # `_group` is None until decoding succeeds. After a failure, the next call begins the row group again.
        self._group = None
        size = size_of(self._content.metadata, self._stored, group)
        self._batches = self._content.iter_batches(
            batch_size=batch_rows(len(group_rows), size),
            row_groups=[group],
            columns=self._stored,
            use_threads=False,
        )
        self._start, self._data = group_rows.start, self._next_batch(file, group_rows.start)
        self._group = group

    def _rows_in_group(self, file: SourceFile, rows: BitMap64) -> Iterator[RowBatch]:
        """Yield those of `rows` that are in the current row group.

        None of them may precede the batch that was decoded last.
        """
        while True:
            assert self._data is not None
            end = self._start + self._data.num_rows
            rows_in_batch = list(rows & BitMap64(range(self._start, end)))
            if len(rows_in_batch) == self._data.num_rows:
                # The whole batch is wanted, so it is passed on without a copy.
                yield RowBatch(rows_in_batch, self._data)
            elif rows_in_batch:
                indices = arrow_array([row - self._start for row in rows_in_batch], pa.int64())
                yield RowBatch(rows_in_batch, self._data.take(indices))
            if rows.max() < end:
                # The next rows may be in this batch too, so it is kept.
                return
            self._start, self._data = end, self._next_batch(file, end)

    def _next_batch(self, file: SourceFile, start: int) -> pa.RecordBatch:
        """Return the next batch of the row group, converted to the schema.

        `start` is the number of its first row. Raises InputChangedError if the file was replaced meanwhile.
        """
        data = next(self._batches, None)
        if data is None:
            raise pa.ArrowInvalid("the row group has fewer rows than the footer says")
        file.check_after_reading()
        try:
            return fitted(data, self._schema)
        except UNFIT:
            return self._with_misfits(data, file, first=start - file.starts[0])

    def _with_misfits(self, data: pa.RecordBatch, file: SourceFile, first: int) -> pa.RecordBatch:
        """Convert a batch in which some values do not fit the types of the schema.

        A value that does not fit becomes null, and the first such value of a row gives a reason in the column
        PROBLEM. `first` is the index in the file of the batch's first row.
        """
        problems: list[str | None] = [None] * data.num_rows
        columns = {}
        for field in self._schema:
            if field.name not in data.schema.names:
                columns[field.name] = pa.nulls(data.num_rows, field.type)
                continue
            columns[field.name], misfits = fitted_values(data.column(field.name), field.type)
            for index, reason in misfits.items():
                if problems[index] is None:
                    row = first + index
                    problems[index] = f"{file.path}: row {row}: column {field.name!r}: {reason}"
        if PROBLEM in columns:
            # A problem found when the file was copied to Parquet takes precedence.
            stored_problems = columns[PROBLEM].to_pylist()
            problems = [stored or misfit for stored, misfit in zip(stored_problems, problems, strict=True)]
            columns[PROBLEM] = arrow_array(problems, pa.string())
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=self._schema)

    def _with_partitions(self, data: pa.RecordBatch, file: SourceFile) -> pa.RecordBatch:
        """Add the Hive partition columns, whose values are in the file's path."""
        for index, field in enumerate(data.schema):
            if field.name in self._dataset.partition_types and field.name not in self._stored:
                value = pa.scalar(file.partitions[field.name], pa.string()).cast(field.type)
                data = data.set_column(index, field, pa.repeat(value, data.num_rows))
        return data


def batch_rows(rows: int, size: int) -> int:
    """Return how many rows to read at once from a row group of `rows` rows and `size` bytes."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def rows_of(batch: RowBatch, names: Sequence[str]) -> list[Row | str]:
    """Return for each row its values in the columns `names`, or the reason (a text) why it cannot be read."""
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
    if not names:
        # Without columns, zip() would yield no rows.
        rows = [{} for _ in batch.rows]
    for index, problem in problems.items():
        rows[index] = problem
    return rows


def values_of(column: pa.Array) -> tuple[list[Any], dict[int, str]]:
    """Return the Python values of a column, and the reason for each value that Python cannot represent.

    The keys of the dict are indices in the column. At these indices, the list has None.
    """
    try:
        token_ids = _integer_lists(column)
        if token_ids is not None:
            return token_ids, {}
        return list(column.to_pylist()), {}
    except UNREADABLE:
        # Some value has no Python form, so each value is converted alone.
        pass
    values: list[Any] = []
    unreadable = {}
    for index, item in enumerate(column):
        try:
            values.append(item.as_py())
        except UNREADABLE as failure:
            values.append(None)
            reason = str(failure)
            if "zoneinfo" in reason:
                # Arrow only reports that the module zoneinfo lacks data.
                reason = f"the time zone is unknown on this machine ({column.type})"
            unreadable[index] = f"unreadable value: {reason}"
    return values, unreadable


def _integer_lists(column: pa.Array) -> list[list[int]] | None:
    """Return the values of a column of integer lists, such as token ids; None for any other column.

    A column with nulls also gives None. This function is much faster than `to_pylist`.
    """
    kind = column.type
    if not ((pt.is_list(kind) or pt.is_large_list(kind)) and pt.is_integer(kind.value_type)):
        return None
    # List n has the items from offset n to offset n + 1. In a slice of a column, the first offset is not 0.
    offsets = _integers(column.offsets)
    first = offsets[0]
    items = column.values.slice(first, offsets[-1] - first)
    if column.null_count or items.null_count:
        return None
    numbers = _integers(items)
    return [numbers[start - first : end - first] for start, end in pairwise(offsets)]


def carried_of(ref: RowRef) -> dict[str, Any]:
    """Return the values of a row in `input.columns`, the columns that are copied into the results.

    A value that Python cannot represent is converted to text.
    """
    row = ref.carried.slice(ref.position, 1)
    return {name: shown_values(row.column(index))[0] for index, name in enumerate(row.schema.names)}


def _integers(column: pa.Array) -> list[int]:
    """Return the values of an integer column without nulls; raise ArrowInvalid if one exceeds 64 bits."""
    numbers = column.cast(pa.int64())
    # Buffer 1 of an Arrow array has the values. An empty array may lack it.
    data, first = memoryview(numbers.buffers()[1] or b""), numbers.offset
    return data[first * 8 : (first + len(numbers)) * 8].cast("q").tolist()


def _unify_json_lines(files: Iterable[SourceFile]) -> None:
    """Give all JSON Lines files the same columns, because a key may occur in only some of them."""
    json_files = [file for file in files if file.format.kind == "JSON Lines"]
    if json_files:
        schema = stored_schema(common_schema([file.schema for file in json_files]))
        for file in json_files:
            file.schema = schema
