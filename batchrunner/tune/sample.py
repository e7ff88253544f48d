"""The rows of the trials: blocks of the job's own rows, spread evenly over the input.

A block keeps neighbouring rows together: rows with a common prefix meet in the cache as in the job. Blocks
are sent in van der Corput's order, in which any first few are spread over the whole input: a trial that is
stopped early has rows from the end of the input too.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.core.console import counted
from batchrunner.input.dataset import RowBatch
from batchrunner.input.sorted_copy import decide_order, open_order, prepare_order, remove_sorted_copies
from batchrunner.output.arrow_arrays import arrow_array
from batchrunner.output.files import whole_file, writing
from batchrunner.runner.prepare import PreparedJob

MOST_ROWS = 16_384
"""Rows of a sample at most: four times what SGLang runs at once by default (4096)."""
BLOCK_ROWS = 32
"""Rows of a block."""
MOST_BYTES = 256 << 20
"""Approximate size of the sample, which is in memory at once."""


@dataclass(frozen=True, slots=True)
class TuningSample:
    """The rows of the trials, in a file of their own."""

    path: Path
    rows: int
    of_rows: int

    def __str__(self) -> str:
        if self.rows == self.of_rows:
            return f"all {self.rows} rows" if self.rows > 1 else "the only row"
        blocks = counted(self.rows // BLOCK_ROWS, "block")
        return f"{self.rows} of {self.of_rows} rows, {blocks} of {BLOCK_ROWS} from all over the input"


def write_sample(prepared: PreparedJob, directory: Path) -> TuningSample:
    """Write the sample into a directory; raises InputError or StorageError.

    Reads the columns that the job needs at most once, and sorts where the job's order is by prefix.
    """
    rows = prepared.selected()
    schema = pa.schema([prepared.dataset.schema.field(name) for name in prepared.renderer.columns])
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        wanted = min(MOST_ROWS, _affordable(prepared))
        if not schema.names:  # a table without columns would have no rows
            schema = pa.schema({"row": pa.int64()})
            data = [pa.record_batch([arrow_array(list(rows[:wanted]), pa.int64())], schema=schema)]
        elif len(rows) > wanted:
            blocks = _blocks(prepared, rows, places(len(rows), wanted // BLOCK_ROWS), directory)
            data = [blocks[at] for at in van_der_corput(range(len(blocks)))]
        else:
            data = [batch.data for batch in prepared.dataset.read(rows, schema.names)]
        table = pa.concat_tables(_table(batch, schema) for batch in data)
        path = directory / "sample.parquet"
        with whole_file(path) as temporary:
            pq.write_table(table, temporary, row_group_size=1024)
    return TuningSample(path, table.num_rows, len(rows))


def places(rows: int, blocks: int) -> list[int]:
    """Return where the blocks begin: evenly spread, without overlap."""
    return [(rows - BLOCK_ROWS) * at // max(blocks - 1, 1) for at in range(blocks)]


def van_der_corput(items: Sequence[int]) -> list[int]:
    """Return items in van der Corput's order: any first few are spread evenly over all."""
    bits = max(1, (len(items) - 1).bit_length())
    places = (int(f"{at:0{bits}b}"[::-1], 2) for at in range(1 << bits))
    return [items[place] for place in places if place < len(items)]


def _affordable(prepared: PreparedJob) -> int:
    """Return how many rows fit into MOST_BYTES, by the mean size of a row."""
    size = prepared.dataset.bytes_of(prepared.renderer.columns)
    row_bytes: int = max(1, size // prepared.dataset.total_rows)
    return max(BLOCK_ROWS, MOST_BYTES // row_bytes // BLOCK_ROWS * BLOCK_ROWS)


def _blocks(
    prepared: PreparedJob, rows: BitMap64, begins: Sequence[int], directory: Path
) -> list[pa.RecordBatch]:
    """Return the blocks that begin at these positions of the job's order of rows."""
    path = None
    if decide_order(prepared, rows).order == "prefix":
        path, _ = prepare_order(prepared, rows, directory, "tune", lambda: None)
    wanted = rows
    if path is None:  # input order: only these rows are read
        wanted = BitMap64().union(*(rows[place : place + BLOCK_ROWS] for place in begins))
        begins = range(0, len(wanted), BLOCK_ROWS)
    with contextlib.closing(open_order(prepared, path)) as order:
        blocks = list(_cut(order.read(wanted), begins))
    remove_sorted_copies(directory)
    return blocks


def _cut(batches: Iterable[RowBatch], begins: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Yield a block from each of these positions, in order; blocks may span batches."""
    waiting = iter(begins)
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


def _table(data: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    """Return rows as a table with this schema; the metadata of columns may differ between files."""
    return pa.Table.from_arrays([data.column(name) for name in schema.names], schema=schema)
