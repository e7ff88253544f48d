"""Does anything get lost or doubled in an object store, whatever is killed, and whenever?

Rounds of one small job whose results go to a local S3 server (moto). A start of the runner is killed with
SIGKILL: at a random moment, or just before or after a chosen request to the store. A third of the starts lose
their disk with it; the next start is on the same machine or on another one, with its own host name and cache,
which counts a silent one as gone after 3 s. In half of the rounds three starts join the run, and each that
is killed is replaced. Some are stopped for a few seconds (SIGSTOP) before they are killed or go on, so that
others take over from them meanwhile. At the end of a round every row must be in the parts once, with the
output of an undisturbed run.
"""

import argparse
import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import obstore
import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.console import tell
from batchrunner.core.errors import EXIT_WRONG
from batchrunner.runner.foreground import run_in_foreground
from benchmarks.measure import save
from benchmarks.torture_round import TOGETHER, Totals, child_of, die_at
from tests.support.other_machine import be_another_machine
from tests.support.store_server import VARIABLES, StoreBucket, new_bucket, store_server

REQUESTS = ("put", "get", "list", "delete")
ROWS = 200
MACHINES = ("a", "b", "c")
LONGEST_S = 900.0
"""A start that takes longer hangs."""
MOST_REFUSED = 30
"""Starts in succession that are refused, since another machine still seems to write."""
PAUSE_S = 6.0
"""Longer than a silent machine is waited for."""


def child(job_file: str, machine: str, request: str, moment: str, number: int, *, join: bool) -> None:
    """Run the job as the command does on a machine, and die at the chosen request."""
    be_another_machine(machine)
    if request in REQUESTS:
        die_at(obstore, request, moment, number)
    report = run_in_foreground(
        job_file, [], fresh=False, retry_failed=False, join=join, quiet=True, as_json=False
    )
    sys.exit(report.exit_code)


@dataclass
class StoreTotals(Totals):
    """What happened in all rounds."""

    pauses: int = 0
    lost_disks: int = 0
    rounds: int = 0


@dataclass
class _Start:
    process: subprocess.Popen[bytes]
    machine: str
    where: str
    strikes_at: float
    is_paused: bool = False


