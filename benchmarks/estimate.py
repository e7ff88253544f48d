"""How far are estimates off? Many random jobs in virtual time, and a dozen on the real engine.

In virtual time the schedulers are simulated (`engines/simulation`), with any costs of a pass and noise from
pass to pass and from run to run; on a roofline they are none of the form that the estimate fits. The sample
is answered there, `forecast/job_time.py` tells the rest, and then the rest is run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import batchrunner
from batchrunner.engines.simulation.scheduler import Scheduler, SchedulerConfig, SimulatedRequest
from batchrunner.forecast.job_time import Attempt, JobRow, Setting, choose, forecast
from batchrunner.sglang.logs.lines import LoggedBatch, clean, record_in
from benchmarks.measure import save
from tests.conftest import SMALL_MODEL
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchrunner.engines.simulation.scheduler import StepResult

SEED = 33
SAMPLED, FEWEST = 0.02, 30
"""Share of the rows in the sample, and rows at least."""
MOST_SAMPLED = 500


@dataclass(frozen=True, slots=True)
class Machine:
    """What passes take, in seconds; the noise is a deviation, as a share."""

    weights_s: float
    sample_s: float
    token_s: float
    kv_token_s: float
    launch_s: float
    prefill_s: float
    """More for a pass with prompt tokens: no CUDA graph."""
    noise: float
    run_noise: float
    roofline: bool

    def pass_s(self, step: StepResult, made: random.Random) -> float:
        compute = self.sample_s * step.samples + self.token_s * step.prefill_tokens
        attention = self.kv_token_s * step.kv_tokens
        # on a roofline arithmetic hides behind the reading of the weights in part
        power = 3 if self.roofline else 1
        mean = self.launch_s + math.pow(self.weights_s**power + compute**power, 1 / power) + attention
        mean += self.prefill_s if step.kind == "prefill" else 0.0
        return step.steps * mean * math.exp(made.gauss(0, self.noise / math.sqrt(step.steps)))


@dataclass(frozen=True, slots=True)
class Row:
    row: int
    prompt: int
    cached: int
    output: int
    asked: int


def answered(
    rows: Iterable[Row], config: SchedulerConfig, machine: Machine, window: int, made: random.Random
) -> tuple[list[Attempt], float]:
    """Let one server answer rows, so many in flight; return the answers and when the last one came."""
    scheduler, coming, now = Scheduler(config), iter(rows), 0.0
    speed = math.exp(made.gauss(0, machine.run_noise))
    began: dict[int, float] = {}
    found: list[Attempt] = []
    while True:
        for row in islice(coming, max(0, window - scheduler.in_flight)):
            began[row.row] = now + 1e-9 * len(began)  # as they are sent
            scheduler.submit(
                SimulatedRequest(
                    row.prompt, row.output, row.asked,
                    prefix=(("shared", row.cached),) if row.cached else (), payload=row,
                )
            )  # fmt: skip
        step = scheduler.step(8)
        if step is None:
            return found, now
        now += speed * machine.pass_s(step, made)
        for sample in step.finished:
            row = sample.payload
            found.append(
                Attempt(
                    JobRow(row.row, row.prompt, sample.cached_tokens, row.asked), began[row.row], now,
                    (sample.outputs,), "engine",
                )
            )  # fmt: skip


def random_job(
    made: random.Random, between: Sequence[float], *, roofline: bool
) -> tuple[list[Row], SchedulerConfig, Machine]:
    """Make a job and a machine: lengths, how prompts tell them, drift, prefixes, limits, speeds."""
    count = round(math.exp(made.uniform(*map(math.log, between))))
    prompt, output = math.exp(made.uniform(4, 7)), math.exp(made.uniform(1, 6))
    spread, told = made.uniform(0.2, 1.2), made.choice([0.0, 0.0, 0.5, 1.0])
    drift, shared = made.choice([1.0, 1.0, 2.0]), made.choice([0.0, 0.0, 0.3, 0.8])
    width = made.uniform(0.1, 1.0)
    asked = made.choice([256, 1024, 2048])
    rows = []
    for at in range(count):
        size = made.gauss(0, width)
        tokens = min(max(4, round(prompt * math.exp(size))), 6_000)
        length = output * math.exp(told * size + made.gauss(0, spread)) * drift ** (at / count)
        had = round(shared * prompt) if shared * prompt < tokens else 0
        rows.append(Row(at, tokens, had, min(max(1, round(length)), asked), asked))
    config = SchedulerConfig(
        max_running=made.choice([32, 64, 128, 256, 512]),
        max_total_tokens=made.choice([20_000, 60_000, 200_000, 400_000]),
        chunked_prefill_tokens=made.choice([2048, 8192]),
    )
    weights_s = math.exp(made.uniform(math.log(2e-3), math.log(2e-2)))
    sample_s = weights_s / made.uniform(100, 600)
    machine = Machine(
        weights_s, sample_s, sample_s * made.uniform(1, 2), weights_s / made.uniform(5e4, 4e5),
        weights_s * made.uniform(0.1, 0.5), weights_s * made.uniform(0.0, 1.0), made.uniform(0.02, 0.2),
        made.uniform(0.0, 0.02), roofline,
    )  # fmt: skip
    return rows, config, machine


def one(seed: int, *, between: Sequence[float], roofline: bool) -> dict[str, Any]:
    """Estimate a random job, and run it."""
    made = random.Random(f"{SEED} {seed}")
    rows, config, machine = random_job(made, between, roofline=roofline)
    wanted = min(MOST_SAMPLED, max(FEWEST, round(SAMPLED * len(rows))))
    known = {row.row: row for row in rows}
    as_known = {row.row: JobRow(row.row, row.prompt, row.cached, row.asked) for row in rows}
    taken = {row.row for row in choose(as_known.values(), wanted)}
    window = config.max_running + 100
    sample = made.sample([known[row] for row in sorted(taken)], wanted)
    attempts, _ = answered(sample, config, machine, wanted // 2, made)
    rest = [row for row in rows if row.row not in taken]
    setting = Setting(config, 1)
    began = time.perf_counter()
    told = forecast(
        attempts, setting, setting,
        [as_known[row.row] for row in rest], len(rest),
    )  # fmt: skip
    took_s = time.perf_counter() - began
    _, seconds = answered(rest, config, machine, window, made)
    return {
        "seed": seed, "rows": len(rows), "sampled": wanted, "seconds": round(seconds, 2),
        "told": round(told.seconds.median, 2), "error": round(told.seconds.median / seconds - 1, 4),
        "covered": told.seconds.low <= seconds <= told.seconds.high,
        "width": round(math.log(told.seconds.high / told.seconds.low), 4),
        "limited_by": told.limited_by, "why": told.why[0], "took_s": round(took_s, 2),
    }  # fmt: skip


def summary(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "jobs": len(jobs),
        "median_error": round(statistics.median(abs(job["error"]) for job in jobs), 4),
        "covered": round(sum(job["covered"] for job in jobs) / len(jobs), 4),
        "median_width": round(statistics.median(job["width"] for job in jobs), 4),
    }


def virtual(count: int, between: Sequence[float]) -> dict[str, Any]:
    """Estimate and run random jobs, a quarter as many on a roofline; return what came out."""
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(2) as pool:
        for name, roofline, jobs in (("linear", False, count), ("roofline", True, count // 4)):
            each = []
            for job in pool.map(partial(one, between=between, roofline=roofline), range(jobs)):
                each.append(job)
                print(json.dumps(job), file=sys.stderr, flush=True)
            found[name] = {**summary(each), "each": each}
            print(name, summary(each), flush=True)
    return found


VOCABULARY = 2048
"""Tokens of the tiny model."""
ENDING = range(100, VOCABULARY, 4)
"""A quarter of them, which end an output once it has the tokens that its row wants (`min_new_tokens`)."""
ARGS = {
    "skip-server-warmup": True,  # its text has tokens that the tiny model lacks
    "max-running-requests": 64, "max-total-tokens": 40_000, "decode-log-interval": 1,
}  # fmt: skip


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Threads of a pass wait for each other, on a busy machine for ever."""


