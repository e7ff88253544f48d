"""What does it cost to put rows into prefix order? Time, memory, disk, and how fast rows are read after it.

The input is shuffled: questions of about 300 characters on documents of about 1,700, some 8 to a document, as
texts in row groups of 50,000. In a fresh process `order: auto` looks at its sample and sorts, as a start does
before its engine; then 100,000 rows are read and rendered as they are for sending, in the order of the input
and in the new one. The peak is the process's high-water mark (VmHWM) before that reading; the disk is looked
at every 0.2 s. What is read lies in the page cache where that is large enough. Where others use the machine,
the CPU time says more than the clock.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.input.order import decide_by_sample
from batchrunner.input.sorted_copy import open_order, prepare_order
from batchrunner.job.load import load_job
from batchrunner.runner.prepare import prepare
from benchmarks.measure import in_fresh_process, save
from benchmarks.memory import peak_mb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyroaring import BitMap64

    from batchrunner.input.dataset import RowReader
    from batchrunner.runner.prepare import PreparedJob

SEED = 7
GOAL_S_A_MILLION, GOAL_MB = 400.0, 512
ROW_GROUP = 50_000
ROWS_A_DOCUMENT = 8
QUESTION_SHARE = 0.15
LIBRARY_CHARACTERS = 8 << 20
ROWS_READ = 100_000
LOOK_S = 0.2


def write_input(path: Path, rows: int, characters: int) -> None:
    """Write `rows` shuffled questions on documents, of so many characters together, a row group at a time."""
    made = random.Random(SEED)
    words = ["".join(made.choices("etaoinshrdlu", k=made.randint(2, 7))) for _ in range(20_000)]
    library = " ".join(made.choices(words, k=LIBRARY_CHARACTERS // 5))
    question = round(characters * QUESTION_SHARE)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])

    def text() -> str:
        page = made.randrange(rows // ROWS_A_DOCUMENT) * 2_654_435_761 % (len(library) - characters)
        asked = made.randrange(len(library) - question)
        return library[page : page + characters - question] + library[asked : asked + question]

    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, ROW_GROUP):
            ids = range(start, min(start + ROW_GROUP, rows))
            writer.write_table(pa.table({"id": ids, "text": [text() for _ in ids]}, schema=schema))


def plan(source: Path, directory: Path) -> dict[str, Any]:
    """Sort as a start does, then read in both orders."""
    job = load_job(
        {
            "input": {"path": str(source), "columns": ["id"]},
            "prompt": {"user": "Answer: {{ text }}"},
            "output": {"path": str(directory / "run")},
            "engine": {"kind": "simulated"},
        }
    )
    prepared = prepare(job)
    rows = prepared.selected()
    place = prepared.run_dir.task_directory
    place.mkdir(parents=True)
    before_mb = peak_mb()
    began, cpu_s = time.monotonic(), time.process_time()
    decide_by_sample(prepared, rows)
    sampled_s = time.monotonic() - began
    with disk_use(place) as disk:
        path, choice = prepare_order(prepared, rows, place, "bench", lambda: None)
    cpu_s = time.process_time() - cpu_s
    planned_s = time.monotonic() - began - sampled_s
    assert path is not None, choice
    peak = peak_mb()
    return {
        "rows": len(rows),
        "sample_s": round(sampled_s, 3),
        "planning_s": round(planned_s, 1),
        "planning_cpu_s": round(cpu_s, 1),
        "peak_mb": peak,
        "peak_before_mb": before_mb,
        "input_mb": round(source.stat().st_size / 1e6),
        "disk_peak_mb": round(max(disk) / 1e6),
        "copy_mb": round(path.stat().st_size / 1e6),
        "choice": asdict(choice),
        "input_order_rows_per_s": reading_rate(prepared, open_order(prepared, None), rows),
        "prefix_order_rows_per_s": reading_rate(prepared, open_order(prepared, path), rows),
        "peak_at_end_mb": peak_mb(),
    }


def reading_rate(prepared: PreparedJob, order: RowReader, rows: BitMap64) -> int:
    began, count = time.monotonic(), 0
    for batch in order.read(rows):
        count += len(prepared.renderer.render(batch))
        if count >= ROWS_READ:
            break
    order.close()
    return round(count / (time.monotonic() - began))


@contextmanager
def disk_use(directory: Path) -> Iterator[list[int]]:
    """Look again and again how many bytes lie in a directory."""
    found, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            sizes = 0
            for path in directory.rglob("*"):
                with suppress(OSError):
                    sizes += path.stat().st_size
            found.append(sizes)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield found
    finally:
        ended.set()
        looker.join()


def measure(rows: int, characters: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-planning-") as scratch:
        write_input(Path(scratch) / "input.parquet", rows, characters)
        found = in_fresh_process("benchmarks.planning", "--in", scratch)
    return {"characters_a_row": characters, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000], help="of each input")
    parser.add_argument("--characters", type=int, nargs="+", default=[2000], help="of a row of each input")
    parser.add_argument("--in", dest="directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.directory:
        print(json.dumps(plan(args.directory / "input.parquet", args.directory)))
        return
    runs = [measure(*size) for size in zip(args.rows, args.characters, strict=True)]
    shown = "; ".join(
        f"{run['rows']:,} rows of {run['characters_a_row']:,} characters in {run['planning_s']:.0f} s "
        f"({run['planning_cpu_s']:.0f} s of CPU), peak {run['peak_mb']:.0f} MB, "
        f"{run['disk_peak_mb']:,} MB of disk for {run['input_mb']:,} MB of input"
        for run in runs
    )
    met = all(
        run["planning_s"] <= GOAL_S_A_MILLION * run["rows"] / 1e6 and run["peak_mb"] < GOAL_MB for run in runs
    )
    goal = {"below_s_a_million_rows": GOAL_S_A_MILLION, "peak_below_mb": GOAL_MB, "met": met}
    line = f"planning: {shown} (goal: {GOAL_S_A_MILLION:.0f} s a million rows, {GOAL_MB} MB)"
    save("planning", line, {"goal": goal, "measured": runs}, ("batchrunner", "pyarrow", "duckdb"))


if __name__ == "__main__":
    main()
