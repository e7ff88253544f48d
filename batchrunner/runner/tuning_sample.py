"""The sample of rows for trials of `batchrun tune`: blocks of the job's rows, spread evenly over the input.

A block keeps neighbouring rows together, so that rows with a shared prefix hit the prefix cache as often as
in the job. The blocks are shuffled, so that even the first few come from all over the input, and a trial that
stops early is representative.
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
"""Maximum number of rows in a sample: four times the requests that SGLang runs at once by default (4096)."""
BLOCK_ROWS = 32
MOST_BYTES = 256 << 20
"""Approximate maximum size of the sample in bytes, because the whole sample is in memory once."""


@dataclass(frozen=True, slots=True)
class TuningSample:
    """The sample of rows for trials, in a Parquet file."""

    path: Path
    rows: int
    of_rows: int
    """Number of rows of the job."""

    def __str__(self) -> str:
        if self.rows == self.of_rows:
            return f"all {counted(self.rows, 'row')}"
        blocks = counted(self.rows // BLOCK_ROWS, "block")
        return f"{self.rows:,} of {self.of_rows:,} rows: {blocks} of {BLOCK_ROWS} rows, spread over the input"


def write_sample(prepared: PreparedJob, directory: Path) -> TuningSample:
    """Write the sample of a job to a file in a directory. Raises InputError or StorageError.

    The columns that the job needs are read at most once. If the job sends rows by common prefix, the rows are
    sorted before blocks are taken from them.
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
            # Multiples of the golden ratio modulo 1 spread the first few blocks evenly, however many they
            # are.
            order = sorted(range(blocks), key=lambda block: block * GOLDEN % 1)
            table = pa.concat_tables(blocks_table.slice(block * BLOCK_ROWS, BLOCK_ROWS) for block in order)
        else:
            table = _table((batch.data for batch in prepared.dataset.read(rows, schema.names)), schema)
        with whole_file(path) as temporary:
            pq.write_table(table, temporary, row_group_size=1024)
    return TuningSample(path, table.num_rows, len(rows))


def _affordable(prepared: PreparedJob) -> int:
    """Estimate the number of rows that fit into MOST_BYTES, from the mean size of the first rows.

    The number is a multiple of BLOCK_ROWS.
    """
    all_rows = BitMap64(range(prepared.dataset.total_rows))
    first_batch = next(prepared.dataset.read(all_rows, prepared.renderer.columns))
    row_bytes: int = max(1, first_batch.data.nbytes // len(first_batch.rows))
    return max(BLOCK_ROWS, MOST_BYTES // row_bytes // BLOCK_ROWS * BLOCK_ROWS)


def _blocks(prepared: PreparedJob, rows: BitMap64, blocks: int, directory: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `blocks` blocks, which are spread evenly over the rows in the job's order."""
    # Each block is a range of positions in the job's order.
    spread = spread_blocks(len(rows), blocks=blocks, size=BLOCK_ROWS)
    positions: Sequence[int] = [position for block in spread for position in block]
    path = None  # Path of the sorted copy; None in input order, or if the rows could not be sorted.
    if decide_order(prepared, rows).order == "prefix":
        path, _ = prepare_order(prepared, rows, directory, writer="tune", check_stop=lambda: None)
    if path is not None:
        # All rows are read, and those at `positions` are taken.
        batches = SortedCopy(path).read(rows)
    else:
        # Only the rows of the blocks are read, so every row that is read is in the sample.
        rows = BitMap64().union(*(rows[block.start : block.stop] for block in spread))
        positions = range(len(rows))
        batches = prepared.dataset.read(rows, prepared.renderer.columns)
    # `begin` and `end` bound a batch's positions among the rows that are read.
    begin = 0
    for batch in batches:
        end = begin + batch.data.num_rows
        positions_in_batch = positions[bisect_left(positions, begin) : bisect_left(positions, end)]
        yield batch.data.take(pa.array([position - begin for position in positions_in_batch], pa.int64()))
        begin = end
    remove_sorted_copies(directory)


def _table(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Return batches as one table with this schema.

    The schemas of the batches are replaced, because the metadata of columns may differ between input files.
    """
    tables = []
    for batch in batches:
        columns = [batch.column(name) for name in schema.names]
        tables.append(pa.Table.from_arrays(columns, schema=schema))
    return pa.concat_tables(tables)
