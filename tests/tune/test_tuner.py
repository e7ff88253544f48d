"""The finished trials that a search resumes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from batchrunner.engines.simulation.replica import PassWork, RowLengths
from batchrunner.tune.measurement import PassSpan, TrialResult, TrialSigns
from batchrunner.tune.tuner import TrialHistory

if TYPE_CHECKING:
    from pathlib import Path

RESULT = TrialResult(
    "measured", "all rows", 40.0, 100.0, 12.0, signs=TrialSigns(running=3.5), curve=((0.0, 0), (1.5, 20)),
    rows=(RowLengths(10, 2, 30, 50, fixed=True),),
    spans=(PassSpan(PassWork(10, 1, 30.0, 4.0, 5.0, 6.0), 0.5),),
)  # fmt: skip


def test_a_trial_is_read_as_it_was(tmp_path: Path) -> None:
    """Lengths of rows and costs of passes too: a search that goes on has the same forecasts."""
    path = tmp_path / "trials.jsonl"
    TrialHistory(path, "this", {}).add({"max-running-requests": 8}, RESULT)
    assert TrialHistory(path, "this", {}).find({"max-running-requests": 8}, 0) == RESULT
    assert TrialHistory(path, "other", {}).find({"max-running-requests": 8}, 0) is None


def test_trials_of_older_versions_are_read(tmp_path: Path) -> None:
    """A record without lengths and costs is a trial all the same."""
    path = tmp_path / "trials.jsonl"
    result = {"ended": "measured", "why": "all rows", "cost_s": 40.0, "tokens_per_s": 100.0}
    path.write_bytes(orjson.dumps({"about": "this", "args": {}, "result": result}) + b"\n")
    found = TrialHistory(path, "this", {}).find({}, 0)
    assert found is not None
    assert (found.tokens_per_s, found.rows, found.spans) == (100.0, (), ())
