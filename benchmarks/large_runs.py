"""Do memory and time stay flat however many rows there are? Whole commands at 100,000 and at a million rows.

The rows are shuffled questions on documents, eight to a document, so that a start sorts them by prefix. The
engine is simulated and answers at once: rows go through as fast as the runner can move them. Each command
(the run, `status`, the run again with nothing to do, `merge`) is a fresh process; its peak is the kernel's
high-water mark (VmHWM), imports included. `--rows 100000 10000000` measures ten million.
"""

import argparse
import contextlib
import io
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs=2, default=[100_000, 1_000_000], metavar=("FEW", "MANY"))
    parser.add_argument("--command", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
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
