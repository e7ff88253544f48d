"""Do 64 real processes share a run without losing or doubling a row, if eight of them are killed?

Each is a command `batchrun JOB --join` of its own, on this machine, with the simulated engine. They start one
after another. Once three of four hold leases, some are killed with SIGKILL. The others do all rows.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.output.run_dir import RunDir
from batchrunner.runner.leases import Leases
from benchmarks.measure import save

SEED = 5
STEP_S = 0.5
"""Seconds of a pass of the simulated engine. A process does eight rows a second, with little work."""
START_EVERY_S = 2.0


def write_job(directory: Path, rows: int) -> Path:
    """Write an input of short rows, and a job on it."""
    pq.write_table(pa.table({"text": [f"line {row}" for row in range(rows)]}), directory / "input.parquet")
    job = {
        "input": {"path": str(directory / "input.parquet")},
        "prompt": {"user": "{{ text }}"},
        "sampling": {"max_new_tokens": 16},
        "order": "input",
        "output": {"path": str(directory / "run")},
        "engine": {"kind": "simulated", "step_s": STEP_S, "max_running": 64},
    }
    path = directory / "job.json"
    path.write_text(json.dumps(job))
    return path


def workers_with_leases(run_dir: RunDir) -> int:
    """Return how many processes hold leases."""
    leases = Leases(run_dir.leases)
    leases.refresh()
    return len({*leases.held().values()})


def measure(processes: int, kills: int, rows: int) -> dict[str, Any]:
    """Run the job in so many processes, kill some, and count the rows in the part files."""
    with tempfile.TemporaryDirectory(prefix="bench-processes-") as scratch:
        directory = Path(scratch)
        job, run_dir = write_job(directory, rows), RunDir(directory / "run")
        command = ["nice", "-n", "10", sys.executable, "-m", "batchrunner", str(job), "--join", "--quiet"]
        began = time.monotonic()
        running = []
        for _ in range(processes):
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(START_EVERY_S)
        most_with_leases = 0
        while most_with_leases < 3 * processes // 4 and any(process.poll() is None for process in running):
            most_with_leases = max(most_with_leases, workers_with_leases(run_dir))
            time.sleep(1)
        alive = [process for process in running if process.poll() is None]
        killed = random.Random(SEED).sample(alive, min(kills, len(alive)))
        for process in killed:
            process.send_signal(signal.SIGKILL)
        codes = Counter(process.wait() for process in running)
        took_s = time.monotonic() - began
        stored = Counter[int]()
        for part in run_dir.all_parts():
            stored.update(pq.read_table(part, columns=["row"]).column("row").to_pylist())
    return {
        "processes": processes,
        "killed": len(killed),
        "held_leases_when_killed": most_with_leases,
        "rows": rows,
        "rows_lost": rows - len(stored),
        "rows_doubled": sum(count > 1 for count in stored.values()),
        "exit_codes": {str(code): count for code, count in sorted(codes.items())},
        "took_s": round(took_s, 1),
    }


def main() -> None:
    """Measure once; save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--rows", type=int, default=100_000)
    args = parser.parse_args()
    figures = measure(args.processes, args.kills, args.rows)
    line = (
        f"many processes: {args.processes} processes, {figures['killed']} killed, {args.rows:,} rows: "
        f"{figures['rows_lost']} lost, {figures['rows_doubled']} doubled, exit codes {figures['exit_codes']}"
    )
    save("many_processes", line, figures, ("batchrunner", "pyarrow"))


if __name__ == "__main__":
    main()
