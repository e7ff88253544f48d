"""Does `batchrun tune` find what a grid finds, in a quarter of its time? SGLang on the CPU, a random model.

A job whose flags are wrong on purpose: conservativeness 3, at most 8 running. Its KV pool is small, so that
admission matters. First every setting of a grid of 24 is measured once, with tune's own trial and rows, none
stopped early; then `tune` runs, with a quarter of the grid's time for its budget. Then tune's flags and the
grid's best run in alternating pairs: a grid's best is also its luckiest.

Times count everything: launches, the look at `--help`, the sample.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.job.load import load_job
from batchrunner.runner.prepare import prepare
from batchrunner.tune.sample import write_sample
from batchrunner.tune.search import TrialRequest
from batchrunner.tune.trial import TrialRunner
from batchrunner.tune.tuner import engine_to_tune, tune
from benchmarks.engine import SERVER_ENVIRONMENT, VOCABULARY
from benchmarks.measure import interval, save
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from batchrunner.tune.measurement import TrialResult
    from batchrunner.tune.space import Args

SEED = 13
GOAL, GOAL_TIME = 0.95, 0.25
WRONG: Args = {"schedule-conservativeness": 3, "max-running-requests": 8}
OVERHEAD_S = 20.0
"""Time that tune takes beside its trials: it reads `--help` and the sample."""
GRID: tuple[tuple[float, ...], tuple[int, ...]] = ((0.1, 0.3, 1.0, 3.0), (8, 16, 32, 64, 128, 256))
FIXED = {"max-total-tokens": 12_000}
PROMPT_TOKENS = (20, 100)
OUTPUT_TOKENS = (50, 250)
"""Reserved in full, 57 rows fit into the pool; of what they hold on average, 90."""


def write_input(path: Path, rows: int) -> None:
    made = random.Random(SEED)
    ids = [[made.randrange(*VOCABULARY) for _ in range(made.randint(*PROMPT_TOKENS))] for _ in range(rows)]
    tokens = [made.randint(*OUTPUT_TOKENS) for _ in range(rows)]
    table = {"input_ids": pa.array(ids, pa.list_(pa.int32())), "tokens": pa.array(tokens, pa.int32())}
    pq.write_table(pa.table(table), path, row_group_size=1000)


def job_for(folder: Path, model: Path) -> dict[str, Any]:
    return {
        "input": {"path": str(folder / "input.parquet")},
        "prompt": {"input_ids": "input_ids"},
        "sampling": {"max_new_tokens": {"column": "tokens"}, "temperature": 0},
        "output": {"path": str(folder / "run")},
        "engine": {
            "kind": "server", "model": str(model), "device": "cpu", "env": SERVER_ENVIRONMENT,
            "args": {**FIXED, **WRONG},
        },
    }  # fmt: skip


def trial(bench: TrialRunner, args: Args, number: int) -> TrialResult:
    """Measure one setting as tune does, but for the rival that would stop it."""
    result = asyncio.run(bench.run(TrialRequest({**FIXED, **args}, "", 0), number, float("inf")))
    print(
        f"  {args}: {result.tokens_per_s:,.0f} tok/s, {result.cost_s:.0f} s, {asdict(result.signs)}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return result


def measure(tokenizer: Path, rows: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-tune-") as scratch:
        folder = Path(scratch)
        model = make_tiny_llama(folder / "tiny", tokenizer)
        write_input(folder / "input.parquet", rows)
        path = folder / "job.yaml"
        path.write_text(json.dumps(job_for(folder, model)))
        job = load_job(path)
        bench = TrialRunner(
            job, engine_to_tune(job), write_sample(prepare(job), folder / "grid"), folder / "grid"
        )
        grid: list[dict[str, Any]] = []
        began = time.perf_counter()
        for number, (care, running) in enumerate(itertools.product(*GRID)):
            args = {"schedule-conservativeness": care, "max-running-requests": running}
            result = trial(bench, args, number)
            grid.append({"args": args, "tokens_per_s": result.tokens_per_s, "cost_s": result.cost_s})
        grid_s = time.perf_counter() - began
        began = time.perf_counter()
        found = tune(str(path), overrides=[], budget_s=GOAL_TIME * grid_s - OVERHEAD_S)
        tune_s = time.perf_counter() - began
        print("\n".join(found.lines()), file=sys.stderr, flush=True)
        best = max(grid, key=lambda setting: setting["tokens_per_s"])
        turns = []
        for turn in range(pairs):
            sides = {"tune": {**WRONG, **found.args}, "grid": best["args"]}
            names = list(sides)[:: 1 if turn % 2 else -1]
            runs = {name: trial(bench, sides[name], 100 + 2 * turn + at) for at, name in enumerate(names)}
            turns.append({name: run.tokens_per_s for name, run in runs.items()})
    return {
        "rows": rows, "tune_s": round(tune_s, 1), "grid_s": round(grid_s, 1),
        "tuned": {**found.as_dict(), "job": "job.yaml"}, "grid": grid, "grid_best": best, "pairs": turns,
    }  # fmt: skip


def report(found: dict[str, Any]) -> None:
    ratio = interval([pair["tune"] / pair["grid"] for pair in found["pairs"]])
    share = found["tune_s"] / found["grid_s"]
    own = next(s for s in found["grid"] if s["args"] == WRONG)["tokens_per_s"]
    line = (
        f"tune: {ratio} x the best of a grid of {len(found['grid'])} (goal {GOAL}) in {share:.2f} of "
        f"its time (goal {GOAL_TIME}): {found['tune_s']:.0f} s against {found['grid_s']:.0f} s; "
        f"{found['tuned']['best_tokens_per_s'] / own:.2f} x the job's own flags"
    )
    met = ratio.median >= GOAL and share <= GOAL_TIME
    goal = {"ratio_at_least": GOAL, "time_share_at_most": GOAL_TIME, "met": met}
    figures = {"goal": goal, "ratio": ratio, "time_share": round(share, 4), "fixed_args": FIXED, **found}
    save("tune", line, figures, ("batchrunner", "sglang", "torch"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("batchrunner.tune").setLevel(logging.INFO)
    report(measure(args.tokenizer, args.rows, args.pairs))


if __name__ == "__main__":
    main()
