"""The search for the fastest flags, in virtual time: what it finds, what it costs, what it never does."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import EngineStartError
from batchrunner.tune.measurement import Incumbent, TrialResult
from batchrunner.tune.search import Search, TrialRequest, compare, key_of, trial_noise
from batchrunner.tune.space import TUNED_FLAGS, FlagChange, TunedFlag
from batchrunner.tune.tuner import run_search, summarize
from tests.support.examples import examples
from tests.support.tuned import CARD, ROWS, WRONG, Kept, tuned
from tests.support.tuning_lab import CPU, Card, Lab, chat_rows

if TYPE_CHECKING:
    from batchrunner.tune.space import Args
import math

from batchrunner.tune.search import _quantile as quantile


def true_speed(args: Args, **options: Any) -> float:
    """Return what a setting does without noise."""
    return Lab(ROWS, **options).measure(TrialRequest(args, "", 0)).tokens_per_s


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.08])
def test_wrong_flags_are_put_right(noise: float) -> None:
    """The goal in virtual time: 0.95 x the best of a grid of 24 in a quarter of the grid's time."""
    found, search = tuned(Lab(ROWS, noise=noise))
    grid = [
        {"schedule-conservativeness": care, "max-running-requests": running}
        for care in (0.1, 0.3, 1.0, 3.0)
        for running in (8, 32, 64, 128, 256, 512)
    ]
    results = [Lab(ROWS).measure(TrialRequest(args, "", 0)) for args in grid]
    best = max(result.tokens_per_s for result in results)
    assert true_speed(search.best.args) >= 0.95 * best
    assert found.spent_s <= sum(result.cost_s for result in results) / 4


def test_good_flags_are_left_alone() -> None:
    """Where nothing is faster nothing is changed, however noisy the trials are."""
    good = {"schedule-conservativeness": 0.1, "max-running-requests": 256}
    for seed in range(8):
        found, _ = tuned(Lab(ROWS, noise=0.05, seed=seed), good)
        assert found.args == {}


@given(budget_s=st.floats(1, 700), seed=st.integers(0, 50))
@examples(10)
def test_the_budget_holds(budget_s: float, seed: int) -> None:
    """Trials never take more than the time for them, and a setting that was not measured is not taken."""
    lab = Lab(ROWS, noise=0.05, seed=seed)
    search = Search(WRONG, CPU)
    asyncio.run(run_search(search, Kept(), lab.run, budget_s))
    assert lab.spent_s <= budget_s + 0.5
    assert search.best.args == WRONG or search.best.speeds


@given(first_s=st.floats(30, 300), seed=st.integers(0, 50))
@examples(6)
def test_a_search_goes_on_where_it_was(first_s: float, seed: int) -> None:
    """No finished trial is repeated, not even by a second start, which ends as one in one piece does."""
    kept, lab = Kept(), Lab(ROWS, noise=0.05, seed=seed)
    asyncio.run(run_search(Search(WRONG, CPU), kept, lab.run, first_s))
    finished = sum(map(len, kept.results.values()))
    asked_before = len(lab.asked)
    found, _ = tuned(lab, kept=kept)
    again = lab.asked[asked_before:]
    assert len({(key_of(args), turn) for args, turn in again}) == len(again)
    assert len(again) + finished == sum(map(len, kept.results.values()))
    whole, _ = tuned(Lab(ROWS, noise=0.05, seed=seed))
    assert (found.args, found.trials) == (whole.args, whole.trials)


@given(
    care=st.sampled_from([0.1, 0.3, 1.0, 2.0, 3.0]),
    running=st.sampled_from([4, 16, 64, 300]),
    pool=st.sampled_from([4_000, 20_000, 100_000]),
    memory=st.sampled_from([0, 50_000, 1_000_000]),
    asked=st.sampled_from([100, 400, 1500]),
)
@examples(10)
def test_it_ends_with_the_best_that_it_saw(
    care: float, running: int, pool: int, memory: int, asked: int
) -> None:
    """Without noise no trial of the search was more than a hair faster than the setting that it ends with."""
    lab = Lab(chat_rows(2500, asked=asked), pool_tokens=pool)
    args = {"schedule-conservativeness": care, "max-running-requests": running}
    found, search = tuned(lab, args, machine=replace(CPU, most_pool_tokens=memory), budget_s=5000)
    fastest = max(max(trial["tokens_per_s"]) for trial in found.trials)
    assert search.best.newest.tokens_per_s >= 0.98 * fastest
    assert found.best_tokens_per_s >= found.own_tokens_per_s


def test_a_setting_that_dies_is_unsafe() -> None:
    """A death is a result: the search goes back from it and ends with flags that live."""
    found, search = tuned(Lab(ROWS, deadly=lambda args: args["max-running-requests"] > 100 and "OOM"))
    assert 8 < search.best.args["max-running-requests"] <= 100
    assert "unsafe: OOM" in [trial["verdict"] for trial in found.trials]


def test_the_edge_of_memory() -> None:
    """The pool grows until the engine dies of it, and the last size that lived is taken."""
    args = {"max-running-requests": 512, "schedule-conservativeness": 0.1}
    lab = Lab(ROWS, pool_tokens=5_000, deadly=lambda a: a.get("max-total-tokens", 0) > 20_000 and "OOM")
    found, _ = tuned(lab, args, machine=replace(CPU, most_pool_tokens=10**6))
    assert found.args["max-total-tokens"] == 20_000


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_memory_in_small_steps_to_the_edge(noise: float) -> None:
    """On a GPU it goes to the guides' spare memory at once, then by 0.01 until it dies, and back by one."""
    args = {"max-running-requests": 512, "schedule-conservativeness": 0.1}
    lab = Lab(
        ROWS, card=Card(), noise=noise, deadly=lambda a: a.get("mem-fraction-static", 0) > 0.905 and "OOM"
    )
    found, search = tuned(lab, args, machine=CARD, budget_s=5000)
    tried = [trial["args"] for trial in found.trials if "attention-backend" not in trial["args"]]
    steps = [args.get("mem-fraction-static") for args in tried]
    assert steps == [None, 0.89, 0.9, 0.91]
    assert found.args == {"mem-fraction-static": 0.9}
    assert search.notes["memory"] == "--mem-fraction-static 0.91: unsafe: OOM"


