"""Do rollouts keep a real engine as busy as single requests? SGLang on the CPU, a tiny random model.

Rows of several turns, whose prompts go on from the answers before, with a tool of some time between two
turns; beside them as many single requests with prompts and outputs of the same lengths, sent by the runner
too. The radix cache is flushed before each. With `--replicas 2` there are two servers. Then the run of the
rollouts is killed at random, again and again, until it is done: each finished generation must stand once in
the log of the servers, and the results must be those of the undisturbed run (temperature 0).

Counts are free of a shared machine's noise, seconds are not: output tokens a forward pass (a line of the log
for each), and the share of the repeated prompt tokens that came from the cache.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.engine import KEY_VARIABLE, SERVER_ARGS, VOCABULARY, flush, serve
from benchmarks.measure import in_fresh_process, save
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from benchmarks.engine import Server

SEED = 5
FIRST, TOLD, OUTPUT = 96, 24, 24
"""Tokens of a row's first prompt, of what a tool says, and of an answer."""
GOAL, CACHED_GOAL = 0.90, 0.90
KILL_S = (3.0, 9.0)
"""Seconds from the start of the command to a kill; the first answers come after about four."""
ARRIVAL_S, START_S = 1.0, 0.5
"""Seconds in which an answer that the server has sent is to arrive and to be written; seconds that a run
takes at least before it sends: what the server receives earlier is from the run that was killed."""
HOOKS = """
import asyncio
async def solve(row, generate):
    prompt, outputs, cached = [*row["prompt"]], [], 0
    for told in row["told"]:
        answer = await generate(prompt)
        outputs.append(answer.columns["output_ids"])
        cached += answer.cached_tokens if len(outputs) > 1 else 0
        await asyncio.sleep({tool_s})
        prompt += [*outputs[-1], *told]
    return {{"outputs": outputs, "cached": cached}}
"""
PASS = re.compile(r"(?:Decode|Prefill) batch")
FINISHED = re.compile(
    r"Finish: obj=.*?input_ids=\[([\d, ]+)\].*"
    r"'request_received_ts': ([\d.]+).*'response_sent_to_client_ts': ([\d.]+)"
)


def write_rows(folder: Path, rows: int, turns: int, tool_s: float) -> None:
    """Write the rows of the rollouts, and the single requests of the same lengths."""
    made = random.Random(SEED)

    def ids(count: int) -> list[int]:
        return [made.randrange(*VOCABULARY) for _ in range(count)]

    table = {"prompt": [ids(FIRST) for _ in range(rows)], "told": [[ids(TOLD)] * turns for _ in range(rows)]}
    pq.write_table(pa.table(table), folder / "rollouts.parquet")
    lengths = [FIRST + turn * (OUTPUT + TOLD) for turn in range(turns)]
    single = {"prompt": [ids(length) for _ in range(rows) for length in lengths]}
    pq.write_table(pa.table(single), folder / "single.parquet")
    (folder / "hooks.py").write_text(HOOKS.format(tool_s=tool_s))


def write_job(folder: Path, name: str, servers: list[Server], run: str) -> Path:
    prompt = {"input_ids": "prompt"} if name == "single" else {"rollout": "hooks:solve"}
    job = {
        "input": {"path": str(folder / f"{name}.parquet")},
        "prompt": prompt,
        "sampling": {"max_new_tokens": OUTPUT, "ignore_eos": True, "temperature": 0},
        "output": {"path": str(folder / run), "columns": ["output_ids"]},
        "engine": {
            "kind": "attach", "urls": [server.url for server in servers], "api_key_env": KEY_VARIABLE,
        },
        "bundle": "off",
    }  # fmt: skip
    file = folder / f"{run}.yaml"
    file.write_text(json.dumps(job))
    return file


def counted(servers: list[Server], begins: list[int]) -> int:
    """Return the forward passes since the logs had these lengths."""
    logs = (server.log.read_text()[begin:] for server, begin in zip(servers, begins, strict=True))
    return sum(len(PASS.findall(log)) for log in logs)


def measured(file: Path, servers: list[Server]) -> dict[str, Any]:
    for server in servers:
        flush(server)
    begins = [len(server.log.read_text()) for server in servers]
    found = in_fresh_process("benchmarks.rollouts", "--job", str(file))
    passes = counted(servers, begins)
    return {**found, "passes": passes, "tokens_a_pass": found["tokens"] / passes}


