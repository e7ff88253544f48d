"""What `--prefill-decode-interval` would bring on an H100, by the simulated scheduler: a prediction.

Prefill goes first as soon as one row ends. Where outputs have spread lengths, rows end one by one, and most
passes are tiny prefills, each of which reads all weights. With an interval of N decode passes the rows that
end meanwhile are replaced together; until then their places are empty. No card took part: costs are estimates
from data sheets, and a pass is taken to cost the sum of its parts, where a card hides one behind another.
"""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, replace
from typing import Any

from batchrunner.engines.simulation.replica import H100_8B, CostModel, RowLengths, steady_work
from batchrunner.engines.simulation.request import SchedulerConfig
from benchmarks.measure import save

SEED = 23
ROWS = 1500
INTERVALS = (0, 2, 4, 8, 16, 32, 64)
SPREAD = 0.6
"""Sigma of the outputs' lognormal lengths."""
ASKED = 4
"""`max_new_tokens` as a multiple of the median output; longer outputs are cut there."""
LENGTHS = ((100, 50), (200, 200), (500, 300), (200, 1000), (2000, 200))
"""Prompt tokens, and median output tokens."""
SLOTS = (256, 2048)
EAGER_LAYER_S = 2.5e-4
"""Host seconds to launch a layer's kernels one by one, as a prefill pass without a graph does: assumed."""
MODELS: dict[str, tuple[CostModel, int, int]] = {
    "8B": (H100_8B, 32, 412_000),
    "0.6B": (CostModel(2.0e-3, 1.2e-6, 4.3e-8, 2.2e-6), 28, 600_000),
    "30B-A3B": (CostModel(2.4e-2, 6.7e-6, 3.7e-8, 1.7e-5), 48, 90_000),
}
"""Costs, layers and tokens of the KV pool (0.88 of 80 GB less the weights) of bf16 models on one H100 SXM,
with the card's figures of `H100_8B`.
- 0.6B (Qwen3-0.6B): 1.2 GB of weights are 0.45 ms, and 1.5 ms are taken for kernels that are too short to
  fill the card; 2·28·8·128·2 B a context token.
- 30B-A3B (Qwen3-30B-A3B): 64 tokens reach 98 % of the 128 experts, so a pass reads 61 GB, whatever it
  computes; 3.3e9 active parameters at 40 % of the peak; 2·48·4·128·2 B a context token.
"""


def rows_of(prompt: int, output: int) -> list[RowLengths]:
    made = random.Random(SEED)
    scale = [made.lognormvariate(0, SPREAD) for _ in range(ROWS)]
    prompts = [made.randint(prompt // 2, prompt * 3 // 2) for _ in range(ROWS)]
    asked = ASKED * output
    return [
        RowLengths(tokens, 0, max(1, min(asked, round(output * factor))), asked)
        for tokens, factor in zip(prompts, scale, strict=True)
    ]


def case(name: str, prompt: int, output: int, slots: int) -> dict[str, Any]:
    cost, layers, pool_tokens = MODELS[name]
    eager_s = max(0.0, EAGER_LAYER_S * layers - cost.base_s)
    rows = rows_of(prompt, output)
    works = {
        interval: steady_work(SchedulerConfig(slots, pool_tokens, decode_interval=interval), rows)
        for interval in INTERVALS
    }
    found: dict[str, Any] = {
        "model": name, "prompt": prompt, "output": output, "slots": slots,
        "running": round(works[0].tokens / works[0].decodes, 1),
        "prefills_per_decode": round(works[0].prefills / works[0].decodes, 3),
    }  # fmt: skip
    for kind, extra_s in (("graph", 0.0), ("eager", eager_s)):
        model = replace(cost, prefill_base_s=extra_s)
        speeds = {interval: work.tokens / model.work_s(work) for interval, work in works.items()}
        best = max(speeds, key=lambda interval: speeds[interval])
        found[kind] = {
            "speeds": {str(interval): round(speed) for interval, speed in speeds.items()},
            "best": best, "gain": round(speeds[best] / speeds[0], 3),
        }  # fmt: skip
    print(found, file=sys.stderr, flush=True)
    return found


def main() -> None:
    found = [
        case(name, prompt, output, slots) for name in MODELS for prompt, output in LENGTHS for slots in SLOTS
    ]
    gains = {name: [run["eager"]["gain"] for run in found if run["model"] == name] for name in MODELS}
    line = "cadence, predicted for an H100: " + ", ".join(
        f"{name} {min(some):.2f} to {max(some):.2f} x" for name, some in gains.items()
    )
    models = {
        name: {**asdict(cost), "layers": layers, "pool_tokens": pool}
        for name, (cost, layers, pool) in MODELS.items()
    }
    save("cadence_simulated", line, {"models": models, "cases": found}, ("batchrunner",))


if __name__ == "__main__":
    main()
