"""The search for the fastest flags, in virtual time: what it finds, what it costs, what it never does."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import EngineStartError
from batchrunner.runner.tune import run_search
from batchrunner.sglang.flags import CLIP
from batchrunner.sglang.logs.reader import Facts
from batchrunner.tuning.flags import FLAGS
from batchrunner.tuning.measurement import Incumbent, TrialResult
from batchrunner.tuning.search import Search, TrialRequest, compare, key_of, trial_noise
from batchrunner.tuning.space import TUNED_FLAGS, Args
from tests.conftest import examples
from tests.support.tuning_lab import (
    CARD,
    CPU,
    FAST_GPU,
    ROWS,
    WAITING,
    WRONG,
    Card,
    Hybrid,
    Kept,
    Lab,
    chat_rows,
    tuned,
)


def measured(args: Args, incumbent: Incumbent | None = None, rows: int = len(ROWS)) -> TrialResult:
    """Return what a setting does without noise."""
    return Lab(ROWS[:rows]).measure(TrialRequest(args, "", 0, incumbent))


@pytest.mark.parametrize("noise", [0.0, 0.08])
def test_wrong_flags_are_put_right(noise: float) -> None:
    """The goal in virtual time: 0.95 x the best of a grid of 24 in a quarter of the grid's time."""
    lab = Lab(ROWS, noise=noise)
    names = ("schedule-conservativeness", "max-running-requests")
    search = Search(WRONG, CPU, [FLAGS[name] for name in names])
    spent_s = asyncio.run(run_search(search, Kept(), lab.run, 1800))
    grid = [
        {"schedule-conservativeness": care, "max-running-requests": running}
        for care in (0.1, 0.3, 1.0, 3.0)
        for running in (8, 32, 64, 128, 256, 512)
    ]
    results = [measured(args) for args in grid]
    best = max(result.tokens_per_s for result in results)
    assert measured(search.winner.args).tokens_per_s >= 0.95 * best
    assert spent_s <= sum(result.cost_s for result in results) / 4


def test_good_flags_are_left_alone() -> None:
    """Where nothing is faster nothing is changed, however noisy the trials are."""
    good = {
        "schedule-conservativeness": 0.1, "max-running-requests": 256, "prefill-decode-interval": 11,
        CLIP: 170,
    }  # fmt: skip
    for seed in range(4):
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
@examples(6)
def test_it_ends_with_the_best_that_it_saw(
    care: float, running: int, pool: int, memory: int, asked: int
) -> None:
    """No trial was 5 % faster than the setting that it ends with: less it does not tell from noise."""
    lab = Lab(chat_rows(2500, asked=asked), pool_tokens=pool)
    args = {"schedule-conservativeness": care, "max-running-requests": running}
    found, search = tuned(lab, args, machine=replace(CPU, most_pool_tokens=memory), budget_s=5000)
    fastest = max(max(trial["tokens_per_s"]) for trial in found.trials)
    assert search.best.newest.tokens_per_s >= 0.95 * fastest
    assert found.best_tokens_per_s >= found.own_tokens_per_s


def test_memory_in_small_steps_to_the_edge() -> None:
    """On a GPU it goes to the guides' spare memory at once, then by 0.01 until it dies, and back by one."""
    args = {"max-running-requests": 512, "schedule-conservativeness": 0.1}
    lab = Lab(
        ROWS, card=Card(), noise=0.01, deadly=lambda a: a.get("mem-fraction-static", 0) > 0.905 and "OOM"
    )
    found, search = tuned(lab, args, machine=CARD, budget_s=5000)
    tried = [trial["args"].get("mem-fraction-static") for trial in found.trials]
    assert [*dict.fromkeys(tried)] == [None, 0.89, 0.9, 0.91]
    assert found.args["mem-fraction-static"] == 0.9
    assert search.notes["mem-fraction-static"] == "--mem-fraction-static 0.91: unsafe: OOM"


