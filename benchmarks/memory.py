"""Does memory stay flat, however many rows there are? Peak RSS at a million rows beside that at 100,000.

The engine is simulated and answers at once, so rows go through as fast as the runner can move them. Each
size runs in a fresh process as the command does; the peak is the kernel's high-water mark of that process
(VmHWM), imports included.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.runner.foreground import run_in_foreground
from benchmarks.measure import in_fresh_process, save

SEED = 7
GOAL_MB = 50
ROW_GROUP = 50_000
WORDS_A_TEXT = 36  # about 200 characters


def write_input(path: Path, rows: int) -> None:
    """Write `rows` seeded texts and an identifier, in row groups of 50,000, holding one at a time."""
    made = random.Random(SEED)
    words = ["".join(made.choices("etaoinshrdlu", k=made.randint(2, 7))) for _ in range(2000)]
    schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, ROW_GROUP):
            count = min(ROW_GROUP, rows - start)
            columns = {
                "id": [f"doc-{start + i:09d}" for i in range(count)],
                "text": [" ".join(made.choices(words, k=WORDS_A_TEXT)) for _ in range(count)],
            }
            writer.write_table(pa.table(columns, schema=schema), row_group_size=ROW_GROUP)


def job_for(source: Path, out: Path) -> dict[str, Any]:
    return {
        "input": {"path": str(source), "columns": ["id"]},
        "prompt": {"user": "Summarise: {{ text }}"},
        "sampling": {"max_new_tokens": 64},
        "output": {"path": str(out)},
        "engine": {"kind": "simulated", "step_s": 0},
    }


def run_once(job_file: str) -> dict[str, Any]:
    report = run_in_foreground(job_file, [], fresh=True, retry_failed=False, quiet=True, as_json=False)
    assert report.exit_code == 0, report.reason
    return {"rows": report.rows_ok, "peak_mb": peak_mb(), "wall_s": report.wall_s}


def peak_mb() -> float:
    """The process's own high-water mark; ru_maxrss would begin at that of the process that started it."""
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return round(int(kilobytes) / 1024, 1)


def measure(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    found = []
    for rows in sizes:
        with tempfile.TemporaryDirectory(prefix="bench-memory-") as scratch:
            write_input(Path(scratch) / "input.parquet", rows)
            job_file = Path(scratch) / "job.yaml"
            job_file.write_text(json.dumps(job_for(Path(scratch) / "input.parquet", Path(scratch) / "run")))
            found += [in_fresh_process("benchmarks.memory", "--job", str(job_file)) for _ in range(rounds)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs=2, default=[100_000, 1_000_000], metavar=("FEW", "MANY"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(run_once(args.job)))
        return
    runs = measure(args.rows, args.rounds)
    few, many = (max(run["peak_mb"] for run in runs if run["rows"] == rows) for rows in args.rows)
    line = (
        f"memory: peak RSS {many:.0f} MB at {args.rows[1]:,} rows, {few:.0f} MB at {args.rows[0]:,} "
        f"({many - few:+.0f} MB; goal: within {GOAL_MB})"
    )
    figures = {
        "goal": {"difference_below_mb": GOAL_MB, "met": abs(many - few) < GOAL_MB},
        "difference_mb": round(many - few, 1),
        "measured": runs,
    }
    save("memory", line, figures, ("batchrunner", "pyarrow", "aiohttp", "uvloop"))


if __name__ == "__main__":
    main()
