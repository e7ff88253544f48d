"""The rows of the trials of `batchrun tune`: blocks of the job's own rows, spread evenly over the input.

A block keeps neighbouring rows together, so that rows with a shared prefix meet in the cache as in the job.
The first few blocks are already spread over the whole input, so that a trial which stops early is fair.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.core.console import counted
from batchrunner.input.order_sample import decide_order
from batchrunner.input.sorted_copy import SortedCopy, prepare_order, remove_sorted_copies
from batchrunner.input.spread import GOLDEN, spread_blocks
from batchrunner.output.files import whole_file, writing
from batchrunner.runner.prepare import PreparedJob

MOST_ROWS = 16_384
"""Rows of a sample at most: four times what SGLang runs at once by default (4096)."""
BLOCK_ROWS = 32
"""Rows of a block."""
MOST_BYTES = 256 << 20
"""Approximate largest size of the sample in bytes, which lies in memory."""


@dataclass(frozen=True, slots=True)
class TuningSample:
    """The rows of the trials, in a file of their own."""

    path: Path
    rows: int
    of_rows: int

    def __str__(self) -> str:
        if self.rows == self.of_rows:
            return f"all {counted(self.rows, 'row')}"
        blocks = counted(self.rows // BLOCK_ROWS, "block")
        return f"{self.rows:,} of {self.of_rows:,} rows, {blocks} of {BLOCK_ROWS} from all over the input"


def write_sample(prepared: PreparedJob, directory: Path) -> TuningSample:
    """Write the sample into a directory; raises InputError or StorageError.

    Reads the columns that the job needs at most once, and sorts where the job's order is by prefix.
    """
    rows, path = prepared.selected(), directory / "sample.parquet"
    schema = pa.schema([prepared.dataset.schema.field(name) for name in prepared.renderer.columns])
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        most_rows = min(MOST_ROWS, _affordable(prepared))
        if not schema.names:  # a table without columns would have no rows
            table = pa.table({"row": pa.array(list(rows[:most_rows]), pa.int64())})
        elif len(rows) > most_rows:
            blocks = most_rows // BLOCK_ROWS
            blocks_table = _table(_blocks(prepared, rows, blocks, directory), schema)
            order = sorted(range(blocks), key=lambda at: at * GOLDEN % 1)
            table = pa.concat_tables(blocks_table.slice(at * BLOCK_ROWS, BLOCK_ROWS) for at in order)
        else:
            table = _table((batch.data for batch in prepared.dataset.read(rows, schema.names)), schema)
        with whole_file(path) as temporary:
            pq.write_table(table, temporary, row_group_size=1024)
    return TuningSample(path, table.num_rows, len(rows))


def _affordable(prepared: PreparedJob) -> int:
    """Return how many rows fit into MOST_BYTES, by the mean size of the first ones."""
    every = BitMap64(range(prepared.dataset.total_rows))
    first = next(prepared.dataset.read(every, prepared.renderer.columns))
    row_bytes: int = max(1, first.data.nbytes // len(first.rows))
    return max(BLOCK_ROWS, MOST_BYTES // row_bytes // BLOCK_ROWS * BLOCK_ROWS)


def _blocks(prepared: PreparedJob, rows: BitMap64, blocks: int, directory: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of so many blocks, which are evenly spread over the job's order of rows."""
    spread = spread_blocks(len(rows), blocks=blocks, size=BLOCK_ROWS)
    places: Sequence[int] = [place for block in spread for place in block]
    path = None
    if decide_order(prepared, rows).order == "prefix":
        path, _ = prepare_order(prepared, rows, directory, writer="tune", check_stop=lambda: None)
    if path is None:  # input order: only these rows are read
        rows = BitMap64().union(*(rows[block.start : block.stop] for block in spread))
        places = range(len(rows))
    begin = 0
    batches = SortedCopy(path).read(rows) if path else prepared.dataset.read(rows, prepared.renderer.columns)
    for batch in batches:
        end = begin + batch.data.num_rows
        here = places[bisect_left(places, begin) : bisect_left(places, end)]
        yield batch.data.take(pa.array([place - begin for place in here], pa.int64()))
        begin = end
    remove_sorted_copies(directory)


def _table(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Return rows as a table with this schema; the metadata of columns may differ between files."""
    return pa.concat_tables(
        pa.Table.from_arrays([batch.column(name) for name in schema.names], schema=schema)
        for batch in batches
    )
