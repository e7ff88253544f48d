"""External sort: writes a sorted copy of rows in bounded memory.

Only the sort keys are sorted, by duckdb, which gives the position of each row. Then the rows are partitioned
by position into buckets. So the columns, whatever their types, pass through Arrow and Parquet only.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.types import Outcome, Request
from batchrunner.input.job_input import MOST_LEASE_ROWS, JobInput, lease_rows
from batchrunner.input.prefixes import common_length, prompt_bytes, sort_key
from batchrunner.input.sort.key_sort import KeySort, SortKey
from batchrunner.input.sort.sorted_copy import write_copy
from batchrunner.job.sampling import FromColumn
from batchrunner.output.buckets import Buckets
from batchrunner.output.columns import arrow_array
from batchrunner.output.files import whole_file

MOST_OUTPUT_TOKENS = 1 << 30
"""Upper bound of `max_new_tokens` in a sort key, more than any model generates."""
MOST_GROUP_BYTES = 32 << 20
"""Approximate most bytes of a row group."""
BUCKET_BYTES = 48 << 20
"""Approximate bytes of rows in a bucket; sorting one takes about three times as much memory."""


def write_sorted(
    job_input: JobInput, rows: BitMap64, path: Path, about: dict[str, Any], check_stop: Callable[[], None]
) -> None:
    """Write a sorted copy of these rows; `about["order"]` is "prefix" or "longest_first".

    Each row is rendered once and read twice. `check_stop` is called after each batch, and may raise to end
    the sort. Raises OSError where the disk is full. Nothing is left of a sort that fails.
    """
    work = path.with_suffix(".work")
    work.mkdir()
    try:
        with closing(KeySort(work)) as keys:
            for key in _keys(job_input, rows, about["order"], check_stop):
                keys.add(key)
            keys.sort()
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
    by_column = isinstance(job_input.job.sampling.max_new_tokens, FromColumn)
    for batch in job_input.dataset.read(rows, job_input.renderer.columns):
        check_stop()
        size = batch.data.nbytes // len(batch.rows)
        for item in job_input.renderer.render(batch):
            yield _key(item, size, longest_first=order == "longest_first", by_column=by_column)


def _key(item: Request | Outcome, size: int, *, longest_first: bool, by_column: bool) -> SortKey:
    """Return the key of a row, also of a row that cannot be sent; `size` is its bytes without the prompt."""
    if not isinstance(item, Request):
        return SortKey(0, b"", 0, item.ref.row, size)
    prompt = prompt_bytes(item)
    first = 0
    if longest_first:
        first = -(_output_limit(item.sampling) if by_column else len(prompt))
    return SortKey(first, *sort_key(prompt), item.ref.row, size + len(prompt))


def _output_limit(sampling: Mapping[str, Any]) -> int:
    """Return `max_new_tokens`, limited to what a sort key can hold."""
    most: int = sampling["max_new_tokens"]
    return max(0, min(most, MOST_OUTPUT_TOKENS))


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
    kinds = [job_input.dataset.schema.field(name).type for name in names]
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
