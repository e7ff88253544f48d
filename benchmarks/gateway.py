"""What does it cost to go through the Model Gateway? Two real replicas behind the real `smg`, on a CPU.

The same jobs go to the workers directly, through a gateway that keeps to routing keys, and through one that
is cache-aware, in turns, from empty caches. Seconds are noisy on a shared machine, so rows/s are compared
within a round. The engine's own counts are not noisy: prompt tokens that were computed, beside the fewest
possible. The queues are those that the replicas report, four times a second, in the middle 60 % of a run.
"""

import argparse
import contextlib
import itertools
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

import batchrunner
from batchrunner.core.engine_info import QueueBand
from batchrunner.engines.http.connections import free_port
from benchmarks.engine import KEY, Log, Server, flush, serve
from benchmarks.measure import in_turns, interval, save
from tests.support.tiny_model import make_tiny_llama

MAX_RUNNING = 32
VOCABULARY = 40_000
GATEWAY = (
    *("--disable-retries", "--disable-circuit-breaker", "--max-concurrent-requests", "0"),
    *("--disable-worker-overload-protection", "--load-monitor-interval", "1"),
)
POLICIES = {"keys": "consistent_hashing", "cache_aware": "cache_aware"}
MIDDLE = 0.2, 0.8
SEEDS = itertools.count(1)


def _ids(made: random.Random, tokens: int) -> list[int]:
    return [made.randrange(1000, VOCABULARY) for _ in range(tokens)]


def workloads(rows: int, seed: int = 0) -> dict[str, tuple[list[list[int]], int, int]]:
    """Return the prompts, the output tokens of a row, and the fewest prompt tokens to compute, by name.

    Each run has a seed of its own: no prompt can be in a cache.
    """
    made = random.Random(seed)
    plain = [_ids(made, 60) for _ in range(rows)]
    short = [_ids(made, 60) for _ in range(3 * rows)]
    steady = [_ids(made, 60) for _ in range(4 * rows)]
    heads = [_ids(made, 300) for _ in range(rows // 20)]
    grouped = [head + _ids(made, 20) for head in heads for _ in range(20)]
    made.shuffle(grouped)
    return {
        "64 tokens": (plain, 64, sum(map(len, plain))),
        "16 tokens, a long job": (steady, 16, sum(map(len, steady))),
        "1 token": (short, 1, sum(map(len, short))),
        "prefixes": (grouped, 8, 300 * len(heads) + 20 * len(grouped)),
    }


@contextlib.contextmanager
def gateway(policy: str, servers: list[Server], folder: Path) -> Iterator[str]:
    """Run `smg` before the servers until the block ends."""
    port = free_port()
    own = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), *GATEWAY]
    urls = [server.url for server in servers]
    with (folder / f"smg-{policy}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "smg.launch_router", *own, "--policy", policy),
                *("--api-key", KEY, "--worker-urls", *urls),
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                listed = orjson.loads(Server(url, folder).ask("GET", "/workers"))["workers"]
                if sum(worker["status"] == "ready" for worker in listed) == len(servers):
                    break
            time.sleep(0.5)
        yield url
    finally:
        process.kill()
        process.wait()


class Queues:
    """The queues of the servers, read while a job runs."""

    def __init__(self, servers: list[Server]) -> None:
        self._servers = servers
        self._ended = threading.Event()
        self._readings: list[list[int]] = []
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._ended.wait(0.25):
            self._readings.append([self._queue_of(server) for server in self._servers])

    @staticmethod
    def _queue_of(server: Server) -> int:
        loads = orjson.loads(server.ask("GET", "/v1/loads?include=core"))["loads"]
        return sum(load["num_waiting_reqs"] for load in loads)

    def in_band(self) -> float | None:
        """Return the share of readings within the healthy band, in the middle of the job."""
        band = QueueBand().scaled(MAX_RUNNING)
        first, last = (round(share * len(self._readings)) for share in MIDDLE)
        queues = [queue for reading in self._readings[first:last] for queue in reading]
        return sum(band.low <= queue <= band.high for queue in queues) / len(queues) if queues else None


def measure(name: str, engine: Mapping[str, Any], servers: list[Server], rows: int) -> dict[str, Any]:
    """Run a job from empty caches."""
    prompts, tokens, least = workloads(rows, seed=next(SEEDS))[name]
    for server in servers:
        flush(server)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "rows.parquet", Path(folder) / "run"
        pq.write_table(pa.table({"ids": prompts}), source)
        job = {
            "input": {"path": str(source)}, "prompt": {"input_ids": "ids"}, "output": {"path": str(out)},
            "engine": dict(engine),
            "sampling": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        }  # fmt: skip
        logs = [Log(server.log) for server in servers]
        with Queues(servers) as queues:
            report = batchrunner.run(job)
        computed = sum(log.work()["prefilled_tokens"] for log in logs)
        return {
            "rows_per_s": report.rows_per_s,
            "ok": report.rows_ok,
            "retries": report.retries,
            "rows_per_request": report.bundles["rows_per_request"],
            "prompt_tokens_over_least": round(computed / least, 4),
            "queue_in_band": queues.in_band(),
        }


def main() -> None:
    """Measure, and write `results/gateway.json`."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=300)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--only", choices=[*workloads(20)], nargs="*", default=[*workloads(20)])
    options.add_argument("--pool", type=int, default=40_000, help="tokens in the KV pool of a replica")
    options.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = make_tiny_llama(folder / "model", asked.tokenizer)
        flags = {"max-running-requests": MAX_RUNNING, "max-total-tokens": asked.pool}
        servers = [stack.enter_context(serve(model, folder, flags, name=f"replica{n}")) for n in range(2)]
        urls = {
            side: stack.enter_context(gateway(policy, servers, folder)) for side, policy in POLICIES.items()
        }
        engines = {
            "direct": {"kind": "attach", "urls": [server.url for server in servers]},
            **{side: {"kind": "gateway", "url": url, "route": "gateway"} for side, url in urls.items()},
        }
        figures: dict[str, Any] = {}
        for workload in asked.only:
            sides = {
                side: lambda engine=engine, workload=workload: measure(workload, engine, servers, asked.rows)
                for side, engine in engines.items()
            }
            rounds = in_turns(sides, asked.rounds)
            figures[workload] = {
                "rounds": rounds,
                **{
                    f"{side}_rows_per_s_over_direct": interval(
                        [turn[side]["rows_per_s"] / turn["direct"]["rows_per_s"] for turn in rounds]
                    )
                    for side in urls
                },
            }
            print(workload, figures[workload], file=sys.stderr, flush=True)
    line = "; ".join(
        f"{workload}: {side} {found[f'{side}_rows_per_s_over_direct']}"
        for workload, found in figures.items()
        for side in POLICIES
    )
    save("gateway", f"rows/s over direct: {line}", figures, ["sglang", "smg"])


if __name__ == "__main__":
    main()
