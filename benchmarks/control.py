"""Does the controller find the best window alone? SGLang on the CPU, a tiny random model, seven workloads.

For each workload: fixed windows from 64 to all rows at once (the runner with `window: N`),
`sglang.Engine.generate` on all rows (the ceiling without a runner), and the runner with nothing set. The
controller and the best fixed window then run in alternating pairs.

Seconds are noisy on a shared machine; the scheduler's own counters are not. So the verdict is by forward
passes for the same tokens and by the mean number of requests that decode together, and the time's ratio
stands beside it with its interval.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.engines.device import cpu_environment, server_args
from benchmarks.engine import (
    KEY_VARIABLE,
    SERVER_ARGS,
    SERVER_ENVIRONMENT,
    VOCABULARY,
    Server,
    flush,
    lognormal,
    runner,
    serve,
    work_of,
)
from benchmarks.measure import in_fresh_process, interval, save
from tests.support.tiny_model import make_tiny_llama

SEED = 11
GOAL, GOAL_TIME = 0.98, 0.95
ENGINE_LOG_MARK = "== workload "


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of prompt and output lengths in tokens."""

    rows: list[tuple[int, int]]
    windows: tuple[int, ...]
    ignore_eos: bool = True
    """Without it SGLang expects outputs to end early, admits more than fit, and retracts."""


def workloads() -> dict[str, Workload]:
    """Make the seven; each has output for some 20 s on two cores."""
    made = random.Random(SEED)
    chat = [
        (lognormal(made, 102, 169), lognormal(made, 74, 70)) for _ in range(1200)
    ]  # LMSYS-Chat's lengths, the outputs a third of them
    heavy = [(48, 1000 if made.random() < 0.01 else 20) for _ in range(1800)]
    wide = (64, 256, 400, 800, 10_000)
    return {
        "short/short": Workload([(32, 24)] * 2000, wide),
        "short/long": Workload([(24, 120)] * 700, wide),
        "long/short": Workload([(400, 12)] * 900, wide),
        "chat": Workload(chat, wide),
        "heavy tail": Workload(heavy, wide),
        "drifting": Workload([(48, 16)] * 1000 + [(48, 80)] * 500, wide),
        "KV-starved": Workload([(100, made.randint(100, 300)) for _ in range(400)], wide, ignore_eos=False),
    }


def write_input(path: Path, workload: Workload) -> None:
    made = random.Random(SEED)
    ids = [[made.randrange(*VOCABULARY) for _ in range(prompt)] for prompt, _ in workload.rows]
    tokens = [output for _, output in workload.rows]
    table = {"input_ids": pa.array(ids, pa.list_(pa.int32())), "tokens": pa.array(tokens, pa.int32())}
    pq.write_table(pa.table(table), path)


