"""Does the runner cost little more than a bare aiohttp loop? Both against nginx, which answers at once.

A round runs all sides in fresh processes, in turning order: the bare loop on asyncio, the bare loop on
uvloop, and the runner, whose command uses uvloop; with `--endpoint ids` (token ids and one new token) also
the runner with 16 and with 64 rows in a request. The bare loop is the fastest that one would write: as
many workers as the window post prepared bodies, read the answers and forget them. The runner reads
Parquet, renders a template, reads the JSON of the answers and writes Parquet with a carried column.

What is timed: the bare loop from its first request to its last answer; the runner by its report's
`wall_s`, from the open engine over reading the first rows to the last part on disk. CPU seconds are those
of the client process alone; the runner's also hold the check of the job and the opening of the engine.
Imports count on no side.

The figures of `ids` have the instructions of a row too, counted by `perf stat`, or where the processor's
counters cannot be read (or with `--callgrind`) by valgrind, which takes ten minutes. They are the difference
between runs of 500 and of 2,000 rows, so that nothing counts but rows. A tool makes the process slow, and
what the runner does by the clock (polls of the load, writes of the journal, connections that were idle)
would count for many times as much as it is. So there is none of it in these runs, and a poll has a figure of
its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import uvloop
from yarl import URL

from batchrunner.core.timing import TIMING
from batchrunner.core.types import Request
from batchrunner.engines.http import client, wire
from batchrunner.engines.http.client import HttpEngine
from batchrunner.job.engine import AttachEngine
from batchrunner.job.load import load_job
from batchrunner.runner.foreground import run_in_foreground
from batchrunner.runner.prepare import prepare
from benchmarks import instructions
from benchmarks.canned_server import nginx
from benchmarks.measure import in_fresh_process, interval, save

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 20
WORDS_A_TEXT = (20, 50)
GOAL = 0.85
PROMPTS = {
    "generate": {"text": "Summarise: {{ text }}"},
    "chat": {"user": "Summarise: {{ text }}"},
    "ids": {"input_ids": "ids"},
}
PROMPT_TOKENS = 60
COUNTED_ROWS = (500, 2000)
LONG_S = 3600.0
"""Seconds that are longer than any run here."""


def write_input(path: Path, rows: int) -> None:
    """Texts of 100 to 300 characters from a seeded generator, and an identifier to carry."""
    made = random.Random(SEED)
    words = ["".join(made.choices("etaoinshrdlu", k=made.randint(2, 9))) for _ in range(2000)]
    texts = [" ".join(made.choices(words, k=made.randint(*WORDS_A_TEXT))) for _ in range(rows)]
    ids = [[made.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]
    names = [f"doc-{i:08d}" for i in range(rows)]
    pq.write_table(pa.table({"id": names, "text": texts, "ids": pa.array(ids, pa.list_(pa.int32()))}), path)


def job_for(source: Path, out: Path, url: str, endpoint: str, window: int) -> dict[str, Any]:
    return {
        "input": {"path": str(source), "columns": ["id"]},
        "prompt": PROMPTS[endpoint],
        "sampling": {"max_new_tokens": 1 if endpoint == "ids" else 64, "temperature": 0},
        "bundle": "off",
        "output": {"path": str(out)},
        "engine": {"kind": "attach", "urls": [url]},
        "window": window,
    }


def cpu_s() -> float:
    """CPU seconds of this process, all threads, children excluded."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def bare(job_file: str, *, fast_loop: bool) -> dict[str, Any]:
    """Prepare the very bodies that the runner would send, then post them."""
    job = load_job(job_file)
    assert isinstance(job.engine, AttachEngine)
    made = prepare(job)
    items = (item for batch in made.batches(made.selected()) for item in batch)
    requests = [item for item in items if isinstance(item, Request)]
    bodies = [orjson.dumps(wire.body_of(request)) for request in requests]
    url = URL(job.engine.urls[0] + wire.path_of(requests[0]))
    run = uvloop.run if fast_loop else asyncio.run
    return run(_post_all(url, bodies, int(job.window)))


async def _post_all(url: URL, bodies: list[bytes], window: int) -> dict[str, Any]:
    waiting = iter(bodies)
    read = 0

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal read
        for body in waiting:
            async with session.post(url, data=body) as response:
                assert response.status == 200
                read += len(await response.read())

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers={"Content-Type": "application/json"}
    ) as session:
        cpu, began = cpu_s(), time.perf_counter()
        with instructions.counted():
            await asyncio.gather(*(work(session) for _ in range(window)))
        wall = time.perf_counter() - began
        return {"rows": len(bodies), "wall_s": wall, "cpu_s": cpu_s() - cpu, "bytes": read}


