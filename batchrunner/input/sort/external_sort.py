"""A sorted copy of the rows that are to be done, written in bounded memory.

Their keys are sorted first, which says where each row belongs; then the rows are dealt out to where they
belong. So whatever type a column has, it passes through nothing but Arrow and Parquet.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.types import Request
from batchrunner.input.prefixes import common, prefix_of, sort_key
from batchrunner.input.row_reader import ABOUT
from batchrunner.input.select import MOST_LEASE_ROWS, lease_rows
from batchrunner.input.sort.key_sort import KeySort, SortKey
from batchrunner.job.spec import FromColumn
from batchrunner.output.buckets import Buckets
from batchrunner.output.columns import arrow_array
from batchrunner.output.run_dir import whole_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from pyroaring import BitMap64

    from batchrunner.core.types import Outcome
    from batchrunner.input.job_input import JobInput

LARGEST = 1 << 30
"""Tokens of an output: more than any model gives."""
MOST_GROUP_BYTES = 32 << 20
"""Of a row group, roughly, however few rows that are."""
BUCKET_BYTES = 48 << 20
"""Rows that are in memory at once while they are dealt out, roughly; three times as much is used."""


def write_sorted(
    job_input: JobInput, rows: BitMap64, path: Path, about: dict[str, Any], look: Callable[[], None]
) -> None:
    """Write a copy of these rows in the order that `about` names (`order`: prefix or longest_first).

    Each row is rendered once and read twice. `look` is called now and then, to raise what ends it. Raises
    OSError where there is no room; what was written is removed then.
    """
    work = path.with_suffix(".work")
    work.mkdir()
    try:
        with closing(KeySort(work)) as keys:
            for key in _keys(job_input, rows, about["order"], look):
                keys.add(key)
            keys.sort()
            look()
            groups = list(cut_into_groups(keys.in_order(), lease_rows(len(rows))))
            buckets = Buckets(work, _PLACE, list(_bucket_ends(groups)))
            for table in _with_places(job_input, rows, keys.places()):
                buckets.put(table)
                look()
        with whole_file(path) as temporary:
            _write(buckets.take(), [count for count, _ in groups], temporary, about)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _keys(job_input: JobInput, rows: BitMap64, kind: str, look: Callable[[], None]) -> Iterator[SortKey]:
    by_column = isinstance(job_input.job.sampling.max_new_tokens, FromColumn)
    for batch in job_input.dataset.read(rows, job_input.renderer.columns):
        look()
        size = batch.data.nbytes // len(batch.rows)
        for item in job_input.renderer.render(batch):
            yield _key(item, size, longest_first=kind == "longest_first", by_column=by_column)


def _key(item: Request | Outcome, size: int, *, longest_first: bool, by_column: bool) -> SortKey:
    """Make the key of a row; one that cannot be sent has one too. `size` is its share of its batch."""
    if not isinstance(item, Request):
        return SortKey(0, b"", 0, item.ref.row, size)
    prefix = prefix_of(item)
    first = 0
    if longest_first:
        first = -(_longest_output(item.sampling) if by_column else len(prefix))
    return SortKey(first, *sort_key(prefix), item.ref.row, size + len(prefix))


def _longest_output(sampling: Mapping[str, Any]) -> int:
    """Return the tokens that an output may have; a column may hold more than a key can."""
    most: int = sampling["max_new_tokens"]
    return max(0, min(most, LARGEST))


def cut_into_groups(rows: Iterable[tuple[bytes, int]], wanted: int) -> Iterator[tuple[int, int]]:
    """Yield rows and bytes of each row group for rows given by their sort keys and bytes.

    A group has about the `wanted` rows, twice as many and 8,192 at most, and ends where the next row has
    least in common with the row before.
    """
    least = max(1, min(wanted, MOST_LEASE_ROWS // 2))
    alike: list[int] = []  # what each row has in common with the row before
    sizes: list[int] = []
    before = b""
    total = 0
    for key, size in rows:
        alike.append(common(before, key))
        while len(sizes) == 2 * least or (sizes and total + size > MOST_GROUP_BYTES):
            first = min(least, (len(sizes) + 1) // 2)
            cut = min(range(first, len(alike)), key=alike.__getitem__)
            yield cut, sum(sizes[:cut])
            alike, sizes = alike[cut:], sizes[cut:]
            total = sum(sizes)
        sizes.append(size)
        total += size
        before = key
    if sizes:
        yield len(sizes), total


def _bucket_ends(groups: list[tuple[int, int]]) -> Iterator[int]:
    """Yield the places where the buckets end, which hold whole row groups."""
    place = gathered = 0
    for rows, size in groups:
        place += rows
        gathered += size
        if gathered >= BUCKET_BYTES:
            yield place
            gathered = 0
    yield place + 1  # for the last bucket, if anything is left for it


_PLACE, _ORDINAL = "\0place", "\0row"
"""Names that no column of the input has."""


def _with_places(job_input: JobInput, rows: BitMap64, places: Iterator[pa.Array]) -> Iterator[pa.Table]:
    """Yield the rows with their places and ordinals, in input order."""
    names = job_input.renderer.columns
    kinds = [job_input.dataset.schema.field(name).type for name in names]
    # files may differ in what they say of a column beyond its type
    schema = pa.schema(zip([*names, _ORDINAL, _PLACE], [*kinds, pa.int64(), pa.int64()], strict=True))
    waiting = pa.chunked_array([], pa.int64())
    for batch in job_input.dataset.read(rows, names):
        count = len(batch.rows)
        while len(waiting) < count:
            waiting = pa.chunked_array([*waiting.chunks, next(places)])
        columns = [batch.data.column(name) for name in names]
        ordinals = arrow_array(batch.rows, pa.int64())
        yield pa.Table.from_arrays([*columns, ordinals, waiting.slice(0, count)], schema=schema)
        waiting = waiting.slice(count)


def _write(tables: Iterator[pa.Table], counts: Iterable[int], path: Path, about: dict[str, Any]) -> None:
    """Write tables, which hold whole row groups, in row groups of so many rows."""
    remaining = iter(counts)
    with ExitStack() as stack:
        writer = None
        for table in tables:
            rows = table.drop_columns(_PLACE).replace_schema_metadata({ABOUT: orjson.dumps(about)})
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(path, rows.schema, compression="zstd"))
            start = 0
            while start < rows.num_rows:
                count = next(remaining)
                writer.write_table(rows.slice(start, count), row_group_size=count)
                start += count
