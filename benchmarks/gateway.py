"""What does the Model Gateway cost? Two SGLang servers on the CPU, behind the gateway and without it.

The same two servers are used through the real gateway, whose flags are those of `engine: {kind: gateway}`,
and with `engine: {kind: attach}` and both addresses, in alternating pairs, in fresh processes, the radix
caches flushed before each. Timed by the report's `wall_s`: from the open engine to the last part on disk.

Two workloads: the rows of `benchmarks.engine`, which share nothing (its tiny random model and its servers'
flags too), and 120 shuffled groups of 8 that begin alike. Of these the scheduler's count of prefilled tokens
says whether a group stays on one replica: the fewest possible are those that one cache of everything would
have needed. Beside them, through the gateway, the rows in input order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.engines.base import IncidentQueue
from batchrunner.engines.launched.gateway import GatewayProcess
from batchrunner.job.engine import GatewayEngine
from batchrunner.job.spec import LimitsSpec
from benchmarks.engine import (
    KEY_VARIABLE,
    SEED,
    SERVER_ARGS,
    SERVER_ENVIRONMENT,
    VOCABULARY,
    Server,
    flush,
    job_for,
    runner,
    serve,
    work_of,
    write_input,
)
from benchmarks.measure import in_fresh_process, interval, save
from benchmarks.prompts import groups, least_tokens, shuffled
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.prompts import Row

GOAL = 0.97
REQUEST_TIMEOUT_S = 3600.0
GOAL_LEAST = 1.05
SIDES = {"unrelated": ("gateway", "direct"), "groups": ("gateway", "direct", "gateway, input order")}
GROUPS, GROUP_ROWS, HEAD_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 120, 8, 430, 32, 16


def write_groups(path: Path) -> int:
    """Write rows that begin alike, shuffled; return the fewest tokens that can be prefilled of them."""
    made = random.Random(SEED)
    rows = shuffled(groups(made, GROUPS, GROUP_ROWS, HEAD_TOKENS, OWN_TOKENS, OUTPUT_TOKENS))
    table = {
        "id": [f"row-{i:05d}" for i in range(len(rows))],
        "input_ids": pa.array([list(_ids(row)) for row in rows], pa.list_(pa.int32())),
        "tokens": pa.array([row.outputs for row in rows], pa.int32()),
    }
    pq.write_table(pa.table(table), path)
    return least_tokens(rows)


def _ids(row: Row) -> Iterator[int]:
    for name, tokens in row.parts:
        yield from random.Random(name).choices(range(*VOCABULARY), k=tokens)


def measured(servers: list[Server], job: Path, side: str) -> dict[str, Any]:
    """Run one side once and add what each scheduler says of it."""
    for server in servers:
        flush(server)
    at = [server.log.stat().st_size for server in servers]
    found = in_fresh_process("benchmarks.gateway", "--job", str(job))
    work = []
    for server, begin in zip(servers, at, strict=True):
        with server.log.open("rb") as log:
            log.seek(begin)
            work.append(work_of(log.read().decode(errors="replace")))
    found |= {"tokens_per_s": round(found["tokens"] / found["wall_s"], 1), "work": work}
    running = " + ".join(f"{each['running_mean']:g}" for each in work)
    prefilled = " + ".join(f"{each['prefilled_tokens']:,}" for each in work)
    print(
        f"  {side}: {found['tokens_per_s']:,.0f} tok/s, running {running}, prefilled {prefilled}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return found


def measure(model: Path | None, tokenizer: Path, rows: int, pairs: int) -> dict[str, Any]:
    key = secrets.token_hex(16)
    os.environ[KEY_VARIABLE] = key
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        made = make_tiny_llama(model or folder / "tiny", tokenizer)
        write_input(folder / "unrelated.parquet", rows)
        least = write_groups(folder / "groups.parquet")
        servers = [stack.enter_context(serve(made, folder, key=key, name=f"server-{n}")) for n in range(2)]
        loop = stack.enter_context(asyncio.Runner())
        gateway = GatewayProcess(
            GatewayEngine(kind="gateway", model=str(made)), IncidentQueue(),
            key=key, log_dir=folder, limits=LimitsSpec(request_timeout=REQUEST_TIMEOUT_S),
        )  # fmt: skip
        url = gateway.url
        loop.run(gateway.start())
        stack.callback(lambda: loop.run(gateway.close()))
        loop.run(gateway.take_workers([server.url for server in servers]))
        engines = {
            "gateway": {"kind": "gateway", "url": url, "api_key_env": KEY_VARIABLE},
            "direct": {
                "kind": "attach", "urls": [server.url for server in servers], "api_key_env": KEY_VARIABLE,
            },
        }  # fmt: skip
        jobs = {}
        for name, sides in SIDES.items():
            for side in sides:
                job = job_for(folder / f"{name}.parquet", folder / f"run-{name}-{side}", "")
                job |= {
                    "engine": engines[side.partition(",")[0]],
                    "order": "input" if "," in side else "auto",
                }
                jobs[name, side] = folder / f"{name}-{side}.yaml"
                jobs[name, side].write_text(json.dumps(job))
        measured(servers, jobs["unrelated", "direct"], "warm-up")  # the first run meets cold code paths
        found: dict[str, list[dict[str, Any]]] = {}
        for name, sides in SIDES.items():
            print(name, file=sys.stderr, flush=True)
            found[name] = [
                {side: measured(servers, jobs[name, side], side) for side in sides[:: 1 if turn % 2 else -1]}
                for turn in range(pairs)
            ]
    return {"rows": rows, "least_tokens_of_groups": least, "pairs": found}


def report(found: dict[str, Any]) -> None:
    least = found["least_tokens_of_groups"]
    verdicts = {name: verdict(name, pairs, least) for name, pairs in found["pairs"].items()}
    ratios = {name: judged["ratio_tokens_per_s"] for name, judged in verdicts.items()}
    to_least = verdicts["groups"]["ratio_to_least"]
    line = (
        f"gateway: output tok/s through the gateway before two replicas {ratios['unrelated']} x the same two "
        f"without it (goal {GOAL}), of rows that begin alike {ratios['groups']} x; of these it prefilled "
        f"{to_least['gateway']} x the fewest possible (goal {GOAL_LEAST}), without it {to_least['direct']} "
        f"x, in input order {to_least['gateway, input order']} x"
    )
    met = {name: ratio.median >= GOAL for name, ratio in ratios.items()}
    met["least"] = to_least["gateway"].median <= GOAL_LEAST
    figures = {
        "goal": {"ratio_at_least": GOAL, "prefilled_to_least_at_most": GOAL_LEAST, "met": met},
        "verdicts": verdicts,
        "server_args": SERVER_ARGS, "server_environment": SERVER_ENVIRONMENT, **found,
    }  # fmt: skip
    save("gateway", line, figures, ("batchrunner", "sglang", "sglang-router", "torch", "aiohttp", "uvloop"))


def verdict(name: str, pairs: list[dict[str, Any]], least: int) -> dict[str, Any]:
    """Compare the sides of one workload."""
    sides = SIDES[name]
    judged: dict[str, Any] = {
        "tokens_per_s": {side: interval([pair[side]["tokens_per_s"] for pair in pairs]) for side in sides},
        "ratio_tokens_per_s": interval(
            [pair["gateway"]["tokens_per_s"] / pair["direct"]["tokens_per_s"] for pair in pairs]
        ),
        "ratio_decode_passes": interval(
            [_sum(pair["gateway"], "decode_passes") / _sum(pair["direct"], "decode_passes") for pair in pairs]
        ),
    }
    if name == "groups":
        judged["ratio_to_least"] = {
            side: interval([_sum(pair[side], "prefilled_tokens") / least for pair in pairs]) for side in sides
        }
    return judged


def _sum(run: dict[str, Any], count: str) -> int:
    total: int = sum(work[count] for work in run["work"])
    return total


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