def test_memory_of_a_hybrid_model_goes_where_it_is_needed() -> None:
    """Where 48 states cap what runs, two trials divide the memory nearly as well as the best of a grid."""
    lab = Lab(ROWS, max_running=2048, cost=FAST_GPU, hybrid=Hybrid(), waiting=WAITING)
    own = {"mamba-radix-cache-strategy": "extra_buffer"}
    found, search = tuned(lab, own, machine=CARD, budget_s=5000)
    assert found.args["disable-radix-cache"] is True
    assert "mamba-radix-cache-strategy" not in found.args
    assert search.notes["mamba-ssm-dtype"] == "changes answers, so the flag is tried only with --allow fp8"
    flags = own | found.args | {CLIP: int(found.env[CLIP])}
    grid = [flags | {"mamba-full-memory-ratio": ratio} for ratio in (0.5, 0.7, 0.9)]
    best = max(lab.measure(TrialRequest(args, "", 0)).tokens_per_s for args in grid)
    assert found.best_tokens_per_s >= 0.97 * best
    assert found.best_tokens_per_s > 3 * found.own_tokens_per_s
    divided = [trial["args"].get("mamba-full-memory-ratio") for trial in found.trials]
    assert len(dict.fromkeys(divided)) <= 3


def test_flags_that_die_at_once() -> None:
    """Where not even the job's own flags can be measured the command says what they died of."""
    with pytest.raises(EngineStartError, match="the job's own flags cannot be measured: OOM"):
        tuned(Lab(ROWS, deadly=lambda _: "OOM"))


def test_hopeless_trials_are_stopped() -> None:
    """A setting that is far behind costs little more than its launch; a wide batch is given its time."""
    best, narrow = measured({"max-running-requests": 256}), measured({"max-running-requests": 8})
    stopped = measured({"max-running-requests": 8}, Incumbent(best.tokens_per_s, 0.15))
    assert stopped.ended == "behind"
    assert stopped.cost_s - 25 < 0.6 * (narrow.cost_s - 25)
    wide = measured({"max-running-requests": 512}, Incumbent(narrow.tokens_per_s, 0.1))
    assert wide.ended == "measured"
    assert wide.tokens_per_s > 2 * narrow.tokens_per_s


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
    assert text.endswith("add this to job.yaml")


def cards_lab(speeds: dict[int, float]) -> Lab:
    """Return a lab in which a replica's speed depends on its GPUs alone."""

    class OnCards(Lab):
        def measure(self, request: TrialRequest, within_s: float = math.inf) -> TrialResult:
            speed = speeds[request.args.get("tp-size", 1)]
            facts = Facts(arguments={"tp_size": request.args.get("tp-size", 1)}, weights_gb=10.0)
            behind = request.incumbent and speed < 0.5 * request.incumbent.tokens_per_s
            return TrialResult("behind" if behind else "measured", "", 60.0, speed, facts=facts)

    return OnCards(ROWS)


@pytest.mark.parametrize(
    ("own", "replicas", "speeds", "expected", "gain"),
    [
        ({"tp-size": 8}, 1, {8: 4000, 4: 3500, 2: 2500, 1: 1400}, {"replicas": 8}, 2.8),
        ({}, 8, {1: 300, 2: 1200, 4: 1900}, {"replicas": 4}, 2.0),
        ({}, 8, {1: 1000, 2: 1900}, {}, 1.0),
        ({}, 1, {1: 1000, 2: 1900}, {"replicas": 8}, 8.0),
    ],
)
def test_gpus_are_shared_out_for_the_most_output(
    own: Args, replicas: int, speeds: dict[int, float], expected: dict[str, Any], gain: float
) -> None:
    """Replicas of one GPU, or fewer of more each: what all of the job's GPUs put out together counts."""
    machine = replace(CARD, cards=8, replicas=replicas)
    found, _ = tuned(cards_lab(speeds), own, machine=machine)
    assert found.layout == expected
    assert found.best_tokens_per_s / found.own_tokens_per_s == pytest.approx(gain, rel=0.01)
    block = (
        yaml.safe_load("\n".join(found.lines()).split("with\n\n")[-1].split("\n\n")[0]) if expected else {}
    )
    assert block.get("engine", {}).get("replicas") == expected.get("replicas")
    said, _ = tuned(cards_lab(speeds), own, machine=replace(machine, says_tp=True))
    assert said.layout.get("tp") == found.args.get("tp-size")
    assert "tp-size" not in said.args
