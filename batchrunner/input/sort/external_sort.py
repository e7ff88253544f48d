"""External sort: writes a sorted copy of rows in bounded memory.

Only the sort keys are sorted, by duckdb, which gives the position of each row. Then the rows are partitioned
by position into buckets. So the columns, whatever their types, pass through Arrow and Parquet only.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.types import Request
from batchrunner.input.job_input import MOST_LEASE_ROWS, JobInput, lease_rows
from batchrunner.input.prefixes import common_length, prompt_bytes, sort_key
from batchrunner.input.sort.sorted_copy import write_copy
from batchrunner.job.sampling import FromColumn
from batchrunner.output.arrow_arrays import arrow_array
from batchrunner.output.buckets import Buckets
from batchrunner.output.files import whole_file

MEMORY = "128MB"
"""Memory limit of duckdb. It takes more than that, but with Arrow's memory the process stays below 512 MB."""
CHUNK_ROWS = 16_384
"""Keys that are passed to or from duckdb at once."""
MOST_OUTPUT_TOKENS = 1 << 30
"""Upper bound of `max_new_tokens` in a sort key, more than any model generates."""
MOST_GROUP_BYTES = 32 << 20
"""Approximate most bytes of a row group."""
BUCKET_BYTES = 48 << 20
"""Approximate bytes of rows in a bucket; sorting one takes about three times as much memory."""


class SortKey(NamedTuple):
    """The sort key of a row: keys are compared field by field, except `size`."""

    first: int
    """Compared before everything else."""
    key: bytes
    """Checksums of the blocks of the prompt, see `prefixes.sort_key`."""
    tail: int
    """Checksum of the rest of the prompt."""
    row: int
    """Ordinal of the row."""
    size: int
    """Approximate bytes of the row."""


_TYPES = {"first": pa.int64(), "key": pa.binary(), "tail": pa.int64(), "row": pa.int64(), "size": pa.int64()}


class KeySort:
    """Sorts keys with duckdb, in bounded memory and on disk. All methods raise OSError where duckdb fails."""

    def __init__(self, directory: Path) -> None:
        """Start duckdb, which writes to `directory` what exceeds its memory."""
        import duckdb  # noqa: PLC0415 - 25 MB, for jobs that sort

        self._error = duckdb.Error
        with self._errors():
            self._duckdb = duckdb.connect(
                config={"memory_limit": MEMORY, "threads": 1, "temp_directory": str(directory / "spilled")}
            )
            self._duckdb.execute(
                "CREATE TABLE keys (first BIGINT, key BLOB, tail BIGINT, row BIGINT, size BIGINT)"
            )

    def sort(self, keys: Iterator[SortKey]) -> None:
        """Sort these keys."""
        while chunk := list(islice(keys, CHUNK_ROWS)):
            columns = zip(zip(*chunk, strict=True), _TYPES.values(), strict=True)
            table = pa.table([arrow_array(values, kind) for values, kind in columns], names=list(_TYPES))
            with self._errors():
                self._duckdb.register("chunk", table)
                self._duckdb.execute("INSERT INTO keys SELECT * FROM chunk")
        with self._errors():
            self._duckdb.execute(
                "CREATE TABLE sorted AS SELECT key, row, size FROM keys ORDER BY first, key, tail, row"
            )
            self._duckdb.execute("DROP TABLE keys")

    def in_order(self) -> Iterator[tuple[bytes, int]]:
        """Yield `key` and `size` of each row in sorted order."""
        for batch in self._batches("SELECT key, size FROM sorted"):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def positions(self) -> Iterator[pa.Array]:
        """Yield the sorted positions of the rows, counted from 0, in input order; deletes the keys."""
        with self._errors():
            self._duckdb.execute("CREATE TABLE positions AS SELECT row, rowid AS position FROM sorted")
            self._duckdb.execute("DROP TABLE sorted")
        for batch in self._batches("SELECT position FROM positions ORDER BY row"):
            yield batch.column(0)

    def close(self) -> None:
        """Close duckdb, which frees its memory and files."""
        self._duckdb.close()

    def _batches(self, query: str) -> Iterator[pa.RecordBatch]:
        with self._errors():
            yield from self._duckdb.sql(query).to_arrow_reader(CHUNK_ROWS)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._error as failure:
            raise OSError(str(failure).splitlines()[0]) from None


