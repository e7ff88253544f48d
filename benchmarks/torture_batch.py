"""Does a batch file lose or double a line, whatever moment `batchrun batch` is killed at?

Rounds of one small batch file. A start is killed with SIGKILL just before, in the middle of or just after a
chosen write, fsync, rename or unlink, those that publish the results included, or at a random moment. Then
the same command is started again, and killed again, until a start reaches its end. At any time the results
must be absent or whole, and at the end they must be those of an undisturbed run, byte for byte. In every
second round three starts share the lines (`--join`).

The engine is simulated.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from batchrunner.core.console import tell
from batchrunner.runner.batch import run_batch
from benchmarks.measure import save
from benchmarks.torture_round import (
    CALLS,
    LONGEST_START_S,
    MOMENTS,
    TOGETHER,
    child_of,
    count_calls,
    die_at,
)

LINES = 300
SETTINGS = ["engine.step_s=0.01", "engine.max_running=16", "output.durable=0.2", "output.part_rows=40"]


@dataclass
class BatchTotals:
    """What happened in all rounds."""

    kills: int = 0
    rounds: int = 0
    torn: int = 0
    """Times that the results were there and not whole."""
    different: int = 0
    """Rounds whose results were others than those of an undisturbed run."""
    by_moment: dict[str, int] = field(default_factory=dict)


def child(folder: str, call: str, moment: str, number: int, *, join: bool) -> None:
    """Do the batch as the command does, and die at the chosen call."""
    place = Path(folder)
    if call in CALLS:
        die_at(os, call, moment, number)
    elif call == "count":
        count_calls(place / "calls.json")
    done = run_batch(
        str(place.parent / "requests.jsonl"), str(place / "results.jsonl"), str(place / "errors.jsonl"),
        {"engine": ["simulated"], "overrides": SETTINGS},
        fresh=False, retry_failed=False, join=join, quiet=True, as_json=False,
    )  # fmt: skip
    sys.exit(done.report.exit_code)


def write_requests(path: Path) -> None:
    """Write the lines of a batch file; every tenth has no messages, and ends with an error."""
    with path.open("w") as file:
        for number in range(LINES):
            messages = [{"role": "user", "content": f"question {number}"}] if number % 10 else []
            line = {
                "custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions",
                "body": {"messages": messages, "max_tokens": 24},
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")


class BatchRound:
    """One batch file, from its first start to its end."""

    def __init__(self, folder: Path, made: random.Random, totals: BatchTotals, calm: Path) -> None:
        self._folder = folder
        self._made = made
        self._totals = totals
        self._expected = {name: (calm / name).read_bytes() for name in ("results.jsonl", "errors.jsonl")}
        self._calls: dict[str, int] = json.loads((calm / "calls.json").read_text())
        folder.mkdir()

    def go(self, kills: int, *, starts: int) -> None:
        """Kill so many starts, of which several run at once, and let the others come to their end."""
        for _ in range(kills // starts):
            running = [self._start(join=starts > 1) for _ in range(starts)]
            for process, where in running:
                status = process.wait(LONGEST_START_S)
                if status == -signal.SIGKILL:
                    self._totals.kills += 1
                    self._totals.by_moment[where] = self._totals.by_moment.get(where, 0) + 1
                elif status not in {0, 1}:  # 1: others died, and their lines are left
                    raise SystemExit(f"exit {status} in {self._folder}")
            self._look()
        last = subprocess.run(_command(self._folder, join=starts > 1), check=False, timeout=LONGEST_START_S)
        if last.returncode:
            raise SystemExit(f"exit {last.returncode} in {self._folder}")
        self._totals.rounds += 1
        self._totals.different += any(self._read(name) != text for name, text in self._expected.items())

    def _start(self, *, join: bool) -> tuple[subprocess.Popen[bytes], str]:
        if self._made.random() < 0.2:
            process = subprocess.Popen(_command(self._folder, join=join))
            time.sleep(self._made.uniform(0.7, 3.0))
            process.kill()
            return process, "at a random moment"
        call, moment = self._made.choice(sorted(self._calls)), self._made.choice(MOMENTS)
        number = self._made.randint(1, max(1, self._calls[call]))
        command = _command(self._folder, call, moment, number, join=join)
        return subprocess.Popen(command), f"{'joined: ' * join}{call} {moment}"

    def _look(self) -> None:
        for name, text in self._expected.items():
            self._totals.torn += self._read(name) not in {None, text}

    def _read(self, name: str) -> bytes | None:
        path = self._folder / name
        return path.read_bytes() if path.exists() else None


def _command(
    folder: Path, call: str = "none", moment: str = "-", number: int = 0, *, join: bool
) -> list[str]:
    return child_of("torture_batch", folder=str(folder), call=call, moment=moment, number=number, join=join)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(**args.child)
        return
    totals, began, made = BatchTotals(), time.monotonic(), random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="torture-batch-") as scratch:
        write_requests(Path(scratch) / "requests.jsonl")
        calm = Path(scratch) / "calm"
        calm.mkdir()
        subprocess.run(_command(calm, "count", join=False), check=True, timeout=LONGEST_START_S)
        while totals.kills < args.kills:
            folder = Path(scratch) / f"round-{totals.rounds}"
            one = BatchRound(folder, made, totals, calm)
            one.go(12, starts=TOGETHER if totals.rounds % 2 else 1)
            tell(f"round {totals.rounds}: {totals.kills} kills")
    line = (
        f"torture_batch: {totals.kills} kills in {totals.rounds} rounds of {LINES} lines, "
        f"{totals.torn} results that were not whole, {totals.different} rounds with other results"
    )
    figures = {
        "goal_met": not (totals.torn or totals.different),
        "took_s": round(time.monotonic() - began, 1),
        "seed": args.seed,
        "kills_by_moment": totals.by_moment,
    }
    save("torture_batch", line, figures, ("batchrunner", "pyarrow"))
    sys.exit(0 if figures["goal_met"] else 1)


if __name__ == "__main__":
    main()
