"""Does the runner keep a real engine as busy as the best bare loop? SGLang on the CPU, a tiny random model.

1,500 rows of token ids with lognormal lengths, each with its own output length (`ignore_eos`), against one
server. First the bare aiohttp loop runs once with each of several windows; then the runner with
`window: auto` and the bare loop with the best of those run in alternating pairs, in fresh processes, the
radix cache flushed before each. The bare loop is timed from its first request to its last answer, the
runner by its report's `wall_s`: from the open engine to the last part on disk.

Seconds are noisy on a shared machine. The scheduler's own counts are not: forward passes and prefilled
tokens (a log line for each, `--decode-log-interval 1`), and the mean number of requests that decode together.
"""

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import uvloop

from batchrunner.core.console import tell
from batchrunner.engines.http.connections import free_port
from batchrunner.engines.launched.server import LAUNCHER, to_argv
from batchrunner.runner.foreground import run_in_foreground
from batchrunner.sglang.device import cpu_environment, has_gpu, server_args
from benchmarks.measure import in_fresh_process, in_turns, interval, post_all, save
from tests.support.tiny_model import make_tiny_llama

SEED = 3
GOAL = 0.97
WINDOWS = (32, 96, 256, 512, 1500)
PROMPT_TOKENS = (102, 169)
"""Mean and standard deviation, those of LMSYS-Chat."""
OUTPUT_TOKENS = (74, 70)
"""LMSYS-Chat's are 222 and 210: a third of them, for the CPU's sake."""
LONGEST_TOKENS = 1000
VOCABULARY = (100, 45_000)
SERVER_ARGS = {
    "max-total-tokens": 40_000, "max-running-requests": 256, "decode-log-interval": 1, "sleep-on-idle": True,
}  # fmt: skip
SERVER_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
"""One thread for a model this small: torch's spinning threads would take the clients' core."""
READY_S = 1200.0
"""Longest wait for a server, in seconds; it needs 25 s of a core's time."""
KEY_VARIABLE, KEY = "SGLANG_API_KEY", "benchmark"


