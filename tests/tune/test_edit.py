"""Arguments are put into a job file, whose other lines stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from batchrunner.core.errors import JobError
from batchrunner.tune.edit import apply_args, edited

if TYPE_CHECKING:
    from pathlib import Path


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
    max-running-requests: 256  # too few
    enable-metrics: true
    schedule-conservativeness: 0.3
# the end
"""
ONE_LINE = """\
engine: {kind: server, model: x}  # one
window: 8
"""
ONE_LINE_AFTER = """\
engine: {kind: server, model: x, args: {schedule-conservativeness: 0.3, max-running-requests: 256}}  # one
window: 8
"""
NO_ARGS = """\
engine:
  kind: server
  model: x"""
NO_ARGS_AFTER = """\
engine:
  kind: server
  model: x
  args:
    schedule-conservativeness: 0.3
    max-running-requests: 256
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
EMPTY = """\
engine:
  args: {}
  env:
    A: |
      two
      lines
"""
EMPTY_AFTER = """\
engine:
  args: {schedule-conservativeness: 0.3, max-running-requests: 256}
  env:
    A: |
      two
      lines
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LINES, LINES_AFTER),
        (ONE_LINE, ONE_LINE_AFTER),
        (NO_ARGS, NO_ARGS_AFTER),
        (UNDERSCORES, UNDERSCORES_AFTER),
        (EMPTY, EMPTY_AFTER),
    ],
)
def test_the_block_is_put_in_place(tmp_path: Path, before: str, after: str, end: str) -> None:
    """Only the values change: comments, order, style, ends of lines and other keys stay as they are."""
    path = tmp_path / "job.yaml"
    path.write_text(before, newline=end)
    apply_args(path, NEW)
    assert path.read_bytes().decode() == after.replace("\n", end)


def test_a_link_to_a_job_stays_one(tmp_path: Path) -> None:
    """What is edited is the file that the link leads to."""
    path, link = tmp_path / "job.yaml", tmp_path / "link.yaml"
    path.write_text(LINES)
    link.symlink_to(path)
    apply_args(link, NEW)
    assert link.is_symlink()
    assert path.read_text() == LINES_AFTER


@pytest.mark.parametrize(
    "text",
    [
        "engine:\n  args:\n  kind: server\n",
        "input: {path: x}\n",
        "engine: {kind: server, # why\n  model: x # because\n  }\n",
    ],
)
def test_a_file_that_cannot_be_edited_is_left(tmp_path: Path, text: str) -> None:
    """Where the block cannot be put in with certainty the file stays as it is, and the command says so."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobError, match="put the block in by hand"):
        apply_args(path, NEW)
    assert path.read_text() == text


ARGS = st.dictionaries(
    st.from_regex(r"[a-z][a-z-]{0,10}[a-z]", fullmatch=True),
    st.one_of(
        st.integers(0, 10**6), st.floats(0, 1, width=16), st.booleans(), st.text("ab: #{}'\n", max_size=5)
    ),
    min_size=1,
    max_size=4,
)


@given(old=ARGS, new=ARGS, flow=st.booleans())
@example(old={"aa": 0}, new={"no": 0}, flow=True)  # YAML's false
def test_any_arguments_can_be_written(old: dict[str, Any], new: dict[str, Any], flow: bool) -> None:
    """Whatever the arguments are, the file says them afterwards, and all else that it said."""
    job = {"engine": {"kind": "server", "args": old, "model": "x"}, "window": 3}
    text = edited(yaml.safe_dump(job, default_flow_style=flow, sort_keys=False), new)
    assert text is not None
    job["engine"] = {"kind": "server", "args": {**old, **new}, "model": "x"}
    assert yaml.safe_load(text) == job


@pytest.mark.parametrize(
    "env", ["", "  env: {HF_HUB_OFFLINE: '1'}\n", "  env:\n    SGLANG_CLIP: '4096'  # all\n"]
)
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
