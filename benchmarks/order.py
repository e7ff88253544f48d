"""What does the order of the rows spare a real engine? SGLang on the CPU, random models, eight workloads.

Each is sent by `sglang.Engine.generate` (all rows at once, in the order of the file: the peer), by the runner
in input order, and by the runner as it is (`order: auto`, `dedupe: true`), in turns; once more by
`Engine.generate` with the rows sorted by prompt (plain sorting). The radix cache is flushed before each.
Where prefill is what matters the model is one whose prefill costs; elsewhere it is the tiny one.

Seconds are noisy on a shared machine; the scheduler's own counts are not: tokens that were prefilled (beside
the fewest possible, which are known exactly: SGLang computes each different beginning once, and of each row
at least the last token) and forward passes. Output tokens are those that the engine put out: a row that got
its answer from its twin counts for none.
"""

import argparse
import json
import os
import random
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.console import tell
from benchmarks.engine import (
    KEY_VARIABLE,
    SERVER_ARGS,
    SERVER_ENVIRONMENT,
    Log,
    Server,
    flush,
    lognormal,
    runner,
    serve,
)
from benchmarks.measure import RESULTS, Interval, in_fresh_process, in_turns, interval, save
from benchmarks.peer import SAMPLING, Peer, peer
from benchmarks.prompts import (
    Row,
    Words,
    conversations,
    few_shot,
    groups,
    nested,
    nodes,
    shuffled,
    unrelated,
)
from tests.support.tiny_model import make_tiny_llama

SEED = 7
LEAST_GOAL, FASTER_GOAL, HARM_GOAL, SLOWER_GOAL = 1.05, 1.35, 1.01, 0.95
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "layers": 2},
    "small": {"hidden": 256, "layers": 2},
    "large": {"hidden": 512, "layers": 4},
}
"""Prefill has to cost more than the output layer does, which is 49,152 wide whatever the model: how much more
depends on how long the prompts are and how much of them is shared."""
COUNTERS = {
    "prompt_tokens": "prompt_tokens", "cached_tokens": "cached_tokens", "generation_tokens": "tokens",
    "num_requests": "requests",
}  # fmt: skip
"""SGLang's names of what we read from `/metrics`, and ours."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows in the order of the file, and what is hoped for."""

    rows: list[Row]
    goal: Literal["faster", "no harm"]
    model: Literal["tiny", "small", "large"] = "tiny"
    same_length: bool = False
    """All outputs have the same length, which the job states; else a column does."""


def workloads() -> dict[str, Workload]:
    """Make the eight; each takes some 10 to 40 s on two cores."""
    made = random.Random(SEED)
    chat = [(lognormal(made, 102, 169), lognormal(made, 74, 70)) for _ in range(900)]
    # the longest need alone as many passes as all others do together
    tail = [(48, 260 if made.random() < 0.004 else min(150, lognormal(made, 32, 40))) for _ in range(2000)]
    alone = unrelated((lognormal(made, 102, 60), 40) for _ in range(700))
    shared: dict[str, tuple[Literal["small", "large"], list[Row]]] = {
        "groups": ("large", shuffled(groups(made, 120, 8, 430, 32, 4))),
        "documents": ("small", groups(made, 60, 8, 800, 30, 4)),
        "multi-turn": ("small", conversations(made, 110, 10, 120, 4)),
        "nested": ("small", shuffled(nested(made, (4, 30, 6), (100, 300, 300, 24), 4))),
    }
    return {
        **{
            name: Workload([row._replace(outputs=4) for row in rows], "faster", model, same_length=True)
            for name, (model, rows) in shared.items()
        },
        # one beginning is in the cache after the first row, whoever sends the others: nothing can be spared
        "few-shot": Workload(few_shot(made, 3000, 800, 24, 4), "no harm"),
        "unrelated": Workload(unrelated(chat), "no harm"),
        "heavy tail": Workload(unrelated(tail), "no harm"),
        "duplicates": Workload(shuffled(alone + made.sample(alone, 300)), "no harm", same_length=True),
    }


