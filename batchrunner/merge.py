"""Parts → one dataset in input order, in bounded memory."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrunner.claim import claimed
from batchrunner.errors import HeldError, OutputError
from batchrunner.sink import part_files, tidy
from batchrunner.storage import RunDir, sync_directory, writing

if TYPE_CHECKING:
    from pathlib import Path

BUCKET_ROWS = 100_000
MOST_BUCKETS = 256
"""Files that are open for writing at once."""
_LIGHTLY = pa.ipc.IpcWriteOptions(compression="lz4")


def merge(run: str | Path) -> Path:
    """Write `merged/*.parquet`, the rows of all parts in input order; return the directory.

    Rows are first dealt out to buckets of consecutive ordinals, then each bucket is sorted: two passes over
    the data, one bucket in memory. Raises OutputError where there is nothing to merge.
    """
    run_dir = RunDir(run)
    run_dir.refuse_links()
    for task in run_dir.all_tasks():
        if task.journals():
            with contextlib.suppress(HeldError), claimed(task) as claim, writing(task.parts):
                tidy(task, claim)
    parts = part_files(run_dir.parts)
    if not parts:
        raise OutputError(f"{run}: no parts to merge: not a run's output path, or nothing has finished yet")
    work = run_dir.merged.with_name("merged.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        _deal_out(parts, work)
        for index, bucket in enumerate(sorted(work.glob("bucket-*.arrows"))):
            with pa.OSFile(str(bucket)) as file, pa.ipc.open_stream(file) as reader:
                table = reader.read_all().sort_by("row")
            pq.write_table(table, work / f"merged-{index:06d}.parquet", compression="zstd")
            bucket.unlink()
        shutil.rmtree(run_dir.merged, ignore_errors=True)
        work.rename(run_dir.merged)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    sync_directory(run_dir.path)
    return run_dir.merged


def _deal_out(parts: list[Path], work: Path) -> None:
    last = max(_last_row(part) for part in parts)
    size = max(BUCKET_ROWS, -(-(last + 1) // MOST_BUCKETS))
    writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
    try:
        for part in parts:
            with pq.ParquetFile(part) as file:
                table = file.read()
            buckets = pc.divide(table.column("row"), size)
            for bucket in pc.unique(buckets).to_pylist():
                if bucket not in writers:
                    path = work / f"bucket-{bucket:06d}.arrows"
                    writers[bucket] = pa.ipc.new_stream(path, table.schema, options=_LIGHTLY)
                writers[bucket].write_table(table.filter(pc.equal(buckets, pa.scalar(bucket, pa.int64()))))
    finally:
        for writer in writers.values():
            writer.close()


def _last_row(part: Path) -> int:
    with pq.ParquetFile(part) as file:
        rows = file.read(["row"]).column("row")
    return int(pc.max(rows).as_py() or 0)