def rows_of(
    count: int, prompt: float, output: float, spread: float = 0.5, *, group: int = 1, shared: int = 0,
    drift: float = 1.0, told: float = 0.0, most: int = 1024,
) -> pa.Table:  # fmt: skip
    """Make rows of lognormal lengths; `told` is how much prompts tell of outputs, which drift over the file.

    So many rows in a `group` have a prefix in `shared` tokens.
    """
    luck = random.Random(SEED)
    ids, wants = [], []
    for at in range(count):
        size, prefix = luck.gauss(0, 0.5), random.Random(at // group)
        begin = [prefix.randrange(100, VOCABULARY) for _ in range(shared)]
        own = min(max(4, round(prompt * math.exp(size))), 3000)
        ids.append(begin + [luck.randrange(100, VOCABULARY) for _ in range(own)])
        wants.append(output * math.exp(told * size + luck.gauss(0, spread)) * drift ** (at / count))
    wanted = pa.array([min(max(0, round(want) - 2), most - 8) for want in wants])
    return pa.table({"ids": pa.array(ids, pa.list_(pa.int32())), "wanted": wanted})


Made = tuple[Callable[[], pa.Table], dict[str, Any]]
TINY: dict[str, Made] = {
    "unrelated": (partial(rows_of, 2500, 150, 50), {}),
    "shared prefixes": (partial(rows_of, 2500, 30, 20, group=20, shared=300), {}),
    "short outputs": (partial(rows_of, 5000, 60, 5), {}),
    "long outputs": (partial(rows_of, 500, 60, 300, 0.4), {}),
    "heavy tail": (partial(rows_of, 3000, 80, 20, 1.2), {}),
    "drifting": (partial(rows_of, 2500, 80, 20, drift=5.0), {}),
    "retrying checks": (partial(rows_of, 1500, 80, 30), {"accept": {"regex": "[aeiou]{2}[^a]*$"}}),
    "many short": (partial(rows_of, 12_000, 20, 2), {}),
    "long prompts": (partial(rows_of, 700, 1200, 10), {}),
}
"""Jobs for a server of the tiny model: what makes their rows, and fields of the job."""


def texts_of(count: int, least: int, most: int) -> pa.Table:
    luck = random.Random(SEED)
    words = ["tree", "river", "because", "of", "the", "old", "price", "seven", "quickly", "was", "and", "not"]
    lengths = [luck.randint(least, most) for _ in range(count)]
    return pa.table({"text": [" ".join(luck.choices(words, k=length)) for length in lengths]})


def own_engines(place: Path) -> dict[str, Made]:
    """Return jobs that start servers of their own."""
    server = {"kind": "server", "env": ONE_THREAD, "adapt": "off"}
    each_pass = {"decode-log-interval": 1}
    chat = {
        "prompt": {"user": "Write about: {{ text }}"}, "sampling": {"max_new_tokens": 160},
        "engine": server | {"model": str(SMALL_MODEL), "args": each_pass},
    }  # fmt: skip
    embedding = {
        "task": "embed", "prompt": {"text": "{{ text }}"}, "sampling": {},
        "engine": server | {"model": str(SMALL_MODEL.parent / "all-minilm-l6-v2")},
    }  # fmt: skip
    model = make_tiny_llama(place / "model", SMALL_MODEL, vocabulary=VOCABULARY)
    two = {"engine": server | {"model": str(model), "replicas": 2, "args": ARGS}}
    return {
        "chat": (partial(texts_of, 250, 2, 20), chat),
        "embeddings": (partial(texts_of, 8000, 5, 120), embedding),
        "two replicas": (partial(rows_of, 4000, 80, 40), two),
    }


def passes_in(place: Path) -> int:
    """Return the forward passes in the logs of the servers that log there."""
    lines = [
        line for log in place.glob("engine*.log") for line in log.read_text(errors="replace").split("\n")
    ]
    return sum(isinstance(record_in(clean(line)), LoggedBatch) for line in lines)


def real(
    name: str, made: Made, place: Path, engine: dict[str, Any], logs: Path, scale: float
) -> dict[str, Any]:
    """Estimate a job with that share of its rows, then run it; its engine logs each pass into `logs`."""
    place.mkdir(parents=True)
    table = made[0]()
    pq.write_table(table.slice(0, round(scale * len(table))), place / "rows.parquet")
    job = {
        "input": {"path": str(place / "rows.parquet")},
        "prompt": {"input_ids": "ids"},
        "sampling": {
            "max_new_tokens": 1024, "min_new_tokens": {"column": "wanted"}, "temperature": 1.0,
            "stop_token_ids": [*ENDING],
        },
        "output": {"path": str(place / "run")},
        "engine": engine,
        **made[1],
    }  # fmt: skip
    before = passes_in(logs)
    told = batchrunner.estimate(job)
    sampled = passes_in(logs)
    began = time.monotonic()
    report = batchrunner.run(job)
    seconds = time.monotonic() - began
    passes = passes_in(logs) - sampled
    low, high, told_passes = told.seconds.low, told.seconds.high, told.passes * engine.get("replicas", 1)
    return {
        "job": name, "rows": report.rows_total, "rows_sampled": told.rows_sampled,
        "passes": passes, "passes_told": told_passes, "passes_error": round(told_passes / passes - 1, 4),
        "seconds": round(seconds, 2), "told": told.seconds.median,
        "error": round(told.seconds.median / seconds - 1, 4), "covered": low <= seconds <= high,
        "width": round(math.log(high / low), 4),
        "sample_share": round((sampled - before) / (passes + sampled - before), 4),
        "limited_by": told.limited_by, "why": told.why,
    }  # fmt: skip


def real_jobs(log: Path, names: Sequence[str], scale: float) -> dict[str, Any]:
    """Estimate and run twelve jobs on the real engine, but for those that `log` has already; sum up."""
    known = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {job["job"] for job in known}

    def keep(found: dict[str, Any]) -> None:
        known.append(found)
        with log.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)

    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        place, shared = Path(directory), Path(directory) / "engine.json"
        for name, made in own_engines(place).items():
            if (not names or name in names) and name not in done:
                engine = made[1]["engine"]
                keep(real(name, made, place / name, engine, place / name / "run", scale))
        for name, made in TINY.items():
            if (not names or name in names) and name not in done:
                if not shared.exists():
                    model = place / "model"
                    spec = {"kind": "server", "model": str(model), "env": ONE_THREAD, "args": ARGS}
                    stack.enter_context(batchrunner.open_engine(spec, log_dir=place, share=shared))
                engine = json.loads(shared.read_text())
                keep(real(name, made, place / name, engine, place, scale))
    return {**summary(known), "each": known}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="random jobs in virtual time")
    parser.add_argument("--rows", type=int, nargs=2, default=(10_000, 50_000), help="rows of such a job")
    parser.add_argument("--real", type=Path, metavar="LOG", help="the real engine, going on where LOG ends")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the real jobs' rows")
    parser.add_argument("names", nargs="*", help="only these real jobs")
    options = parser.parse_args()
    if options.real:
        told = real_jobs(options.real, options.names, options.scale)
        off = statistics.median(abs(job["passes_error"]) for job in told["each"])
        line = f"{told['jobs']} jobs: median error {told['median_error']:.1%}, in passes {off:.1%}"
        save("estimate_real", line, told, ("sglang",), "estimate")
        return 0
    found = virtual(options.jobs, options.rows)
    told = found["linear"]
    line = (
        f"{told['jobs']} random jobs in virtual time: median error {told['median_error']:.1%}, "
        f"in the interval {told['covered']:.0%}"
    )
    save("estimate", line, found, ())
    return 0


if __name__ == "__main__":
    sys.exit(main())
