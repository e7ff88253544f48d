"""What does the Model Gateway cost? Two SGLang servers on the CPU, behind the gateway and without it.

The rows of `benchmarks.engine` (its tiny random model and its servers' flags too) against the same two
servers: once through the real gateway, whose flags are those of `engine: {kind: gateway}`, and once with
`engine: {kind: attach}` and both addresses, in alternating pairs, in fresh processes, the radix caches
flushed before each. Timed by the report's `wall_s`: from the open engine to the last part on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from batchrunner.engines.router import gateway_process, start_gateway
from batchrunner.engines.workerlist import WorkerList
from batchrunner.job import GatewayEngine
from benchmarks.engine import (
    KEY_VARIABLE,
    SERVER_ARGS,
    SERVER_ENVIRONMENT,
    Server,
    flush,
    job_for,
    runner,
    serve,
    work_of,
    write_input,
)
from benchmarks.measure import in_fresh_process, interval, save
from tests.tiny_model import make_tiny_llama

GOAL = 0.97
REQUEST_TIMEOUT_S = 3600.0
SIDES = ("gateway", "direct")


def measured(servers: list[Server], jobs: dict[str, Path], side: str) -> dict[str, Any]:
    """Run one side once and add what each scheduler says of it."""
    for server in servers:
        flush(server)
    at = [server.log.stat().st_size for server in servers]
    found = in_fresh_process("benchmarks.gateway", "--job", str(jobs[side]))
    work = []
    for server, begin in zip(servers, at, strict=True):
        with server.log.open("rb") as log:
            log.seek(begin)
            work.append(work_of(log.read().decode(errors="replace")))
    found |= {"side": side, "tokens_per_s": round(found["tokens"] / found["wall_s"], 1), "work": work}
    running = " + ".join(f"{each['running_mean']:g}" for each in work)
    print(f"  {side}: {found['tokens_per_s']:,.0f} tok/s, running {running}", file=sys.stderr, flush=True)
    return found


def measure(model: Path | None, tokenizer: Path, rows: int, pairs: int) -> dict[str, Any]:
    key = secrets.token_hex(16)
    os.environ[KEY_VARIABLE] = key
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        made = make_tiny_llama(model or folder / "tiny", tokenizer)
        write_input(folder / "input.parquet", rows)
        servers = [stack.enter_context(serve(made, folder, key=key, name=f"server-{n}")) for n in range(2)]
        loop = stack.enter_context(asyncio.Runner())
        gateway, url = gateway_process(
            GatewayEngine(kind="gateway", model=str(made)),
            key=key, log_dir=folder, request_timeout_s=REQUEST_TIMEOUT_S,
        )  # fmt: skip
        loop.run(start_gateway(gateway, url))
        stack.callback(lambda: loop.run(gateway.stop()))
        loop.run(_give(url, key, servers))
        engines = {
            "gateway": {"kind": "gateway", "url": url, "api_key_env": KEY_VARIABLE},
            "direct": {
                "kind": "attach", "urls": [server.url for server in servers], "api_key_env": KEY_VARIABLE,
            },
        }  # fmt: skip
        jobs = {side: folder / f"{side}.yaml" for side in SIDES}
        for side, path in jobs.items():
            job = job_for(folder / "input.parquet", folder / f"run-{side}", "")
            path.write_text(json.dumps({**job, "engine": engines[side]}))
        warm = measured(servers, jobs, "direct")  # the first run meets cold code paths
        found = []
        for turn in range(pairs):
            pair = [measured(servers, jobs, side) for side in (SIDES if turn % 2 else SIDES[::-1])]
            found.append({run["side"]: run for run in pair})
    return {"rows": rows, "warm_up": warm, "pairs": found}


async def _give(url: str, key: str, servers: list[Server]) -> None:
    workers = WorkerList(url, key)
    try:
        assert await workers.bring_to({server.url for server in servers})
    finally:
        await workers.close()


def report(found: dict[str, Any]) -> None:
    pairs = found["pairs"]
    ratio = interval([p["gateway"]["tokens_per_s"] / p["direct"]["tokens_per_s"] for p in pairs])
    speed = {side: interval([p[side]["tokens_per_s"] for p in pairs]) for side in SIDES}
    passes = interval([_passes(p["gateway"]) / _passes(p["direct"]) for p in pairs])
    line = (
        f"gateway: {speed['gateway'].median:,.0f} output tok/s through the gateway before two replicas, "
        f"{ratio} x the same two without it (goal {GOAL}); decode passes x {passes.median:.3f}"
    )
    figures = {
        "goal": {"ratio_at_least": GOAL, "met": ratio.median >= GOAL},
        "ratio_tokens_per_s": ratio, "ratio_decode_passes": passes, "tokens_per_s": speed,
        "server_args": SERVER_ARGS, "server_environment": SERVER_ENVIRONMENT, **found,
    }  # fmt: skip
    save("gateway", line, figures, ("batchrunner", "sglang", "sglang-router", "torch", "aiohttp", "uvloop"))


def _passes(run: dict[str, Any]) -> int:
    passes: int = sum(work["decode_passes"] for work in run["work"])
    return passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", type=Path, help="where the tiny model is, or is to be made")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(runner(args.job)))
    else:
        report(measure(args.model, args.tokenizer, args.rows, args.pairs))


if __name__ == "__main__":
    main()
