"""Parts → one dataset in input order, in bounded memory."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrunner.claim import claimed
from batchrunner.deal import Buckets
from batchrunner.errors import HeldError, OutputError
from batchrunner.sink import part_files, tidy
from batchrunner.storage import RunDir, sync_directory, writing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

BUCKET_ROWS = 100_000
"""Of a bucket, and of a merged file."""


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
        for index, table in enumerate(_in_order(parts, work)):
            pq.write_table(table, work / f"merged-{index:06d}.parquet", compression="zstd")
        shutil.rmtree(run_dir.merged, ignore_errors=True)
        work.rename(run_dir.merged)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    sync_directory(run_dir.path)
    return run_dir.merged


def _in_order(parts: list[Path], work: Path) -> Iterator[pa.Table]:
    rows = 1 + max(_last_row(part) for part in parts)
    buckets = Buckets(work, "row", range(BUCKET_ROWS, rows + BUCKET_ROWS, BUCKET_ROWS))
    for part in parts:
        with pq.ParquetFile(part) as file:
            buckets.put(file.read())
    return buckets.take()


def _last_row(part: Path) -> int:
    with pq.ParquetFile(part) as file:
        rows = file.read(["row"]).column("row")
    return int(pc.max(rows).as_py() or 0)
