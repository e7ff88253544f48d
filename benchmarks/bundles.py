"""Many rows in one request: what does it save? A real SGLang on the CPU, a tiny model, one new token.

Each turn runs the same rows (60 token ids each) three times, in turning order: bundled (`bundle: auto`), one
by one (`bundle: off`), and by `sglang.Engine.generate`, which gets all rows in one call and writes nothing.
Rows a second hang on what else the machine does; CPU time hangs on it less: that of the server's front
process, which takes and answers all requests, and our own. `--replicas 2` does it on two replicas,
whose CPU time is part of that of the front processes, and without `Engine.generate`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import batchrunner
from batchrunner.engines.device import cpu_environment, server_args
from benchmarks.measure import interval, measured_run, save
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MARK = f"BENCH_BUNDLES={os.getpid()}"
THREADS = {"OMP_NUM_THREADS": "1"}
"""For a model this small; the threads of several would fight for the cores."""
PROMPT_TOKENS = 60
SAMPLING = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
ARGS = {
    "context-length": 2048, "max-total-tokens": 60_000, "max-running-requests": 256, "sleep-on-idle": True,
    "disable-radix-cache": True,
}  # fmt: skip
SHIM = Path(batchrunner.__file__).parent / "engines" / "cpu_shim"


def write_input(path: Path, rows: int) -> None:
    """Write rows of token ids from a seeded generator."""
    made = random.Random(20)
    ids = [[made.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]
    pq.write_table(pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))}), path)


def by_runner(engine: batchrunner.OpenEngine, source: Path, bundle: str) -> dict[str, float]:
    """Run the job; return rows a second, milliseconds of CPU a row, and rows a request."""
    job = {
        "input": {"path": str(source)},
        "prompt": {"input_ids": "ids"},
        "sampling": SAMPLING,
        "output": {"path": str(source.parent / "run")},
        "engine": engine.spec,
        "order": "input",
        "bundle": bundle,
    }
    _, figures = measured_run(job, engine, MARK)
    return figures


def serve_generate(model: str, source: str) -> None:
    """Load `sglang.Engine`, and generate all rows for each line of standard input; a process of its own."""
    import sglang  # noqa: PLC0415 - heavy

    args = {name.replace("-", "_"): value for name, value in server_args(ARGS, cpu=True).items()}
    engine = sglang.Engine(model_path=model, **args)
    prompts = pq.read_table(source)["ids"].to_pylist()
    print(json.dumps("ready"), file=sys.stderr, flush=True)
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        answers = engine.generate(input_ids=prompts, sampling_params=SAMPLING)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert len(answers) == len(prompts)
        found = {"rows_s": len(prompts) / seconds, "own_ms": 1000 * cpu / len(prompts)}
        print("found", json.dumps(found), flush=True)
    engine.shutdown()


@contextmanager
def generate_process(model: Path, source: Path) -> Iterator[Callable[[], dict[str, float]]]:
    """Yield what has `sglang.Engine` generate all rows once more, in its own process."""
    environ = {**os.environ, **cpu_environment(dict(os.environ)), **THREADS}
    environ["PYTHONPATH"] = os.pathsep.join([str(SHIM), str(Path.cwd()), environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.bundles", "--serve", str(model), str(source)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environ, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def once() -> dict[str, float]:
            process.stdin.write("go\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            for line in process.stdout or ():
                if line.startswith("found "):
                    found: dict[str, float] = json.loads(line.removeprefix("found "))
                    return found
            raise SystemExit("sglang.Engine ended")

        yield once
        process.stdin.close()


def measure(tokenizer: Path, rows: int, turns: int, replicas: int) -> dict[str, list[dict[str, float]]]:
    """Run each side once a turn, each turn beginning with another one.

    Several `replicas` are not compared with `Engine.generate`.
    """
    with tempfile.TemporaryDirectory(prefix="bench-bundles-") as scratch:
        folder = Path(scratch)
        source = folder / "input.parquet"
        write_input(source, rows)
        model = make_tiny_llama(folder / "tiny", tokenizer)
        name, _, value = MARK.partition("=")
        spec = {
            "kind": "server",
            "replicas": replicas,
            "model": str(model),
            "device": "cpu",
            "args": ARGS,
            "env": {name: value, **THREADS},
        }
        with ExitStack() as stack:
            sides: dict[str, Callable[[], dict[str, float]]] = {}
            if replicas == 1:
                sides["generate"] = stack.enter_context(generate_process(model, source))
            engine = stack.enter_context(batchrunner.open_engine(spec, log_dir=folder))
            sides["bundled"] = lambda: by_runner(engine, source, "auto")
            sides["single"] = lambda: by_runner(engine, source, "off")
            for side in sides.values():  # imports, first compilations
                side()
            found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            names = list(sides)
            for turn in range(turns):
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    found[name].append(sides[name]())
                    print(turn, name, found[name][-1], file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_generate(*options.serve)
        return
    found = measure(options.tokenizer, options.rows, options.turns, options.replicas)

    def ratio(other: str, what: str) -> Any:
        return interval([a[what] / b[what] for a, b in zip(found["bundled"], found[other], strict=True)])

    of = {
        side: {what: interval([run[what] for run in runs]) for what in runs[0]}
        for side, runs in found.items()
    }
    ratios = {f"bundled/{side}": ratio(side, "rows_s") for side in found if side != "bundled"}
    others = ", ".join(f"{value} x {side.partition('/')[2]}" for side, value in ratios.items())
    line = (
        f"bench-bundles: {of['bundled']['rows_s'].median:,.0f} rows/s in requests of "
        f"{of['bundled']['rows_a_request'].median:.1f} rows, {others}; "
        "CPU ms a row, bundled and one by one: front process "
        f"{of['bundled']['front_ms'].median:.2f} and {of['single']['front_ms'].median:.2f}, "
        f"we {of['bundled']['own_ms'].median:.2f} and {of['single']['own_ms'].median:.2f}"
    )
    figures = {
        "rows": options.rows, "turns": options.turns, "replicas": options.replicas, "sides": of,
        "rows_per_s_ratio": ratios,
        "front_cpu_ratio": {"bundled/single": ratio("single", "front_ms")},
        "own_cpu_ratio": {"bundled/single": ratio("single", "own_ms")},
        "measured": found,
    }  # fmt: skip
    save(
        "bundles" if options.replicas == 1 else "bundles_replicas",
        line,
        figures,
        ("batchrunner", "sglang", "aiohttp"),
    )


if __name__ == "__main__":
    main()
