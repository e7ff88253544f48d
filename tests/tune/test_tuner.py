"""The finished trials that a search resumes from."""

from __future__ import annotations

from pathlib import Path

from batchrunner.engines.simulation.replica import PassWork, RowLengths
from batchrunner.tune.measurement import PassSpan, TrialResult, TrialSigns
from batchrunner.tune.tuner import TrialHistory

RESULT = TrialResult(
    "measured", "all rows", 40.0, 100.0, 12.0, signs=TrialSigns(running=3.5),
    rows=(RowLengths(10, 2, 30, 50, fixed=True),),
    spans=(PassSpan(PassWork(11, 30.0, 4.0, 5.0, 1, 6.0), 0.5),),
)  # fmt: skip


def test_a_trial_is_read_as_it_was(tmp_path: Path) -> None:
    """Lengths of rows and costs of passes too: a search that goes on has the same forecasts.

    A record that a crash cut short does not count.
    """
    path = tmp_path / "trials.jsonl"
    path.write_text('{"about": "this", "args": {}, "res')
    TrialHistory(path, "this", {}).add({"max-running-requests": 8}, RESULT)
    assert TrialHistory(path, "this", {}).find({"max-running-requests": 8}, 0) == RESULT
    assert TrialHistory(path, "other", {}).find({"max-running-requests": 8}, 0) is None
