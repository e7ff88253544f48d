"""Embeddings: what do lists of rows save, and is a pass of the scheduler full? A real SGLang on the CPU.

Each turn embeds the same texts by `batchrunner.run` with a server, and by `sglang.Engine.encode`, which gets
all of them in one call and writes nothing: with all-MiniLM-L6-v2, where the model takes the time, and with a
random BERT of two layers, where all else does. Each scheduler has one thread. For the tiny model a bare
aiohttp loop on the same server, one row a request, is the third side.

Rows a second hang on what else the machine does; CPU time hangs on it less. That of the server's front
process, which takes and answers requests, and that of the client are told for the runner and for the bare
loop. The runner's holds the start of the run, the reading of its input, the tokenization of its prompts,
which the bare loop leaves to the front process, and the writing of its results. The bare loop posts bodies
that were made before, and forgets the answers. Instructions would not hang on other programs at all, but the
front process is one that only perf could count, which many virtual machines do not let.

Forward passes and tokens are those of the server's log. The fewest passes are the tokens, or the rows, of all
texts divided by the most that a pass takes. Padded tokens are those computed beyond those of the texts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

import batchrunner
from batchrunner.engines.device import MEAN_POOLING, cpu_environment, server_args, with_server_modules
from batchrunner.engines.model_files import read_config, takes_mean
from batchrunner.job.tasks import EmbedTask
from benchmarks.engine import KEY_VARIABLE, SERVER_ENVIRONMENT, Server, serve
from benchmarks.measure import front_cpu_s, interval, measured_run, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchrunner.core.engine_info import EngineInfo

MARK = f"BENCH_EMBED={os.getpid()}"
LEAST_WORDS, MOST_WORDS = 4, 60
GOAL_RATE, GOAL_CPU = 0.97, 0.6
WINDOW = 256
"""Requests that the bare loop has in flight."""
_PASS = re.compile(r"Prefill batch, #new-seq: (\d+), #new-token: (\d+)")


class Case(NamedTuple):
    """A model, and how much it embeds."""

    name: str
    model: str
    rows: int
    bare: bool
    """Whether the bare loop is a side."""
    args: dict[str, Any]
    """Arguments of its engines beyond those that the task gives."""


def write_input(path: Path, docs: Path, rows: int) -> list[str]:
    """Write beginnings of real docstrings, of 4 to 60 words by a seeded generator, and return them."""
    made = random.Random(20)
    words = [text.split() for text in pq.read_table(docs)["text"].to_pylist()]
    texts = [" ".join(made.choice(words)[: made.randint(LEAST_WORDS, MOST_WORDS)]) for _ in range(rows)]
    pq.write_table(pa.table({"text": texts}), path)
    return texts


def make_tiny_bert(directory: Path, tokenizer_from: Path) -> Path:
    """Write a seeded random BERT of two layers."""
    import torch  # noqa: PLC0415 - takes seconds
    from transformers import AutoTokenizer, BertConfig, BertModel  # noqa: PLC0415

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, position_embedding_type="absolute",
    )  # fmt: skip
    BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def by_runner(engine: batchrunner.OpenEngine, source: Path) -> dict[str, float]:
    """Run the job; return rows a second, milliseconds of CPU a row, and rows a request."""
    job = {
        "task": "embed",
        "input": {"path": str(source)},
        "prompt": {"text": "text"},
        "output": {"path": str(source.parent / "run")},
        "engine": engine.spec,
        "dedupe": False,
    }
    report, figures = measured_run(job, engine, MARK)
    return {**figures, "prompt_tokens": report.prompt_tokens}


def by_bare_loop(server: Server, texts: list[str]) -> dict[str, float]:
    """Post one text a request; return rows a second and milliseconds of CPU a row."""
    fields = {"model": "default", "encoding_format": "base64"}
    bodies = [orjson.dumps({**fields, "input": text}) for text in texts]
    front_s, own_s, began = front_cpu_s(MARK), time.process_time(), time.perf_counter()
    asyncio.run(_post_all(server, bodies))
    wall_s = time.perf_counter() - began
    own_s, front_s = time.process_time() - own_s, front_cpu_s(MARK) - front_s
    rows = len(texts)
    return {"rows_s": rows / wall_s, "front_ms": 1000 * front_s / rows, "own_ms": 1000 * own_s / rows}


async def _post_all(server: Server, bodies: list[bytes]) -> None:
    waiting, url = iter(bodies), f"{server.url}{EmbedTask.path}"

    async def work(session: aiohttp.ClientSession) -> None:
        for body in waiting:
            async with session.post(url, data=body) as response:
                assert response.status == 200
                await response.read()

    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        await asyncio.gather(*(work(session) for _ in range(WINDOW)))


@contextmanager
def attached(server: Server) -> Iterator[batchrunner.OpenEngine]:
    """Open the server as an engine that runs already."""
    os.environ[KEY_VARIABLE] = server.key
    spec = {"kind": "attach", "urls": [server.url], "api_key_env": KEY_VARIABLE}
    with batchrunner.open_engine(spec, task="embed") as engine:
        yield engine


def serve_encode(model: str, source: str, args: str) -> None:
    """Load `sglang.Engine`, and encode all rows for each line of standard input; a process of its own."""
    import sglang  # noqa: PLC0415 - heavy

    all_args = server_args(json.loads(args), cpu=True)
    engine = sglang.Engine(model_path=model, **{name.replace("-", "_"): all_args[name] for name in all_args})
    prompts = pq.read_table(source)["text"].to_pylist()
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        answers = engine.encode(prompts)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert len(answers) == len(prompts)
        found = {"rows_s": len(prompts) / seconds, "own_ms": 1000 * cpu / len(prompts)}
        print("found", json.dumps(found), flush=True)
    engine.shutdown()


@contextmanager
def encode_process(
    case: Case, source: Path, args: dict[str, Any]
) -> Iterator[Callable[[], dict[str, float]]]:
    """Yield what has `sglang.Engine` encode all rows once more, in its own process."""
    environ = {**os.environ, **SERVER_ENVIRONMENT, **cpu_environment(dict(os.environ))}
    environ.pop(MARK.partition("=")[0])
    command = [sys.executable, "-m", "benchmarks.embed", "--serve", case.model, str(source), json.dumps(args)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        (source.parent / "encode.log").open("w") as log,
        subprocess.Popen(command, stderr=log, env=environ, **pipes) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        sends, says = process.stdin, process.stdout

        def once() -> dict[str, float]:
            sends.write("go\n")
            sends.flush()
            for line in says:
                if line.startswith("found "):
                    found: dict[str, float] = json.loads(line.removeprefix("found "))
                    return found
            raise SystemExit(f"sglang.Engine ended: {(source.parent / 'encode.log').read_text()[-2000:]}")

        yield once
        sends.close()


class Passes:
    """Reads the forward passes that a server has logged since the last look."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = 0

    def new(self) -> list[tuple[int, int]]:
        """Return the rows and tokens of each."""
        text = self._log.read_text(errors="replace")
        found = [(int(rows), int(tokens)) for rows, tokens in _PASS.findall(text, self._read)]
        self._read = len(text)
        return found