def runner(job_file: str, bundle: int = 1, *, by_clock: bool = True, polls: bool = True) -> dict[str, Any]:
    """Run the job as the command does, with so many rows in a request.

    Without `by_clock` the journal is not written while rows are sent and no connection is closed because it
    is idle, without `polls` the load is not read.
    """
    overrides = []
    if not by_clock:
        overrides.append(f"output.durable={LONG_S:g}")
        client.KEEPALIVE_S = LONG_S
    if not polls:
        TIMING.load_poll = LONG_S
    if bundle > 1:
        TIMING.bundle_fill = 60.0  # all are full, also where a tool makes this process slow
        (url,) = json.loads(Path(job_file).read_text())["engine"]["urls"]
        overrides += [f"engine.urls=[{url}/rows{bundle}]", f"bundle={bundle}"]
    cpu, began = cpu_s(), time.perf_counter()
    polled = 0
    poll = HttpEngine.loads

    async def counted_poll(engine: HttpEngine) -> Any:
        nonlocal polled
        polled += 1
        return await poll(engine)

    HttpEngine.loads = counted_poll  # type: ignore[method-assign, assignment]
    with instructions.counted():
        report = run_in_foreground(
            job_file, overrides, fresh=True, retry_failed=False, quiet=True, as_json=False
        )
    assert report.exit_code == 0, report.reason
    call_s = time.perf_counter() - began
    assert report.bundles["most_rows"] == bundle
    own = {"wall_s": report.wall_s, "cpu_s": cpu_s() - cpu, "call_s": call_s, "polls": polled}
    return {"rows": report.rows_ok, **own}


SIDES: dict[str, Callable[[str], dict[str, Any]]] = {
    "runner": runner,
    "bare_asyncio": lambda job_file: bare(job_file, fast_loop=False),
    "bare_uvloop": lambda job_file: bare(job_file, fast_loop=True),
    "runner_16": lambda job_file: runner(job_file, 16),
    "runner_64": lambda job_file: runner(job_file, 64),
}
ONLY_IDS = {"runner_16", "runner_64"}
COUNTED: dict[str, Callable[[str], dict[str, Any]]] = {
    "bare_asyncio": SIDES["bare_asyncio"],
    "runner": lambda job_file: runner(job_file, by_clock=False, polls=False),
    "runner_16": lambda job_file: runner(job_file, 16, by_clock=False, polls=False),
    "runner_64": lambda job_file: runner(job_file, 64, by_clock=False, polls=False),
}
"""Sides whose instructions a row are counted."""
POLLING = "runner_that_polls"
COUNTED_BESIDE = {**COUNTED, POLLING: lambda job_file: runner(job_file, by_clock=False)}


def sides_of(endpoint: str) -> list[str]:
    return [side for side in SIDES if endpoint == "ids" or side not in ONLY_IDS]