class Log:
    """What a scheduler writes of its passes from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size

    def text(self) -> str:
        with self._path.open("rb") as log:
            log.seek(self._at)
            return log.read().decode(errors="replace")

    def work(self) -> dict[str, Any]:
        return work_of(self.text())


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    log: Path

    def ask(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(
            self.url + path, method=method, headers={"Authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            content: bytes = response.read()
            return content


@contextmanager
def serve(
    model: Path, folder: Path, args: Mapping[str, Any] = SERVER_ARGS, *, name: str = "server"
) -> Iterator[Server]:
    """Run SGLang on a free loopback port until the block ends; it cannot outlive this process.

    Its key is in the environment of this process and of those that it starts.
    """
    port, log = free_port(), folder / f"{name}.log"
    os.environ[KEY_VARIABLE] = KEY
    argv = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
    argv += to_argv(server_args(dict(args), cpu=not has_gpu()))
    environment = {**os.environ, **SERVER_ENVIRONMENT}
    environment |= {} if has_gpu() else cpu_environment(environment)
    launcher = subprocess.Popen(
        [sys.executable, str(LAUNCHER)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    assert launcher.stdin is not None
    config = {"module": "sglang.launch_server", "argv": argv, "key": KEY, "log": str(log)}
    try:
        launcher.stdin.write(orjson.dumps(config) + b"\n")
        launcher.stdin.flush()
        server = Server(f"http://127.0.0.1:{port}", log)
        _wait_until_ready(server, launcher)
        yield server
    finally:
        launcher.stdin.close()
        launcher.wait(timeout=30)


def _wait_until_ready(server: Server, launcher: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if launcher.poll() is not None:
            raise SystemExit(f"the server ended:\n{server.log.read_text()[-3000:]}")
        try:
            server.ask("GET", "/ready")
        except OSError as refusal:
            if isinstance(refusal, urllib.error.HTTPError) and refusal.code == HTTPStatus.NOT_FOUND:
                return  # an older SGLang: it listens once it is ready
            time.sleep(0.5)
        else:
            return
    raise SystemExit(f"the server was not ready within {READY_S:g} s")


def flush(server: Server) -> None:
    """Empty the radix cache; the server refuses while it still clears up after the last request."""
    for _ in range(60):
        try:
            server.ask("POST", "/flush_cache")
        except urllib.error.HTTPError:
            time.sleep(0.5)
        else:
            return
    raise SystemExit("the cache could not be flushed")


def write_input(path: Path, rows: int) -> None:
    made = random.Random(SEED)
    prompts = [lognormal(made, *PROMPT_TOKENS) for _ in range(rows)]
    outputs = [lognormal(made, *OUTPUT_TOKENS) for _ in range(rows)]
    ids = [[made.randrange(*VOCABULARY) for _ in range(tokens)] for tokens in prompts]
    table = {
        "id": pa.array([f"row-{i:05d}" for i in range(rows)]),
        "input_ids": pa.array(ids, pa.list_(pa.int32())),
        "tokens": pa.array(outputs, pa.int32()),
    }
    pq.write_table(pa.table(table), path)


def lognormal(made: random.Random, mean: float, deviation: float, longest: int = LONGEST_TOKENS) -> int:
    variance = math.log(1 + deviation**2 / mean**2)
    value = made.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
    return max(1, min(longest, round(value)))


def job_for(source: Path, out: Path, url: str) -> dict[str, Any]:
    return {
        "input": {"path": str(source), "columns": ["id"]},
        "prompt": {"input_ids": "input_ids"},
        "sampling": {"max_new_tokens": {"column": "tokens"}, "ignore_eos": True, "temperature": 0},
        "output": {"path": str(out)},
        "engine": {"kind": "attach", "urls": [url], "api_key_env": KEY_VARIABLE},
    }


def runner(job_file: str) -> dict[str, Any]:
    report = run_in_foreground(job_file, [], fresh=True, retry_failed=False, quiet=True, as_json=False)
    if report.exit_code:
        raise SystemExit("\n".join(report.lines()))
    return {
        "wall_s": report.wall_s, "tokens": report.output_tokens, "window": report.window, "load": report.load,
        "incidents": report.incidents,
    }  # fmt: skip


def bare(job_file: str, window: int) -> dict[str, Any]:
    job = json.loads(Path(job_file).read_text())
    rows = pq.read_table(job["input"]["path"]).to_pylist()
    bodies = [
        orjson.dumps({
            "input_ids": row["input_ids"],
            "sampling_params": {**job["sampling"], "max_new_tokens": row["tokens"]},
        })
        for row in rows
    ]  # fmt: skip
    url = job["engine"]["urls"][0] + "/generate"
    wall_s, _ = uvloop.run(post_all(url, bodies, window, os.environ[KEY_VARIABLE]))
    return {"wall_s": wall_s, "tokens": sum(row["tokens"] for row in rows), "window": window}


def measured(server: Server, job_file: Path, side: str, window: int = 0) -> dict[str, Any]:
    """Run one side once and add what the scheduler says of it."""
    flush(server)
    log = Log(server.log)
    arguments = ["--side", side, "--job", str(job_file), "--window", str(window)]
    found = in_fresh_process("benchmarks.engine", *arguments)
    work = log.work()
    found |= {"side": side, "tokens_per_s": round(found["tokens"] / found["wall_s"], 1), "work": work}
    tell(f"  {side} {found['window']}: {found['tokens_per_s']:,.0f} tok/s {work}")
    return found


def work_of(log: str) -> dict[str, Any]:
    """Sum up the passes that a piece of the server's log tells of: each wrote a line."""
    passes = re.findall(r"(Prefill|Decode) batch.*?#running-req: (\d+).*?#queue-req: (\d+)", log)
    decodes = [int(running) for kind, running, _ in passes if kind == "Decode"]
    return work_in(
        decode_passes=len(decodes),
        prefill_passes=len(passes) - len(decodes),
        running=sum(decodes),
        queue=sum(int(queue) for _, _, queue in passes),
        prefilled=sum(map(int, re.findall(r"Prefill batch.*?#new-token: (\d+)", log))),
        cached=sum(map(int, re.findall(r"Prefill batch.*?#cached-token: (\d+)", log))),
        retracted=sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log))),
    )


