"""The picture of a run is drawn from its event log, whatever the log holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import batchrunner
from tests.conftest import batchrun, job_of
from tests.fake_sglang import FakeSGLang

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_run_is_drawn(tmp_path: Path) -> None:
    """`batchrun plot` writes a picture beside the results and says where."""
    with (
        FakeSGLang(max_running=32, delay_s=0.05) as server,
        FakeSGLang(max_running=32, delay_s=0.05) as other,
    ):
        job = job_of(tmp_path, server, rows=3000)
        job["engine"]["urls"].append(other.url)
        batchrunner.run(job)
    drawn = batchrun("plot", tmp_path / "run")
    assert drawn.exit_code == 0, drawn.stderr
    assert drawn.stdout.strip() == str(tmp_path / "run" / "run.png")
    assert (tmp_path / "run" / "run.png").read_bytes().startswith(PNG)


def test_a_run_of_a_silent_engine_is_drawn(tmp_path: Path) -> None:
    """A server that tells no load has a window and a rate all the same."""
    with FakeSGLang(max_running=8, delay_s=0.05) as server:
        server.polls = "gone"
        batchrunner.run(job_of(tmp_path, server, rows=300))
    assert batchrun("plot", tmp_path / "run").exit_code == 0


def test_nothing_to_draw(tmp_path: Path) -> None:
    """A path that holds no run is said to hold none."""
    refused = batchrun("plot", tmp_path)
    assert refused.exit_code == 2
    assert "no samples to draw" in refused.stderr
