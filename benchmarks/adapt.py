"""Flags that change while a run goes on: five bad starts on the real engine, beside the best known flags.

    python -m benchmarks.adapt --minutes 20

A start's flags are the defaults of servers on a CPU, since a run touches no flag that its job names. Prints
for each start: output tokens a forward pass in the last third, as a share of those with the best known flags;
the time of the run with them, as a share of this run's (restarts included); and the restarts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import batchrunner
from batchrunner.core.timing import TIMING
from batchrunner.sglang import device
from batchrunner.sglang.logs.lines import STEPS_A_LINE, LoggedBatch, origin_of, record_in
from tests.conftest import SMALL_MODEL
from tests.support.tiny_model import make_tiny_llama

VOCABULARY, ENDS = 2048, range(100, 2048, 64)
"""Tokens of the model, and those that end an output: it has 64 tokens on average."""
PROMPT, MOST = 200, 1024
BEST = {"max-running-requests": 64, "max-total-tokens": 40_000, "schedule-conservativeness": 0.3}
FEW, CHUNKS = {"max-running-requests": 4}, {"chunked-prefill-size": 128}
STARTS: dict[str, dict[str, Any]] = {
    "few slots": FEW,
    "small chunks": CHUNKS,
    "too careful": {"schedule-conservativeness": 1.43},
    "huge max_new_tokens": {"max-total-tokens": 20_000},
    "few slots, small chunks": FEW | CHUNKS,
}


def job_with(place: Path, rows: int) -> dict[str, Any]:
    """Write the input of so many rows, and return the job."""
    luck = random.Random(1)
    ids = [
        [luck.randrange(100, VOCABULARY) for _ in range(luck.randint(20, 2 * PROMPT))] for _ in range(rows)
    ]
    pq.write_table(pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))}), place / "rows.parquet")
    return {
        "input": {"path": str(place / "rows.parquet")},
        "prompt": {"input_ids": "ids"},
        "sampling": {"max_new_tokens": MOST, "temperature": 1.0, "stop_token_ids": [*ENDS]},
        "output": {"path": str(place / "run")},
        "engine": {
            "kind": "server", "device": "cpu", "env": {"OMP_NUM_THREADS": "1"},
            "args": {"skip-server-warmup": True},  # its text has tokens that the model lacks
            "model": str(make_tiny_llama(place.parent / "model", SMALL_MODEL, vocabulary=VOCABULARY)),
        },
    }  # fmt: skip


def run(place: Path, rows: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Run a job whose server starts with these flags; return its figures."""
    place.mkdir()
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    job, usual = job_with(place, rows), dict(device.CPU_ARGS)
    device.CPU_ARGS.update(flags)
    try:
        report = batchrunner.run(job)
    finally:
        device.CPU_ARGS.clear()
        device.CPU_ARGS.update(usual)
    steps = [told["why"] for told in report.incidents if told["what"] == "adapted"]
    return {
        "seconds": round(report.wall_s, 1),
        "tokens_a_pass": round(tokens_a_pass(place / "run" / "engine-server.log"), 2),
        "restarts": sum(told["what"] == "adapts" for told in report.incidents),
        "steps": steps,
        "rows_ok": report.rows_ok,
    }


def tokens_a_pass(log: Path) -> float:
    """Return output tokens for each forward pass in the last third of the time that a log tells of."""
    told = [(origin_of(line).at, record_in(line)) for line in log.read_text(errors="replace").splitlines()]
    found = [(at, batch) for at, batch in told if isinstance(batch, LoggedBatch) and at is not None]
    since = found[-1][0] - (found[-1][0] - found[0][0]) / 3
    last = [batch for at, batch in found if at >= since]
    passes = sum(STEPS_A_LINE if batch.decode else 1 for batch in last)
    return sum(STEPS_A_LINE * batch.running for batch in last if batch.decode) / passes


def main() -> None:
    """Find how many rows the time takes, then run each start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="length of a run with the best flags")
    parser.add_argument("--window", type=float, default=TIMING.adapt, help="seconds of work that are judged")
    parser.add_argument("--starts", nargs="*", default=[*STARTS], help="only these")
    options = parser.parse_args()
    TIMING.adapt = options.window
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        first = run(place / "first", 400, BEST)
        rows = int(400 * 60 * options.minutes / first["seconds"])
        print(f"{rows:,} rows", flush=True)
        began = time.strftime("%Y-%m-%d %H:%M")
        best = run(place / "best", rows, BEST)
        print(json.dumps({"start": "best", "began": began, **best}), flush=True)
        for number, name in enumerate(options.starts):
            found = run(place / str(number), rows, STARTS[name])
            shares = {
                "last_third": round(found["tokens_a_pass"] / best["tokens_a_pass"], 3),
                "whole": round(best["seconds"] / found["seconds"], 3),
            }
            print(json.dumps({"start": name, **shares, **found}), flush=True)


if __name__ == "__main__":
    main()
