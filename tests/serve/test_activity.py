"""The activity of a server: states of runs, and points of the engine's load."""

from typing import Any

import msgspec

from batchrunner.output.samples import LoggedSample
from batchrunner.serve.activity import MOST_POINTS, POINT_EVERY_S, Activity
from tests.support.page import sample


def run_sample(**values: Any) -> LoggedSample:
    """Return the state of a run."""
    event = {"elapsed_s": 0.0, "time_left_s": None, **sample(0.0, **values)}
    return msgspec.convert(event, LoggedSample)


def test_the_load_is_that_of_all_runs() -> None:
    """Rates of all runs add up; those of an ended run do not count; without a load it is unknown."""
    activity = Activity()
    activity.update("a", run_sample(output_tokens_per_s=10.0, prompt_tokens_per_s=1.0), 100.0)
    activity.update("b", run_sample(output_tokens_per_s=5.0, prompt_tokens_per_s=2.0, queue=3), 106.0)
    activity.end("a")
    activity.update("b", run_sample(output_tokens_per_s=7.0, signals=[]), 112.0)
    assert [*activity.runs] == ["b"]
    assert activity.load_since(0.0) == {
        "time": [100.0, 106.0, 112.0],
        "running": [8, 8, None],
        "queue": [0, 3, None],
        "token_usage": [0.5, 0.5, None],
        "output_tokens_per_s": [10.0, 15.0, 7.0],
        "prompt_tokens_per_s": [1.0, 3.0, 0.0],
    }
    assert activity.load_since(106.0)["time"] == [112.0]
    activity.end("b")
    activity.end("never began")
    assert activity.runs == {}


def test_points_are_rare_and_bounded() -> None:
    """Many samples a second make a point every few seconds, and old points go."""
    activity = Activity()
    for step in range(4 * MOST_POINTS * int(POINT_EVERY_S)):
        activity.update("a", run_sample(), step / 2)
    times = [time or 0.0 for time in activity.load_since(-1.0)["time"]]
    assert len(times) == MOST_POINTS
    assert times == [times[0] + POINT_EVERY_S * number for number in range(MOST_POINTS)]
    activity.update("a", run_sample(), 5.0)
    assert activity.load_since(-1.0)["time"][-1] == 5.0  # the clock was set back
