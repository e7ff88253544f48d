"""Rows that grow out of a small KV pool on the real scheduler: what token usage in the loop saves there.

SGLang on the CPU, a tiny random model, a pool that holds about 50 of the rows on average. They begin together
and grow together, SGLang admits more than fit, and retracts some. Passes, retractions and the share of decode
passes with an empty queue are the scheduler's own counts, which have no noise; seconds are not compared. The
same file runs on an earlier commit, for a comparison.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.control import SEED, Workload, measured, write_input
from benchmarks.engine import KEY_VARIABLE, SERVER_ARGS, Server, serve
from benchmarks.measure import save
from tests.support.tiny_model import make_tiny_llama

ROWS = 400
POOL_TOKENS, MAX_RUNNING = 5_000, 96
WINDOWS = (64, 48, 96)
GOOD_USAGE = 0.9
DECODE = re.compile(r"Decode batch.*token usage: ([\d.]+).*#queue-req: (\d+)")


def growing() -> Workload:
    """Make rows of 24 prompt tokens and 100 to 175 new ones."""
    made = random.Random(SEED)
    return Workload([(24, made.randint(100, 175)) for _ in range(ROWS)], WINDOWS, ignore_eos=False)


def once(server: Server, folder: Path, workload: Workload, window: int | None) -> dict[str, Any]:
    """Run the runner once; add how often the scheduler's queue was empty while rows were left to send."""
    at = server.log.stat().st_size
    found = measured(server, folder, workload, window)
    with server.log.open("rb") as log:
        log.seek(at)
        passes = [(float(u), int(q)) for u, q in DECODE.findall(log.read().decode(errors="replace"))]
    waited = [i for i, (_, queue) in enumerate(passes) if queue]
    passes = passes[: waited[-1] + 1] if waited else passes  # behind it is the tail
    empty = [usage for usage, queue in passes if not queue]
    starved = [usage for usage in empty if usage < GOOD_USAGE]
    of = max(1, len(passes))
    return {
        "side": found["side"], "passes": found["passes"], "retracted": found["work"]["retracted"],
        "running_mean": found["work"]["running_mean"], "empty_share": round(len(empty) / of, 4),
        "empty_and_unused_share": round(len(starved) / of, 4), "load": found["load"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs with nothing set")
    parser.add_argument("--window", type=int, action="append", help="fixed windows, in place of all")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    args = parser.parse_args()
    workload = growing()
    with tempfile.TemporaryDirectory(prefix="bench-growing-") as scratch:
        folder = Path(scratch)
        model = make_tiny_llama(folder / "tiny", args.tokenizer)
        write_input(folder / "input.parquet", workload)
        server_args = {**SERVER_ARGS, "max-total-tokens": POOL_TOKENS, "max-running-requests": MAX_RUNNING}
        with serve(model, folder, server_args) as server:
            os.environ[KEY_VARIABLE] = server.key
            auto = [once(server, folder, workload, None) for _ in range(args.runs)]
            fixed = [once(server, folder, workload, window) for window in args.window or workload.windows]
    best = min(fixed, key=lambda run: run["passes"])
    line = f"control, rows that grow out of the pool: best fixed window {best['side']}"
    for name, runs in {"fixed": [best], "auto": auto}.items():
        told = [f"{r['passes']} passes, {r['retracted']} retracted, {r['empty_share']} empty" for r in runs]
        line += f"; {name}: {' | '.join(told)}"
    figures = {"server_args": server_args, "rows": ROWS, "fixed": fixed, "auto": auto}
    save("control_growing", line, figures, ("batchrunner", "sglang", "torch"))


if __name__ == "__main__":
    main()