def with_passes(side: Callable[[], dict[str, float]], passes: Passes, info: EngineInfo) -> dict[str, float]:
    """Run a side; add its forward passes, and the fewest possible."""
    passes.new()
    found = side()
    if "prompt_tokens" not in found:
        return found
    made = passes.new()
    rows, tokens = sum(each for each, _ in made), sum(each for _, each in made)
    assert info.prefill_tokens
    fewest = max(tokens / info.prefill_tokens, rows / (info.max_running or rows))
    own = {"passes": len(made), "fewest_passes": math.ceil(fewest), "rows_in_passes": rows}
    return {**found, **own, "padded_tokens": tokens - found["prompt_tokens"]}


def measure(case: Case, docs: Path, turns: int) -> dict[str, list[dict[str, float]]]:
    """Run each side once a turn, each turn beginning with another one."""
    with tempfile.TemporaryDirectory(prefix="bench-embed-") as scratch:
        folder = Path(scratch)
        source = folder / "input.parquet"
        texts = write_input(source, docs, case.rows)
        name, _, value = MARK.partition("=")
        os.environ["PYTHONPATH"] = with_server_modules(os.environ)
        os.environ |= {name: value, **(MEAN_POOLING if takes_mean(case.model) else {})}
        args = {**EmbedTask.server_args(read_config(case.model), cpu=True), **case.args}
        with (
            encode_process(case, source, args) as by_encode,
            serve(Path(case.model), folder, args) as server,
            attached(server) as engine,
        ):
            passes = Passes(server.log)
            sides: dict[str, Callable[[], dict[str, float]]] = {
                "runner": lambda: by_runner(engine, source),
                "encode": by_encode,
            }
            if case.bare:
                sides["bare"] = lambda: by_bare_loop(server, texts)
            for side in sides.values():  # imports, first compilations
                side()
            found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            names = list(sides)
            for turn in range(turns):
                at = turn % len(names)
                for name in names[at:] + names[:at]:
                    found[name].append(with_passes(sides[name], passes, engine.info))
                    print(case.name, turn, name, found[name][-1], file=sys.stderr, flush=True)
    return found