def test_flags_that_die_at_once() -> None:
    """Where not even the job's own flags can be measured the command says what they died of."""
    with pytest.raises(EngineStartError, match="the job's own flags cannot be measured: OOM"):
        tuned(Lab(ROWS, deadly=lambda _: "OOM"))


def test_a_best_whose_repetition_brings_nothing() -> None:
    """Where all rows fail when the best is tried again, what it is raced with takes its place."""
    tuned_flag = TunedFlag("x", lambda now: [] if now.args else [FlagChange({"max-running-requests": 9}, "")])
    search = Search({}, CPU, [tuned_flag])
    steps = search.steps()
    assert next(steps).args == {}
    assert steps.send(TrialResult("measured", "", 1.0, tokens_per_s=100)).args == {"max-running-requests": 9}
    assert steps.send(TrialResult("measured", "", 1.0, tokens_per_s=103)).args == {}
    with pytest.raises(StopIteration):
        steps.send(TrialResult("measured", "all rows failed", 1.0))
    assert search.best.args == {"max-running-requests": 9}
    assert summarize(search, "job.yaml", "all rows", 1.0).own_tokens_per_s == 100


def test_hopeless_trials_are_stopped() -> None:
    """A setting that is far behind costs little more than its launch."""
    best = Lab(ROWS).measure(TrialRequest({"max-running-requests": 256}, "", 0))
    slow = TrialRequest({"max-running-requests": 8}, "", 0, Incumbent(best.curve, 0.15))
    stopped, whole = Lab(ROWS).measure(slow), Lab(ROWS).measure(replace(slow, incumbent=None))
    assert stopped.ended == "behind"
    assert stopped.cost_s - 25 < 0.6 * (whole.cost_s - 25)


def test_a_wide_batch_is_given_its_time() -> None:
    """A setting that runs more at once ends its first rows later, and is not given up for that."""
    narrow = Lab(ROWS).measure(TrialRequest({"max-running-requests": 8}, "", 0))
    wide = Lab(ROWS).measure(TrialRequest({"max-running-requests": 512}, "", 0, Incumbent(narrow.curve, 0.1)))
    assert wide.ended == "measured"
    assert wide.tokens_per_s > 2 * narrow.tokens_per_s


def test_a_small_job_is_measured_whole() -> None:
    """A job with fewer rows than run at once has no steady part: its whole time counts."""
    result = Lab(ROWS[:40]).measure(TrialRequest({"max-running-requests": 256}, "", 0))
    assert result.ended == "measured"
    assert result.steady_s == pytest.approx(result.cost_s - 25, abs=0.3)


def test_the_tail_does_not_count() -> None:
    """The last rows, for which no request waits, do not make a setting look slower than it is."""
    short, long = (
        Lab(ROWS[:n]).measure(TrialRequest({"max-running-requests": 64}, "", 0)) for n in (400, 4000)
    )
    assert short.tokens_per_s == pytest.approx(long.tokens_per_s, rel=0.15)


def test_dead_heats_are_not_won() -> None:
    """Fewer than one in eight challengers that are exactly as fast are taken for faster, at any noise."""
    luck = random.Random(7)
    for noise in (0.01, 0.05, 0.1):
        wins = 0
        for _ in range(200):
            mine: list[float] = []
            best = [luck.lognormvariate(0, noise)]
            verdict = "again"
            while verdict == "again":
                mine.append(luck.lognormvariate(0, noise))
                while len(best) < len(mine):
                    best.append(luck.lognormvariate(0, noise))
                verdict, _ = compare(mine, best, trial_noise([mine, best]))
            wins += verdict == "faster"
        assert wins < 25 + 25 * (noise > 0.05)


def test_the_table_names_each_trial_and_reason() -> None:
    """What is printed has every setting with its verdict, every flag with a reason, and the block to take."""
    found, _ = tuned(Lab(ROWS))
    text = "\n".join(found.lines())
    assert text.count("x the best") >= 3
    assert "engine:\n  args:\n    schedule-conservativeness: 0.1\n    max-running-requests: 256\n" in text
    assert all(f"\n{tuned_flag.name}: " in text for tuned_flag in TUNED_FLAGS)
    assert "--apply writes this" in text


@pytest.mark.parametrize("freedom", [*range(4, 15), 20, 40])
def test_the_interval_is_students(freedom: int) -> None:
    """One-sided 95 %, by the density's own integral; from 14 degrees of freedom on a little more."""
    step = quantile(freedom) / 1000
    scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    density = [(1 + ((at + 0.5) * step) ** 2 / freedom) ** (-(freedom + 1) / 2) for at in range(1000)]
    covered = 0.5 + scale * step * sum(density)
    assert 0.9499 < covered < (0.9501 if freedom < 15 else 0.9575)


def test_more_output_a_pass_settles_a_near_tie() -> None:
    """Where the scheduler's own count says faster, and the times agree, no further trial is spent on it."""
    spread = trial_noise([])
    assert compare([103], [100], spread)[0] == "again"
    assert compare([103], [100], spread, more_per_pass=True)[0] == "faster"
    assert compare([80], [100], spread, more_per_pass=True)[0] == "no faster"