def job_for(folder: Path, workload: Workload, url: str, window: int | None) -> Path:
    job = {
        "input": {"path": str(folder / "input.parquet")},
        "prompt": {"input_ids": "input_ids"},
        "sampling": {
            "max_new_tokens": {"column": "tokens"}, "ignore_eos": workload.ignore_eos, "temperature": 0,
        },
        "output": {"path": str(folder / "run")},
        "engine": {"kind": "attach", "urls": [url], "api_key_env": KEY_VARIABLE},
        "window": "auto" if window is None else window,
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def measured(server: Server, folder: Path, workload: Workload, window: int | None) -> dict[str, Any]:
    """Run the runner once, with a fixed window or with none, and add the scheduler's own counts."""
    if window is not None:
        window = min(window, len(workload.rows))
    job_file = job_for(folder, workload, server.url, window)
    flush(server)
    at = server.log.stat().st_size
    found = in_fresh_process("benchmarks.control", "--side", str(job_file))
    with server.log.open("rb") as log:
        log.seek(at)
        work = work_of(log.read().decode(errors="replace"))
    return _summed(found, work, "auto" if window is None else window)


def _summed(found: dict[str, Any], work: dict[str, Any], side: object) -> dict[str, Any]:
    passes = work["decode_passes"] + work["prefill_passes"]
    result = {
        "side": side, "tokens_per_s": round(found["tokens"] / found["wall_s"], 1), "passes": passes,
        "tokens_per_pass": round(found["tokens"] / passes, 2), "work": work, "wall_s": found["wall_s"],
        "load": {k: v for k, v in found.get("load", {}).items() if k != "window_over_time"},
    }  # fmt: skip
    print(
        f"  {side}: {result['tokens_per_s']:,.0f} tok/s, {passes} passes, running {work['running_mean']}, "
        f"{work['retracted']} retracted {result['load'] if side == 'auto' else ''}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return result


def engine_generate(model: str, inputs: list[str]) -> None:
    """Run `sglang.Engine.generate` on all rows of each workload; the scheduler logs to standard error."""
    import time  # noqa: PLC0415

    import sglang  # noqa: PLC0415

    args = {k.replace("-", "_"): v for k, v in server_args(SERVER_ARGS, cpu=True).items()}
    engine = sglang.Engine(model_path=model, log_level="info", **args)  # each pass is counted in its log
    for index, source in enumerate(inputs):
        rows = pq.read_table(source).to_pylist()
        eos = json.loads(Path(source).with_suffix(".json").read_text())["ignore_eos"]
        sampling = [{"max_new_tokens": r["tokens"], "ignore_eos": eos, "temperature": 0} for r in rows]
        engine.flush_cache()
        print(f"{ENGINE_LOG_MARK}{index}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        answers = engine.generate(input_ids=[r["input_ids"] for r in rows], sampling_params=sampling)
        wall_s = time.perf_counter() - began
        tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
        print(json.dumps({"wall_s": wall_s, "tokens": tokens}), flush=True)
    engine.shutdown()


def measure_engine_generate(model: Path, folder: Path, chosen: dict[str, Workload]) -> dict[str, Any]:
    inputs = []
    for index, workload in enumerate(chosen.values()):
        path = folder / f"engine-{index}.parquet"
        write_input(path, workload)
        path.with_suffix(".json").write_text(json.dumps({"ignore_eos": workload.ignore_eos}))
        inputs.append(str(path))
    environment = dict(os.environ)
    environment |= {**cpu_environment(environment), **SERVER_ENVIRONMENT}
    command = [sys.executable, "-m", "benchmarks.control", "--engine-generate", str(model), *inputs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"wall_s"')]
    logs = done.stderr.split(ENGINE_LOG_MARK)[1:]
    return {
        name: _summed(run, work_of(log), "Engine.generate")
        for name, run, log in zip(chosen, found, logs, strict=True)
    }


def measure(tokenizer: Path, names: list[str], pairs: int) -> dict[str, Any]:
    chosen = {name: workload for name, workload in workloads().items() if not names or name in names}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-control-") as scratch:
        folder = Path(scratch)
        model = make_tiny_llama(folder / "tiny", tokenizer)
        ceilings = measure_engine_generate(model, folder, chosen)
        with serve(model, folder) as server:
            os.environ[KEY_VARIABLE] = server.key
            for name, workload in chosen.items():
                print(name, file=sys.stderr, flush=True)
                write_input(folder / "input.parquet", workload)
                if not found:
                    measured(server, folder, workload, 256)  # the first run meets cold code paths
                windows = sorted({min(window, len(workload.rows)) for window in workload.windows})
                sweep = [measured(server, folder, workload, window) for window in windows]
                best = max(sweep, key=lambda run: run["tokens_per_pass"])["side"]
                turns = []
                for turn in range(max(pairs, 1)):
                    sides = [None, best] if turn % 2 else [best, None]
                    runs = [measured(server, folder, workload, side) for side in sides]
                    turns.append({"auto" if run["side"] == "auto" else "best": run for run in runs})
                found[name] = {"rows": len(workload.rows), "sweep": sweep, "best": best, "pairs": turns}
        for name, run in ceilings.items():
            found[name]["engine_generate"] = run
    return found


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """Compare the controller with the best fixed window and with Engine.generate."""
    pairs = found["pairs"]
    auto = [pair["auto"] for pair in pairs]
    passes = interval([p["auto"]["tokens_per_pass"] / p["best"]["tokens_per_pass"] for p in pairs])
    best_of_sweep = max(run["tokens_per_pass"] for run in found["sweep"])
    ceiling = found["engine_generate"]
    load = [run["load"] for run in auto]
    return {
        "passes_ratio": passes,
        "passes_ratio_to_best_of_sweep": interval([run["tokens_per_pass"] / best_of_sweep for run in auto]),
        "passes_ratio_to_engine_generate": interval(
            [run["tokens_per_pass"] / ceiling["tokens_per_pass"] for run in auto]
        ),
        "running_ratio": interval(
            [p["auto"]["work"]["running_mean"] / p["best"]["work"]["running_mean"] for p in pairs]
        ),
        "time_ratio": interval([p["auto"]["tokens_per_s"] / p["best"]["tokens_per_s"] for p in pairs]),
        "time_ratio_to_engine_generate": interval(
            [run["tokens_per_s"] / ceiling["tokens_per_s"] for run in auto]
        ),
        "in_band_share": min((run["in_band_share"] for run in load if run["steady_s"]), default=None),
        "empty_queue_share": max((run["empty_queue_share"] for run in load if run["steady_s"]), default=None),
        "retracted": [run["work"]["retracted"] for run in auto],
    }


def report(found: dict[str, Any]) -> None:
    verdicts = {name: verdict(workload) for name, workload in found.items()}
    met = [name for name, v in verdicts.items() if v["passes_ratio_to_best_of_sweep"].median >= GOAL]
    line = f"control: {len(met)} of {len(found)} workloads at {GOAL} x their best fixed window, by passes"
    for name, v in verdicts.items():
        print(
            f"{name}: best {found[name]['best']}; passes {v['passes_ratio_to_best_of_sweep']} x best fixed, "
            f"{v['passes_ratio_to_engine_generate']} x Engine.generate; time {v['time_ratio']}; "
            f"in band {v['in_band_share']}, empty {v['empty_queue_share']}"
        )
    figures = {
        "goal": {"passes_ratio_at_least": GOAL, "time_ratio_low_at_least": GOAL_TIME, "met": met},
        "server_args": SERVER_ARGS, "server_environment": SERVER_ENVIRONMENT,
        "verdicts": verdicts, "workloads": found,
    }  # fmt: skip
    save("control", line, figures, ("batchrunner", "sglang", "torch", "aiohttp", "uvloop", "orjson"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", action="append", default=[], choices=list(workloads()))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--engine-generate", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(runner(args.side)))
    elif args.engine_generate:
        engine_generate(args.engine_generate[0], args.engine_generate[1:])
    else:
        report(measure(args.tokenizer, args.workload, args.pairs))


if __name__ == "__main__":
    main()
