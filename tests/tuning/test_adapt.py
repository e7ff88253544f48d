"""The gain of a step of flag tuning, by the rates of the servers."""

import math
from collections.abc import Sequence

import pytest

from batchrunner.tuning.adapt import EXPECTED, RESERVATION_FLAG, gain_over_others, steps_for
from batchrunner.tuning.space import Args
from tests.support.tuning_lab import FAST_GPU, ROWS, Hybrid, Lab, live


@pytest.mark.parametrize(
    ("ratios", "ratios_of_others", "gain"),
    [
        ([1.5, 1.4], [], 0.4),
        ([0.8, 0.7], [], -0.2),
        ([1.5, 0.9], [], 0.0),
        ([1.5, 1.5], [[1.5, 1.5], [1.5, 1.5]], 0.0),
        ([1.5, 1.5], [[1.0, 1.0], [1.5, 1.5]], 0.2),
        ([1.0, 1.0], [[0.5, 0.5]], 1.0),
    ],
)
def test_a_gain_is_what_both_rates_show_beyond_the_others(
    ratios: Sequence[float], ratios_of_others: Sequence[Sequence[float]], gain: float
) -> None:
    """The smaller of both rates counts; where one rises and the other falls, the gain is unclear."""
    assert gain_over_others(ratios, ratios_of_others) == pytest.approx(gain)


@pytest.mark.parametrize(
    ("strategy", "shared", "best"),
    [
        ("extra_buffer", 0.0, {"disable-radix-cache": True}),
        ("extra_buffer", 0.3, {"mamba-radix-cache-strategy": "extra_buffer_lazy"}),
        ("no_buffer", 0.3, {}),
    ],
)
def test_a_full_state_pool_is_widened_at_once(strategy: str, shared: float, best: Args) -> None:
    """48 states and 450 waiting: within two restarts 0.97 x as fast as with the best division of memory."""
    lab = Lab(ROWS, max_running=2048, cost=FAST_GPU, hybrid=Hybrid())
    args: Args = {"mamba-radix-cache-strategy": strategy}
    situation, before = live(lab, args, shared)
    assert situation.facts.states is not None
    assert situation.facts.states.slots == 48
    (_, expected), *_ = steps_for(situation, {}, lambda _: True)
    restarts = 0
    while steps := steps_for(situation, {}, lambda _: True):
        args |= steps[0][0].args
        restarts += 1
        situation, after = live(lab, args, shared)
    assert restarts <= 2
    fastest = max(
        live(lab, args | best | {"mamba-full-memory-ratio": ratio}, shared)[1]
        for ratio in (0.55, 0.7, 0.9, 1.5, 1.8, 2, 2.4)
    )
    assert after >= 0.97 * fastest
    assert after > 1.15 * before
    widened = situation.server.running / 8  # requests that ran at first
    assert expected >= EXPECTED * math.log2(widened)


@pytest.mark.parametrize(
    "args",
    [
        {"disable-radix-cache": True, "max-running-requests": 16},
        {"mamba-radix-cache-strategy": "no_buffer", "max-running-requests": 16},
    ],
)
def test_a_limit_of_running_requests_rises_with_the_state_pool(args: Args) -> None:
    """A larger state pool alone would be a restart for nothing, because the limit would still hold."""
    lab = Lab(ROWS, max_running=2048, cost=FAST_GPU, hybrid=Hybrid())
    situation, before = live(lab, args, shared=0.3)
    (step, _), *_ = steps_for(situation, {}, lambda _: True)
    _, after = live(lab, {**args, **step.args}, shared=0.3)
    assert after > 1.15 * before
    # If the job sets the limit, the pool is not changed either.
    assert steps_for(situation, {}, lambda name: name != "max-running-requests") == []


def test_a_state_pool_grows_up_to_the_jobs_limit_of_running_requests() -> None:
    """A job that lets more requests run than the pool holds gets a pool for as many, and no larger one."""
    lab = Lab(ROWS, max_running=2048, cost=FAST_GPU, hybrid=Hybrid())
    args: Args = {"mamba-radix-cache-strategy": "extra_buffer", "max-running-requests": 12}
    situation, before = live(lab, args)
    (step, _), *_ = steps_for(situation, {}, lambda name: name != "max-running-requests")
    assert step.args["max-mamba-cache-size"] == 12
    widened, after = live(lab, {**args, **step.args})
    assert after > 1.15 * before
    assert not steps_for(widened, {}, lambda name: name not in {"max-running-requests", RESERVATION_FLAG})


@pytest.mark.parametrize(
    ("pools_gb", "args"),
    [
        (1, {"mamba-radix-cache-strategy": "no_buffer"}),
        (1, {"disable-radix-cache": True}),
        (2, {"mamba-radix-cache-strategy": "extra_buffer_lazy"}),
    ],
)
def test_few_large_states(pools_gb: float, args: Args) -> None:
    """Where a state takes a tenth of the memory or more, the KV pool keeps at least as much."""
    lab = Lab(ROWS, max_running=2048, cost=FAST_GPU, hybrid=Hybrid(pools_gb, 0.1, tokens_a_gb=10_000))
    situation, before = live(lab, args, shared=0.3)
    for step, _ in steps_for(situation, {}, lambda name: name != "disable-radix-cache"):
        assert 0 < step.args.get("mamba-full-memory-ratio", 1) <= 9
        assert live(lab, {**args, **step.args}, shared=0.3)[1] >= before


def test_states_that_the_job_divides_stay() -> None:
    """A flag that the job sets is not changed, nor any flag that needs it to change too."""
    lab = Lab(ROWS, max_running=2048, cost=FAST_GPU, hybrid=Hybrid())
    situation, _ = live(lab, {"mamba-radix-cache-strategy": "extra_buffer"})
    assert steps_for(situation, {}, lambda name: name != "mamba-full-memory-ratio") == []
