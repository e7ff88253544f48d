"""Does a stage of Ray Data keep an engine as busy as `batchrun` does, with blocks of 100 rows?

A round runs both sides in turning order on the same rows and the same kind of engine: the command on a
Parquet file, and `batchrunner.ray.generate` with one actor on a cluster of this machine, from `from_arrow` in
blocks of 100 rows to `iter_batches`, whose rows are dropped. The throughput is that of
all rows but the first 512, from the end of the first 512 to the end of the last one: a function for `parse`
notes on both sides when each answer comes. So the start of the command, the actor and the engine counts on no
side; it is `start_s`, the seconds until the first answer. `wall_s` is from the start to the last answer.

Memory is the largest resident size of the command, and of the actor's process, in MB.

`--model DIR` takes a real SGLang server on that model, on the CPU, in place of the simulated engine: one for
all runs, its cache flushed before each. Its log counts the work of all rows, which other processes on the
machine do not change: forward passes, prefilled tokens and the rows that decode together. The goal then
counts for the decoded rows a pass.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray

import batchrunner.ray
from benchmarks.engine import KEY_VARIABLE, Server, flush, serve, work_of
from benchmarks.measure import save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_ROWS = 100
FIRST_ROWS = 512
"""Rows that are done when the measurement begins: twice a batch."""
PARSE = {"python": "benchmarks.finished_at:finished", "columns": {"at": "float64"}}
ROOT = Path(__file__).parent.parent
GOAL = 0.95
SAMPLING = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
KEY = "for-the-benchmark"
"""The real server's API key, which Ray's actors have it in their environment from the start."""
SERVER_ARGS = {"max-total-tokens": 20_000, "max-running-requests": 32, "decode-log-interval": 1}


def table_of(rows: int) -> pa.Table:
    """Return rows whose prompts share a beginning of some 30 words."""
    begin = "You are given a number and its use. " * 4
    return pa.table({"id": list(range(rows)), "text": [f"{begin}Number {i}." for i in range(rows)]})


def run_command(rows: int, engine: dict[str, Any]) -> dict[str, float]:
    """Return the figures of `batchrun`."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "input.parquet"
        pq.write_table(table_of(rows), source, row_group_size=BLOCK_ROWS)
        run = Path(directory) / "run"
        job: dict[str, Any] = {
            "input": {"path": str(source), "columns": ["id"]},
            "prompt": {"user": "{{ text }}"},
            "sampling": SAMPLING,
            "output": {"path": str(run)},
            "engine": engine,
            "parse": PARSE,
        }
        file = Path(directory) / "job.json"
        file.write_text(json.dumps(job))
        began = time.time()
        process = subprocess.Popen([sys.executable, "-m", "batchrunner", "run", str(file), "--quiet"])
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0, status
        parts = [pq.read_table(part, columns=["at"]) for part in sorted((run / "parts").glob("*.parquet"))]
    return figures_of(pa.concat_tables(parts), rows, began, usage.ru_maxrss / 1024)


def run_stage(rows: int, engine: dict[str, Any]) -> dict[str, float]:
    """Return the figures of the pipeline, with the memory of its actor."""
    table = table_of(rows)
    with largest_actor() as largest:
        began = time.time()
        ds = ray.data.from_arrow([table.slice(at, BLOCK_ROWS) for at in range(0, rows, BLOCK_ROWS)])
        ds = batchrunner.ray.generate(ds, prompt="{{ text }}", parse=PARSE, sampling=SAMPLING, engine=engine)
        batches = ds.iter_batches(batch_size=None, batch_format="pyarrow")
        parts = [batch.select(["at"]) for batch in batches]
    return figures_of(pa.concat_tables(parts), rows, began, max(largest))


def figures_of(answers: pa.Table, rows: int, began: float, memory_mb: float) -> dict[str, float]:
    """Return the figures of a side, from the times of its answers."""
    times = sorted(answers.column("at").to_pylist())
    assert len(times) == rows, (len(times), rows)
    return {
        "rows_per_s": round((rows - FIRST_ROWS) / (times[-1] - times[FIRST_ROWS - 1]), 2),
        "start_s": round(times[0] - began, 2),
        "wall_s": round(times[-1] - began, 2),
        "memory_mb": round(memory_mb),
    }


@contextlib.contextmanager
def largest_actor() -> Iterator[list[float]]:
    """Look for the actors of Ray Data four times a second; give their largest sizes so far, in MB."""
    ended, sizes = threading.Event(), [0.0]

    def look() -> None:
        while not ended.wait(0.25):
            for status in Path("/proc").glob("[0-9]*/status"):
                with contextlib.suppress(OSError, StopIteration):
                    if b"ray::MapWorker" in status.with_name("cmdline").read_bytes():
                        lines = status.read_text().splitlines()
                        sizes.append(int(next(x for x in lines if x.startswith("VmHWM")).split()[1]) / 1024)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        thread.join()


def counted(server: Server, side: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run a side; add the work that the server's scheduler has logged meanwhile."""
    flush(server)
    at = server.log.stat().st_size
    found = side()
    with server.log.open("rb") as log:
        log.seek(at)
        return {**found, **work_of(log.read().decode(errors="replace"))}


def measure(rounds: int, rows: int, engine: dict[str, Any], server: Server | None) -> list[dict[str, Any]]:
    """Run both sides in turning order, and return the figures of the rounds."""
    sides = {"batchrun": run_command, "ray": run_stage}
    made: list[dict[str, Any]] = []
    for number in range(rounds):
        found: dict[str, Any] = {}
        for name in sorted(sides, reverse=bool(number % 2)):
            side = functools.partial(sides[name], rows, engine)
            found[name] = side() if server is None else counted(server, side)
            print(name, found[name], file=sys.stderr, flush=True)
        found["ratio"] = ratio(found, "rows_per_s")
        if server is not None:
            found["ratio_of_rows_a_pass"] = ratio(found, "running_mean")
        made.append(found)
    return made


def ratio(found: dict[str, dict[str, float]], what: str) -> float:
    """Return a figure of the stage as a share of the command's."""
    return round(found["ray"][what] / found["batchrun"][what], 4)


def main() -> None:
    """Run the rounds and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--model", type=Path, help="directory of a model for a real server")
    given = parser.parse_args()
    os.environ |= {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", KEY_VARIABLE: KEY}
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    engine: dict[str, Any] = {"kind": "simulated", "max_running": 32, "step_s": 0.05}
    judged, name = "ratio", "ray_data"
    with contextlib.ExitStack() as stack:
        server = None
        if given.model:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-ray-")))
            server = stack.enter_context(serve(given.model.absolute(), folder, SERVER_ARGS, key=KEY))
            engine = {"kind": "attach", "urls": [server.url], "api_key_env": KEY_VARIABLE}
            judged, name = "ratio_of_rows_a_pass", "ray_data_real"
        rounds = measure(given.rounds, given.rows, engine, server)
    middle = median(each[judged] for each in rounds)
    figures = {
        "engine": {"model": given.model.name, **SERVER_ARGS} if given.model else engine,
        "rows": given.rows, "block_rows": BLOCK_ROWS, "sampling": SAMPLING, "load_average": os.getloadavg(),
        "rounds": rounds, judged: middle, "goal": GOAL, "miss": middle < GOAL,
    }  # fmt: skip
    what = "decoded rows a pass" if given.model else "throughput"
    line = f"ray: {middle:.3f} x the {what} of batchrun (goal {GOAL}), blocks of {BLOCK_ROWS} rows"
    save(name, line, figures, ("ray", "pyarrow", "aiohttp"), "ray_data")


if __name__ == "__main__":
    main()
