"""The finished trials that a search resumes from; the flags that are written into a job file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from batchrunner.core.errors import JobError
from batchrunner.engines.simulation.replica import PassWork, RowLengths
from batchrunner.tune.measurement import PassSpan, TrialResult, TrialSigns
from batchrunner.tune.tuner import TrialHistory, apply_args

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


NEW = {"schedule-conservativeness": 0.3, "max-running-requests": 256}


LINES = """\
engine:  # here
  kind: server
  args:
    max-running-requests: 8  # too few
    enable-metrics: true
# the end
"""
LINES_AFTER = """\
engine:  # here
  kind: server
  args:
    max-running-requests: 256 # too few
    enable-metrics: true
# the end
    schedule-conservativeness: 0.3
"""
ONE_LINE = """\
engine: {kind: server, model: x}  # one
window: 8
"""
ONE_LINE_AFTER = """\
engine: {kind: server, model: x, args: {schedule-conservativeness: 0.3, max-running-requests: 256}} # one
window: 8
"""
UNDERSCORES = """\
engine:
  args: {max_running_requests: 8, dtype: half}
  model: x
"""
UNDERSCORES_AFTER = """\
engine:
  args: {max_running_requests: 256, dtype: half, schedule-conservativeness: 0.3}
  model: x
"""


@pytest.mark.parametrize(
    ("before", "after"), [(LINES, LINES_AFTER), (ONE_LINE, ONE_LINE_AFTER), (UNDERSCORES, UNDERSCORES_AFTER)]
)
def test_the_block_is_put_in_place(tmp_path: Path, before: str, after: str) -> None:
    """Only the values change: comments, order, style and other keys stay as they are, and so does a link."""
    path, link = tmp_path / "job.yaml", tmp_path / "link.yaml"
    path.write_text(before)
    link.symlink_to(path)
    apply_args(link, NEW)
    assert link.is_symlink()
    assert path.read_text() == after


def test_a_file_that_cannot_be_edited_is_left(tmp_path: Path) -> None:
    """Where the job's engine is not in the file, the file stays as it is, and the command says so."""
    path = tmp_path / "job.yaml"
    path.write_text("input: {path: x}\n")
    with pytest.raises(JobError, match="put the block in by hand"):
        apply_args(path, NEW)
    assert path.read_text() == "input: {path: x}\n"


@pytest.mark.parametrize("env", ["", "  env: {HF_HUB_OFFLINE: '1', SGLANG_CLIP: '4096'}  # all\n"])
def test_variables_go_into_env(tmp_path: Path, env: str) -> None:
    """A variable of the server stands in `engine.env` afterwards, as a text, beside those that were there."""
    path = tmp_path / "job.yaml"
    path.write_text(f"engine:\n  kind: server\n{env}  args: {{max-running-requests: 8}}\n# the end\n")
    before = yaml.safe_load(path.read_text())["engine"].get("env") or {}
    apply_args(path, NEW, {"SGLANG_CLIP": "256"})
    engine = yaml.safe_load(path.read_text())["engine"]
    assert engine["env"] == {**before, "SGLANG_CLIP": "256"}
    assert engine["args"] == {"max-running-requests": 256, "schedule-conservativeness": 0.3}
    assert path.read_text().endswith("# the end\n")
