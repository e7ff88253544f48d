"""Does `batchrun tune` leave a corner on the real engine? Starts with two wrong flags each, a random model.

Slots and chunks that are both too small hide one another: with few slots a larger chunk has nothing to fill
it, with small chunks more slots stay empty. SGLang on the CPU.

What tune found is held against the best setting that is known, by output tokens a forward pass: the
scheduler's own count, which a shared machine does not disturb. That is fair here because a pass of this small
model costs about the same whatever is in it. Its time is held against that of 60 trials as long as its own.

Finished trials and starts are kept under `--keep`: the same command goes on there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import tempfile
import time
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
from benchmarks.measure import save
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from batchrunner.tune.measurement import TrialResult
    from batchrunner.tune.space import Args

SEED = 31
FIXED: Args = {"max-total-tokens": 40_000}
BEST: Args = {"max-running-requests": 128, "chunked-prefill-size": 4096, "schedule-conservativeness": 0.3}
"""The best setting that is known: the pool holds some 110 rows of this size."""
GOAL, GOAL_TIME, RANDOM = 0.95, 0.25, 60
"""Least output tokens a pass beside BEST, most time beside that of a search at random, and its trials."""
STARTS: dict[str, Args] = {
    "few slots and small chunks": {"max-running-requests": 8, "chunked-prefill-size": 128},
    "too careful and small chunks": {"schedule-conservativeness": 3, "chunked-prefill-size": 128},
}
PACKAGES = ("batchrunner", "sglang", "torch")
PROMPT_TOKENS, OUTPUT_TOKENS = (150, 450), (20, 100)


def write_input(path: Path, rows: int) -> None:
    made = random.Random(SEED)
    ids = [[made.randrange(*VOCABULARY) for _ in range(made.randint(*PROMPT_TOKENS))] for _ in range(rows)]
    tokens = [made.randint(*OUTPUT_TOKENS) for _ in range(rows)]
    table = {"input_ids": pa.array(ids, pa.list_(pa.int32())), "tokens": pa.array(tokens, pa.int32())}
    pq.write_table(pa.table(table), path, row_group_size=1000)


def job_of(folder: Path, model: Path, name: str) -> Path:
    """Write the job of a start; return its path."""
    path = folder / f"{name.replace(' ', '-')}.yaml"
    job = {
        "input": {"path": str(folder / "input.parquet")},
        "prompt": {"input_ids": "input_ids"},
        "sampling": {"max_new_tokens": {"column": "tokens"}, "temperature": 0},
        "output": {"path": str(path.with_suffix(""))},
        "engine": {
            "kind": "server", "model": str(model), "device": "cpu", "env": SERVER_ENVIRONMENT,
            "args": {**FIXED, **STARTS[name]},
        },
    }  # fmt: skip
    path.write_text(json.dumps(job))
    return path


def measured(path: Path, folder: Path, args: Args) -> TrialResult:
    """Run one of tune's own trials under a setting, to its end."""
    job = load_job(path)
    bench = TrialRunner(
        job, engine_to_tune(job), write_sample(prepare(job), folder / "held"), folder / "held"
    )
    return asyncio.run(bench.run(TrialRequest({**FIXED, **args}, "", 0), 0, float("inf")))


def run(folder: Path, model: Path, name: str, budget_s: float) -> dict[str, Any]:
    """Tune from a start, and hold what was found against the best setting that is known."""
    path, start = job_of(folder, model, name), STARTS[name]
    began = time.perf_counter()
    found = tune(str(path), overrides=[], budget_s=budget_s)
    tune_s = time.perf_counter() - began
    changed = {**found.args, **found.env}
    sides = {"own": start, "tuned": {**start, **changed}, "best": BEST}
    results = {side: measured(path, folder, args) for side, args in sides.items()}
    passes = {side: result.signs.tokens_per_pass or 0.0 for side, result in results.items()}
    trial_s = sum(result.cost_s for result in results.values()) / len(results)
    return {
        "start": name, "wrong": start, "changed": changed, "both": set(start) <= set(changed),
        "tokens_per_pass": passes, "ratio": round(passes["tuned"] / passes["best"], 3),
        "gain": round(passes["tuned"] / passes["own"], 3), "reason": found.reason,
        "seconds": round(tune_s, 1), "time_share": round(tune_s / (RANDOM * trial_s), 3),
        "tuned": {**found.as_dict(), "job": "job.yaml"},
    }  # fmt: skip


def report(found: list[dict[str, Any]]) -> None:
    """Write what is known so far."""
    ratio, share = (
        pick(start[key] for start in found) for pick, key in ((min, "ratio"), (max, "time_share"))
    )
    line = (
        f"tune, real engine: {ratio:.2f} of the best known output tokens a pass or more (goal {GOAL}) from "
        f"{len(found)} of {len(STARTS)} starts, in at most {share:.2f} of the time of {RANDOM} trials (goal "
        f"{GOAL_TIME}); " + ", ".join(f"{start['gain']:.2f} x from {start['start']}" for start in found)
    )
    met = ratio >= GOAL and share <= GOAL_TIME and len(found) == len(STARTS)
    goal = {"ratio_at_least": GOAL, "time_share_at_most": GOAL_TIME, "met": met}
    save("tune_corner", line, {"goal": goal, "best_known": BEST, "starts": found}, PACKAGES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--budget", type=float, default=360, help="seconds for each start")
    parser.add_argument("--keep", type=Path, help="where trials are kept, to go on from there")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("batchrunner.tune").setLevel(logging.INFO)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-tune-corner-") as scratch:
        folder = args.keep or Path(scratch)
        model = make_tiny_llama(folder / "tiny", args.tokenizer)
        write_input(folder / "input.parquet", args.rows)
        for name in STARTS:
            kept = folder / f"{name.replace(' ', '-')}.json"
            if not kept.exists():
                kept.write_text(json.dumps(run(folder, model, name, args.budget)))
            found.append(json.loads(kept.read_text()))
            report(found)


if __name__ == "__main__":
    main()
