"""Does the runner cost little more than a bare aiohttp loop? Both against nginx, which answers at once.

A round runs all sides in fresh processes, in turning order: the bare loop on asyncio, the bare loop on
uvloop, and the runner, whose command uses uvloop. The bare loop is the fastest that one would write: as
many workers as the window post prepared bodies and read the answers. The runner reads Parquet, renders a
template, reads the JSON of the answers and writes Parquet with a carried column. What is timed: the bare
loop from its first request to its last answer; the runner by its report's `wall_s`, from the open engine
over reading the first rows to the last part on disk. Imports count on no side.

`--instructions` counts those of a row instead, of token ids and one new token, also with 16 and with 64 rows
in a request: by `perf stat`, or where the processor's counters cannot be read by valgrind, which takes ten
minutes. They are the difference between runs of 500 and of 2,000 rows, so that nothing counts but rows. A
tool makes the process slow, and what the runner does by the clock (polls of the load, writes of the journal,
connections that were idle) would count for many times as much as it is: there is none of it in these runs.

`--replicas` measures the seconds of CPU of a row with 1, 8 and 64 replicas, each of which is an address of
nginx, with `--instructions` also those. The requests in flight are the same in all.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import uvloop

from batchrunner.core.timing import TIMING
from batchrunner.core.types import Request
from batchrunner.engines.http import client, wire
from batchrunner.job.engine import AttachEngine
from batchrunner.job.load import load_job
from batchrunner.runner.foreground import run_in_foreground
from batchrunner.runner.prepare import prepare
from benchmarks import instructions
from benchmarks.canned_server import ADDRESSES, nginx
from benchmarks.measure import in_fresh_process, in_turns, interval, post_all, save

SEED = 20
WORDS_A_TEXT = (20, 50)
GOAL = 0.85
CHAT = {"prompt": {"user": "Summarise: {{ text }}"}, "sampling": {"max_new_tokens": 64, "temperature": 0}}
IDS = {"prompt": {"input_ids": "ids"}, "sampling": {"max_new_tokens": 1, "temperature": 0}}
WINDOW, PROMPT_TOKENS = 256, 60
COUNTED_ROWS = (500, 2000)
LONG_S = 3600.0
"""Seconds that are longer than any run here."""
PACKAGES = ("batchrunner", "aiohttp", "uvloop", "orjson", "jinja2", "pyarrow")


def write_input(path: Path, rows: int) -> None:
    """Texts of 100 to 300 characters from a seeded generator, and an identifier to carry."""
    made = random.Random(SEED)
    words = ["".join(made.choices("etaoinshrdlu", k=made.randint(2, 9))) for _ in range(2000)]
    texts = [" ".join(made.choices(words, k=made.randint(*WORDS_A_TEXT))) for _ in range(rows)]
    ids = [[made.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]
    names = [f"doc-{i:08d}" for i in range(rows)]
    pq.write_table(pa.table({"id": names, "text": texts, "ids": pa.array(ids, pa.list_(pa.int32()))}), path)


@contextmanager
def job_on_nginx(rows: int, request: dict[str, Any]) -> Iterator[str]:
    """Give the path of a job on so many rows, whose server is there meanwhile."""
    with tempfile.TemporaryDirectory(prefix="bench-client-") as scratch, nginx(Path(scratch)) as url:
        place = Path(scratch)
        write_input(place / "input.parquet", rows)
        job = {
            "input": {"path": str(place / "input.parquet"), "columns": ["id"]},
            "bundle": "off", "output": {"path": str(place / "run")},
            "engine": {"kind": "attach", "urls": [url]}, "window": WINDOW, **request,
        }  # fmt: skip
        (place / "job.yaml").write_text(json.dumps(job))
        yield str(place / "job.yaml")


def bare(job_file: str, *, fast_loop: bool = False) -> dict[str, Any]:
    """Prepare the very bodies that the runner would send, then post them."""
    job = load_job(job_file)
    assert isinstance(job.engine, AttachEngine)
    made = prepare(job)
    items = (item for batch in made.batches(made.selected()) for item in batch)
    requests = [item for item in items if isinstance(item, Request)]
    bodies = [orjson.dumps(wire.body_of(request)) for request in requests]
    run = uvloop.run if fast_loop else asyncio.run
    with instructions.counted():
        wall_s, _ = run(post_all(job.engine.urls[0] + wire.path_of(requests[0]), bodies, WINDOW))
    return {"rows": len(bodies), "wall_s": wall_s}


def runner(job_file: str) -> dict[str, Any]:
    """Run the job as the command does."""
    return run_with(job_file, [])


def without_clock(job_file: str, bundle: int) -> dict[str, Any]:
    """Run the job with so many rows in a request, and do nothing by the clock."""
    client.KEEPALIVE_S = TIMING.load_poll = LONG_S
    overrides = [f"output.durable={LONG_S:g}"]
    if bundle > 1:
        TIMING.bundle_fill = 60.0  # all are full, also where a tool makes this process slow
        (url,) = json.loads(Path(job_file).read_text())["engine"]["urls"]
        overrides += [f"engine.urls=[{url}/rows{bundle}]", f"bundle={bundle}"]
    return run_with(job_file, overrides, bundle)


def with_replicas(job_file: str, replicas: int, *, counted: bool) -> dict[str, Any]:
    """Run the job with so many replicas; if `counted`, do nothing by the clock."""
    overrides = []
    if counted:
        client.KEEPALIVE_S = TIMING.load_poll = LONG_S
        overrides = [f"output.durable={LONG_S:g}"]
    (url,) = json.loads(Path(job_file).read_text())["engine"]["urls"]
    urls = [url.replace(ADDRESSES[0], address) for address in ADDRESSES[:replicas]]
    overrides += [f"engine.urls={json.dumps(urls)}", f"window={WINDOW // replicas}"]
    began = time.process_time()
    return run_with(job_file, overrides) | {"cpu_s": round(time.process_time() - began, 3)}


def run_with(job_file: str, overrides: list[str], bundle: int = 1) -> dict[str, Any]:
    with instructions.counted():
        report = run_in_foreground(
            job_file, overrides, fresh=True, retry_failed=False, quiet=True, as_json=False
        )
    assert report.exit_code == 0, report.reason
    assert report.bundles["most_rows"] == bundle
    return {"rows": report.rows_ok, "wall_s": report.wall_s}


TIMED: dict[str, Callable[[str], dict[str, Any]]] = {
    "runner": runner, "bare_asyncio": bare, "bare_uvloop": partial(bare, fast_loop=True),
}  # fmt: skip
REPLICAS: dict[str, Callable[[str], dict[str, Any]]] = {
    f"{replicas} replicas{suffix}": partial(with_replicas, replicas=replicas, counted=bool(suffix))
    for replicas in (1, 8, 64)
    for suffix in ("", " counted")
}
COUNTED: dict[str, Callable[[str], dict[str, Any]]] = {
    "bare loop": bare,
    **{f"{rows} rows a request": partial(without_clock, bundle=rows) for rows in (1, 16, 64)},
}


def time_sides(rounds: int, rows: int) -> None:
    """Time all sides, so many times."""
    with job_on_nginx(rows, CHAT) as job_file:
        sides = {
            side: partial(in_fresh_process, "benchmarks.client", "--side", side, "--job", job_file)
            for side in TIMED
        }
        found = in_turns(sides, rounds)
    rows_s = {side: interval([turn[side]["rows"] / turn[side]["wall_s"] for turn in found]) for side in TIMED}
    plain, fast = (
        interval([turn[side]["wall_s"] / turn["runner"]["wall_s"] for turn in found])
        for side in ("bare_asyncio", "bare_uvloop")
    )
    line = (
        f"client (window {WINDOW}): {rows_s['runner'].median:,.0f} rows/s, {plain} x a bare aiohttp loop, "
        f"{fast} x one on uvloop (goal {GOAL})"
    )
    figures = {
        "goal": {
            "ratio_at_least": GOAL, "met_asyncio": plain.median >= GOAL, "met_uvloop": fast.median >= GOAL,
        },
        "window": WINDOW, "rows": rows, "rows_per_s": rows_s,
        "rows_per_s_ratio": {"runner/bare_asyncio": plain, "runner/bare_uvloop": fast}, "measured": found,
    }  # fmt: skip
    save("client", line, figures, PACKAGES)


def count_instructions() -> None:
    """Count the instructions of each side's process for a row more."""
    few, many = COUNTED_ROWS
    found: dict[str, list[int]] = {side: [] for side in COUNTED}
    for rows in COUNTED_ROWS:
        with job_on_nginx(rows, IDS) as job_file:
            for side in COUNTED:
                command = [sys.executable, "-m", "benchmarks.client", "--side", side, "--job", job_file]
                found[side].append(instructions.count(command))
    a_row = {side: round((more - less) / (many - few)) for side, (less, more) in found.items()}
    shares = [f"{side} {count:,} ({count / a_row['bare loop']:.2f})" for side, count in a_row.items()]
    line = f"client: instructions a row, and beside the bare loop's: {', '.join(shares)}"
    figures = {"window": WINDOW, "rows": COUNTED_ROWS, "instructions_a_row": a_row}
    save("client_instructions", line, figures, PACKAGES, "client")


