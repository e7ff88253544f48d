"""Rounds of torture with a stand-in for SGLang.

Rows in bundles with faults of any kind, answers that are rejected, and other models.
"""

import json
import logging
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.console import tell
from batchrunner.dispatch.checks import SEED_STEP
from benchmarks.torture_round import LONGEST_START_S, Round, Totals, job_for, undisturbed
from tests.support.answers import Said
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.launchable import FRAGILE, launchable

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
        tell(f"round with bundles {number + 1} of {rounds}: {told}")


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


TRIES = 3
"""How often a row is asked for a good answer."""
CHECKS: tuple[dict[str, Any], ...] = (
    {"regex": "^good"},
    {"expression": "output.startswith('good')"},
    {"json": {"type": "object", "properties": {"good": {"const": True}}, "required": ["good"]}},
)


def said_of(row: int, number: int, *, as_json: bool) -> str:
    """Return what a row is answered when it is asked for the `number`th time; from 0 to 2 are rejected."""
    is_good = number > row % (TRIES + 1)
    if as_json:
        return json.dumps({"row": row, "number": number, "good": is_good})
    return f"{'good' if is_good else 'bad'} {number} to {row}"


def check_rounds(scratch: Path, rounds: int, seed: int, totals: Totals) -> None:
    """Kill runs whose rows are asked again because their answers are not good.

    A later start does not ask a row again that has ended, and asks one that has not from the beginning: its
    attempts are those that it needs in a run which nobody disturbs.
    """
    made, source = random.Random(seed), ids_file(scratch)
    _, calls = undisturbed(scratch / "calm-checks", source.with_name("input.parquet"), {"kind": "simulated"})
    for number in range(rounds):
        folder = scratch / f"checks-{number}"
        folder.mkdir()
        check = CHECKS[number % len(CHECKS)]

        def script(sent: Sent, *, as_json: bool = "json" in check) -> Said:
            asked = sent.body["sampling_params"].get("sampling_seed", 0) // SEED_STEP + 1
            return Said(said_of(number_of(sent), asked, as_json=as_json))

        attempts = {row: min(row % (TRIES + 1) + 1, TRIES) for row in range(ROWS)}
        expected = {row: said_of(row, asked, as_json="json" in check) for row, asked in attempts.items()}
        with FakeSGLang(script, max_running=32, delay_s=0.05) as server:
            job = bundled(folder, source, {"kind": "attach", "urls": [server.url]}, made)
            job["accept"] = {**check, "tries": TRIES}
            job["limits"] = {"max_failed_rows": ROWS}
            one = Round(folder, job, expected, totals, made, calls, attempts=attempts)
            one.go_together(kills=6) if number % 2 else one.go(kills=6)
            totals.checked += 1
        told = f"{totals.kills} kills, {totals.miscounted} rows with other attempts"
        tell(f"round with checks {number + 1} of {rounds}: {told}")


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
        totals.judge({row: f"answer 0 to [{row}]" for row in range(ROWS)}, found)
        tell(f"swap {number + 1} of {rounds}: exit {status}, {asked} rows sent to the other model")
