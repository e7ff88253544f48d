"""The picture of a run is drawn from its event log, whatever the log holds."""

from __future__ import annotations

from pathlib import Path

import batchrunner
from tests.conftest import batchrun, job_of, write_job
from tests.fake_sglang import FakeSGLang

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


def test_each_task_is_drawn(tmp_path: Path) -> None:
    """Of a run that several tasks did, each has its picture beside its events."""
    with FakeSGLang(max_running=32, delay_s=0.05) as server:
        file = write_job(job_of(tmp_path, server, rows=2000), tmp_path)
        for shard in ("0/2", "1/2"):
            assert batchrun(file, "-q", "--shard", shard).exit_code == 0
    drawn = batchrun("plot", tmp_path / "run").stdout.split()
    assert [Path(path).parent.name for path in drawn] == ["shard-00000-of-00002", "shard-00001-of-00002"]
    assert all(Path(path).read_bytes().startswith(PNG) for path in drawn)


def test_nothing_to_draw(tmp_path: Path) -> None:
    """A path that holds no run is said to hold none."""
    refused = batchrun("plot", tmp_path)
    assert refused.exit_code == 2
    assert "no samples to draw" in refused.stderr