def write_input(path: Path, workload: Workload, words: Words) -> dict[str, int]:
    """Write the rows, with their sampling beside them; return what is known of them."""
    prompts = [words.of(row) for row in workload.rows]
    table = {
        "text": ["".join(f" {word}" for word in prompt) for prompt in prompts],
        "tokens": pa.array([row.outputs for row in workload.rows], pa.int32()),
    }
    pq.write_table(pa.table(table), path)
    return {
        "rows": len(prompts), "prompt_tokens": sum(map(len, prompts)), "least_tokens": nodes(prompts),
    }  # fmt: skip


def job_for(folder: Path, workload: Workload, url: str, order: str) -> Path:
    outputs = workload.rows[0].outputs if workload.same_length else {"column": "tokens"}
    job = {
        "input": {"path": str(folder / "input.parquet")},
        "prompt": {"text": "text"},
        "sampling": {"max_new_tokens": outputs, **SAMPLING},
        "output": {"path": str(folder / "run")},
        "engine": {"kind": "attach", "urls": [url], "api_key_env": KEY_VARIABLE},
        "order": order, "dedupe": order == "auto",
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def by_runner(server: Server, folder: Path, workload: Workload, order: str) -> dict[str, Any]:
    """Send the rows with the runner, in a fresh process."""
    job_file = job_for(folder, workload, server.url, order)
    flush(server)
    before, log = _counters(server), Log(server.log)
    found = in_fresh_process("benchmarks.order", "--side", str(job_file))
    after = _counters(server)
    found |= {name: round(after[name] - before[name]) for name in before}
    return found | {"work": log.work()}


def _counters(server: Server) -> dict[str, float]:
    """Read what the server has counted of the rows that it has finished."""
    text = server.ask("GET", "/metrics").decode()
    found = dict.fromkeys(COUNTERS.values(), 0.0)
    for metric, value in re.findall(r"^sglang:(\w+)_total\{.*?\} (\S+)$", text, re.MULTILINE):
        if metric in COUNTERS:
            found[COUNTERS[metric]] += float(value)
    return found


def summed(name: str, known: dict[str, int], found: dict[str, Any]) -> dict[str, Any]:
    """Say of one run what counts."""
    passes, least = found["work"]["passes"], known["least_tokens"]
    result = {
        **found, "passes": passes, "prefilled_tokens": found["prompt_tokens"] - found["cached_tokens"],
        "tokens_per_s": round(found["tokens"] / found["wall_s"], 1),
        "rows_per_s": round(known["rows"] / found["wall_s"], 1),
    }  # fmt: skip
    result["ratio_to_least"] = round(result["prefilled_tokens"] / least, 4)
    tell(
        f"  {name}: {result['ratio_to_least']} x the least of {least:,} prefilled, "
        f"{passes} passes, {result['tokens_per_s']:,.0f} tok/s, {result['wall_s']:.1f} s"
    )
    return result


def measure(found: dict[str, Any], tokenizer: Path, names: list[str], rounds: int) -> None:
    """Put into `found` what each workload gave."""
    words = Words(tokenizer)
    for kind, size in MODELS.items():
        chosen = {n: w for n, w in workloads().items() if w.model == kind and (not names or n in names)}
        if not chosen:
            continue
        with tempfile.TemporaryDirectory(prefix="bench-order-") as scratch:
            folder = Path(scratch)
            model = make_tiny_llama(folder / kind, tokenizer, **size)
            with peer(model, folder) as engine, serve(model, folder) as server:
                for name, workload in chosen.items():
                    tell(name)
                    found[name] = side_by_side(engine, server, folder, workload, words, rounds)


def side_by_side(
    engine: Peer, server: Server, folder: Path, workload: Workload, words: Words, rounds: int
) -> dict[str, Any]:
    """Run the three sides so many times, each round beginning with another one, and plain sorting once."""
    known = write_input(folder / "input.parquet", workload, words)
    sides: dict[str, Callable[[], dict[str, Any]]] = {
        "engine_generate": lambda: summed("engine", known, engine.generate(folder / "input.parquet")),
        "input": lambda: summed("input", known, by_runner(server, folder, workload, "input")),
        "ours": lambda: summed("ours", known, by_runner(server, folder, workload, "auto")),
    }
    measured = in_turns(sides, rounds)
    in_order = summed("sorted", known, engine.generate(folder / "input.parquet", in_order=True))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "load_average": os.getloadavg(),
        **known, "model": workload.model, "goal": workload.goal, "rounds": measured, "sorted": in_order,
    }  # fmt: skip


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """Compare the runner with the peer and with its own input order."""
    rounds = found["rounds"]

    def ratio(key: str, side: str) -> Interval:
        return interval([turn["ours"][key] / turn[side][key] for turn in rounds])

    judged = {
        "ratio_to_least": interval([turn["ours"]["ratio_to_least"] for turn in rounds]),
        "tokens_per_s_to_engine_generate": ratio("tokens_per_s", "engine_generate"),
        "rows_per_s_to_engine_generate": ratio("rows_per_s", "engine_generate"),
        "rows_per_s_to_input": ratio("rows_per_s", "input"),
        "passes_to_input": ratio("passes", "input"),
        "prefilled_to_input": ratio("prefilled_tokens", "input"),
    }  # fmt: skip
    return judged | {"met": met(found["goal"], judged)}


