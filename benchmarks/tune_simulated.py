"""Does the search get out of corners? Five bad starts on three workloads, in virtual time.

Trials are those of `tests/support/tuning_lab.py`: the simulated scheduler in the engine's place, with the
noise of a machine that others use. Speeds that are compared in the end are of no trial, but of the long run:
the work of steady time with all rows, at the true cost. The search is held against the best of 60 settings
that are drawn at random from the whole space; its trials' time, launches included, against that of a trial
of each.

Then the early stop: of challengers that are truly as fast as the best or faster, how many does a trial drop
before its end? Their times have the same noise.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from itertools import cycle
from typing import TYPE_CHECKING, Any

from batchrunner.engines.flags import CLIP
from batchrunner.engines.simulation.replica import WAITING, PassWork
from batchrunner.engines.simulation.scheduler import DECAY_STEPS, Scheduler, SchedulerConfig, SimulatedRequest
from batchrunner.tune.measurement import Incumbent
from batchrunner.tune.search import Search, TrialRequest, margin_to_stop, trial_noise
from batchrunner.tune.tuner import run_search
from benchmarks.measure import save
from tests.support.tuning_lab import CPU, TINY_CPU, Kept, Lab

if TYPE_CHECKING:
    from batchrunner.tune.space import Args

SEED = 29
GOAL, GOAL_DROPPED = 0.95, 0.05
NOISE = 0.03
"""Standard deviation of a trial's log speed."""
GENERATIONS, FEWEST_ENDS = 2, 500
"""Generations that the long run counts after one that warms up, and samples that end there at least."""
RANDOM = 60
ROWS = 6000
POOL_TOKENS = 60_000
BUDGET_S = 3600.0
STARTS: dict[str, Args] = {
    "few slots": {"max-running-requests": 8},
    "small chunks": {"chunked-prefill-size": 128},
    "too careful": {"schedule-conservativeness": 3.0},
    "few slots and small chunks": {"max-running-requests": 8, "chunked-prefill-size": 128},
    "too careful and small chunks": {"schedule-conservativeness": 3.0, "chunked-prefill-size": 256},
}
SPACE: dict[str, tuple[Any, ...]] = {
    "max-running-requests": (8, 16, 32, 64, 128, 256, 512),
    "chunked-prefill-size": (128, 256, 512, 1024, 2048, 4096, 8192, 16_384),
    "schedule-conservativeness": (0.1, 0.3, 1.0, 1.43, 3.0),
    CLIP: (32, 64, 128, 256, 512, 4096),
    "prefill-decode-interval": (0, 0, 2, 4, 8, 16, 32),
}


def workloads() -> dict[str, list[tuple[int, int, int]]]:
    """Return prompt, output and asked tokens of each workload's rows."""
    made = random.Random(SEED)

    def rows(prompt: tuple[int, int], mu: float, sigma: float, asked: int) -> list[tuple[int, int, int]]:
        return [
            (made.randint(*prompt), max(1, min(asked, int(made.lognormvariate(mu, sigma)))), asked)
            for _ in range(ROWS)
        ]

    return {
        "chat, asks for far more": rows((40, 160), 3.9, 0.7, 1000),
        "long prompts, short outputs": rows((300, 900), 3.0, 0.6, 100),
        "short prompts, long outputs": rows((20, 60), 5.0, 0.5, 400),
    }


def lab(rows: list[tuple[int, int, int]], noise: float = 0.0, seed: int = 1) -> Lab:
    return Lab(rows, pool_tokens=POOL_TOKENS, max_running=256, cost=TINY_CPU, noise=noise, seed=seed)


def steady_work(config: SchedulerConfig, rows: list[tuple[int, int, int]]) -> PassWork:
    """Return the work of steady time, with the rows sent again and again.

    It begins once a generation has ended and the scheduler's new-token ratio has had the passes to fall.
    """
    scheduler = Scheduler(config)
    coming = cycle(rows)
    work = PassWork()
    peak = ended = 0
    end: int | None = None
    while end is None or ended < end:
        while scheduler.queue < WAITING:
            scheduler.submit(SimulatedRequest(*next(coming)))
        before = scheduler.generated_tokens
        step = scheduler.step()
        assert step is not None, "samples wait"
        ended += len(step.finished)
        peak = max(peak, scheduler.running)
        if end is not None:
            work = work.plus(step, scheduler.generated_tokens - before)
        elif ended >= peak > 0 and scheduler.prefill_passes + scheduler.decode_passes >= DECAY_STEPS:
            end = ended + max(GENERATIONS * peak, FEWEST_ENDS)
    return work


