"""A killed process whose parent has not asked for its exit status is dead, though the kernel lists it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import Started, batchrun, eventually, job_of, started, write_job
from tests.support.runs import rows_once, status_of

if TYPE_CHECKING:
    from tests.support.fake_sglang import FakeSGLang


def leave_a_zombie(task: Started) -> None:
    """Kill a process and do not ask for its exit status, as the first process of many containers."""
    task.process.kill()
    place = Path(f"/proc/{task.process.pid}")
    state = place / "stat"
    eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z")
    eventually(lambda: len(list((place / "task").iterdir())) == 1)  # other threads keep its files open


def test_the_next_start_goes_on(tmp_path: Path, server: FakeSGLang) -> None:
    """A start on the output path of a zombie is not refused, and `status` does not call it running."""
    server.script = lambda sent: "answer" if int(sent.prompt.split()[1]) < 20 else "hold"
    job = job_of(tmp_path, server, rows=60, window=8, output={"durable": 0.1})
    file = write_job(job, tmp_path)
    with started(file) as killed:
        eventually(lambda: status_of(tmp_path / "run").get("rows_on_disk") == 20)
        assert status_of(tmp_path / "run")["running"]
        leave_a_zombie(killed)
        assert status_of(tmp_path / "run")["running"] is None
        server.answer_held()
        assert batchrun(file).exit_code == 0
    rows_once(job, 60)
