"""A sorted copy of rows: a Parquet file that holds them in sending order.

The file has the columns that the job reads, and the ordinals as its last column. Its metadata (`about`) names
its order and its run. A position is the index of a row in the file, from 0. The file is written in bounded
memory. DuckDB sorts only the sort keys, which gives the position of each row. The rows themselves are
partitioned by position into buckets. So values of any type pass through Arrow and Parquet only, not through
DuckDB.
"""

from __future__ import annotations

import logging
import shutil
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from duckdb import DuckDBPyConnection

log = logging.getLogger(__name__)

_ABOUT = b"batchrunner"
"""Key of `about` in the metadata of the Parquet file."""


class SortedCopy:
    """Reads a sorted copy. In a joined run each of its row groups is a lease."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises InputError if it is missing or damaged."""
        self._path = path
        try:
            self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER_BYTES)
            self.about: dict[str, Any] = orjson.loads(self._file.schema_arrow.metadata[_ABOUT])
        except (OSError, pa.ArrowException, KeyError, TypeError, orjson.JSONDecodeError):
            raise InputError(
                f"{path}: the sorted rows of this run are missing or damaged",
                hint="put the file back, or run the command again (with --join, once no worker runs and "
                f"{path.parent} is deleted): pending rows are sorted again, and finished rows are kept",
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
        rows = BitMap64()
        ordinals = self._file.schema_arrow.names[-1:]
        for group in self._groups(positions):
            rows |= rows_of_column(self._file.read_row_group(group, ordinals, use_threads=False).column(0))
        return rows

    def read(self, rows: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield these rows in the order of the copy; raises InputError.

        `positions` cover whole row groups, in which the rows lie; None stands for all positions.
        """
        try:
            for group in self._groups(positions or self.positions):
                metadata = self._file.metadata.row_group(group)
                size = batch_rows(metadata.num_rows, metadata.total_byte_size)
                for data in self._file.iter_batches(size, [group], use_threads=False):
                    *columns, numbers = data.schema.names
                    ordinals = data.column(numbers).to_pylist()
                    indices = [at for at, row in enumerate(ordinals) if row in rows]
                    if indices:
                        picked_data = data.select(columns).take(arrow_array(indices, pa.int64()))
                        yield RowBatch([ordinals[at] for at in indices], picked_data)
        except (OSError, pa.ArrowException) as failure:
            raise InputError(f"{self._path}: cannot be read: {first_line(failure)}") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _groups(self, positions: range) -> range:
        starts = self.group_starts
        return range(bisect_left(starts, positions.start), bisect_left(starts, positions.stop))


MEMORY = "128MB"
"""Memory limit of DuckDB. DuckDB exceeds it, but the process with Arrow's memory stays below 512 MB."""
CHUNK_ROWS = 16_384
"""Rows that are passed to or from DuckDB at once."""
MOST_OUTPUT_TOKENS = 1 << 30
"""A sort key has this number if `max_new_tokens` is larger. No model generates as many tokens."""
MOST_GROUP_BYTES = 32 << 20
"""Approximate maximum size of a row group in bytes."""
BUCKET_BYTES = 48 << 20
"""Approximate size of a bucket in bytes. Sorting a bucket takes about three times as much memory."""
_KEYS = {"first": pa.int64(), "key": pa.binary(), "tail": pa.int64(), "row": pa.int64(), "size": pa.int64()}
"""Columns of a sort key; the first four decide the order."""
_POSITION, _ORDINAL = "\0position", "\0row"
"""Names of the columns that are added to those of the input; no input column has such a name."""


@contextmanager
def connect(work: Path) -> Iterator[DuckDBPyConnection]:
    """Open a DuckDB database in bounded memory that spills to a directory; its errors become OSError."""
    import duckdb  # noqa: PLC0415 - 25 MB, for jobs that sort

    spilled = str(work / "spilled")
    try:
        with duckdb.connect(config={"memory_limit": MEMORY, "threads": 1, "temp_directory": spilled}) as db:
            yield db
    except duckdb.Error as failure:
        raise OSError(first_line(failure)) from None


def write_sorted(
    job_input: JobInput, rows: BitMap64, path: Path, *, about: dict[str, Any], check_stop: Callable[[], None]
) -> None:
    """Write a sorted copy of these rows; `about["order"]` is "prefix" or "longest_first".

    Each row is rendered once and read twice. `check_stop` is called before each row, and may raise to end the
    sort. Raises OSError if the disk is full. A sort that fails leaves no files.
    """
    work = path.with_suffix(".work")
    work.mkdir()
    try:
        with connect(work) as db:
            insert(db, "keys", _KEYS, _keys(job_input, rows, about["order"], check_stop))
            db.execute("CREATE TABLE sorted AS SELECT row, size FROM keys ORDER BY first, key, tail, row")
            db.execute("DROP TABLE keys")
            check_stop()
            sizes = (size for (size,) in _values(db, "SELECT size FROM sorted"))
            groups = list(cut_into_groups(sizes, lease_rows(len(rows))))
            db.execute("CREATE TABLE positions AS SELECT row, rowid AS position FROM sorted")
            db.execute("DROP TABLE sorted")
            from batchrunner.output.buckets import Buckets  # noqa: PLC0415 - only for jobs that sort

            buckets = Buckets(work, _POSITION, list(_bucket_ends(groups)))
            positions = _values(db, "SELECT position FROM positions ORDER BY row")
            for table in _with_positions(job_input, rows, positions):
                buckets.put(table)
                check_stop()
        with whole_file(path) as temporary:
            _write_copy(buckets.take(), [size for size, _ in groups], temporary, about)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def insert(
    db: DuckDBPyConnection, table: str, kinds: Mapping[str, pa.DataType], rows: Iterator[tuple[Any, ...]]
) -> None:
    """Create a table with these columns and insert the rows, many at once."""
    no_rows = pa.Table.from_batches([], pa.schema(kinds.items()))
    db.from_arrow(no_rows).create(table)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        columns = zip(*chunk, strict=True)
        arrays = {}
        for (name, kind), values in zip(kinds.items(), columns, strict=True):
            arrays[name] = arrow_array(values, kind)
        db.from_arrow(pa.table(arrays)).insert_into(table)


def _values(db: DuckDBPyConnection, query: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query's result, in bounded memory."""
    for batch in db.sql(query).to_arrow_reader(CHUNK_ROWS):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _write_copy(tables: Iterable[pa.Table], sizes: Iterable[int], path: Path, about: dict[str, Any]) -> None:
    """Write tables as one Parquet file, without their last column, the position.

    `sizes` are the numbers of rows of all row groups. A table consists of whole row groups.
    """
    groups = iter(sizes)
    with ExitStack() as stack:
        writer = None
        for table in tables:
            rows = table.drop_columns(_POSITION).replace_schema_metadata({_ABOUT: orjson.dumps(about)})
            writer = writer or stack.enter_context(pq.ParquetWriter(path, rows.schema, compression="zstd"))
            start = 0
            while start < rows.num_rows:
                size = next(groups)
                writer.write_table(rows.slice(start, size), row_group_size=size)
                start += size


def _keys(
    job_input: JobInput, rows: BitMap64, order: str, check_stop: Callable[[], None]
) -> Iterator[tuple[int, bytes, int, int, int]]:
    """Yield the sort key (_KEYS) of each row, even of a row that cannot be sent."""
    by_column = isinstance(job_input.job.sampling.max_new_tokens, FromColumn)
    for batch in job_input.dataset.read(rows, job_input.renderer.columns):
        size = batch.data.nbytes // len(batch.rows)  # mean size of a row, without its prompt
        for item in job_input.renderer.render(batch, check_stop):
            if not isinstance(item, Request):
                yield 0, b"", 0, item.ref.row, size
                continue
            prompt = prompt_bytes(item)
            length = len(prompt)
            if by_column:
                length = max(0, min(item.sampling["max_new_tokens"], MOST_OUTPUT_TOKENS))
            first = -length if order == "longest_first" else 0
            yield first, *sort_key(prompt), item.ref.row, size + len(prompt)


def cut_into_groups(sizes: Iterable[int], group_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the rows and bytes of each row group; `sizes` are the bytes of the rows in order.

    A group has `group_rows` rows, or fewer if it would exceed MOST_GROUP_BYTES.
    """
    rows = total = 0
    for size in sizes:
        if rows == group_rows or (rows and total + size > MOST_GROUP_BYTES):
            yield rows, total
            rows = total = 0
        rows, total = rows + 1, total + size
    if rows:
        yield rows, total


def _bucket_ends(groups: list[tuple[int, int]]) -> Iterator[int]:
    """Yield the position behind the last row of each bucket; a bucket holds whole row groups."""
    position = bucket_bytes = 0
    for rows, size in groups:
        position += rows
        bucket_bytes += size
        if bucket_bytes >= BUCKET_BYTES:
            yield position
            bucket_bytes = 0
    yield position + 1  # the end of the last bucket, which may be empty


def _with_positions(
    job_input: JobInput, rows: BitMap64, positions: Iterator[tuple[int]]
) -> Iterator[pa.Table]:
    """Yield the rows in input order with their ordinals and positions; `positions` are in input order."""
    names = job_input.renderer.columns
    schema = job_input.dataset.schema_of(names)
    for added_name in (_ORDINAL, _POSITION):
        schema = schema.append(pa.field(added_name, pa.int64()))
    for batch in job_input.dataset.read(rows, names):
        batch_positions = [position for (position,) in islice(positions, len(batch.rows))]
        ordinal_column = arrow_array(batch.rows, pa.int64())
        position_column = arrow_array(batch_positions, pa.int64())
        columns = [*batch.data.columns, ordinal_column, position_column]
        yield pa.Table.from_arrays(columns, schema=schema)


def prepare_order(
    job_input: JobInput,
    rows: BitMap64,
    directory: Path,
    writer: str,
    check_stop: Callable[[], None],
    *,
    replace: bool = True,
) -> tuple[Path | None, OrderDecision]:
    """Decide on the order of these rows and sort them; return the path of the sorted copy and the decision.

    The path is None for input order. The copy is written to `directory` with `writer` in its name; `replace`
    deletes earlier copies there. `check_stop` is called regularly, and may raise to end the sort. Raises
    InputError, or OutputError if the disk is full and `order` is not `auto`.
    """
    if replace:
        remove_sorted_copies(directory)
    decision = decide_order(job_input, rows, check_stop)
    if decision.order == "input" or not rows:
        return None, decision
    path = directory / f"order-{writer}.parquet"
    began = time.monotonic()
    log.info("sorting %s rows", f"{len(rows):,}")
    about = {
        "order": decision.order, "fingerprint": fingerprint(job_input.job, job_input.dataset.facts(), ""),
    }  # fmt: skip
    try:
        write_sorted(job_input, rows, path, about=about, check_stop=check_stop)
    except (OSError, pa.ArrowException) as failure:
        problem = f"{directory}: {len(rows)} rows could not be sorted: {first_line(failure)}"
        if job_input.job.order != "auto":
            raise OutputError(problem, hint="free disk space, or set order: input") from None
        decision = OrderDecision("input", f"{decision.order} would be better, but {problem}")
        log.warning("%s", decision)
        return None, decision
    log.info("sorted in %.0f s (%d MiB)", time.monotonic() - began, path.stat().st_size >> 20)
    return path, decision


def find_sorted_copy(
    job_input: JobInput, rows: BitMap64, directory: Path
) -> tuple[Path, OrderDecision] | None:
    """Return an earlier attempt's sorted copy with the job's order and all these rows; None without one."""
    order = job_input.job.order
    for path in directory.glob("order-*.parquet"):
        try:
            copy = SortedCopy(path)
            now = fingerprint(job_input.job, job_input.dataset.facts(), "")
            check_same_run(copy.about["fingerprint"], now, directory)
        except (InputError, ResumeError):
            continue
        kind = copy.about["order"]
        fits = kind == ("prefix" if order == "auto" else order)
        if rows and fits and not rows - copy.rows(copy.positions):
            return path, OrderDecision(kind, "sorted by an earlier attempt")
    return None


def remove_sorted_copies(directory: Path) -> None:
    """Delete the sorted copies of earlier attempts, finished or not. Raises OSError."""
    for path in directory.glob("*order-*"):  # also hidden files, which are unfinished
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
