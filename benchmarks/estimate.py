"""How far are estimates off? Many random jobs in virtual time, and a dozen on the real engine.

In virtual time the schedulers are simulated (`engines/simulation`), with any costs of a pass and noise from
pass to pass and from run to run; on a roofline they are none of the form that the estimate fits. The sample
is answered there, `forecast/job_time.py` tells the rest, and then the rest is run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import batchrunner
from batchrunner.engines.simulation.scheduler import Scheduler, SchedulerConfig, SimulatedRequest
from batchrunner.forecast.job_time import Attempt, JobRow, Setting, forecast
from benchmarks.measure import save

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
                    row.row, began[row.row], now, row.prompt, sample.cached_tokens, (sample.outputs,),
                    row.asked, False, "engine",
                )
            )  # fmt: skip


def random_job(made: random.Random, *, roofline: bool) -> tuple[list[Row], SchedulerConfig, Machine]:
    """Make a job and a machine: lengths, how prompts tell them, drift, prefixes, limits, speeds."""
    count = round(math.exp(made.uniform(math.log(10_000), math.log(50_000))))
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


def one(seed: int, *, roofline: bool) -> dict[str, Any]:
    """Estimate a random job, and run it."""
    made = random.Random(f"{SEED} {seed}")
    rows, config, machine = random_job(made, roofline=roofline)
    wanted = min(MOST_SAMPLED, max(FEWEST, round(SAMPLED * len(rows))))
    ordered = sorted(rows, key=lambda row: (row.prompt, row.row))
    begin = made.random()
    sample = [ordered[int((at + begin) * len(rows) / wanted)] for at in range(wanted)]
    taken = {row.row for row in sample}
    window = config.max_running + 100
    attempts, _ = answered(made.sample(sample, wanted), config, machine, wanted // 2, made)
    rest = [row for row in rows if row.row not in taken]
    setting = Setting(config, 1)
    began = time.perf_counter()
    told = forecast(
        attempts, setting, setting,
        [JobRow(row.row, row.prompt, row.cached, row.asked) for row in rest], len(rest),
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


def virtual(count: int) -> dict[str, Any]:
    """Estimate and run random jobs, a quarter as many on a roofline; return what came out."""
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(2) as pool:
        for name, roofline, jobs in (("linear", False, count), ("roofline", True, count // 4)):
            each = []
            for job in pool.map(partial(one, roofline=roofline), range(jobs)):
                each.append(job)
                print(json.dumps(job), file=sys.stderr, flush=True)
            found[name] = {**summary(each), "each": each}
            print(name, summary(each), flush=True)
    return found


def real(job: str) -> dict[str, Any]:
    """Estimate a job on its own engine, and run it; both start anew."""
    with tempfile.TemporaryDirectory() as scratch:
        changed = [f"output.path={scratch}/run"]
        told = batchrunner.estimate(job, overrides=changed)
        began = time.monotonic()
        report = batchrunner.run(job, overrides=changed)
        seconds = time.monotonic() - began
    return {
        "job": job, "rows": report.rows_total, "sampled": told.rows_sampled, "seconds": round(seconds, 2),
        "told": round(told.seconds.median, 2), "error": round(told.seconds.median / seconds - 1, 4),
        "covered": told.seconds.low <= seconds <= told.seconds.high,
        "width": round(math.log(told.seconds.high / told.seconds.low), 4),
        "passes": told.passes, "limited_by": told.limited_by, "why": told.why[0],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="random jobs in virtual time")
    parser.add_argument("real", nargs="*", metavar="JOB.yaml", help="jobs for their own engines instead")
    options = parser.parse_args()
    if options.real:
        each = [real(job) for job in options.real]
        told = summary(each)
        save("estimate_real", f"{told}", {**told, "each": each}, ("sglang",), "estimate")
        return 0
    found = virtual(options.jobs)
    told = found["linear"]
    line = (
        f"{told['jobs']} random jobs in virtual time: median error {told['median_error']:.1%}, "
        f"in the interval {told['covered']:.0%}"
    )
    save("estimate", line, found, ())
    return 0


if __name__ == "__main__":
    sys.exit(main())
