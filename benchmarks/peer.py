"""The peer: `sglang.Engine.generate` on all rows, in a process of its own that is kept for many calls."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchrunner.sglang.device import cpu_environment, server_args
from benchmarks.engine import SERVER_ARGS, SERVER_ENVIRONMENT, Log

SAMPLING = {"ignore_eos": True, "temperature": 0, "skip_special_tokens": False}
"""A random model puts out special tokens too: without the last an answer of them alone is empty, which the
runner takes for a failed row."""


class Peer:
    """`sglang.Engine` in a process of its own, kept for all workloads."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def generate(self, path: Path, *, in_order: bool = False) -> dict[str, Any]:
        """Send the rows of a Parquet file (text, tokens) at once; `in_order` sorts them by prompt before."""
        assert self._process.stdin
        assert self._process.stdout
        log = Log(self._log)
        request = {"path": str(path), "sorted": in_order}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"wall_s"'):
                return {**json.loads(line), "work": log.work()}
        raise SystemExit(self._log.read_text()[-3000:])


@contextmanager
def peer(model: Path, folder: Path) -> Iterator[Peer]:
    """Start it; it is ended with the block."""
    environment = dict(os.environ)
    environment |= {**cpu_environment(environment), **SERVER_ENVIRONMENT}
    log = folder / "peer.log"
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peer", str(model)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=environment,
        ) as process,
    ):  # fmt: skip
        yield Peer(process, log)
        assert process.stdin
        process.stdin.close()  # it ends by itself then


def engine_generate(model: str) -> None:
    """Answer requests of a `Peer`, a line each; the scheduler logs to standard error."""
    import sglang  # noqa: PLC0415

    args = {k.replace("-", "_"): v for k, v in server_args(SERVER_ARGS, cpu=True).items()}
    engine = sglang.Engine(model_path=model, log_level="info", **args)
    for line in sys.stdin:
        request = json.loads(line)
        rows = pq.read_table(request["path"]).to_pylist()
        if request["sorted"]:
            rows.sort(key=lambda row: row["text"])
        sampling = [{"max_new_tokens": row["tokens"], **SAMPLING} for row in rows]
        engine.flush_cache()
        began = time.perf_counter()
        answers = engine.generate(prompt=[row["text"] for row in rows], sampling_params=sampling)
        wall_s = time.perf_counter() - began
        metas = [answer["meta_info"] for answer in answers]
        found = {
            "wall_s": wall_s,
            "tokens": sum(meta["completion_tokens"] for meta in metas),
            "prompt_tokens": sum(meta["prompt_tokens"] for meta in metas),
            "cached_tokens": sum(meta["cached_tokens"] for meta in metas),
        }  # fmt: skip
        print(json.dumps(found), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    engine_generate(sys.argv[1])