class StoreRound:
    """One job in a bucket of its own, from its first start to its end."""

    def __init__(
        self, folder: Path, bucket: StoreBucket, source: Path, totals: StoreTotals, made: random.Random
    ) -> None:
        """Write the job into the folder."""
        self._folder, self._bucket, self._totals, self._made = folder, bucket, totals, made
        self._refused = 0  # starts that were refused, since another one was not
        self._environ = {**os.environ, **VARIABLES, "AWS_ENDPOINT_URL": bucket.endpoint}
        self._environ["XDG_CACHE_HOME"] = str(folder / "disks")
        job = {
            "input": {"path": str(source), "columns": ["id"]},
            "prompt": {"text": "text"},
            "sampling": {"max_new_tokens": 16, "temperature": 0},
            "output": {"path": f"{bucket.uri}/run", "part_rows": made.choice((30, 10_000)), "durable": 0.5},
            "engine": {"kind": "simulated", "step_s": 0.03, "max_running": 16},
            "order": made.choice(("input", "prefix")),
        }
        folder.mkdir(parents=True)
        (folder / "job.yaml").write_text(json.dumps(job))

    def go(self, kills: int, *, together: int) -> None:
        """Let so many starts work at once; kill so many, and let another one come for each."""
        join = together > 1
        running = [self._spawn(join=join, kill=True) for _ in range(together)]
        while running:
            time.sleep(0.05)
            for each in list(running):
                status = each.process.poll()
                if status is None:
                    self._strike(each)
                    continue
                running.remove(each)
                if status not in {0, 1, 2, -signal.SIGKILL}:
                    raise SystemExit(f"exit {status} in {self._folder}")
                if status == -signal.SIGKILL:
                    kills -= 1
                    self._note(each, running)
                self._refused = self._refused + 1 if status == EXIT_WRONG else 0
                if self._refused > MOST_REFUSED:
                    raise SystemExit(f"no start goes on any more in {self._folder}")
                if status:  # 1: others died, and their rows are left; 2: another machine still seems to write
                    running.append(self._spawn(join=join, kill=kills > 0))
        last = self._spawn(join=join, kill=False).process.wait(LONGEST_S)
        if last:
            raise SystemExit(f"exit {last} in {self._folder}")

    def rows(self) -> list[tuple[int, str]]:
        """Return row and output of all parts."""
        found: list[tuple[int, str]] = []
        for key in self._bucket.keys("run/parts/"):
            table = pq.read_table(io.BytesIO(self._bucket.get(key)))
            found += zip(table["row"].to_pylist(), table["output"].to_pylist(), strict=True)
        return found

    def _strike(self, start: _Start) -> None:
        if time.monotonic() < start.strikes_at:
            return
        if not start.is_paused and self._made.random() < 0.3:
            start.process.send_signal(signal.SIGSTOP)
            start.is_paused, start.strikes_at = True, time.monotonic() + PAUSE_S
            self._totals.pauses += 1
            return
        if start.is_paused and self._made.random() < 0.5:
            start.process.send_signal(signal.SIGCONT)
            start.strikes_at = math.inf
            return
        start.process.kill()

    def _note(self, start: _Start, others: list[_Start]) -> None:
        """Count a start that was killed, and lose its machine or not, with all that it does."""
        self._totals.killed(start.where)
        if self._made.random() < 1 / 3:
            for each in others:
                if each.machine == start.machine:
                    each.process.kill()
                    each.process.wait()
            shutil.rmtree(self._folder / "disks" / start.machine, ignore_errors=True)
            self._totals.lost_disks += 1

    def _spawn(self, *, join: bool, kill: bool) -> _Start:
        machine = self._made.choice(MACHINES)
        request, moment, number = "none", "at a random moment", 0
        strikes_at = math.inf
        if kill and self._made.random() < 0.6:
            request, moment = self._made.choice(REQUESTS), self._made.choice(("before", "after"))
            number = self._made.randint(1, 12)
        elif kill:
            strikes_at = time.monotonic() + self._made.uniform(2.0, 12.0)
        where = f"{'joined: ' * join}{moment if request == 'none' else f'{moment} {request}'}"
        command = child_of(
            "torture_store", job_file=str(self._folder / "job.yaml"), machine=machine, request=request,
            moment=moment, number=number, join=join,
        )  # fmt: skip
        with (self._folder / "stderr").open("ab") as said:
            process = subprocess.Popen(command, env=self._environ, stderr=said)
        return _Start(process, machine, where, strikes_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=150)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no round after that")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(**args.child)
        return
    totals, began, made = StoreTotals(), time.monotonic(), random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="torture-store-") as scratch, store_server() as address:
        source = Path(scratch) / "input.parquet"
        ids = list(range(ROWS))
        pq.write_table(pa.table({"id": ids, "text": [f"row {i}" for i in ids]}), source, row_group_size=50)
        calm = StoreRound(
            Path(scratch) / "calm", new_bucket(address), source, StoreTotals(), random.Random(0)
        )
        calm.go(0, together=1)
        expected = dict(calm.rows())
        while totals.kills < args.kills and time.monotonic() - began < 60 * args.minutes:
            number = totals.rounds
            one = StoreRound(Path(scratch) / f"round-{number}", new_bucket(address), source, totals, made)
            one.go(kills=8, together=TOGETHER if number % 2 else 1)
            totals.judge(expected, one.rows())
            totals.rounds += 1
            told = (
                f"{totals.kills} kills, {totals.pauses} pauses, {totals.lost} lost, {totals.doubled} doubled"
            )
            tell(f"round {number}: {told}")
    line = (
        f"torture in a store: {totals.kills} kills and {totals.pauses} pauses in {totals.rounds} rounds, "
        f"{totals.lost_disks} disks lost, {totals.rows:,} rows, {totals.lost} lost, "
        f"{totals.doubled} doubled, {totals.different} different"
    )
    figures = {
        "goal_met": not (totals.lost or totals.doubled or totals.different),
        "took_s": round(time.monotonic() - began, 1), "seed": args.seed,
        "kills": totals.kills, "pauses": totals.pauses, "kills_by_moment": dict(totals.by_moment),
    }  # fmt: skip
    save("torture_store", line, figures, ("batchrunner", "pyarrow", "obstore"))
    sys.exit(0 if figures["goal_met"] else 1)


if __name__ == "__main__":
    main()
