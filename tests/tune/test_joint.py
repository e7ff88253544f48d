"""Flags that limit one another, changed together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchrunner.engines.flags import CLIP
from batchrunner.engines.simulation.replica import RowLengths
from batchrunner.engines.simulation.scheduler import SchedulerConfig
from batchrunner.tune.joint import Forecast, arguments_of, clips, config_of
from batchrunner.tune.measurement import TrialSigns
from batchrunner.tune.search import TrialRequest
from batchrunner.tune.space import TuningState
from tests.support.tuning_lab import CPU, ROWS, Lab, chat_rows, tuned

LONG_ROWS = [(row[0] + 500, *row[1:]) for row in chat_rows(700)]
"""Prompts long enough for a small chunk to hold a wide batch up."""
CORNER = {"max-running-requests": 8, "chunked-prefill-size": 128}


def lab(noise: float = 0.0) -> Lab:
    return Lab(LONG_ROWS, pool_tokens=100_000, logs=True, noise=noise)


def test_two_flags_out_of_a_corner() -> None:
    """Slots and chunk that limit one another are both found, by few trials, also where times are noisy."""
    _, search = tuned(lab(0.03), CORNER, budget_s=600)
    assert search.best.args["max-running-requests"] >= 32
    assert search.best.args["chunked-prefill-size"] >= 512
    good = {"max-running-requests": 128, "chunked-prefill-size": 8192}
    true, best = (lab().measure(TrialRequest(args, "", 0)) for args in (search.best.args, good))
    assert true.tokens_per_s >= 0.95 * best.tokens_per_s


def test_only_differences_become_flags() -> None:
    """What stays is not named."""
    now = SchedulerConfig(8, 1000)
    other = SchedulerConfig(16, 1000, clip_tokens=64, decode_interval=4)
    assert arguments_of(other, now) == {
        "max-running-requests": 16, CLIP: 64, "prefill-decode-interval": 4,
    }  # fmt: skip


def test_the_clip_is_a_length_that_outputs_have() -> None:
    """Rows that ask for no more than they put out need none."""
    rows = [RowLengths(10, 0, output, 2000) for output in range(1, 101)]
    assert clips(rows) == [64, 96, 112, 4096]
    assert clips([row._replace(asked=100) for row in rows]) == [64, 96, 4096]
    assert clips([row._replace(fixed=True) for row in rows]) == []


SIGNS = TrialSigns(max_running=16, pool_tokens=40_000, prefill_limit=8192)


def test_a_setting_as_the_simulation_has_it() -> None:
    """Limits are those that the server told; what it does not tell is the job's own flag, or the default."""
    args = {CLIP: 200, "prefill-decode-interval": 4}
    config = config_of(TuningState(args, SIGNS, CPU))
    assert config == SchedulerConfig(16, 40_000, clip_tokens=200, decode_interval=4)
    whole = config_of(TuningState({}, replace(SIGNS, prefill_limit=-1), CPU))
    assert whole is not None
    assert whole.chunked_prefill_tokens is None


@pytest.mark.parametrize(
    ("args", "lacking"),
    [
        ({"dp-size": 2}, {}),
        ({"page-size": 64}, {}),
        ({"enable-mixed-chunk": True}, {}),
        ({"schedule-policy": "lpm"}, {}),
        ({}, {"max_running": None}),
        ({}, {"pool_tokens": None}),
        ({}, {"prefill_limit": None}),
    ],
)
def test_what_is_not_known_is_not_expected(args: dict[str, int], lacking: dict[str, Any]) -> None:
    """No forecast is made of several schedulers at once, of larger pages, or of limits that nobody told."""
    assert config_of(TuningState(dict(args), replace(SIGNS, **lacking), CPU)) is None


def test_it_expects_what_trials_find() -> None:
    """Two trials of bad settings tell the speed of better ones; without a log they tell nothing."""
    blind, forecast = Forecast(), Forecast()
    for running in (8, 32):
        request = TrialRequest({"max-running-requests": running}, "", 0)
        forecast.learn(Lab(ROWS, logs=True).measure(request))
        blind.learn(Lab(ROWS).measure(request))
    assert forecast.is_ready
    assert not blind.is_ready
    assert forecast.speed(SchedulerConfig(8, 50)) == 0  # a pool that is smaller than a row serves nothing
    for args in ({"max-running-requests": 64}, {"max-running-requests": 128, "chunked-prefill-size": 256}):
        found = Lab(ROWS, logs=True).measure(TrialRequest(dict(args), "", 0))
        config = config_of(TuningState(dict(args), found.signs, CPU))
        assert config is not None
        assert forecast.speed(config) == pytest.approx(found.tokens_per_s, rel=0.15)