def write_sorted(
    job_input: JobInput, rows: BitMap64, path: Path, about: dict[str, Any], check_stop: Callable[[], None]
) -> None:
    """Write a sorted copy of these rows; `about["order"]` is "prefix" or "longest_first".

    Each row is rendered once and read twice. `check_stop` is called before each row, and may raise to end
    the sort. Raises OSError where the disk is full. Nothing is left of a sort that fails.
    """
    work = path.with_suffix(".work")
    work.mkdir()
    try:
        with closing(KeySort(work)) as keys:
            keys.sort(_keys(job_input, rows, about["order"], check_stop))
            check_stop()
            groups = list(cut_into_groups(keys.in_order(), lease_rows(len(rows))))
            buckets = Buckets(work, _POSITION, list(_bucket_ends(groups)))
            for table in _with_positions(job_input, rows, keys.positions()):
                buckets.put(table)
                check_stop()
        with whole_file(path) as temporary:
            tables = (table.drop_columns(_POSITION) for table in buckets.take())
            write_copy(tables, [size for size, _ in groups], temporary, about)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _keys(
    job_input: JobInput, rows: BitMap64, order: str, check_stop: Callable[[], None]
) -> Iterator[SortKey]:
    """Yield the key of each row, also of a row that cannot be sent."""
    longest_first = order == "longest_first"
    by_column = isinstance(job_input.job.sampling.max_new_tokens, FromColumn)
    for batch in job_input.dataset.read(rows, job_input.renderer.columns):
        size = batch.data.nbytes // len(batch.rows)  # of a row, without its prompt
        for item in job_input.renderer.render(batch, check_stop):
            if not isinstance(item, Request):
                yield SortKey(0, b"", 0, item.ref.row, size)
                continue
            prompt = prompt_bytes(item)
            length = len(prompt)
            if by_column:
                length = max(0, min(item.sampling["max_new_tokens"], MOST_OUTPUT_TOKENS))
            first = -length if longest_first else 0
            yield SortKey(first, *sort_key(prompt), item.ref.row, size + len(prompt))


def cut_into_groups(rows: Iterable[tuple[bytes, int]], wanted: int) -> Iterator[tuple[int, int]]:
    """Yield the number of rows and of bytes of each row group; `rows` are sort keys and bytes, in order.

    A group has from `wanted` to twice as many rows, but at most MOST_LEASE_ROWS and about MOST_GROUP_BYTES.
    Within these limits it ends where two neighbours have the shortest common prefix.
    """
    least = max(1, min(wanted, MOST_LEASE_ROWS // 2))
    shared: list[int] = []  # length of the prefix that each row shares with the row before
    sizes: list[int] = []
    before = b""
    total = 0
    for key, size in rows:
        shared.append(common_length(before, key))
        while len(sizes) == 2 * least or (sizes and total + size > MOST_GROUP_BYTES):
            first = min(least, (len(sizes) + 1) // 2)
            cut = min(range(first, len(shared)), key=shared.__getitem__)
            yield cut, sum(sizes[:cut])
            shared, sizes = shared[cut:], sizes[cut:]
            total = sum(sizes)
        sizes.append(size)
        total += size
        before = key
    if sizes:
        yield len(sizes), total


def _bucket_ends(groups: list[tuple[int, int]]) -> Iterator[int]:
    """Yield the position after the last row of each bucket; a bucket holds whole row groups."""
    position = gathered = 0
    for rows, size in groups:
        position += rows
        gathered += size
        if gathered >= BUCKET_BYTES:
            yield position
            gathered = 0
    yield position + 1  # the end of the last bucket, which may be empty


_POSITION, _ORDINAL = "\0position", "\0row"
"""Names of columns, which no input column can have."""


def _with_positions(job_input: JobInput, rows: BitMap64, positions: Iterator[pa.Array]) -> Iterator[pa.Table]:
    """Yield the rows in input order with their ordinals and positions; `positions` come in input order."""
    names = job_input.renderer.columns
    kinds = [job_input.dataset.type_of(name) for name in names]
    # one schema: files may give a column different metadata
    schema = pa.schema(zip([*names, _ORDINAL, _POSITION], [*kinds, pa.int64(), pa.int64()], strict=True))
    waiting = pa.chunked_array([], pa.int64())
    for batch in job_input.dataset.read(rows, names):
        count = len(batch.rows)
        while len(waiting) < count:
            waiting = pa.chunked_array([*waiting.chunks, next(positions)])
        columns = [batch.data.column(name) for name in names]
        ordinals = arrow_array(batch.rows, pa.int64())
        yield pa.Table.from_arrays([*columns, ordinals, waiting.slice(0, count)], schema=schema)
        waiting = waiting.slice(count)
