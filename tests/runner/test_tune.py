"""The finished trials that a search resumes from."""

from pathlib import Path

from batchrunner.runner.tune import TrialHistory
from batchrunner.sglang.logs.lines import ServerReady
from batchrunner.sglang.logs.reader import Facts
from batchrunner.tuning.measurement import TrialResult, TrialSigns
from batchrunner.tuning.memory import Memory

RESULT = TrialResult(
    "measured", "all rows", 40.0, 100.0, 12.0, signs=TrialSigns(running=3.5),
    facts=Facts(arguments={"tp_size": 2}, ready=ServerReady(1000, 8192, 48), weights_gb=7.5, quantised=""),
)  # fmt: skip


def test_a_trial_is_read_as_it_was(tmp_path: Path) -> None:
    """Its server too: a search that goes on proposes the same.

    A record that a crash cut short does not count.
    """
    path = tmp_path / "trials.jsonl"
    path.write_text('{"about": "this", "args": {}, "res')
    TrialHistory(Memory(path), "this", {}).add({"max-running-requests": 8}, RESULT)
    assert TrialHistory(Memory(path), "this", {}).find({"max-running-requests": 8}, 0) == RESULT
    assert TrialHistory(Memory(path), "other", {}).find({"max-running-requests": 8}, 0) is None
