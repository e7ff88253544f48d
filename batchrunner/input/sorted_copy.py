"""Writes and reads a sorted copy of the input: a Parquet file with the rows in sending order.

The file has the columns that the job reads, and the row numbers in the input as its last column. Its metadata
(`about`) names its order and its run. The position of a row is its index in the file, from 0.

Writing needs little memory. DuckDB sorts only the sort keys, which gives the position of each row. The rows
themselves are partitioned by position into buckets, and each bucket is sorted in memory. Values of rows pass
only through Arrow and Parquet, which keep every type, and not through DuckDB.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import shutil
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.core.errors import InputError, OutputError, ResumeError, first_line
from batchrunner.core.types import Request, rows_of_column
from batchrunner.input.dataset import RowBatch, batch_rows
from batchrunner.input.files import READ_BUFFER_BYTES
from batchrunner.input.job_input import JobInput, lease_rows
from batchrunner.input.order import OrderDecision
from batchrunner.input.order_sample import decide_order
from batchrunner.input.prompt_bytes import prompt_bytes, sort_key
from batchrunner.job.sampling import FromColumn
from batchrunner.output.arrow_arrays import arrow_array
from batchrunner.output.files import whole_file
from batchrunner.output.run_json import check_same_run, fingerprint

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, Error

log = logging.getLogger(__name__)

COPY_PREFIX = "order-"
"""Beginning of the names of sorted copies."""
_ABOUT = b"batchrunner"
"""Metadata key under which the Parquet file stores its order and its run."""
MEMORY_BYTES = 128 << 20
"""Memory limit of DuckDB for a sort of at most SORTED_BYTES. DuckDB exceeds it, but the whole process stays
below 512 MB."""
SORTED_BYTES = 2 << 30
"""Bytes that DuckDB surely sorts within MEMORY_BYTES. It sorted 4 GB of sort keys, and failed with 14 GB."""
KEY_BYTES = 48
"""Approximate bytes that a row of the table of sort keys takes, besides its key."""
CHUNK_ROWS = 16_384
"""Number of rows that are passed to or from DuckDB at once."""
MOST_OUTPUT_TOKENS = 1 << 30
"""Upper limit of `max_new_tokens` in a sort key, more than any model generates."""
MOST_GROUP_BYTES = 32 << 20
"""Approximate maximum size of a row group in bytes."""
BUCKET_BYTES = 48 << 20
"""Approximate size of a bucket in bytes. Sorting a bucket takes about three times as much memory."""
_KEY_COLUMNS = {
    "first": pa.int64(),
    "key": pa.binary(),
    "tail": pa.int64(),
    "row": pa.int64(),
    "size": pa.int64(),
}
"""Columns of the table of sort keys. Rows are sorted by the first four; `size` is in bytes."""
_POSITION = "\0position"
"""Column with the positions of rows in the copy. No input column has this name."""
_ORDINAL = "\0row"
"""Column with the row numbers in the input. No input column has this name."""


class GroupSize(NamedTuple):
    """Size of a row group of a sorted copy."""

    rows: int
    bytes: int


class SortedCopy:
    """Reads a sorted copy: a Parquet file with the input's rows in sending order.

    If several workers share a run, a worker claims the rows of one row group at a time.
    """

    def __init__(self, path: Path) -> None:
        """Open the file; raise InputError if it is missing or damaged."""
        self._path = path
        try:
            self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER_BYTES)
            self.about: dict[str, Any] = orjson.loads(self._file.schema_arrow.metadata[_ABOUT])
            """The `order` of the copy, and the `fingerprint` of its run."""
        except (OSError, pa.ArrowException, KeyError, TypeError, orjson.JSONDecodeError):
            raise InputError(
                f"{path}: the sorted rows of this run are missing or damaged",
                hint="put the file back, or run the command again (with --join: stop all workers and delete "
                f"{path.parent} before): pending rows are sorted again, and finished rows are kept",
            ) from None
        groups = range(self._file.num_row_groups)
        counts = [self._file.metadata.row_group(group).num_rows for group in groups]
        self.group_starts = [0, *accumulate(counts)]
        """Position at which each row group begins; at the end, the number of all rows."""

    @property
    def positions(self) -> range:
        """Range of the positions of all rows."""
        return range(self.group_starts[-1])

    def rows(self, positions: range) -> BitMap64:
        """Return the row numbers (in the input) of the rows at these positions of the copy.

        `positions` must cover whole row groups.
        """
        rows = BitMap64()
        # The last column has the row numbers.
        ordinals = self._file.schema_arrow.names[-1:]
        for group in self._groups(positions):
            rows |= rows_of_column(self._file.read_row_group(group, ordinals, use_threads=False).column(0))
        return rows

    def read(self, rows: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield the rows with these numbers, in the order of the copy; raise InputError.

        Only rows at `positions` of the copy are read, which must cover whole row groups; None means all.
        """
        try:
            for group in self._groups(positions or self.positions):
                metadata = self._file.metadata.row_group(group)
                size = batch_rows(metadata.num_rows, metadata.total_byte_size)
                for data in self._file.iter_batches(size, [group], use_threads=False):
                    # The row numbers are not passed on as a column.
                    *columns, ordinal_column = data.schema.names
                    ordinals = data.column(ordinal_column).to_pylist()
                    indices = [index for index, row in enumerate(ordinals) if row in rows]
                    if indices:
                        selected_data = data.select(columns).take(arrow_array(indices, pa.int64()))
                        yield RowBatch([ordinals[index] for index in indices], selected_data)
        except (OSError, pa.ArrowException) as failure:
            raise InputError(f"{self._path}: cannot be read: {first_line(failure)}") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _groups(self, positions: range) -> range:
        """Return the numbers of the row groups that contain `positions`."""
        starts = self.group_starts
        return range(bisect_left(starts, positions.start), bisect_left(starts, positions.stop))


