"""What does it cost to go on with a run that is nearly done? Whole commands at 10⁶, 10⁷ and 10⁸ rows.

The input is Parquet files of 100,000 short rows. A first start makes the run; then the package's own writers
add the results of all rows but 1 %, in parts of 10,000 rows that ended out of order. 1 % of the rows failed.
The missing rows are spread over the input in stretches of 8,192, as leases leave them. The run of `joined` is
the same, with its leases: those of the missing rows are free.

Each command is a fresh process on a copy of the run, and is timed from its creation. A command that sends
rows is timed until its first row would be sent, and then killed; the engine is simulated. The peak is the
kernel's high-water mark of memory (VmHWM), imports included. Beside the resumed runs stand new runs that sort
all rows by prefix, and that do not. The files lie in the page cache where they fit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Never
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.cli import app
from batchrunner.engines.simulated import Simulator
from batchrunner.job.load import load_job
from batchrunner.output.counts import RowCounts, TableCounts, with_counts
from batchrunner.output.files import make_directory
from batchrunner.output.parts import write_part
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import hold_task
from batchrunner.runner.leases import LeasePlan, Leases
from batchrunner.runner.prepare import prepare
from benchmarks.measure import in_fresh_process, peak_mb, save

SEED = 7
FILE_ROWS = 100_000
PART_ROWS = 10_000
STRETCH_ROWS = 8192
MISSING_EVERY = 100
"""One of so many stretches is missing."""
FAILED_EVERY = 100
"""One of so many rows failed."""
MIXED_ROWS = 10 * PART_ROWS
"""Rows end out of order within so many."""


def write_input(directory: Path, rows: int) -> None:
    """Write files of numbered lines."""
    directory.mkdir()
    for start in range(0, rows, FILE_ROWS):
        ids = pa.array(np.arange(start, min(start + FILE_ROWS, rows)))
        texts = pc.binary_join_element_wise("line", ids.cast(pa.string()), " ")
        path = directory / f"input-{start // FILE_ROWS:06d}.parquet"
        pq.write_table(pa.table({"id": ids, "text": texts}), path)


def write_job(directory: Path, run: str) -> Path:
    """Write a job whose output path is `run`."""
    job = {
        "input": {"path": str(directory / "input"), "columns": ["id"]},
        "prompt": {"user": "{{ text }}"},
        "sampling": {"max_new_tokens": 16},
        "order": "input",
        "limits": {"max_failed_rows": 1.0},
        "output": {"path": str(directory / run)},
        "engine": {"kind": "simulated", "step_s": 0},
    }
    path = directory / f"{run}.json"
    path.write_text(json.dumps(job))
    return path


def finished_rows(first: int, rows: int) -> Iterator[np.ndarray]:
    """Yield the rows of each part, in the order in which they might have ended."""
    chance = np.random.default_rng(SEED)
    for start in range(first, rows, MIXED_ROWS):
        mixed = np.arange(start, min(start + MIXED_ROWS, rows))
        mixed = mixed[mixed // STRETCH_ROWS % MISSING_EVERY != 1]
        chance.shuffle(mixed)
        for begin in range(0, len(mixed), PART_ROWS):
            yield mixed[begin : begin + PART_ROWS]


def results(rows: np.ndarray, schema: pa.Schema) -> pa.Table:
    """Return made-up results of these rows, with their counts."""
    numbers = pa.array(rows)
    is_failed = pa.array(rows % FAILED_EVERY == 0)
    nothing = pa.scalar(None)
    answers = pc.binary_join_element_wise("the answer to line", numbers.cast(pa.string()), " ")
    ones = pa.array(np.ones(len(rows), dtype=np.int64))
    values: dict[str, Any] = {
        "row": numbers,
        "id": numbers,
        "output": pc.if_else(is_failed, nothing, answers),
        "finish_reason": pc.if_else(is_failed, nothing, "stop"),
        "prompt_tokens": pc.if_else(is_failed, nothing, 7),
        "cached_tokens": pc.if_else(is_failed, nothing, 0),
        "completion_tokens": pc.if_else(is_failed, nothing, pa.array(rows % 100)),
        "latency_s": pa.array(1 + rows % 977 / 250),
        "attempts": ones,
        "error": pc.if_else(is_failed, "the line is too long", nothing),
    }
    columns = [values.get(name, pa.nulls(len(rows))) for name in schema.names]
    table = pa.table(
        [pa.array(column).cast(kind) if isinstance(column, list) else column.cast(kind)
         for column, kind in zip(columns, schema.types, strict=True)],
        schema=schema,
    )  # fmt: skip
    failed = pc.sum(is_failed).as_py()
    ok = len(rows) - failed
    counts = TableCounts(RowCounts(ok=ok, finish_reasons=Counter(stop=ok)), RowCounts(failed=failed))
    return with_counts(table, counts)


def write_run(directory: Path, rows: int) -> None:
    """Write the input, and a run of which 1 % is missing."""
    write_input(directory / "input", rows)
    job = write_job(directory, "run")
    command(str(job), "--quiet", "--set", f"input.limit={PART_ROWS}")
    run_dir = RunDir(directory / "run")
    make_directory(run_dir.task_directory)
    schema = pq.read_schema(run_dir.part(0))
    with hold_task(run_dir) as lock:
        for number, mixed in enumerate(finished_rows(PART_ROWS, rows), 10):
            write_part(run_dir, number, [results(mixed, schema)], lock)
        lock.forget_predecessor()


def write_leases(directory: Path, rows: int) -> None:
    """Copy the run to `joined`, and write the leases that its workers have ended or left."""
    copy_run(directory / "run", directory / "joined")
    prepared = prepare(load_job(write_job(directory, "joined")))
    run_dir = prepared.run_dir
    leases = Leases(run_dir.leases, "w1")
    plan = LeasePlan(
        rows=BitMap64(range(rows)),
        cuts=[*range(0, rows, STRETCH_ROWS), rows],
        rows_total=rows,
        fingerprint=prepared.fingerprint(""),
        order=None,
        choice={"order": "input", "why": "the job says so"},
    )
    leases.make_plan(plan)
    for number in range(len(leases)):
        if number % MISSING_EVERY != 1:
            lease = leases.take(number)
            assert lease is not None
            leases.end(lease, BitMap64())
    content = json.loads(run_dir.run_json.read_bytes())
    content["fingerprint"], content["rows_total"] = plan.fingerprint | {"model": "simulated"}, rows
    run_dir.run_json.write_text(json.dumps(content))
    prepared.close()


def copy_run(run: Path, copy: Path) -> None:
    """Copy a run; results are linked, because no command changes a file of results in place."""

    def link_or_copy(source: str, target: str) -> None:
        if source.endswith(".parquet"):
            os.link(source, target)
        else:
            shutil.copy2(source, target)

    shutil.copytree(run, copy, copy_function=link_or_copy)


def command(*arguments: str) -> None:
    """Run the command in this process."""
    code = app(list(arguments), standalone_mode=False)
    assert code in {None, 0, 1, 3}, f"batchrun {' '.join(arguments)}: exit code {code}"


def timed(began: float, *arguments: str) -> dict[str, Any]:
    """Run the command; `began` is when this process was asked for. A run ends at its first row."""

    async def first_row(*_: object) -> Never:
        print(json.dumps(figures(began) | {"sent_a_row": True}), flush=True)
        os._exit(0)

    with mock.patch.object(Simulator, "generate", first_row):
        command(*arguments)
    return figures(began)


def figures(began: float) -> dict[str, Any]:
    """Return the seconds and the peak memory so far."""
    return {"s": round(time.time() - began, 2), "cpu_s": round(time.process_time(), 2), "peak_mb": peak_mb()}


def fresh(*arguments: str) -> dict[str, Any]:
    """Time a command in a fresh process."""
    return in_fresh_process(
        "benchmarks.resume", "--began", str(time.time()), "--", *arguments, timeout_s=7200
    )


def measure(directory: Path, rows: int, cases: list[str]) -> dict[str, dict[str, Any]]:
    """Measure each case on a copy of the run."""
    started = time.time()
    write_run(directory, rows)
    write_leases(directory, rows)
    print(f"{rows:,} rows: written in {time.time() - started:.0f} s", flush=True)
    source = {"join": "run", "joined": "joined"}
    words = {
        "status": ["status", "RUN"],
        "resume": ["JOB", "--quiet"],
        "retry_failed": ["JOB", "--quiet", "--retry-failed"],
        "join": ["JOB", "--quiet", "--join"],
        "joined": ["JOB", "--quiet", "--join"],
        "joined_status": ["status", "RUN"],
        "merge_parts": ["merge", "RUN"],
        "first_row_unsorted": ["JOB", "--quiet"],
        "first_row_sorted": ["JOB", "--quiet", "--set", "order=prefix"],
        "merge_file": ["merge", "RUN", "FILE"],
    }
    measured = {}
    for case in cases:
        copy = directory / "copy"
        if not case.startswith("first_row"):
            copy_run(directory / source.get(case.split("_")[0], "run"), copy)
        file = directory / "all.parquet"
        places = {"RUN": str(copy), "JOB": str(write_job(directory, "copy")), "FILE": str(file)}
        measured[case] = fresh(*(places.get(word, word) for word in words[case]))
        print(f"{rows:,} rows: {case}: {measured[case]}", flush=True)
        shutil.rmtree(copy)
        file.unlink(missing_ok=True)
    return measured


CASES = ["status", "resume", "retry_failed", "join", "joined", "joined_status", "merge_parts", "merge_file",
         "first_row_unsorted", "first_row_sorted"]  # fmt: skip


def main() -> None:
    """Measure each size; save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--directory", help="where the runs are written")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.command:
        print(json.dumps(timed(args.began, *args.command)))
        return
    runs = []
    for rows in args.rows:
        with tempfile.TemporaryDirectory(prefix="bench-resume-", dir=args.directory) as scratch:
            runs.append({"rows": rows, "measured": measure(Path(scratch), rows, args.cases)})
    lines = []
    for run in runs:
        shown = [f"{case} {cost['s']} s, {cost['peak_mb']:.0f} MB" for case, cost in run["measured"].items()]
        lines.append(f"resume: {run['rows']:,} rows: {'; '.join(shown)}")
    save("resume", "\n".join(lines), {"runs": runs}, ("batchrunner", "pyarrow", "pyroaring", "orjson"))


if __name__ == "__main__":
    main()
