"""What does durability cost? The runner with its journal beside the same runner without one.

As `benchmarks.client`: nginx answers at once, the runner reads Parquet and writes Parquet. The side without
a journal keeps its rows in memory until their part is written, at most 30 s. Judged by the CPU seconds of the
runner's process a row, in alternating pairs of fresh processes; the wall time, fsyncs included, beside it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchrunner.output import writer as sink
from benchmarks.canned_server import nginx
from benchmarks.client import job_for, runner, write_input
from benchmarks.measure import in_fresh_process, interval, save

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

GOAL = 1.05


class NoJournal:
    """Stands in for the journal and keeps nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, table: pa.Table) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def without(job_file: str) -> dict[str, Any]:
    vars(sink)["Journal"] = NoJournal
    return runner(job_file)


SIDES: dict[str, Callable[[str], dict[str, Any]]] = {"journal": runner, "none": without}


def measure(pairs: int, rows: int, window: int) -> list[dict[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="bench-journal-") as scratch, nginx(Path(scratch)) as url:
        source, job_file = Path(scratch) / "input.parquet", Path(scratch) / "job.yaml"
        write_input(source, rows)
        job_file.write_text(json.dumps(job_for(source, Path(scratch) / "run", url, "chat", window)))
        return [
            {
                side: in_fresh_process("benchmarks.journal", "--side", side, "--job", str(job_file))
                for side in (list(SIDES) if turn % 2 else reversed(SIDES))
            }
            for turn in range(pairs)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(SIDES[args.side](args.job)))
        return
    found = measure(args.pairs, args.rows, args.window)
    cpu = interval([pair["journal"]["cpu_s"] / pair["none"]["cpu_s"] for pair in found])
    wall = interval([pair["journal"]["wall_s"] / pair["none"]["wall_s"] for pair in found])
    line = f"journal: {cpu} x the CPU time a row without one (goal {GOAL}), {wall} x the wall time"
    goal = {"cpu_ratio_at_most": GOAL, "met": cpu.median <= GOAL}
    figures = {"goal": goal, "cpu_ratio": cpu, "wall_ratio": wall, "rows": args.rows, "measured": found}
    save("journal", line, figures, ("batchrunner", "pyarrow"))


if __name__ == "__main__":
    main()