@contextmanager
def connect(work: Path) -> Iterator[DuckDBPyConnection]:
    """Create a DuckDB database with bounded memory in the directory `work`.

    A database in memory would not do: from some ten million rows on, its tables leave no memory for a sort.
    DuckDB's errors become OSError, with ENOMEM if memory runs out, and with ENOSPC if the disk is full.
    """
    import duckdb  # noqa: PLC0415 - 25 MB, for jobs that sort

    # DuckDB waits while an earlier database of this process at the same path exists, although it was closed.
    path = work / f"{secrets.token_hex(8)}.duckdb"
    try:
        with duckdb.connect(
            path,
            config={
                "memory_limit": _memory_limit(MEMORY_BYTES),
                "threads": 1,
                "temp_directory": str(work / "spilled"),
            },
        ) as db:
            yield db
    except duckdb.Error as failure:
        is_memory = isinstance(failure, duckdb.OutOfMemoryException)
        raise _os_error(failure, is_memory=is_memory) from None


def _os_error(failure: Error, *, is_memory: bool) -> OSError:
    """Return an error of DuckDB as an OSError; `is_memory` says that DuckDB calls it "out of memory".

    DuckDB does so too if rows that do not fit into memory find no room on the disk. Then its text names the
    setting that limits its temporary files, by default to 90 % of the free disk space.
    """
    text, reason = str(failure), first_line(failure)
    disk_is_full = os.strerror(errno.ENOSPC)
    if disk_is_full in text:
        return OSError(errno.ENOSPC, reason)
    if "max_temp_directory_size" in text:
        return OSError(errno.ENOSPC, f"{disk_is_full}: {reason}")
    return OSError(errno.ENOMEM if is_memory else errno.EIO, reason)


def _memory_limit(size: int) -> str:
    """Return a number of bytes as a value of DuckDB's `memory_limit`."""
    return f"{size // 1_000_000}MB"


