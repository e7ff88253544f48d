"""The rows of the trials: blocks of the job's own, so chosen that every beginning of the sample is like all.

A block keeps together what stands together: rows that share a beginning meet in the cache as in the job.
Blocks are taken evenly by place and, among neighbours, by length (implicit stratification: a systematic
sample of a list that is sorted by both). They are sent in van der Corput's order, in which any first few lie
spread over the whole: a trial that is stopped early has seen the file's end too.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.core.types import Request
from batchrunner.input.dataset import RowBatch
from batchrunner.input.prefixes import prefix_of
from batchrunner.input.sort.plan import arrange, choice_for, order_at, remove_copies
from batchrunner.output.columns import arrow_array
from batchrunner.output.run_dir import whole_file, writing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from batchrunner.runner.prepare import PreparedJob

MOST_ROWS = 16_384
"""Four generations of the most that SGLang runs at once by default (4096): a trial sends what it needs."""
BLOCK_ROWS = 32
CANDIDATES = 2
"""Blocks that are looked at for each that is taken."""
STRATUM = 8
"""Neighbouring candidates that are put in order of length."""
MOST_BYTES = 256 << 20
"""Of candidates, roughly: they are in memory at once."""


@dataclass(frozen=True, slots=True)
class TuningSample:
    """The rows of the trials, in a file of their own."""

    path: Path
    rows: int
    of_rows: int

    def __str__(self) -> str:
        if self.rows == self.of_rows:
            return f"all {self.rows} rows"
        blocks = self.rows // BLOCK_ROWS
        return f"{self.rows} of {self.of_rows} rows, {blocks} blocks of {BLOCK_ROWS} from all over the input"


def take(prepared: PreparedJob, directory: Path) -> TuningSample:
    """Write the sample into a directory of ours; raises InputError or StorageError.

    Reads the columns that the job needs once at most, and sorts where the job's order is by prefix.
    """
    rows = prepared.selected()
    schema = pa.schema([prepared.dataset.schema.field(name) for name in prepared.renderer.columns])
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        wanted = min(MOST_ROWS, _affordable(prepared))
        if not schema.names:  # its rows are all alike, but a table without a column has none
            schema = pa.schema({"row": pa.int64()})
            data = [pa.record_batch([arrow_array(list(rows[:wanted]), pa.int64())], schema=schema)]
        elif len(rows) > wanted:
            blocks = _blocks(prepared, rows, candidates(len(rows), wanted // BLOCK_ROWS), directory)
            sizes = [_size(prepared, block) for block in blocks]
            data = [blocks[at] for at in spread(chosen(sizes))]
        else:
            data = [batch.data for batch in prepared.dataset.read(rows, schema.names)]
        table = pa.concat_tables(_table(batch, schema) for batch in data)
        path = directory / "sample.parquet"
        with whole_file(path) as temporary:
            pq.write_table(table, temporary, row_group_size=1024)
    return TuningSample(path, table.num_rows, len(rows))


def candidates(rows: int, blocks: int) -> list[int]:
    """Return the places where the candidates for so many blocks begin: evenly spread, none overlapping."""
    count = min(CANDIDATES * blocks, rows // BLOCK_ROWS)
    return [(rows - BLOCK_ROWS) * at // max(count - 1, 1) for at in range(count)]


def chosen(sizes: Sequence[float]) -> list[int]:
    """Return which candidates are taken: every second one, by place and then by size, to and fro."""
    listed: list[int] = []
    for number, begin in enumerate(range(0, len(sizes), STRATUM)):
        stratum = range(begin, min(begin + STRATUM, len(sizes)))
        listed += sorted(stratum, key=sizes.__getitem__, reverse=bool(number % 2))
    return sorted(listed[::CANDIDATES])


def spread(items: Sequence[int]) -> list[int]:
    """Return items in van der Corput's order: any first few lie evenly over all."""
    bits = max(1, (len(items) - 1).bit_length())
    places = (int(f"{at:0{bits}b}"[::-1], 2) for at in range(1 << bits))
    return [items[place] for place in places if place < len(items)]


def _affordable(prepared: PreparedJob) -> int:
    """Return how many rows may be taken, by what a row of the input has."""
    size = prepared.dataset.bytes_of(prepared.renderer.columns)
    row_bytes: int = max(1, size // prepared.dataset.total_rows)
    return max(BLOCK_ROWS, MOST_BYTES // CANDIDATES // row_bytes // BLOCK_ROWS * BLOCK_ROWS)


def _blocks(
    prepared: PreparedJob, rows: BitMap64, places: Sequence[int], directory: Path
) -> list[pa.RecordBatch]:
    """Return the blocks that begin at these places of the order in which the job sends its rows."""
    path = None
    if choice_for(prepared, rows).order == "prefix":
        path, _ = arrange(prepared, rows, directory, "tune", lambda: None)
    wanted = rows
    if path is None:  # only they need be read
        wanted = BitMap64().union(*(rows[place : place + BLOCK_ROWS] for place in places))
        places = range(0, len(wanted), BLOCK_ROWS)
    with contextlib.closing(order_at(prepared, path)) as order:
        blocks = list(_cut(order.read(wanted), places))
    remove_copies(directory)
    return blocks


def _cut(batches: Iterable[RowBatch], places: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Yield 32 rows from each of these places on, in order; the rows come in batches."""
    waiting = iter(places)
    place, begin = next(waiting, None), 0
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        while place is not None and place < begin + batch.data.num_rows:
            gathered = sum(piece.num_rows for piece in kept)
            from_row = place + gathered - begin
            kept.append(batch.data.slice(from_row, BLOCK_ROWS - gathered))
            if gathered + kept[-1].num_rows < BLOCK_ROWS:
                break
            yield pa.concat_batches(kept)
            place, kept = next(waiting, None), []
        begin += batch.data.num_rows


def _size(prepared: PreparedJob, block: pa.RecordBatch) -> float:
    """Return the bytes of a block's prompts."""
    items = prepared.renderer.render(RowBatch(list(range(block.num_rows)), block))
    return sum(len(prefix_of(item)) for item in items if isinstance(item, Request))


def _table(data: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    """Return rows as a table; files may differ in what they say of a column beyond its type."""
    return pa.Table.from_arrays([data.column(name) for name in schema.names], schema=schema)
