"""Does `batchrun tune` leave a corner on the real engine? Starts with two wrong flags each, a random model.

Slots and chunks that are both too small hide one another: with few slots a larger chunk has nothing to fill
it, with small chunks more slots stay empty. SGLang on the CPU; what counts is which flags the search changes,
by its own trials, within a time for each start.
"""

from __future__ import annotations

import argparse
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

from batchrunner.tune.tuner import tune
from benchmarks.engine import SERVER_ENVIRONMENT, VOCABULARY
from benchmarks.measure import save
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from batchrunner.tune.space import Args

SEED = 31
FIXED: Args = {"max-total-tokens": 40_000}
STARTS: dict[str, Args] = {
    "few slots and small chunks": {"max-running-requests": 8, "chunked-prefill-size": 128},
    "too careful and small chunks": {"schedule-conservativeness": 3, "chunked-prefill-size": 128},
}
PROMPT_TOKENS, OUTPUT_TOKENS = (150, 450), (20, 100)


def write_input(path: Path, rows: int) -> None:
    made = random.Random(SEED)
    ids = [[made.randrange(*VOCABULARY) for _ in range(made.randint(*PROMPT_TOKENS))] for _ in range(rows)]
    tokens = [made.randint(*OUTPUT_TOKENS) for _ in range(rows)]
    table = {"input_ids": pa.array(ids, pa.list_(pa.int32())), "tokens": pa.array(tokens, pa.int32())}
    pq.write_table(pa.table(table), path, row_group_size=1000)


def run(folder: Path, model: Path, name: str, budget_s: float) -> dict[str, Any]:
    start = STARTS[name]
    path = folder / f"{name.replace(' ', '-')}.yaml"
    job = {
        "input": {"path": str(folder / "input.parquet")},
        "prompt": {"input_ids": "input_ids"},
        "sampling": {"max_new_tokens": {"column": "tokens"}, "temperature": 0},
        "output": {"path": str(folder / f"run-{len(name)}")},
        "engine": {
            "kind": "server", "model": str(model), "device": "cpu", "env": SERVER_ENVIRONMENT,
            "args": {**FIXED, **start},
        },
    }  # fmt: skip
    path.write_text(json.dumps(job))
    began = time.perf_counter()
    found = tune(str(path), overrides=[], budget_s=budget_s)
    changed = {**found.args, **found.env}
    return {
        "start": name, "wrong": start, "changed": changed, "both": set(start) <= set(changed),
        "gain": round(found.best_tokens_per_s / found.own_tokens_per_s, 3), "reason": found.reason,
        "seconds": round(time.perf_counter() - began, 1), "tuned": {**found.as_dict(), "job": "job.yaml"},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--budget", type=float, default=1800, help="seconds for each start")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("batchrunner.tune").setLevel(logging.INFO)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-tune-corner-") as scratch:
        folder = Path(scratch)
        model = make_tiny_llama(folder / "tiny", args.tokenizer)
        write_input(folder / "input.parquet", args.rows)
        for name in STARTS:
            found.append(run(folder, model, name, args.budget))
            both = sum(start["both"] for start in found)
            line = (
                f"tune, real engine: both wrong flags changed from {both} of {len(found)} starts, "
                + ", ".join(f"{start['gain']:.2f} x from {start['start']}" for start in found)
            )
            goal = {"both": True, "met": both == len(found)}
            save("tune_corner", line, {"goal": goal, "starts": found}, ("batchrunner", "sglang", "torch"))


if __name__ == "__main__":
    main()