def measure(rounds: int, rows: int, endpoint: str, window: int) -> list[dict[str, dict[str, Any]]]:
    """Run every side once a round, each round beginning with another one."""
    found = []
    with tempfile.TemporaryDirectory(prefix="bench-client-") as scratch, nginx(Path(scratch)) as url:
        write_input(Path(scratch) / "input.parquet", rows)
        job_file = Path(scratch) / "job.yaml"
        job = job_for(Path(scratch) / "input.parquet", Path(scratch) / "run", url, endpoint, window)
        job_file.write_text(json.dumps(job))
        names = sides_of(endpoint)
        for turn in range(rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            found.append(
                {
                    side: in_fresh_process("benchmarks.client", "--side", side, "--job", str(job_file))
                    for side in order
                }
            )
    return found


def instructions_a_row(tool: instructions.Tool, window: int) -> dict[str, int]:
    """Count the instructions of each side's process for a row more, and the runner's for a poll."""
    counted: dict[str, list[instructions.Counted]] = {side: [] for side in COUNTED_BESIDE}
    few, many = COUNTED_ROWS
    for rows in COUNTED_ROWS:
        with tempfile.TemporaryDirectory(prefix="bench-client-") as scratch, nginx(Path(scratch)) as url:
            write_input(Path(scratch) / "input.parquet", rows)
            job_file = Path(scratch) / "job.yaml"
            job = job_for(Path(scratch) / "input.parquet", Path(scratch) / "run", url, "ids", window)
            job_file.write_text(json.dumps(job))
            command = [sys.executable, "-m", "benchmarks.client", "--counted", "--job", str(job_file)]
            for side in COUNTED if rows == few else COUNTED_BESIDE:
                counted[side].append(instructions.count([*command, "--side", side], tool))
    found = {
        side: round((counted[side][1].instructions - counted[side][0].instructions) / (many - few))
        for side in COUNTED
    }
    unpolled, polled = counted["runner"][1], counted[POLLING][0]
    polls = [json.loads(each.output.splitlines()[-1])["polls"] for each in (unpolled, polled)]
    a_poll = (polled.instructions - unpolled.instructions) / (polls[1] - polls[0])
    return {**found, "a_poll": round(a_poll)}


def report(
    rounds: list[dict[str, dict[str, Any]]], endpoint: str, window: int, counted: dict[str, int]
) -> None:
    def ratios(of: str, key: str) -> Any:
        if key == "rows_s":
            return interval([r[of]["wall_s"] / r["runner"]["wall_s"] for r in rounds])
        return interval([r["runner"]["cpu_s"] / r[of]["cpu_s"] for r in rounds])

    sides = sides_of(endpoint)
    rows_s = {s: interval([r[s]["rows"] / r[s]["wall_s"] for r in rounds]) for s in sides}
    cpu = {s: interval([r[s]["cpu_s"] / r[s]["rows"] * 1000 for r in rounds]) for s in sides}
    plain, fast = ratios("bare_asyncio", "rows_s"), ratios("bare_uvloop", "rows_s")
    line = (
        f"client ({endpoint}, window {window}): {rows_s['runner'].median:,.0f} rows/s, {plain} x a bare "
        f"aiohttp loop, {fast} x one on uvloop (goal {GOAL}); CPU s per 1,000 rows: "
        f"runner {cpu['runner'].median:.3f}, bare {cpu['bare_asyncio'].median:.3f}, "
        f"on uvloop {cpu['bare_uvloop'].median:.3f}"
    )
    bundled: dict[str, Any] = {}
    for side in ONLY_IDS.intersection(sides):
        to_bare = [r[side]["cpu_s"] / r["bare_asyncio"]["cpu_s"] for r in rounds]
        bundled[f"{side}/bare_asyncio"] = interval(to_bare)
    for side in sorted(ONLY_IDS.intersection(sides)):
        line += (
            f"; {side.removeprefix('runner_')} rows a request: {rows_s[side].median:,.0f} rows/s, "
            f"CPU {cpu[side].median:.3f}, {bundled[f'{side}/bare_asyncio']} x the bare loop's"
        )
    if endpoint == "ids" and not counted:
        line += "; instructions were not counted: neither perf nor valgrind can here"
    if counted:
        bare_one = counted["bare_asyncio"]
        shares = [f"{side} {counted[side]:,} ({counted[side] / bare_one:.2f})" for side in COUNTED]
        line += (
            f"; instructions a row, and beside the bare loop's: {', '.join(shares)}; "
            f"for a poll: {counted['a_poll']:,}"
        )
    figures = {
        "goal": {
            "ratio_at_least": GOAL, "met_asyncio": plain.median >= GOAL, "met_uvloop": fast.median >= GOAL,
        },
        "endpoint": endpoint, "window": window, "rows": rounds[0]["runner"]["rows"], "rounds": len(rounds),
        "rows_per_s": rows_s, "cpu_s_per_1000_rows": cpu,
        "rows_per_s_ratio": {"runner/bare_asyncio": plain, "runner/bare_uvloop": fast},
        "cpu_ratio": {f"runner/{s}": ratios(s, "cpu") for s in ("bare_asyncio", "bare_uvloop")},
        "bundled_cpu_ratio": bundled, "instructions_a_row": counted,
        "measured": rounds,
    }  # fmt: skip
    save(
        "client" if endpoint != "ids" else "client_bundled",
        line,
        figures,
        ("batchrunner", "aiohttp", "uvloop", "orjson", "jinja2", "pyarrow"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--endpoint", choices=PROMPTS, help="default: chat, then ids")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--callgrind", action="store_true", help="count instructions with valgrind")
    parser.add_argument("--side", choices=[*SIDES, POLLING], help=argparse.SUPPRESS)
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps((COUNTED_BESIDE if args.counted else SIDES)[args.side](args.job)))
        return
    for endpoint in [args.endpoint] if args.endpoint else ["chat", "ids"]:
        tool: instructions.Tool | None = "callgrind" if args.callgrind else instructions.tool_here()
        counted = instructions_a_row(tool, args.window) if tool and endpoint == "ids" else {}
        rounds = measure(args.rounds, args.rows, endpoint, args.window)
        report(rounds, endpoint, args.window, counted)


if __name__ == "__main__":
    main()
