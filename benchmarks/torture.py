"""Does anything get lost or doubled, whatever is killed, and whenever?

Rounds of one small job each. A start of the runner is killed with SIGKILL: at a random moment, or just
before, in the middle of or just after a chosen write, fsync, rename, unlink or truncation of a file. Then it
is started again, and killed again, until a start reaches its end. At the end of a round every row must be
there once, with the very output of an undisturbed run. On the way nothing that was durable may vanish, and
what is done again may only have ended in the last second (by default; here `durable` is 0.2 s, to have more
kills a minute).

In half of the rounds several starts join the run (`--join`), and each that is killed is replaced by another.
Those that were killed stay zombies until the end of the round: nobody asks for their exit status. In half of
either, rows are sorted first (`order: prefix`). In every third, prompts and columns are made by Python
functions.

In rounds with bundles (`--bundles N`, torture_servers.py) the rows of a stand-in server share requests, and
some of them are refused for good, for now, aborted, cut off or left without an answer; in every third one a
row kills the server, which the run has launched. In rounds with checks (`--checks N`) three rows of four are
answered badly at first, and asked again: the attempts in their results are those that each needed, whenever
starts were killed. In rounds with other models (`--swaps N`) the server goes
away in the middle of a run, and another one, with another model, comes on its port.

In further rounds (`--changes N`) the input changes during a run: its file is replaced, rewritten in place or
truncated, or a file is added. No row of a new content may be in the results, and the exit code must say that
rows are missing.

The engine is simulated, for the number of kills.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.console import tell
from benchmarks.measure import save
from benchmarks.torture_round import (
    DURABLE_S,
    LATE_S,
    LONGEST_START_S,
    ROWS,
    Round,
    Totals,
    child,
    job_for,
    undisturbed,
)
from benchmarks.torture_servers import bundle_rounds, check_rounds, swap_rounds

FUNCTIONS = """
from typing import TypedDict

class Size(TypedDict):
    size: int

def prompt(row):
    return row["text"]

def parse(answer) -> Size:
    return {"size": len(answer)}
"""


def simulated_rounds(scratch: Path, source: Path, kills: int, seed: int, totals: Totals) -> None:
    engine = {"kind": "simulated", "step_s": 0.01, "max_running": 16}
    expected, calls = undisturbed(scratch / "calm", source, engine)
    made, number = random.Random(seed), 0
    (scratch / "torture_functions.py").write_text(FUNCTIONS)
    functions = {
        "prompt": {"python": "torture_functions:prompt"},
        "parse": "torture_functions:parse",
        "python_path": [str(scratch)],
    }
    while totals.kills < kills:
        folder = scratch / f"round-{number}"
        folder.mkdir()
        job = job_for(folder, source, engine)
        job["output"]["part_rows"] = made.choice((40, 10_000))
        job["order"] = "prefix" if number // 2 % 2 else "input"
        job |= functions if number % 3 == 2 else {}
        one = Round(folder, job, expected, totals, made, calls)
        one.go_together(kills=12) if number % 2 else one.go(kills=12)
        number += 1
        tell(f"round {number}: {totals.kills} kills")


def changed_rounds(scratch: Path, rounds: int, seed: int, totals: Totals) -> None:
    """Change the input at a random moment of a run; then put it back, and let a start finish the run."""
    made = random.Random(seed)
    for number in range(rounds):
        folder = scratch / f"changed-{number}"
        source = _texts(folder / "in" / "a.parquet", 0)
        kept, what = source.read_bytes(), ("replaced", "rewritten", "truncated", "added")[number % 4]
        job = job_for(folder, source.parent, {"kind": "simulated", "step_s": 0.005, "max_running": 16})
        job["order"], job["input"]["columns"] = made.choice(("input", "prefix")), ["text"]
        (folder / "job.yaml").write_text(json.dumps(job))
        command = [sys.executable, "-m", "batchrunner", str(folder / "job.yaml"), "-q"]
        command += ["--join"] * made.randint(0, 1)
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            parts = folder / "run" / "parts"
            while process.poll() is None and not list(parts.glob("part-*.parquet")):
                time.sleep(0.02)
            time.sleep(made.uniform(0.0, 0.3))
            runs_on = process.poll() is None
            _change(source, what)
            status = process.wait(LONGEST_START_S)
        wrong = runs_on and status not in {0, 1 if what == "added" else 2}  # 0: it was over before
        if what != "added":
            source.write_bytes(kept)
        last = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=LONGEST_START_S, check=False)
        rows = pq.read_table(parts).select(["row", "text"]).to_pylist()
        right = all(row["text"] == f"row {row['row']}" for row in rows)
        totals.changes += 1
        totals.unnoticed += bool(wrong or not right or last.returncode)
        expected = set(range(2 * ROWS if what == "added" else ROWS))
        totals.rows += len(expected)
        totals.lost += len(expected - {row["row"] for row in rows})
        totals.doubled += len(rows) - len({row["row"] for row in rows})
    tell(f"{rounds} rounds with changed input")


def _texts(path: Path, first: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [f"row {row}" for row in range(first, first + ROWS)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=50)
    return path


def _change(source: Path, what: str) -> None:
    other = _texts(source.with_name("other.tmp"), ROWS)
    if what == "replaced":
        other.replace(source)
    elif what == "rewritten":
        source.write_bytes(other.read_bytes())
    elif what == "truncated":
        source.write_bytes(source.read_bytes()[:-100])
    else:
        other.replace(source.with_name("b.parquet"))
    other.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--changes", type=int, default=12, help="rounds in which the input changes")
    parser.add_argument("--bundles", type=int, default=9, help="rounds with rows that share requests")
    parser.add_argument("--checks", type=int, default=6, help="rounds with answers that are rejected")
    parser.add_argument("--swaps", type=int, default=6, help="rounds in which another model comes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(**args.child)
        return
    totals, began = Totals(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        source = Path(scratch) / "input.parquet"
        ids = list(range(ROWS))
        pq.write_table(pa.table({"id": ids, "text": [f"row {i}" for i in ids]}), source, row_group_size=50)
        simulated_rounds(Path(scratch), source, args.kills, args.seed, totals)
        changed_rounds(Path(scratch), args.changes, args.seed, totals)
        bundle_rounds(Path(scratch), args.bundles, args.seed, totals)
        check_rounds(Path(scratch), args.checks, args.seed, totals)
        swap_rounds(Path(scratch), args.swaps, args.seed, totals)
    line = (
        f"torture: {totals.kills} kills, {totals.rows:,} rows, {totals.lost} lost, {totals.doubled} doubled, "
        f"{totals.different} different, {totals.vanished} durable ones gone, {totals.redone} done again "
        f"({totals.redone_too_late} of them older than {DURABLE_S + LATE_S:g} s), "
        f"{totals.changes} changes of the input and {totals.swaps} of the model, "
        f"{totals.unnoticed} unnoticed; rows shared requests in {totals.shared} rounds, and were asked again "
        f"in {totals.checked}: {totals.miscounted} rows with a wrong count of attempts"
    )
    figures = {
        "goal_met": not (
            totals.lost
            or totals.doubled
            or totals.different
            or totals.vanished
            or totals.redone_too_late
            or totals.unnoticed
            or totals.miscounted
        ),
        "took_s": round(time.monotonic() - began, 1), "seed": args.seed,
        "kills_by_moment": dict(totals.by_moment),
    }  # fmt: skip
    save("torture", line, figures, ("batchrunner", "pyarrow"))
    sys.exit(0 if figures["goal_met"] else 1)


if __name__ == "__main__":
    main()