def count_replicas(rows: int, *, with_instructions: bool) -> None:
    """Measure the seconds of CPU of a row with 1, 8 and 64 replicas, and count its instructions if asked."""
    sides = [side for side in REPLICAS if not side.endswith("counted")]
    with job_on_nginx(rows, IDS) as job_file:
        runs = in_turns(
            {
                side: partial(in_fresh_process, "benchmarks.client", "--side", side, "--job", job_file)
                for side in sides
            },
            rounds=3,
        )
    cpu_us = {side: round(min(1e6 * turn[side]["cpu_s"] / rows for turn in runs), 1) for side in sides}
    shown = [f"{side} {cpu_us[side]}" for side in sides]
    line = f"client, µs of CPU a row (least of 3 runs): {', '.join(shown)}"
    figures = {"window_of_all": WINDOW, "rows": rows, "cpu_us_a_row": cpu_us, "runs": runs}
    if with_instructions:
        few, many = COUNTED_ROWS
        counts: dict[str, list[int]] = {side: [] for side in sides}
        for counted_rows in COUNTED_ROWS:
            with job_on_nginx(counted_rows, IDS) as job_file:
                for side in sides:
                    command = [sys.executable, "-m", "benchmarks.client"]
                    command += ["--side", f"{side} counted", "--job", job_file]
                    counts[side].append(instructions.count(command))
        figures["instructions_a_row"] = {
            side: round((more - less) / (many - few)) for side, (less, more) in counts.items()
        }
        line += f"; instructions: {figures['instructions_a_row']}"
    save("client_replicas", line, figures, PACKAGES, "client")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--instructions", action="store_true", help="count them instead")
    parser.add_argument("--replicas", action="store_true", help="measure 1, 8 and 64 replicas")
    parser.add_argument("--side", choices={**TIMED, **COUNTED, **REPLICAS}, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps({**TIMED, **COUNTED, **REPLICAS}[args.side](args.job)))
    elif args.replicas:
        count_replicas(args.rows, with_instructions=args.instructions)
    elif args.instructions:
        count_instructions()
    else:
        time_sides(args.rounds, args.rows)


if __name__ == "__main__":
    main()