def met(goal: str, judged: Mapping[str, Interval]) -> dict[str, bool]:
    """Tell which goals of a workload are met."""
    goals = {"least": judged["ratio_to_least"].median <= LEAST_GOAL}
    if goal == "faster":
        return goals | {"faster": judged["tokens_per_s_to_engine_generate"].median >= FASTER_GOAL}
    return goals | {
        "passes": judged["passes_to_input"].median <= HARM_GOAL,
        "prefilled": judged["prefilled_to_input"].median <= HARM_GOAL,
        "time": judged["rows_per_s_to_input"].low >= SLOWER_GOAL,
    }


def report(found: dict[str, Any]) -> None:
    """Judge what was measured; of workloads that were not, what was found before stays."""
    before = RESULTS / "order.json"
    if before.exists() and len(found) < len(workloads()):
        known = json.loads(before.read_text())["workloads"]
        found = {name: known.get(name, {}) | found.get(name, {}) for name in known | found}
    verdicts = {name: verdict(workload) for name, workload in found.items()}
    for name, judged in verdicts.items():
        missed = [goal for goal, is_met in judged["met"].items() if not is_met]
        print(
            f"{name}: prefilled {judged['ratio_to_least']} x the least, {judged['prefilled_to_input']} x "
            f"input order; output tok/s {judged['tokens_per_s_to_engine_generate']} x Engine.generate; "
            f"passes {judged['passes_to_input']} x input order; missed: {', '.join(missed) or 'nothing'}"
        )
    well = [name for name, judged in verdicts.items() if all(judged["met"].values())]
    line = f"order: {len(well)} of {len(verdicts)} workloads meet their goals ({', '.join(well) or 'none'})"
    figures = {
        "goals": {
            "ratio_to_least_at_most": LEAST_GOAL, "faster_at_least": FASTER_GOAL,
            "passes_and_prefilled_to_input_at_most": HARM_GOAL, "time_low_at_least": SLOWER_GOAL,
        },
        "models": MODELS, "server_args": SERVER_ARGS, "server_environment": SERVER_ENVIRONMENT,
        "verdicts": verdicts, "workloads": found,
    }  # fmt: skip
    save("order", line, figures, ("batchrunner", "sglang", "torch", "aiohttp", "uvloop", "orjson"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", action="append", default=[], choices=list(workloads()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(runner(args.side)))
    else:
        found: dict[str, Any] = {}
        try:
            measure(found, args.tokenizer, args.workload, args.rounds)
        finally:  # where it breaks off, what was measured stays
            report(found)


if __name__ == "__main__":
    main()
