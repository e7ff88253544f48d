"""Rounds of torture with a stand-in for SGLang: rows in bundles with faults of any kind, and other models."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.torture_round import LONGEST_START_S, Round, Totals, job_for, undisturbed
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.fragile import FRAGILE
from tests.support.launchable import launchable

if TYPE_CHECKING:
    pass

ROWS = 900
POISON = 117
"""The row that kills a server which the run launches, see `FRAGILE`."""
FAULTS: tuple[Behaviour, ...] = (
    *("busy 429", "busy 503", "broken 500", "abort", "abort 503", "empty", "not json", "disconnect", "hold"),
)
FAULT_SHARE = 0.03
"""Share of the attempts that end in one of the faults."""
REFUSED: tuple[Behaviour, ...] = ("too long", "bad schema", "abort 400")
"""What rows of their own fault get at each attempt; the first two are a 400 for all rows of a request."""
REQUEST_TIMEOUT_S = 1.5


def number_of(sent: Sent) -> int:
    """Return the number of a row: its one token."""
    return int(sent.prompt.strip("[]"))


def is_refused(row: int) -> bool:
    return row % 97 == 13


def fate(made: random.Random, sent: Sent) -> Behaviour:
    row = number_of(sent)
    if is_refused(row):
        return REFUSED[row % 3]
    return made.choice(FAULTS) if made.random() < FAULT_SHARE else "answer"


def bundled(folder: Path, source: Path, engine: dict[str, Any], made: random.Random) -> dict[str, Any]:
    """Return a job whose rows are token ids and share requests."""
    job = {
        **job_for(folder, source, engine),
        "prompt": {"input_ids": "ids"}, "bundle": made.choice((4, 8, 64)), "window": 64, "order": "input",
        "limits": {"max_failed_rows": ROWS, "request_timeout": REQUEST_TIMEOUT_S},
    }  # fmt: skip
    job["output"]["part_rows"] = made.choice((40, 10_000))
    return job


def ids_file(folder: Path) -> Path:
    path, rows = folder / "ids.parquet", list(range(ROWS))
    pq.write_table(pa.table({"id": rows, "ids": [[row] for row in rows]}), path, row_group_size=100)
    return path


def bundle_rounds(scratch: Path, rounds: int, seed: int, totals: Totals) -> None:
    """Kill runs whose rows share requests with rows that fail in any way."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # clients that were killed
    made, source = random.Random(seed), ids_file(scratch)
    _, calls = undisturbed(scratch / "calm-bundles", source.with_name("input.parquet"), {"kind": "simulated"})
    for number in range(rounds):
        folder = scratch / f"bundles-{number}"
        folder.mkdir()
        if number % 3 == 2:
            engine = launchable(folder, FRAGILE)
            _kill(folder, source, engine, made, calls, totals, {POISON}, together=False)
        else:
            with FakeSGLang(lambda sent: fate(made, sent), max_running=32, delay_s=0.05) as server:
                engine = {"kind": "attach", "urls": [server.url]}
                failed = {row for row in range(ROWS) if is_refused(row)}
                _kill(folder, source, engine, made, calls, totals, failed, together=bool(number % 3))
                totals.shared += server.requests < len(server.sent)
        told = f"{totals.kills} kills, in {totals.shared} of them rows shared requests"
        print(f"round with bundles {number + 1} of {rounds}: {told}", file=sys.stderr, flush=True)


def _kill(
    folder: Path,
    source: Path,
    engine: dict[str, Any],
    made: random.Random,
    calls: dict[str, int],
    totals: Totals,
    failed: set[int],
    *,
    together: bool,
) -> None:
    expected = {row: None if row in failed else f"answer 0 to [{row}]" for row in range(ROWS)}
    one = Round(folder, bundled(folder, source, engine, made), expected, totals, made, calls)
    one.go_together(kills=6) if together else one.go(kills=6)


def swap_rounds(scratch: Path, rounds: int, seed: int, totals: Totals) -> None:
    """Let another model come to the address of a server during a run; then the first one again."""
    made, source = random.Random(seed), ids_file(scratch)
    for number in range(rounds):
        folder = scratch / f"swap-{number}"
        folder.mkdir()
        with FakeSGLang(max_running=16, delay_s=0.05) as first:
            job = bundled(folder, source, {"kind": "attach", "urls": [first.url]}, made)
            job["bundle"] = made.choice((1, 8))
            (folder / "job.yaml").write_text(json.dumps(job))
            command = [sys.executable, "-m", "batchrunner", str(folder / "job.yaml"), "-q"]
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            first.wait_for(made.randint(50, 500))
            port = int(first.url.rpartition(":")[2])
        time.sleep(made.uniform(0.0, 1.0))
        with FakeSGLang(lambda _: "empty", model="another/model", port=port) as other:
            status = process.wait(LONGEST_START_S)
            asked = len(other.sent)
        with FakeSGLang(port=port):
            last = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=LONGEST_START_S, check=False)
        table = pq.read_table(folder / "run" / "parts")
        found = list(zip(table["row"].to_pylist(), table["output"].to_pylist(), strict=True))
        totals.swaps += 1
        totals.unnoticed += status != 1 or last.returncode != 0
        totals.rows += ROWS
        totals.lost += ROWS - len(dict(found))
        totals.doubled += len(found) - len(dict(found))
        totals.different += sum(output != f"answer 0 to [{row}]" for row, output in found)
        print(f"swap {number + 1} of {rounds}: exit {status}, {asked} rows sent to the other model",
              file=sys.stderr, flush=True)  # fmt: skip
