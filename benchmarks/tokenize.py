"""Tokens made on the client or on the server: what does a row cost each of them?

A real SGLang on the CPU (a tiny random model), chats of three lengths with 2 output tokens, in alternating
pairs. Judged by CPU seconds: of the server's front process, which makes tokens, templates and replies for all
rows alone, and of our own. Rows a second say nothing here: on a CPU the model is the bottleneck.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import batchrunner
from benchmarks.measure import front_cpu_s, interval, save
from tests.support.tiny_model import make_tiny_llama

LENGTHS = {500: 200, 4000: 100, 16_000: 30}
"""Characters of a prompt, and rows."""
SIDES = ("client", "server")
MARK = f"BENCH_TOKENIZE={os.getpid()}"


def write_input(path: Path, words: str, characters: int, rows: int) -> None:
    made = random.Random(characters)
    starts = [made.randrange(len(words) - characters) for _ in range(rows)]
    pq.write_table(pa.table({"text": [words[start : start + characters] for start in starts]}), path)


def one_run(engine: batchrunner.OpenEngine, source: Path, side: str) -> dict[str, float]:
    """Return milliseconds of CPU a row."""
    job: dict[str, Any] = {
        "input": {"path": str(source)},
        "prompt": {"user": "{{ text }}"},
        "sampling": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True},
        "output": {"path": str(source.parent / "run")},
        "engine": engine.spec,
        "tokenize": side,
    }
    front_s, own_s = front_cpu_s(MARK), time.process_time()
    report = batchrunner.run(job, engine=engine, fresh=True)
    own_s, front_s = time.process_time() - own_s, front_cpu_s(MARK) - front_s
    results = pq.read_table(source.parent / "run" / "parts")
    assert report.rows_ok == report.rows_total, report.reason
    tokens = sum(results["prompt_tokens"].to_pylist()) / len(results)
    return {
        "front_ms": 1000 * front_s / report.rows_ok,
        "own_ms": 1000 * own_s / report.rows_ok,
        "tokens": tokens,
    }


def measure(tokenizer: Path, docs: Path, pairs: int) -> dict[str, Any]:
    words = " ".join(pq.read_table(docs)["text"].to_pylist())
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-tokenize-") as scratch:
        folder = Path(scratch)
        args = {"context-length": 8192, "max-total-tokens": 60_000}
        model = make_tiny_llama(folder / "tiny", tokenizer)
        name, _, value = MARK.partition("=")
        env = {name: value}
        spec = {"kind": "server", "model": str(model), "device": "cpu", "args": args, "env": env}
        with batchrunner.open_engine(spec, log_dir=folder) as engine:
            for characters, rows in LENGTHS.items():
                source = folder / "input.parquet"
                write_input(source, words, characters, rows)
                runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
                one_run(engine, source, "server")  # imports, first compilations
                for turn in range(pairs):
                    for side in SIDES if turn % 2 else reversed(SIDES):
                        runs[side].append(one_run(engine, source, side))
                found[f"{runs['client'][0]['tokens']:.0f} tokens"] = {
                    f"{side} {what}": interval([run[what] for run in runs[side]])
                    for side in SIDES
                    for what in ("front_ms", "own_ms")
                }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--docs", type=Path, default=Path("data/docs.parquet"))
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    found = measure(options.tokenizer, options.docs, options.pairs)
    parts = [
        f"{name}: server {ms['server front_ms'].median:.2f} → {ms['client front_ms'].median:.2f}, "
        f"we {ms['server own_ms'].median:.2f} → {ms['client own_ms'].median:.2f}"
        for name, ms in found.items()
    ]
    line = f"bench-tokenize: CPU ms a row, tokens on the server → on the client: {'; '.join(parts)}"
    packages = ("batchrunner", "sglang", "tokenizers", "transformers")
    save("tokenize", line, {"ms_of_cpu_a_row": found}, packages)


if __name__ == "__main__":
    main()