def allow_memory_to_sort(db: DuckDBPyConnection, size: int) -> None:
    """Set the memory limit of a database to what a sort of `size` bytes needs, at least MEMORY_BYTES.

    DuckDB sorts stretches of rows that fit into memory, and then merges all stretches at once. With twice the
    memory, stretches are twice as long, and twice as many can be merged. So the memory grows with the square
    root of the size.
    """
    memory = round(MEMORY_BYTES * max(1.0, math.sqrt(size / SORTED_BYTES)))
    db.execute(f"SET memory_limit = '{_memory_limit(memory)}'")


def write_sorted(
    job_input: JobInput, rows: BitMap64, path: Path, *, about: dict[str, Any], check_stop: Callable[[], None]
) -> None:
    """Write a sorted copy of `rows` to `path`, in the order `about["order"]`: "prefix" or "longest_first".

    Each row is rendered once and read twice. `check_stop` is called before each row, and may raise an
    exception to stop the sort. Raises OSError, for example if the disk is full, MemoryError, or
    ArrowException. A sort that fails leaves no files.
    """
    from batchrunner.output.buckets import Buckets  # noqa: PLC0415 - only for jobs that sort

    work = path.with_suffix(".work")
    work.mkdir()
    try:
        with connect(work) as db:
            # The first reading of the input computes the sort keys. `first` decides in the order
            # "longest_first", and is 0 in the order "prefix". `key` and `tail` come from `sort_key`.
            keys = _sort_keys(job_input, rows, order=about["order"], check_stop=check_stop)
            insert(db, "keys", _KEY_COLUMNS, keys)
            query = "SELECT count(*), coalesce(sum(octet_length(key)), 0) FROM keys"
            ((key_count, key_bytes),) = _result_of(db, query)
            allow_memory_to_sort(db, key_count * KEY_BYTES + int(key_bytes))
            db.execute("CREATE TABLE sorted AS SELECT row, size FROM keys ORDER BY first, key, tail, row")
            # Tables are dropped as soon as possible, because the disk may be small.
            db.execute("DROP TABLE keys")
            check_stop()
            sizes = (size for (size,) in _result_of(db, "SELECT size FROM sorted"))
            groups = list(cut_into_groups(sizes, lease_rows(len(rows))))
            # `rowid` is the number of a row in its table, here the position in sorted order.
            db.execute("CREATE TABLE positions AS SELECT row, rowid AS position FROM sorted")
            db.execute("DROP TABLE sorted")
            # The second reading, in input order, writes each row to the file of its bucket, a range of
            # positions. A bucket is small enough to be sorted in memory.
            buckets = Buckets(work, _POSITION, list(_bucket_ends(groups)))
            positions = (
                position for (position,) in _result_of(db, "SELECT position FROM positions ORDER BY row")
            )
            for table in _with_positions(job_input, rows, positions):
                buckets.put(table)
                check_stop()
        with whole_file(path) as temporary:
            _write_copy(
                buckets.take(),
                rows_by_group=[group.rows for group in groups],
                path=temporary,
                about=about,
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)


def insert(
    db: DuckDBPyConnection, table: str, types: Mapping[str, pa.DataType], rows: Iterator[tuple[Any, ...]]
) -> None:
    """Create a table in DuckDB with columns of these types, and insert `rows`, CHUNK_ROWS at a time."""
    # The table must exist even if there are no rows.
    no_rows = pa.Table.from_batches([], pa.schema(types.items()))
    # One transaction for all chunks, because each transaction waits for the disk.
    db.begin()
    db.from_arrow(no_rows).create(table)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        columns = zip(*chunk, strict=True)
        arrays = {}
        for (name, kind), values in zip(types.items(), columns, strict=True):
            arrays[name] = arrow_array(values, kind)
        db.from_arrow(pa.table(arrays)).insert_into(table)
    db.commit()


