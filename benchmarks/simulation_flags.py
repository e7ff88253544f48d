"""Does the simulated scheduler do what the real one does under flags that change when it prefills?

Twelve servers, each with other flags: `prefill-decode-interval`, mixed chunks, the clip of `max_new_tokens`,
few slots, small chunks, a pool that is too small, and several of these together. Method and client are those
of `benchmarks/simulation.py`. A third of the rows are long prompts; how long outputs become is drawn, or left
to the model's whim where the clip matters.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine import KEY_VARIABLE, VOCABULARY, serve
from benchmarks.measure import save
from benchmarks.simulation import (
    CLIP,
    COMMON_ARGS,
    FULL,
    GOAL,
    STOP_TOKENS,
    TRIES,
    Row,
    Setting,
    Workload,
    really,
    simulated,
)
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 17
WINDOW = 160
KEYS = ("passes", "tokens_per_pass", "prefill_tokens_per_prefill", "running_mean")
"""Figures of a run that are compared."""


def settings() -> Iterator[Setting]:
    made = random.Random(SEED)

    def ids(tokens: int) -> list[int]:
        return [made.randrange(*VOCABULARY) for _ in range(tokens)]

    def spread(count: int) -> list[Row]:
        prompts = [made.randint(300, 600) if at % 3 == 0 else made.randint(30, 120) for at in range(count)]
        return [Row(ids(p), 1 + int(made.lognormvariate(3.6, 0.7)) % 300) for p in prompts]

    def stopping(count: int, asked: int) -> list[Row]:
        return [Row(ids(made.randint(32, 128)), asked, STOP_TOKENS[0]) for _ in range(count)]

    def setting(
        name: str, rows: list[Row], args: dict[str, Any], env: dict[str, str] | None = None
    ) -> Setting:
        common = {**COMMON_ARGS, "max-total-tokens": 40_000, "max-running-requests": 96}
        window = min(WINDOW, 2 * len(rows) // 3)
        return Setting({**common, **args}, [Workload(name, window, rows)], env or {})

    interval, chunk, slots = "prefill-decode-interval", "chunked-prefill-size", "max-running-requests"
    mixed = {"enable-mixed-chunk": True}
    small = {"max-total-tokens": 8000, "schedule-conservativeness": 0.1}
    yield setting("interval 4", spread(260), {interval: 4})
    yield setting("interval 16", spread(260), {interval: 16})
    yield setting("interval 32 from 72 running", spread(260), {interval: 32, f"{interval}-min-bs": 72})
    yield setting("mixed chunks", spread(260), mixed)
    yield setting("mixed chunks of 256", spread(260), {chunk: 256, **mixed})
    yield setting("mixed chunks, interval 8", spread(260), {interval: 8, **mixed})
    yield setting("clip 64", stopping(200, 1500), {}, {CLIP: "64"})
    careful = {"schedule-conservativeness": 0.3}
    yield setting("clip 256, conservativeness 0.3", stopping(200, 1500), careful, {CLIP: "256"})
    yield setting("8 slots, chunks of 128", spread(60), {slots: 8, chunk: 128})
    yield setting("24 slots, interval 6", spread(100), {slots: 24, interval: 6})
    yield setting("small pool, mixed chunks", spread(120), {**small, **mixed})
    yield setting("small pool, clip 32, interval 8", stopping(100, 300), {interval: 8, **small}, {CLIP: "32"})


def figures(work: dict[str, Any], outputs: list[int]) -> dict[str, Any]:
    """Add what a pass brought."""
    prefills = max(work["prefill_passes"], 1)
    return {
        **work,
        "tokens_per_pass": round(sum(outputs) / work["passes"], 3),
        "prefill_tokens_per_prefill": round(work["prefilled_tokens"] / prefills, 1),
    }


def measure(tokenizer: Path, only: str, begin: int) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory(prefix="bench-simulation-flags-") as scratch:
        folder = Path(scratch)
        model = make_tiny_llama(folder / "tiny", tokenizer)
        for number, setting in enumerate(settings()):
            [workload] = setting.workloads
            if only not in workload.name or number < begin:
                continue
            place = folder / str(number)
            place.mkdir()
            os.environ.pop(CLIP, None)
            os.environ.update(setting.env)
            with serve(model, place, setting.args) as server:
                os.environ[KEY_VARIABLE] = server.key
                really(server, Workload("warm-up", 40, workload.rows[:40]))  # cold code paths
                for _ in range(TRIES):
                    work, outputs, ramp = really(server, workload)
                    if work["window_used"] >= FULL:
                        break
            real = figures(work, outputs)
            model_of_it = figures(simulated(setting.config, workload, outputs, ramp), outputs)
            apart = {key: round(model_of_it[key] / real[key] - 1, 4) for key in KEYS}
            print(
                f"{workload.name}\n   real {real}\n  model {model_of_it}\n  apart {apart}",
                file=sys.stderr,
                flush=True,
            )
            found.append({
                "setting": workload.name, "rows": len(workload.rows), "window": workload.window,
                "server_args": setting.args, "server_env": setting.env,
                "real": real, "simulated": model_of_it, "apart": apart,
            })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--only", default="", help="a part of a setting's name")
    parser.add_argument("--begin", type=int, default=0, help="number of the first setting, from 0")
    args = parser.parse_args()
    found = measure(args.tokenizer, args.only, args.begin)
    worst = {key: max(abs(run["apart"][key]) for run in found) for key in KEYS}
    line = f"simulation of flags: over {len(found)} settings at most " + ", ".join(
        f"{share:.1%} off in {key.replace('_', ' ')}" for key, share in worst.items()
    )
    goal_keys = ("passes", "tokens_per_pass")
    goal = {"apart_at_most": GOAL, "met": max(worst[key] for key in goal_keys) <= GOAL}
    save(
        "simulation_flags",
        f"{line} (goal {GOAL:.0%} in passes and tokens a pass)",
        {"goal": goal, "worst": worst, "settings": found},
        ("batchrunner", "sglang", "torch"),
    )


if __name__ == "__main__":
    main()
