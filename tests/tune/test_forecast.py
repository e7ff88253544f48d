"""What the scheduler's simulation expects of a setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchrunner.engines.simulation.request import SchedulerConfig
from batchrunner.tune.joint import Forecast, config_of
from batchrunner.tune.measurement import TrialSigns
from batchrunner.tune.search import TrialRequest
from batchrunner.tune.space import CLIP, TuningState
from tests.support.tuned import ROWS
from tests.support.tuning_lab import CPU, Lab

SIGNS = TrialSigns(max_running=16, pool_tokens=40_000, prefill_limit=8192)


def test_a_setting_as_the_simulation_has_it() -> None:
    """Limits are those that the server told; what it does not tell is the job's own flag, or the default."""
    args = {CLIP: 200, "prefill-decode-interval": 4, "enable-mixed-chunk": True, "schedule-policy": "lpm"}
    config = config_of(TuningState(args, SIGNS, CPU))
    assert config == SchedulerConfig(
        16, 40_000, policy="lpm", clip_tokens=200, decode_interval=4, mixed_chunk=True
    )
    whole = config_of(TuningState({}, replace(SIGNS, prefill_limit=-1), CPU))
    assert whole is not None
    assert whole.chunked_prefill_tokens is None


@pytest.mark.parametrize(
    ("args", "lacking"),
    [
        ({"dp-size": 2}, {}),
        ({"page-size": 64}, {}),
        ({}, {"max_running": None}),
        ({}, {"pool_tokens": None}),
        ({}, {"prefill_limit": None}),
    ],
)
def test_what_is_not_known_is_not_expected(args: dict[str, int], lacking: dict[str, Any]) -> None:
    """No forecast is made of several schedulers at once, of larger pages, or of limits that nobody told."""
    assert config_of(TuningState(dict(args), replace(SIGNS, **lacking), CPU)) is None


def test_it_expects_what_trials_find() -> None:
    """Two trials of bad settings tell the speed of better ones."""
    lab = Lab(ROWS, logs=True)
    forecast = Forecast()
    for running in (8, 32):
        forecast.learn(lab.measure(TrialRequest({"max-running-requests": running}, "", 0)))
    assert forecast.is_ready
    for args in ({"max-running-requests": 64}, {"max-running-requests": 128, "chunked-prefill-size": 256}):
        found = lab.measure(TrialRequest(dict(args), "", 0))
        config = config_of(TuningState(dict(args), found.signs, CPU))
        assert config is not None
        assert forecast.speed(config) == pytest.approx(found.tokens_per_s, rel=0.15)


def test_trials_without_a_log_tell_nothing() -> None:
    """Where the log lacks the passes' times, nothing is expected."""
    forecast = Forecast()
    forecast.learn(Lab(ROWS).measure(TrialRequest({}, "", 0)))
    assert not forecast.is_ready


def test_a_row_that_does_not_fit() -> None:
    """A pool that is smaller than a row serves nothing."""
    forecast = Forecast()
    forecast.learn(Lab(ROWS, logs=True).measure(TrialRequest({}, "", 0)))
    assert forecast.speed(SchedulerConfig(8, 50)) == 0