def work_in(
    *,
    decode_passes: int,
    prefill_passes: int,
    running: int,
    queue: int,
    prefilled: int,
    cached: int,
    retracted: int,
) -> dict[str, Any]:
    """Return a scheduler's work; `running` and `queue` are sums over the decode passes, and over all."""
    return {
        "passes": decode_passes + prefill_passes,
        "decode_passes": decode_passes,
        "prefill_passes": prefill_passes,
        "running_mean": round(running / max(decode_passes, 1), 2),
        "queue_mean": round(queue / max(decode_passes + prefill_passes, 1), 2),
        "cached_share": round(cached / max(prefilled + cached, 1), 4),
        "prefilled_tokens": prefilled,
        "retracted": retracted,
    }


def measure(model: Path | None, tokenizer: Path, rows: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as scratch:
        folder = Path(scratch)
        made = make_tiny_llama(model or folder / "tiny", tokenizer)
        write_input(folder / "input.parquet", rows)
        with serve(made, folder) as server:
            job_file = folder / "job.yaml"
            job_file.write_text(json.dumps(job_for(folder / "input.parquet", folder / "run", server.url)))
            warm = measured(server, job_file, "bare", 256)  # the first run meets cold code paths
            sweep = [measured(server, job_file, "bare", window) for window in WINDOWS]
            best = max(sweep, key=lambda run: run["tokens_per_s"])["window"]
            found = in_turns(
                {
                    "runner": lambda: measured(server, job_file, "runner"),
                    "bare": lambda: measured(server, job_file, "bare", best),
                },
                pairs,
            )
    return {"rows": rows, "best_window": best, "warm_up": warm, "sweep": sweep, "pairs": found}


def report(found: dict[str, Any]) -> None:
    pairs, best = found["pairs"], found["best_window"]
    ratio = interval([p["runner"]["tokens_per_s"] / p["bare"]["tokens_per_s"] for p in pairs])
    passes = interval(
        [p["runner"]["work"]["decode_passes"] / p["bare"]["work"]["decode_passes"] for p in pairs]
    )
    running = {s: interval([p[s]["work"]["running_mean"] for p in pairs]) for s in ("runner", "bare")}
    speed = {s: interval([p[s]["tokens_per_s"] for p in pairs]) for s in ("runner", "bare")}
    line = (
        f"engine: {speed['runner'].median:,.0f} output tok/s with window auto "
        f"({pairs[0]['runner']['window']}), {ratio} x the bare loop's best window ({best}) (goal {GOAL}); "
        f"decode passes x {passes.median:.3f}, mean running {running['runner'].median:.0f} "
        f"against {running['bare'].median:.0f}"
    )
    figures = {
        "goal": {"ratio_at_least": GOAL, "met": ratio.median >= GOAL},
        "ratio_tokens_per_s": ratio, "ratio_decode_passes": passes,
        "tokens_per_s": speed, "running_mean": running, "server_args": SERVER_ARGS,
        "server_environment": SERVER_ENVIRONMENT, **found,
    }  # fmt: skip
    save("engine", line, figures, ("batchrunner", "sglang", "torch", "aiohttp", "uvloop", "orjson"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--model", type=Path, help="where the tiny model is, or is to be made")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--side", choices=("runner", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--window", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(runner(args.job) if args.side == "runner" else bare(args.job, args.window)))
    else:
        report(measure(args.model, args.tokenizer, args.rows, args.pairs))


if __name__ == "__main__":
    main()