def _result_of(db: DuckDBPyConnection, query: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query's result, in bounded memory."""
    for batch in db.sql(query).to_arrow_reader(CHUNK_ROWS):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _write_copy(
    tables: Iterable[pa.Table], *, rows_by_group: Iterable[int], path: Path, about: dict[str, Any]
) -> None:
    """Write tables as one Parquet file, without their column of positions.

    `rows_by_group` has the number of rows of each row group. Each table consists of whole row groups. `about`
    is stored in the metadata of the file.
    """
    remaining_groups = iter(rows_by_group)
    with ExitStack() as stack:
        writer = None
        for table in tables:
            rows = table.drop_columns(_POSITION).replace_schema_metadata({_ABOUT: orjson.dumps(about)})
            if writer is None:
                # All tables have the schema of the first one.
                writer = stack.enter_context(pq.ParquetWriter(path, rows.schema, compression="zstd"))
            start = 0
            while start < rows.num_rows:
                group_rows = next(remaining_groups)
                writer.write_table(rows.slice(start, group_rows), row_group_size=group_rows)
                start += group_rows


def _sort_keys(
    job_input: JobInput, rows: BitMap64, *, order: str, check_stop: Callable[[], None]
) -> Iterator[tuple[int, bytes, int, int, int]]:
    """Yield the sort key (_KEY_COLUMNS) of each row; rows that cannot be rendered come first."""
    has_limit_column = isinstance(job_input.job.sampling.max_new_tokens, FromColumn)
    for batch in job_input.dataset.read(rows, job_input.renderer.columns):
        # Mean size of a row in the batch, without its prompt.
        size = batch.data.nbytes // len(batch.rows)
        for item in job_input.renderer.render(batch, check_stop):
            if not isinstance(item, Request):
                yield 0, b"", 0, item.ref.row, size
                continue
            prompt = prompt_bytes(item)
            # In the order "prefix", only the prompt decides.
            length = 0
            if order == "longest_first":
                length = len(prompt)
                if has_limit_column:
                    # If rows have limits of their own, the limit decides, because long outputs take the most
                    # time.
                    length = max(0, min(item.sampling["max_new_tokens"], MOST_OUTPUT_TOKENS))
            # Negative, because DuckDB sorts in ascending order and the longest rows come first.
            first = -length
            yield first, *sort_key(prompt), item.ref.row, size + len(prompt)


def cut_into_groups(sizes: Iterable[int], most_rows: int) -> Iterator[GroupSize]:
    """Yield the size of each row group.

    `sizes` has the bytes of each row, in order. A group has `most_rows` rows, or fewer if it would exceed
    MOST_GROUP_BYTES.
    """
    group_rows = group_bytes = 0
    for size in sizes:
        is_full = group_rows == most_rows or group_bytes + size > MOST_GROUP_BYTES
        # A row of more than MOST_GROUP_BYTES becomes a group of its own.
        if group_rows and is_full:
            yield GroupSize(group_rows, group_bytes)
            group_rows = group_bytes = 0
        group_rows += 1
        group_bytes += size
    if group_rows:
        yield GroupSize(group_rows, group_bytes)


def _bucket_ends(groups: Iterable[GroupSize]) -> Iterator[int]:
    """Yield the position after the last row of each bucket. A bucket holds whole row groups."""
    position = bucket_bytes = 0
    for group in groups:
        position += group.rows
        bucket_bytes += group.bytes
        if bucket_bytes >= BUCKET_BYTES:
            yield position
            bucket_bytes = 0
    # The ends must ascend, so the last bucket ends one position later. If the last group filled a bucket,
    # this last bucket is empty.
    yield position + 1


def _with_positions(job_input: JobInput, rows: BitMap64, positions: Iterator[int]) -> Iterator[pa.Table]:
    """Yield `rows` in input order, with a column of row numbers and a column of positions in the copy.

    `positions` yields the position of each row, in input order.
    """
    names = job_input.renderer.columns
    schema = job_input.dataset.schema_of(names)
    for added_name in (_ORDINAL, _POSITION):
        schema = schema.append(pa.field(added_name, pa.int64()))
    for batch in job_input.dataset.read(rows, names):
        batch_positions = list(islice(positions, len(batch.rows)))
        ordinal_column = arrow_array(batch.rows, pa.int64())
        position_column = arrow_array(batch_positions, pa.int64())
        columns = [*batch.data.columns, ordinal_column, position_column]
        yield pa.Table.from_arrays(columns, schema=schema)


def prepare_order(
    job_input: JobInput,
    rows: BitMap64,
    directory: Path,
    *,
    writer: str,
    check_stop: Callable[[], None],
    remove_earlier: bool = True,
) -> tuple[Path | None, OrderDecision]:
    """Decide on the order of `rows` and sort them; return the path of the sorted copy and the decision.

    The path is None for input order. The copy is written to `directory`, with `writer` in its name. With
    `remove_earlier`, earlier copies in this directory are deleted. `check_stop` is called regularly, and may
    raise an exception to stop. Raises InputError. If the sort fails, for example for lack of disk space, a
    job with `order: auto` keeps input order, and any other job raises OutputError.
    """
    if remove_earlier:
        remove_sorted_copies(directory)
    decision = decide_order(job_input, rows, check_stop)
    if decision.order == "input" or not rows:
        return None, decision
    path = directory / f"{COPY_PREFIX}{writer}.parquet"
    began = time.monotonic()
    log.info("sorting %s rows", f"{len(rows):,}")
    about = {"order": decision.order, "fingerprint": _fingerprint(job_input)}
    try:
        write_sorted(job_input, rows, path, about=about, check_stop=check_stop)
    except (OSError, MemoryError, pa.ArrowException) as failure:
        reason = getattr(failure, "strerror", None) or first_line(failure)
        problem = f"{directory}: {len(rows)} rows could not be sorted: {reason}"
        if job_input.job.order != "auto":
            raise OutputError(problem, hint=_hint_after(failure)) from None
        decision = OrderDecision("input", f"order {decision.order!r} would be better, but {problem}")
        log.warning("%s", decision)
        return None, decision
    seconds, mebibytes = time.monotonic() - began, path.stat().st_size >> 20
    log.info("sorted the rows in %.0f s (%d MiB)", seconds, mebibytes)
    return path, decision


def _hint_after(failure: Exception) -> str:
    """Return what the user can do after a sort has failed."""
    no_sort = "set order: input, which needs no sort"
    number = getattr(failure, "errno", None)
    # More memory is no remedy, because DuckDB's memory limit does not depend on the machine.
    return f"free disk space, or {no_sort}" if number in {errno.ENOSPC, errno.EDQUOT} else no_sort


def _fingerprint(job_input: JobInput) -> dict[str, Any]:
    """Return the fingerprint of a copy's run. Its model is empty, because the order does not depend on it."""
    return fingerprint(job_input.job, job_input.dataset.facts(), "")


def find_sorted_copy(
    job_input: JobInput, rows: BitMap64, directory: Path
) -> tuple[Path, OrderDecision] | None:
    """Return a sorted copy from an earlier start of the run, if it has all `rows` in the job's order.

    Returns None if there is no such copy in `directory`.
    """
    wanted_order = job_input.job.order
    if wanted_order == "auto":
        # With `auto`, a copy exists only if an earlier start decided on "prefix".
        wanted_order = "prefix"
    for path in directory.glob(f"{COPY_PREFIX}*.parquet"):
        try:
            copy = SortedCopy(path)
        except InputError:
            # The copy is damaged.
            continue
        with closing(copy):
            try:
                # The fingerprint has an empty model, so models are not compared: the order does not
                # depend on them.
                check_same_run(copy.about["fingerprint"], _fingerprint(job_input), directory)
            except ResumeError:
                # The copy belongs to another job.
                continue
            copy_order = copy.about["order"]
            # Without rows to send, no copy is used, as in `prepare_order`.
            if rows and copy_order == wanted_order and not rows - copy.rows(copy.positions):
                return path, OrderDecision(copy_order, "sorted by an earlier start of the run")
    return None


def remove_sorted_copies(directory: Path) -> None:
    """Delete all sorted copies in a directory, also unfinished ones; raise OSError."""
    # The first `*` also matches hidden files, which are unfinished copies.
    for path in directory.glob(f"*{COPY_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