def results(run: Path) -> dict[int, Any]:
    rows = [row for part in (run / "parts").glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    found = {row["row"]: json.loads(row["returned"]) for row in rows}
    if len(found) < len(rows):
        raise SystemExit(f"{run}: {len(rows) - len(found)} rows are there twice")
    return found


def killed(file: Path, servers: list[Server], kills: int) -> dict[str, int]:
    """Run with kills; count these, the answers sent before one that were asked for again, and the late ones.

    Late is what the server had sent within the last second before the kill. What a killed run had asked and
    the server finishes after the kill has reached nobody, and counts as neither.
    """
    begins = [len(server.log.read_text()) for server in servers]
    chance, kills_at = random.Random(SEED), list[float]()
    while True:
        running = subprocess.Popen(
            [sys.executable, "-m", "batchrunner", "run", str(file)], stderr=subprocess.DEVNULL
        )
        try:
            code = running.wait(chance.uniform(*KILL_S) if len(kills_at) < kills else None)
        except subprocess.TimeoutExpired:
            kills_at.append(time.time())
            running.kill()
            running.wait()
            continue
        if code:
            raise SystemExit(f"{file}: exit code {code}")
        break
    answers = defaultdict[str, list[tuple[float, float]]](list)
    for server, begin in zip(servers, begins, strict=True):
        for line in FINISHED.finditer(server.log.read_text()[begin:]):
            if "'abort'" not in line[0]:
                answers[line[1]].append((float(line[2]), float(line[3])))
    before = list[float]()
    """Seconds from an answer that is asked for again to the kill of the run that had asked."""
    for times in answers.values():
        for received, sent in sorted(times)[:-1]:
            kill = min((kill for kill in kills_at if kill + START_S > received), default=math.inf)
            before += [kill - sent] if sent < kill else []
    late = sum(each <= ARRIVAL_S for each in before)
    return {"kills": len(kills_at), "asked_again": len(before) - late, "late": late}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tool-s", type=float, default=1.0)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument(
        "--pool", type=int, default=SERVER_ARGS["max-total-tokens"], help="tokens of a server"
    )
    parser.add_argument("--job", help="run this job and print its figures (for the script itself)")
    options = parser.parse_args()
    if options.job:
        from benchmarks.engine import runner  # noqa: PLC0415 - only in the process of a run

        print(json.dumps(runner(options.job)))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = folder / "model"
        make_tiny_llama(model, Path("data/smollm2-135m-instruct"))
        write_rows(folder, options.rows, options.turns, options.tool_s)
        args = {
            **SERVER_ARGS,
            "max-total-tokens": options.pool,
            "log-requests": True,
            "log-requests-level": 3,
        }
        servers = [
            stack.enter_context(serve(model, folder, args, name=f"server{number}"))
            for number in range(options.replicas)
        ]
        single = measured(write_job(folder, "single", servers, "single"), servers)
        rollouts = measured(write_job(folder, "rollouts", servers, "rollouts"), servers)
        undisturbed = results(folder / "rollouts")
        repeated = options.rows * sum(
            FIRST + OUTPUT + turn * (OUTPUT + TOLD) for turn in range(options.turns - 1)
        )
        cached = sum(row["cached"] for row in undisturbed.values()) / repeated
        found = {}
        if options.kills:
            found = killed(write_job(folder, "rollouts", servers, "killed"), servers, options.kills)
            after = results(folder / "killed")
            same = sum(undisturbed[row]["outputs"] == made["outputs"] for row, made in after.items())
            found |= {"rows": len(after), "equal_rows": same}
    share = rollouts["tokens_a_pass"] / single["tokens_a_pass"]
    line = (
        f"{options.rows} rows of {options.turns} turns, {options.replicas} replicas of {options.pool:,} "
        f"tokens: {share:.2f} of the output tokens a forward pass of single requests (goal {GOAL}), "
        f"{cached:.1%} of the repeated prompt tokens from the cache (goal {CACHED_GOAL:.0%})"
    )
    if found:
        line += (
            "; {kills} kills: {asked_again} finished generations asked for again, and {late} that were sent "
            "within a second before the kill; {rows} rows, {equal_rows} equal"
        ).format(**found)
    figures = {
        "single": single, "rollouts": rollouts, "share": share, "cached_share": cached, **found,
    }  # fmt: skip
    save(
        f"rollouts_{options.replicas}{'_killed' if found else ''}",
        line,
        figures,
        ["sglang", "torch"],
        module="rollouts",
    )


if __name__ == "__main__":
    main()