def true_speed(rows: list[tuple[int, int, int]], args: Args) -> float:
    """Return output tokens per second in the long run."""
    work = steady_work(lab(rows).config(args), rows)
    return work.tokens / TINY_CPU.work_s(work)


def random_search(rows: list[tuple[int, int, int]]) -> tuple[Args, float, float]:
    """Return the best of the settings drawn at random, its speed, and the seconds of all their trials."""
    made = random.Random(SEED)
    found: list[tuple[float, Args]] = []
    spent_s = 0.0
    while len(found) < RANDOM:
        args = {name: made.choice(values) for name, values in SPACE.items()}
        spent_s += lab(rows).measure(TrialRequest(args, "", 0)).cost_s
        found.append((true_speed(rows, args), args))
    speed, args = max(found, key=lambda pair: pair[0])
    return args, speed, spent_s


def tuned(rows: list[tuple[int, int, int]], start: Args, seed: int) -> tuple[Search, float, int]:
    noisy = lab(rows, NOISE, seed)
    search = Search(dict(start), CPU)
    spent_s = asyncio.run(run_search(search, Kept(), noisy.run, BUDGET_S))
    return search, spent_s, len(noisy.asked)


def corners() -> list[dict[str, Any]]:
    found = []
    for name, rows in workloads().items():
        best_args, best, random_s = random_search(rows)
        for number, (start_name, start) in enumerate(STARTS.items()):
            began = time.perf_counter()
            search, spent_s, trials = tuned(rows, start, number)
            own, mine = (true_speed(rows, args) for args in (start, search.winner.args))
            found.append({
                "workload": name, "start": start_name, "args": search.winner.args, "trials": trials,
                "ratio": round(mine / best, 4), "gain": round(mine / own, 4),
                "time_share": round(spent_s / random_s, 4), "search_s": round(time.perf_counter() - began, 1),
                "random_best": best_args,
            })  # fmt: skip
            print({k: v for k, v in found[-1].items() if k != "random_best"}, file=sys.stderr, flush=True)
    return found


def dropped(pairs: int = 120) -> dict[str, Any]:
    """Count challengers that a trial drops although they are not slower than the best."""
    made = random.Random(SEED + 1)
    not_slower = wrong = slower = right = 0
    margin = margin_to_stop(trial_noise([]))
    for number in range(pairs):
        rows = list(workloads().values())[number % 3]
        best, other = ({name: made.choice(values) for name, values in SPACE.items()} for _ in range(2))
        truth = [true_speed(rows, args) for args in (best, other)]
        if truth[1] < truth[0]:
            best, other, truth = other, best, truth[::-1]
        incumbent = lab(rows, NOISE, number).measure(TrialRequest(best, "", 0))
        rival = Incumbent(incumbent.tokens_per_s, margin)
        ended = lab(rows, NOISE, number + 1).measure(TrialRequest(other, "", 0, rival)).ended
        not_slower += 1
        wrong += ended == "behind"
        if truth[0] < 0.5 * truth[1]:  # and the other way round: is a hopeless one stopped?
            winner = lab(rows, NOISE, number).measure(TrialRequest(other, "", 0))
            hopeless = TrialRequest(best, "", 0, Incumbent(winner.tokens_per_s, margin))
            slower += 1
            right += lab(rows, NOISE, number + 1).measure(hopeless).ended == "behind"
    return {
        "not_slower": not_slower, "dropped": wrong, "share": round(wrong / not_slower, 4),
        "half_as_fast": slower, "stopped": right,
    }  # fmt: skip


def main() -> None:
    found, stops = corners(), dropped()
    worst = min(run["ratio"] for run in found)
    share = max(run["time_share"] for run in found)
    missed = [f"{run['start']} on {run['workload']}" for run in found if run["ratio"] < GOAL]
    line = (
        f"tune, simulated: {worst:.3f} x the best of {RANDOM} random settings or more over {len(found)} "
        f"starts (goal {GOAL}), in at most {share:.2f} of their time; {stops['share']:.1%} of "
        f"{stops['not_slower']} challengers that are not slower are dropped early (goal {GOAL_DROPPED:.0%})"
    )
    goal = {
        "ratio_at_least": GOAL, "dropped_at_most": GOAL_DROPPED, "missed": missed,
        "met": not missed and stops["share"] <= GOAL_DROPPED,
    }  # fmt: skip
    save("tune_simulated", line, {"goal": goal, "starts": found, "early_stop": stops}, ("batchrunner",))


if __name__ == "__main__":
    main()
