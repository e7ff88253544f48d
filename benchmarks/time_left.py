"""Can the time left of a run be believed? Eleven real runs of a few minutes, each of another shape.

Most runs are on the simulated engine in real time, whose pace hardly depends on the CPU. Three are on a real
SGLang on the CPU with a tiny random model, whose pace depends on other work on the machine. The record is
the event log of each worker, and for a run of several workers also `batchrun status`, asked every five
seconds.

A line is a logged state of the run, five seconds after the line before at the earliest. Judged are the lines
from a tenth of the rows to five seconds before the end. A line is near the truth if its time left differs by
at most 15 % from the time that was left. A line without a time left is not near. A jump is a line that more
than doubles the one before, without an event of the log between the two.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.errors import BatchrunError
from batchrunner.output.events import read_events
from batchrunner.output.run_dir import RunDir
from batchrunner.output.samples import LoggedSample, sample_of
from batchrunner.runner.status import status
from benchmarks.engine import KEY, KEY_VARIABLE, VOCABULARY, Server, lognormal, serve
from benchmarks.measure import save
from tests.support.tiny_model import make_tiny_llama

SEED = 7
LINE_S = 5.0
"""Minimum seconds between two lines."""
NEAR, JUMP = 0.15, 2.0
GOAL = 0.90
"""Minimum share of the lines that are near the truth."""
MAX_RUNNING = 32
PASS_S = 0.01
"""Seconds of a full pass of the simulated engine: about 15 rows of 200 tokens a second."""
SERVER_ARGS = {"max-total-tokens": 20_000, "max-running-requests": MAX_RUNNING, "sleep-on-idle": True}
REAL_TOKENS = (20, 15)
"""Mean and standard deviation of the output lengths on a real engine, which is slow on a CPU with other work.
"""
NO_EXPLANATION = frozenset({"sample", "lease", "lease_end"})
"""Events that explain no jump."""
ROLLOUT = '''
"""A rollout of three turns, with a tool that takes half a second."""
import asyncio

async def solve(row, generate):
    messages = [{"role": "user", "content": row["text"]}]
    for _ in range(3):
        answer = await generate(messages, max_new_tokens=96)
        messages += [answer.message, {"role": "user", "content": "And then?"}]
        await asyncio.sleep(0.5)
    return {"turns": len(messages) // 2}
'''


@dataclass(frozen=True, slots=True)
class Line:
    """What a run said at one moment."""

    at_s: float
    """Time since the epoch, in seconds."""
    done_share: float
    """Fraction of the rows of the attempt that had ended."""
    left_s: float | None


@dataclass(slots=True)
class Record:
    """The lines of one worker, or of a whole run of several workers."""

    lines: list[Line]
    ended_at_s: float
    event_times: list[float] = field(default_factory=list)
    """Times of the events that may explain a jump."""

    def figures(self) -> dict[str, Any]:
        """Judge the lines."""
        judged = [line for line in self.lines if self._is_judged(line)]
        errors = [
            abs(line.left_s / (self.ended_at_s - line.at_s) - 1) for line in judged if line.left_s is not None
        ]
        jumps = sum(self._is_jump(earlier, later) for earlier, later in pairwise(judged))
        return {
            "took_s": round(self.ended_at_s - self.lines[0].at_s, 1),
            "lines": len(judged),
            "near_share": round(sum(error <= NEAR for error in errors) / max(1, len(judged)), 3),
            "without_time": len(judged) - len(errors),
            "error_median": round(sorted(errors)[len(errors) // 2], 3) if errors else None,
            "error_worst": round(max(errors), 3) if errors else None,
            "jumps": jumps,
            "record": [
                [round(line.at_s - self.ended_at_s, 1), round(line.done_share, 4), line.left_s]
                for line in self.lines
            ],
        }

    def _is_judged(self, line: Line) -> bool:
        return line.done_share >= 0.1 and line.at_s <= self.ended_at_s - LINE_S

    def _is_jump(self, earlier: Line, later: Line) -> bool:
        if earlier.left_s is None or later.left_s is None or later.left_s <= JUMP * earlier.left_s:
            return False
        return not any(earlier.at_s < at_s <= later.at_s for at_s in self.event_times)


def record_of(log: Path) -> Record:
    """Read the record of the last attempt in an event log."""
    samples: list[LoggedSample] = []
    event_times: list[float] = []
    for event in read_events(log):
        if event["event"] == "start":
            samples, event_times = [], []
        elif (sample := sample_of(event)) is not None:
            samples.append(sample)
        elif event["event"] not in NO_EXPLANATION:
            event_times.append(event["time"])
    samples = [sample for sample in samples if sample.rows_total]
    rows_before, last = samples[0].rows_done, samples[-1]
    ended_at = next(sample.time for sample in samples if sample.rows_done == last.rows_done)
    lines: list[Line] = []
    for sample in samples:
        if not lines or sample.time >= lines[-1].at_s + LINE_S:
            share = (sample.rows_done - rows_before) / max(1, last.rows_done - rows_before)
            lines.append(Line(at_s=sample.time, done_share=share, left_s=sample.time_left_s))
    return Record(lines=lines, ended_at_s=ended_at, event_times=event_times)


@dataclass(frozen=True, slots=True)
class Case:
    """A run to judge: its folder, and the length of the whole benchmark relative to five minutes."""

    folder: Path
    scale: float

    def rows(self, per_second: float) -> int:
        """Return the number of rows of a run of five minutes, times the scale."""
        return round(300 * self.scale * per_second)

    def job(self, table: dict[str, Any], **fields: Any) -> Path:
        """Write the input and a job on the simulated engine; `fields` replace those of the job."""
        pq.write_table(pa.table(table), self.folder / "input.parquet")
        job = {
            "input": {"path": str(self.folder / "input.parquet")},
            "prompt": {"user": "{{ text }}"},
            "sampling": {"max_new_tokens": 800},
            "output": {"path": str(self.run)},
            "engine": {"kind": "simulated", "max_running": MAX_RUNNING, "step_s": PASS_S},
            "order": "input",
            **fields,
        }
        path = self.folder / "job.json"
        path.write_text(json.dumps(job))
        return path

    @property
    def run(self) -> Path:
        """Path of the run's directory."""
        return self.folder / "run"

    def start(self, job: Path, *options: str) -> subprocess.Popen[bytes]:
        """Start the command."""
        with (self.folder / "stderr").open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "batchrunner", str(job), *options],
                cwd=self.folder, stdout=subprocess.DEVNULL, stderr=errors, env=environment(self.folder),
            )  # fmt: skip

    def finish(self, command: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a command that must succeed."""
        if command.wait():
            raise SystemExit(f"{self.folder.name}: {(self.folder / 'stderr').read_text()[-3000:]}")

    def record(self) -> dict[str, Any]:
        """Judge the run of one worker."""
        return {"run": record_of(self.run / "events.jsonl").figures()}


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a command that finds the functions in `folder`, and this package."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[1])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def texts(rows: int) -> dict[str, Any]:
    """Return a table of rows with short texts."""
    return {"text": [f"Text number {row}" for row in range(rows)]}


def uneven(case: Case) -> dict[str, Any]:
    """Run rows with log-normal output lengths."""
    case.finish(case.start(case.job(texts(case.rows(12)))))
    return case.record()


def short_and_long(case: Case) -> dict[str, Any]:
    """Run rows of which one in five has forty times as many output tokens as the others."""
    rows = case.rows(20)
    made = random.Random(SEED)
    tokens = [made.choices((20, 800), (4, 1))[0] for _ in range(rows)]
    table = {**texts(rows), "tokens": tokens}
    job = case.job(table, sampling={"max_new_tokens": {"column": "tokens"}, "ignore_eos": True})
    case.finish(case.start(job))
    return case.record()


def growing(case: Case) -> dict[str, Any]:
    """Run rows whose outputs grow from 100 to 300 tokens in the order of the input."""
    rows = case.rows(15)
    table = {**texts(rows), "tokens": [100 + 200 * row // rows for row in range(rows)]}
    job = case.job(table, sampling={"max_new_tokens": {"column": "tokens"}, "ignore_eos": True})
    case.finish(case.start(job))
    return case.record()


def prefix_groups(case: Case) -> dict[str, Any]:
    """Run rows in groups that share a prefix of 600 tokens, reordered by prefix."""
    rows = case.rows(12)
    made = random.Random(SEED)
    documents = [
        " ".join(made.choice(("red", "green", "blue")) for _ in range(500)) for _ in range(rows // 20)
    ]
    table = {"text": [f"{made.choice(documents)} Question {row}" for row in range(rows)]}
    case.finish(case.start(case.job(table, order="auto")))
    return case.record()


def resumed(case: Case) -> dict[str, Any]:
    """Interrupt a run once a third of its rows have ended, and resume it."""
    rows = case.rows(18)
    job = case.job(texts(rows))
    first = case.start(job)
    log = case.run / "events.jsonl"
    while first.poll() is None:
        done = [sample.rows_done for event in read_events(log) if (sample := sample_of(event))]
        if done and done[-1] >= rows // 3:
            first.send_signal(signal.SIGINT)
            first.wait()
        time.sleep(1)
    case.finish(case.start(job))
    return case.record()


def joined(case: Case) -> dict[str, Any]:
    """Share a run between three workers, and ask for its state every five seconds."""
    command = case.start(case.job(texts(case.rows(36))), "--processes", "3")
    together: list[Line] = []
    while command.poll() is None:
        with contextlib.suppress(BatchrunError):
            state = status(case.run)
            if state.rows_total and state.running:
                share = state.rows_on_disk / state.rows_total
                together.append(Line(at_s=time.time(), done_share=share, left_s=state.time_left_s))
        time.sleep(LINE_S)
    case.finish(command)
    workers = [record_of(task.events) for task in RunDir(case.run).all_tasks() if task.events.exists()]
    ended_at = max(worker.ended_at_s for worker in workers)
    run = Record(lines=together, ended_at_s=ended_at)
    figures = {"run": run.figures()}
    return figures | {f"worker {number}": worker.figures() for number, worker in enumerate(workers)}


def estimated(case: Case) -> dict[str, Any]:
    """Estimate a run of uneven rows by a sample, and run it."""
    job = case.job(texts(case.rows(12)))
    command = [sys.executable, "-m", "batchrunner", "estimate", str(job), "--json"]
    done = subprocess.run(
        command, check=True, cwd=case.folder, capture_output=True, env=environment(case.folder)
    )
    case.finish(case.start(job))
    return {**case.record(), "estimate": orjson.loads(done.stdout)}


def rollout(case: Case) -> dict[str, Any]:
    """Run rollouts of three turns with a tool."""
    (case.folder / "hooks.py").write_text(ROLLOUT)
    case.finish(case.start(case.job(texts(case.rows(7)), prompt={"rollout": "hooks:solve"})))
    return case.record()


def real_engine(case: Case, server: Server) -> dict[str, Any]:
    """Run rows of uneven lengths on a real engine."""
    return _attached(case, server, rows=case.rows(1.5))


def background(case: Case, server: Server) -> dict[str, Any]:
    """Run in the background of a real engine, whose users come in bursts of ten seconds."""
    stop = threading.Event()
    users = threading.Thread(target=lambda: asyncio.run(_use(server, stop)))
    users.start()
    try:
        return _attached(case, server, rows=case.rows(1), background=True)
    finally:
        stop.set()
        users.join()


def _attached(case: Case, server: Server, *, rows: int, **engine: Any) -> dict[str, Any]:
    attach = {"kind": "attach", "urls": [server.url], "api_key_env": KEY_VARIABLE, **engine}
    case.finish(case.start(_real_job(case, rows, attach)))
    return case.record()


def _real_job(case: Case, rows: int, engine: dict[str, Any]) -> Path:
    """Write the input and a job for a real engine: prompts of token ids, and log-normal output lengths."""
    made = random.Random(SEED)
    prompts = [[made.randrange(*VOCABULARY) for _ in range(made.randrange(20, 60))] for _ in range(rows)]
    return case.job(
        {"ids": prompts, "tokens": [lognormal(made, *REAL_TOKENS) for _ in range(rows)]},
        prompt={"input_ids": "ids"},
        sampling={"max_new_tokens": {"column": "tokens"}, "ignore_eos": True},
        engine=engine,
    )


async def _use(server: Server, stop: threading.Event) -> None:
    """Send users' requests: in every other span of ten seconds, three a second."""
    body = {"input_ids": [[500, 600, 700]], "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.post(server.url + "/generate", data=orjson.dumps(body)) as response:
            await response.read()

    async with aiohttp.ClientSession(headers=headers) as session:
        requests: set[asyncio.Task[None]] = set()
        while not stop.is_set():
            if int(time.time() / 10) % 2:
                requests.add(asyncio.create_task(ask(session)))
            await asyncio.sleep(1 / 3)
        await asyncio.gather(*requests, return_exceptions=True)


def engine_death(case: Case, model: Path) -> dict[str, Any]:
    """Launch a real engine, and kill its scheduler once four rows in ten have ended."""
    rows = case.rows(1.2)
    launched = {"kind": "server", "model": str(model), "device": "cpu", "args": SERVER_ARGS}
    command = case.start(_real_job(case, rows, launched))
    is_killed = False
    while command.poll() is None:
        events = read_events(case.run / "events.jsonl")
        done = [sample.rows_done for event in events if (sample := sample_of(event))]
        if not is_killed and done and done[-1] >= 0.4 * rows:
            is_killed = True
            for pid in schedulers_below(command.pid):
                os.kill(pid, signal.SIGKILL)
        time.sleep(1)
    case.finish(command)
    return {**case.record(), "killed": is_killed}


def schedulers_below(pid: int) -> Iterator[int]:
    """Yield the processes below a process that are SGLang's schedulers."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            if b"sglang::schedul" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield child
            yield from schedulers_below(child)


SIMULATED: dict[str, Callable[[Case], dict[str, Any]]] = {
    case.__name__: case
    for case in (uneven, short_and_long, growing, prefix_groups, resumed, joined, estimated, rollout)
}
REAL = ("real_engine", "background", "engine_death")


def measure_real(names: Sequence[str], folder: Path, scale: float, tokenizer: Path) -> dict[str, Any]:
    """Run the cases on a real engine, one after the other."""
    figures: dict[str, Any] = {}
    if not names:
        return figures
    model = make_tiny_llama(folder / "tiny", tokenizer)
    if "engine_death" in names:
        figures["engine_death"] = engine_death(case_in(folder, "engine_death", scale), model)
    attached = [case for case in (real_engine, background) if case.__name__ in names]
    if attached:
        with serve(model, folder, {**SERVER_ARGS, "enable-metrics": True}) as server:
            for case in attached:
                figures[case.__name__] = case(case_in(folder, case.__name__, scale), server)
    return figures


def case_in(folder: Path, name: str, scale: float) -> Case:
    """Make the folder of a case."""
    (folder / name).mkdir()
    return Case(folder=folder / name, scale=scale)


def measure(names: Sequence[str], scale: float, tokenizer: Path, at_once: int) -> dict[str, Any]:
    """Run the cases: those on the simulated engine a few at once, beside those on a real engine."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-time-left-") as scratch,
        ThreadPoolExecutor(at_once) as pool,
    ):
        folder = Path(scratch)
        simulated = {
            name: pool.submit(case, case_in(folder, name, scale))
            for name, case in SIMULATED.items()
            if name in names
        }
        real = [name for name in REAL if name in names]
        figures = measure_real(real, folder, scale, tokenizer)
        return {name: future.result() for name, future in simulated.items()} | figures


def main() -> None:
    """Measure, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[*SIMULATED, *REAL])
    parser.add_argument(
        "--scale", type=float, default=1.0, help="length of the runs, in units of five minutes"
    )
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--at-once", type=int, default=3, help="runs on the simulated engine at a time")
    args = parser.parse_args()
    load_before = os.getloadavg()
    cases = measure(args.cases, args.scale, args.tokenizer, args.at_once)
    lines = [
        f"{name}: {case['run']['near_share']:.0%} of {case['run']['lines']} lines within {NEAR:.0%}, "
        f"worst {case['run']['error_worst']}, {case['run']['jumps']} jumps, {case['run']['took_s']} s"
        for name, case in cases.items()
    ]
    is_met = all(case["run"]["near_share"] >= GOAL and not case["run"]["jumps"] for case in cases.values())
    figures = {"goal_met": is_met, "scale": args.scale, "load_before": load_before, "cases": cases}
    save("time_left", "\n".join(lines), figures, ("batchrunner", "sglang", "pyarrow"))


if __name__ == "__main__":
    main()
