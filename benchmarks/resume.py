"""Does a run of ten million rows in five thousand parts stay quick to look at and to start again?

The run is written by the project's own code: a first start does one part; parts, journals as a kill leaves
them and a day of samples are added until 1 % of the rows are left. Timed, each in a fresh process from its
creation: `status`; the start that does the rest, until its first row would be sent (the engine is simulated);
a start that finds nothing to do; `report`; `merge`, which writes a page too. The peak is the high-water mark
of the same span. What is read lies in the page cache, having just been written.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.cli import app
from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.dispatch.progress import Snapshot
from batchrunner.engines.simulated import Simulator
from batchrunner.output.events import EventLog
from batchrunner.output.files import make_directory
from batchrunner.output.holding import hold_task
from batchrunner.output.journal import Journal
from batchrunner.output.parts import write_part
from batchrunner.output.run_dir import RunDir
from batchrunner.runner.progress import SAMPLE_S
from benchmarks.measure import in_fresh_process, save
from benchmarks.memory import peak_mb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchrunner.core.types import Completion, Request

SEED = 7
GOAL_S, GOAL_MB = 10.0, 300
ROW_GROUP = 50_000
DAY_S = 24 * 3600
REPLICAS = 8
LEFT = 0.01
JOURNALS = 3
FRAME_ROWS = 100
FAILED_EVERY = 1000  # so that nearly every part has some
MIXED_PARTS = 10  # rows end out of order: those of so many parts are mixed


def write_input(path: Path, rows: int) -> None:
    """Write `rows` numbered lines in row groups of 50,000."""
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, ROW_GROUP):
            ids = range(start, min(start + ROW_GROUP, rows))
            writer.write_table(pa.table({"id": ids, "text": [f"line {i}" for i in ids]}, schema=schema))


def write_job(directory: Path, part_rows: int) -> Path:
    job = {
        "input": {"path": str(directory / "input.parquet"), "columns": ["id"]},
        "prompt": {"text": "text"},
        "sampling": {"max_new_tokens": 16},
        "output": {"path": str(directory / "run"), "part_rows": part_rows},
        "engine": {"kind": "simulated", "step_s": 0},
    }
    path = directory / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def ended_rows(rows: range, part_rows: int) -> Iterator[list[int]]:
    """Deal rows out to parts, in the order in which they might have ended."""
    made = random.Random(SEED)
    for start in range(rows.start, rows.stop, MIXED_PARTS * part_rows):
        mixed = list(range(start, min(start + MIXED_PARTS * part_rows, rows.stop)))
        made.shuffle(mixed)
        for first in range(0, len(mixed), part_rows):
            yield mixed[first : first + part_rows]


def results(rows: list[int], schema: pa.Schema) -> pa.Table:
    """Make up what a run keeps of these rows."""

    def unless_failed(values: list[Any]) -> list[Any]:
        return [value if row % FAILED_EVERY else None for row, value in zip(rows, values, strict=True)]

    count = len(rows)
    values = {
        "row": rows,
        "id": rows,
        "output": unless_failed([f"the answer to line {row}" for row in rows]),
        "finish_reason": unless_failed(["stop"] * count),
        "prompt_tokens": unless_failed([7] * count),
        "cached_tokens": unless_failed([0] * count),
        "completion_tokens": unless_failed([row % 100 for row in rows]),
        "latency_s": [1 + row % 977 / 250 for row in rows],
        "attempts": [1] * count,
        "error": [None if row % FAILED_EVERY else f"line {row} is too long" for row in rows],
    }
    return pa.table(values, schema=schema)


def write_journal(path: Path, table: pa.Table) -> None:
    journal = Journal(path)
    for first in range(0, table.num_rows, FRAME_ROWS):
        journal.append(table.slice(first, FRAME_ROWS))
    journal.close()


def write_day(log: EventLog, rows: int) -> None:
    """Write as many samples as a day has."""
    loads = tuple(
        SchedulerLoad(f"http://10.0.0.{i}:30000", "loads", 200, 8, 0.87, 412_345, 474_000, 256, f"r{i}", 1e9)
        for i in range(REPLICAS)
    )
    state = Snapshot(
        rows_total=rows,
        rows_done=rows // 2,
        rows_failed=0,
        rows_per_s=rows / DAY_S,
        output_tokens_per_s=50 * rows / DAY_S,
        prompt_tokens_per_s=200 * rows / DAY_S,
        cached_tokens_per_s=100 * rows / DAY_S,
        window=208 * REPLICAS,
        in_flight=208 * REPLICAS,
        by_scheduler={
            load.scheduler: {"window": 208, "output_tokens_per_s": 5e3, "retractions": 0} for load in loads
        },
        waiting=0,
        retractions=0,
        loads=loads,
        bands={load.scheduler: (4, 16) for load in loads},
        simulated=True,
    )
    log.open()
    for _ in range(round(DAY_S / SAMPLE_S)):
        log.write("sample", **state.as_sample())
    log.close()


def write_run(directory: Path, rows: int, parts: int) -> Path:
    """Write input and run of `rows` rows in `parts` parts, 1 % of them missing; return the job file."""
    part_rows = rows // parts
    write_input(directory / "input.parquet", rows)
    job = write_job(directory, part_rows)
    command(str(job), "--quiet", "--set", f"input.limit={part_rows}")
    run_dir = RunDir(directory / "run")
    make_directory(run_dir.task_directory)
    schema = pq.read_schema(run_dir.part(0))
    ended = list(ended_rows(range(part_rows, round(rows * (1 - LEFT))), part_rows))
    with hold_task(run_dir) as lock:
        for number, mixed in enumerate(ended, 1):
            table = results(mixed, schema)
            if number <= len(ended) - JOURNALS:
                write_part(run_dir, number, [table], lock)
            else:
                write_journal(run_dir.journal(number, lock.token), table)
    write_day(EventLog(run_dir.events), rows)
    return job


def command(*arguments: str) -> None:
    """Run the command in this process; it leaves an exit code other than 0 to its return value."""
    code = app(list(arguments), standalone_mode=False)
    assert code in {None, 0, 3}, f"batchrun {' '.join(arguments)}: exit code {code}"  # 3: with failed rows


def timed(began: float, *arguments: str) -> dict[str, Any]:
    """Run the command; `began` is when this process was asked for. A run is timed until its first row."""
    answered = Simulator.generate
    first: dict[str, Any] = {}

    async def generate(engine: Simulator, request: Request, route: str) -> Completion:
        if not first:
            first.update(so_far(began))
        return await answered(engine, request, route)

    with mock.patch.object(Simulator, "generate", generate):
        command(*arguments)
    return {**(first or so_far(began)), "peak_at_end_mb": peak_mb()}


def so_far(began: float) -> dict[str, float]:
    return {"s": round(time.time() - began, 3), "peak_mb": peak_mb()}


def measure(rows: int, parts: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="bench-resume-") as scratch:
        job = str(write_run(Path(scratch), rows, parts))
        run = str(Path(scratch) / "run")
        return {
            "status": [fresh("status", run) for _ in range(rounds)],
            "resume": [fresh(job, "--quiet")],
            "nothing_to_do": [fresh(job, "--quiet") for _ in range(rounds)],
            "report": [fresh("report", run)],
            "merge": [fresh("merge", run)],
        }


def fresh(*arguments: str) -> dict[str, Any]:
    return in_fresh_process("benchmarks.resume", "--began", str(time.time()), "--", *arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--parts", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.command:
        print(json.dumps(timed(args.began, *args.command)))
        return
    found = measure(args.rows, args.parts, args.rounds)
    slowest = {name: max(run["s"] for run in runs) for name, runs in found.items()}
    peak = {name: max(run["peak_mb"] for run in runs) for name, runs in found.items()}
    shown = ", ".join(
        f"{name.replace('_', ' ')} {slowest[name]:.1f} s / {peak[name]:.0f} MB" for name in found
    )
    line = (
        f"resume: {args.rows:,} rows in {args.parts:,} parts: {shown} (goal: {GOAL_S:.0f} s / {GOAL_MB} MB)"
    )
    judged = [name for name in found if name not in {"report", "merge"}]
    met = all(slowest[name] < GOAL_S and peak[name] < GOAL_MB for name in judged)
    goal = {"below_s": GOAL_S, "peak_below_mb": GOAL_MB, "of": judged, "met": met}
    figures = {"goal": goal, "rows": args.rows, "parts": args.parts, "measured": found}
    save("resume", line, figures, ("batchrunner", "pyarrow", "pyroaring", "orjson"))


if __name__ == "__main__":
    main()
