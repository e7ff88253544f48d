"""Do memory and time stay flat however many rows there are? Whole commands at 100,000 and at a million rows.

The rows are shuffled questions on documents, eight to a document, so that a start sorts them by prefix. The
engine is simulated and answers at once: rows go through as fast as the runner can move them. Each command
(the run, `status`, the run again with nothing to do, `merge`) is a fresh process; its peak is the kernel's
high-water mark (VmHWM), imports included. `--rows 100000 10000000` measures ten million.

`--sort 100000000` measures only what sorting costs: how much later the first row is sent, and how much memory
and disk the sort takes. The rows are lines of 84 characters in Parquet files (zstd), eight lines of each
prefix in random order. A run with `order: input` and one with `order: prefix` are each stopped gently some
time after their first row. Memory, disk and CPU time are read from outside every half second.

`--start 1000000000 --files 10000` measures when the first row of a run of so many equal rows is sent, by one
worker and with `--join`.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.cli import app
from benchmarks.measure import in_fresh_process, peak_mb, save

SEED = 7
GOAL_MB, GOAL_S = 50.0, 10.0
ROW_GROUP = 50_000
ROWS_A_DOCUMENT = 8
DOCUMENT, QUESTION = 280, 70
"""Characters."""
LINE_PREFIX, LINE_REST = 68, 16
"""Characters of a line that is sorted: those that it shares with others, and its own."""
LIBRARY_BYTES = 1 << 24
"""Size of the random text from which the lines are cut."""
POLL_S = 0.5


def write_input(path: Path, rows: int) -> None:
    """Write `rows` questions on documents in random order, a row group at a time."""
    made = random.Random(SEED)
    library = "".join(made.choices("etaoin shrdlu", k=1 << 20))
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])

    def text() -> str:
        page = made.randrange(rows // ROWS_A_DOCUMENT) * 2_654_435_761 % (len(library) - DOCUMENT)
        asked = made.randrange(len(library) - QUESTION)
        return library[page : page + DOCUMENT] + library[asked : asked + QUESTION]

    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, ROW_GROUP):
            ids = range(start, min(start + ROW_GROUP, rows))
            writer.write_table(pa.table({"id": ids, "text": [text() for _ in ids]}, schema=schema))


def job_for(directory: Path) -> dict[str, Any]:
    return {
        "input": {"path": str(directory / "input.parquet"), "columns": ["id"]},
        "prompt": {"user": "Answer: {{ text }}"},
        "sampling": {"max_new_tokens": 16},
        "order": "prefix",
        "output": {"path": str(directory / "run")},
        "engine": {"kind": "simulated", "step_s": 0},
    }


def timed(arguments: list[str]) -> dict[str, Any]:
    """Run one command in this process; return its seconds and its peak memory in MB."""
    began, cpu_s = time.monotonic(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        code = app(arguments, standalone_mode=False)
    assert not code, f"batchrun {' '.join(arguments)}: exit code {code}"
    return {
        "s": round(time.monotonic() - began, 2),
        "cpu_s": round(time.process_time() - cpu_s, 2),
        "peak_mb": peak_mb(),
    }


def measure(rows: int) -> dict[str, dict[str, Any]]:
    """Measure each command at this size."""
    with tempfile.TemporaryDirectory(prefix="bench-large-") as scratch:
        place = Path(scratch)
        write_input(place / "input.parquet", rows)
        job, run = place / "job.yaml", str(place / "run")
        job.write_text(json.dumps(job_for(place)))
        commands = {
            "run": [str(job), "--quiet"],
            "status": ["status", run],
            "nothing_to_do": [str(job), "--quiet"],
            "merge": ["merge", run],
        }
        return {
            name: in_fresh_process("benchmarks.large_runs", "--command", json.dumps(words))
            for name, words in commands.items()
        }


def write_lines(directory: Path, rows: int, files: int) -> None:
    """Write lines with common prefixes to Parquet files, in random order, a file at a time."""
    directory.mkdir()
    chance = np.random.default_rng(SEED)
    library = chance.choice(np.frombuffer(b"etaoin shrdlu", np.uint8), size=LIBRARY_BYTES)
    last_start = LIBRARY_BYTES - LINE_PREFIX
    file_rows = -(-rows // files)
    for file, first in enumerate(range(0, rows, file_rows)):
        ids = np.arange(first, min(first + file_rows, rows))
        prefixes = chance.integers(rows // ROWS_A_DOCUMENT, size=len(ids)) * 2_654_435_761 % last_start
        rests = chance.integers(last_start, size=len(ids))
        letters = np.hstack([
            library[prefixes[:, None] + np.arange(LINE_PREFIX)],
            library[rests[:, None] + np.arange(LINE_REST)],
        ])  # fmt: skip
        offsets = np.arange(len(ids) + 1, dtype=np.int32) * letters.shape[1]
        texts = pa.StringArray.from_buffers(len(ids), pa.py_buffer(offsets), pa.py_buffer(letters.tobytes()))
        table = pa.table({"id": ids, "text": texts})
        path = directory / f"{file:06d}.parquet"
        pq.write_table(table, path, row_group_size=ROW_GROUP, compression="zstd")


def disk_mb(directory: Path) -> float:
    """Return the disk space of all files below a directory, which may change meanwhile."""
    blocks = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                blocks += (Path(path) / name).stat().st_blocks
    return round(blocks * 512 / 1e6, 1)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, in user and in system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def events_of(run: Path, name: str) -> list[dict[str, Any]]:
    """Return the complete events of this name in the log of a run."""
    logs = [*run.glob("events.jsonl"), *run.glob("tasks/*/events.jsonl")]
    lines = logs[0].read_bytes().splitlines(keepends=True) if logs else []
    events = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [event for event in events if event["event"] == name]


def run_for(directory: Path, name: str, seconds: float, *options: str, **fields: Any) -> dict[str, Any]:
    """Run the input in `directory`, and stop the run gently so many seconds after its first row.

    Return the costs until the first row, and those until the stop. The run has the given name, options of the
    command and job fields.
    """
    run, job = directory / name, directory / f"{name}.json"
    source = {"path": str(directory / "input"), "columns": ["id"]}
    job.write_text(json.dumps({
        **job_for(directory), "input": source, "output": {"path": str(run)}, **fields,
    }))  # fmt: skip
    began = time.time()
    with (run.parent / f"{run.name}.log").open("w+") as log:
        words = [sys.executable, "-m", "batchrunner", str(job), *options]
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        first_row: dict[str, Any] = {}
        at_stop: dict[str, Any] = {}
        peak_disk_mb = 0.0
        while process.poll() is None:
            time.sleep(POLL_S)
            peak_disk_mb = max(peak_disk_mb, disk_mb(run))
            begins = events_of(run, "order") if not first_row else []
            if begins:  # the event is written just before the first row is sent
                first_row = {
                    "s": round(begins[0]["time"] - began, 1),
                    "cpu_s": round(cpu_seconds(process.pid), 1),
                    "peak_mb": peak_mb(process.pid),
                    "disk_peak_mb": peak_disk_mb,
                }
                print(f"{run.name}: first row: {first_row}", flush=True)
            if first_row and time.time() - began > first_row["s"] + seconds:
                at_stop = {"cpu_s": round(cpu_seconds(process.pid), 1), "peak_mb": peak_mb(process.pid)}
                process.send_signal(signal.SIGTERM)
                process.wait()
        log.seek(0)
        text = log.read()
    if not at_stop:
        raise SystemExit(f"{run.name}: ended within {seconds} s of its first row:\n{text[-4000:]}")
    samples = events_of(run, "sample")
    first, last = samples[0], samples[-1]
    span_s, rows = last["time"] - first["time"], last["rows_done"] - first["rows_done"]
    cpu_s = at_stop["cpu_s"] - first_row["cpu_s"]
    return {
        "first_row": first_row,
        "after": {
            **at_stop,
            "s": round(span_s, 1),
            "rows": rows,
            "rows_per_s": round(rows / span_s),
            "rows_per_cpu_s": round(last["rows_done"] / cpu_s),
        },
        "log": [line for line in text.splitlines() if line.startswith("sort")],
    }


def measure_sort(directory: Path, rows: int, files: int, seconds: float) -> dict[str, Any]:
    """Measure a run that sorts its rows, and one that does not."""
    began, cpu_s = time.monotonic(), time.process_time()
    write_lines(directory / "input", rows, files)
    wall_s = time.monotonic() - began
    print(f"input: {wall_s:.0f} s, {time.process_time() - cpu_s:.0f} s of CPU", flush=True)
    measured: dict[str, Any] = {"input_mb": disk_mb(directory / "input")}
    for order in ("input", "prefix"):
        measured[order] = run_for(directory, f"run-{order}", seconds, order=order)
        print(f"{order}: {measured[order]}", flush=True)
    return measured


def save_sort(rows: int, files: int, measured: dict[str, Any]) -> None:
    """Save what sorting costs."""
    first, after, unsorted = measured["prefix"]["first_row"], measured["prefix"]["after"], measured["input"]
    line = (
        f"sort: {rows:,} rows: first row after {first['s']:,.0f} s ({first['cpu_s']:,.0f} s of CPU), "
        f"unsorted {unsorted['first_row']['s']:.1f} s; {first['peak_mb']:.0f} MB of memory, "
        f"{first['disk_peak_mb']:,.0f} MB of disk for {measured['input_mb']:,.0f} MB of input; "
        f"then {after['rows_per_s']:,} rows/s, unsorted {unsorted['after']['rows_per_s']:,}"
    )
    figures = {"rows": rows, "files": files, **measured}
    save("sort", line, figures, ("batchrunner", "pyarrow", "duckdb", "numpy"), module="large_runs")


def write_equal_rows(directory: Path, rows: int, files: int) -> None:
    """Write a file of equal rows, and copies of it."""
    directory.mkdir()
    first = directory / "000000.parquet"
    file_rows = rows // files
    table = pa.table({"id": np.zeros(file_rows, np.int64), "text": ["the same text"] * file_rows})
    pq.write_table(table, first, compression="zstd")
    for file in range(1, files):
        shutil.copyfile(first, directory / f"{file:06d}.parquet")


def measure_start(directory: Path, rows: int, files: int, seconds: float) -> dict[str, Any]:
    """Measure when a run of many files sends its first row, alone and with `--join`."""
    write_equal_rows(directory / "input", rows, files)
    options: dict[str, list[str]] = {"alone": [], "join": ["--join"]}
    return {
        name: run_for(directory, f"run-{name}", seconds, *words, order="input")
        for name, words in options.items()
    }


def save_start(rows: int, files: int, measured: dict[str, Any]) -> None:
    """Save what a start costs."""
    costs = []
    for name, figures in measured.items():
        first = figures["first_row"]
        costs.append(f"{name} {first['s']} s ({first['cpu_s']} s of CPU), {first['peak_mb']:.0f} MB")
    line = f"start: {rows:,} rows in {files:,} files, first row after: {'; '.join(costs)}"
    packages = ("batchrunner", "pyarrow", "duckdb", "numpy")
    save("start", line, {"rows": rows, "files": files, **measured}, packages, module="large_runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs=2, default=[100_000, 1_000_000], metavar=("FEW", "MANY"))
    parser.add_argument("--command", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--sort", type=int, metavar="ROWS", help="measure only the sort of so many rows")
    parser.add_argument("--start", type=int, metavar="ROWS", help="measure only the start of so many rows")
    parser.add_argument("--files", type=int, default=200, help="number of files with --sort or --start")
    parser.add_argument("--seconds", type=float, default=120, help="seconds from the first row to the stop")
    parser.add_argument("--directory", help="where --sort and --start write their files")
    args = parser.parse_args()
    if args.sort or args.start:
        measure_runs = measure_sort if args.sort else measure_start
        with tempfile.TemporaryDirectory(prefix="bench-large-", dir=args.directory) as scratch:
            measured = measure_runs(Path(scratch), args.sort or args.start, args.files, args.seconds)
        save_runs = save_sort if args.sort else save_start
        save_runs(args.sort or args.start, args.files, measured)
        return
    if args.command:
        print(json.dumps(timed(args.command)))
        return
    few, many = (measure(rows) for rows in args.rows)
    more_mb = many["run"]["peak_mb"] - few["run"]["peak_mb"]
    shown = ", ".join(f"{name} {found['s']:.1f} s, {found['peak_mb']:.0f} MB" for name, found in many.items())
    beside = f"the run's peak {more_mb:+.0f} MB beside {args.rows[0]:,}"
    line = f"large runs: {args.rows[1]:,} rows: {shown}; {beside}"
    met = more_mb < GOAL_MB and all(many[name]["s"] < GOAL_S for name in ("status", "nothing_to_do"))
    figures = {
        "goal": {"difference_below_mb": GOAL_MB, "status_and_resume_below_s": GOAL_S, "met": met},
        "rows": args.rows, "few": few, "many": many,
    }  # fmt: skip
    save("large_runs", line, figures, ("batchrunner", "pyarrow", "duckdb", "uvloop"))


if __name__ == "__main__":
    main()