def figures_of(case: Case, found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the medians of a case and their ratios, each with its interval."""

    def ratio(side: str, *what: str) -> Any:
        pairs = zip(found["runner"], found[side], strict=True)
        return interval([sum(a[key] for key in what) / sum(b[key] for key in what) for a, b in pairs])

    of = {
        side: {what: interval([run[what] for run in runs]) for what in runs[0]}
        for side, runs in found.items()
    }
    figures: dict[str, Any] = {"rows": case.rows, "sides": of, "measured": found}
    figures["rows_per_s_ratio"] = {"runner/encode": ratio("encode", "rows_s")}
    if case.bare:
        figures["cpu_ratio"] = {
            "runner/bare, client and front process": ratio("bare", "own_ms", "front_ms"),
            "runner/bare, front process": ratio("bare", "front_ms"),
            "runner/bare, client": ratio("bare", "own_ms"),
        }
    return figures


def line_of(name: str, figures: dict[str, Any]) -> str:
    """Say in words what came out for a model."""
    runner = figures["sides"]["runner"]
    line = (
        f"{name}: {runner['rows_s'].median:,.0f} rows/s, "
        f"{figures['rows_per_s_ratio']['runner/encode']} x Engine.encode (goal {GOAL_RATE}), "
        f"{runner['passes'].median:.0f} forward passes of {runner['fewest_passes'].median:.0f} at least, "
        f"{runner['padded_tokens'].median:.0f} padded tokens, "
        f"{runner['rows_a_request'].median:.1f} rows a request"
    )
    if "cpu_ratio" in figures:
        bare, (both, *_) = figures["sides"]["bare"], figures["cpu_ratio"].values()
        line += (
            f"; CPU ms a row, runner and bare loop: front process {runner['front_ms'].median:.2f} and "
            f"{bare['front_ms'].median:.2f}, client {runner['own_ms'].median:.2f} and "
            f"{bare['own_ms'].median:.2f}, together {both} x (goal {GOAL_CPU})"
        )
    return line


def commit() -> str:
    """Return the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("data/all-minilm-l6-v2"))
    parser.add_argument("--docs", type=Path, default=Path("data/docs.parquet"))
    parser.add_argument("--rows", type=int, default=512, help="for the real model")
    parser.add_argument("--tiny-rows", type=int, default=4000)
    parser.add_argument("--max-running", type=int, help="--max-running-requests of the engines")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_encode(*options.serve)
        return
    args = {"max-running-requests": options.max_running} if options.max_running else {}
    with tempfile.TemporaryDirectory(prefix="bench-embed-") as scratch:
        tiny = make_tiny_bert(Path(scratch) / "tiny", options.model)
        cases = [
            Case("tiny BERT", str(tiny), options.tiny_rows, bare=True, args=args),
            Case("all-MiniLM-L6-v2", str(options.model), options.rows, bare=False, args=args),
        ]
        found = {case.name: figures_of(case, measure(case, options.docs, options.turns)) for case in cases}
    rates = [each["rows_per_s_ratio"]["runner/encode"].median for each in found.values()]
    both, *_ = found["tiny BERT"]["cpu_ratio"].values()
    goals = {"rows_per_s_ratio": GOAL_RATE, "rate_met": min(rates) >= GOAL_RATE}
    goals |= {"cpu_ratio": GOAL_CPU, "cpu_met": both.median <= GOAL_CPU}
    figures = {
        "goals": goals,
        "device": "CPU, float32, torch_native",
        "commit": commit(),
        "turns": options.turns,
        "max_running_requests": options.max_running,
        **found,
    }
    line = "bench-embed: " + "; ".join(line_of(name, each) for name, each in found.items())
    save("embed", line, figures, ("batchrunner", "sglang", "aiohttp", "torch", "transformers"))


if __name__ == "__main__":
    main()
