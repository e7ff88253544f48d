"""Several tasks share one input and one output path: each does its rows, and together they do all, once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import batchrun, eventually, job_of, results_of, started, write_job, write_rows

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang


def test_tasks_share_a_run(tmp_path: Path, server: FakeSGLang) -> None:
    """Three tasks at once write one dataset: every row once, and the run is merged and reported as one."""
    write_rows(tmp_path / "input.parquet", 100)
    job = job_of(tmp_path, server, input={"columns": ["id"], "filter": "id != 50"})
    file = write_job(job, tmp_path)
    with started(file, "-q", "--shard", "0/3") as first, started(file, "-q", "--shard", "1/3") as second:
        assert batchrun(file, "-q", "--shard", "2/3").exit_code == 0
        assert (first.end(), second.end()) == (0, 0)
    assert [row["row"] for row in results_of(job)] == [n for n in range(100) if n != 50]
    assert len(server.sent) == 99
    state = json.loads(batchrun("status", tmp_path / "run", "--json").stdout)
    assert (state["rows_total"], state["rows_on_disk"], state["finished"]) == (99, 99, True)
    assert [task["task"] for task in state["tasks"]] == [f"shard-{i:05d}-of-00003" for i in range(3)]
    told = batchrun("status", tmp_path / "run").stdout
    assert "shard-00001-of-00003: 32 rows on disk" in told
    assert batchrun("merge", tmp_path / "run").exit_code == 0
    report = tmp_path / "run" / "tasks" / "shard-00001-of-00003" / "report.json"
    assert json.loads(report.read_text())["rows_total"] == 32


def test_a_shard_resumes(tmp_path: Path, server: FakeSGLang) -> None:
    """A killed task goes on with its own rows, and another task's death is not its affair."""
    write_rows(tmp_path / "input.parquet", 60)
    job = job_of(tmp_path, server)
    server.script = lambda sent: "answer" if int(sent.prompt.split()[1]) < 40 else "hold"
    file = write_job(job, tmp_path)
    with started(file, "--shard", "1/2") as task:
        eventually(lambda: _on_disk(tmp_path / "run") == 10)
        task.process.kill()
        task.process.wait()
    server.answer_held()
    server.forget()
    assert batchrun(file, "-q", "--shard", "0/2").exit_code == 0
    assert sorted(int(prompt.split()[1]) for prompt in server.prompts) == list(range(30))
    assert batchrun(file, "-q", "--shard", "1/2").exit_code == 0
    assert len(server.sent) == 50
    assert [row["row"] for row in results_of(job)] == list(range(60))


def _on_disk(run: Path) -> int:
    found = batchrun("status", run, "--json")
    return int(json.loads(found.stdout)["rows_on_disk"]) if found.exit_code == 0 else -1


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (["--shard", "0/2"], ["--shard", "0/3"], "done with --shard i/2"),
        (["--shard", "0/2"], [], "done with --shard i/2"),
        ([], ["--shard", "0/2"], "done with neither --shard nor --join"),
        (["--join"], [], "done with --join"),
        (["--join"], ["--shard", "0/2"], "done with --join"),
    ],
)
def test_another_parting_is_refused(tmp_path: Path, first: list[str], second: list[str], told: str) -> None:
    """Rows that were parted in one way are not parted in another: some would be done twice."""
    file = write_job(job_of(tmp_path), tmp_path)
    assert batchrun(file, "-q", *first).exit_code == 0
    refused = batchrun(file, "-q", *second)
    assert refused.exit_code == 2
    assert told in refused.stderr


def test_a_shard_starts_nothing_fresh(tmp_path: Path) -> None:
    """One task of several may not discard what the others have done."""
    file = write_job(job_of(tmp_path), tmp_path)
    refused: Any = batchrun(file, "--fresh", "--shard", "0/2")
    assert refused.exit_code == 2
    assert "--fresh would discard" in refused.stderr


def test_slurm_tells_the_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job array each task does its share, wherever the array's numbers begin and however they step."""
    for name, value in {"ID": "7", "MIN": "3", "STEP": "2", "COUNT": "4"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    job = job_of(tmp_path, rows=40)
    file = write_job(job, tmp_path)
    assert batchrun(file, "-q", "--shard", "slurm").exit_code == 0
    assert (tmp_path / "run" / "tasks" / "shard-00002-of-00004" / "report.json").exists()
    assert 20 in [row["row"] for row in results_of(job)]
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    refused = batchrun(file, "--shard", "slurm")
    assert refused.exit_code == 2
    assert "SLURM_ARRAY_TASK_ID" in refused.stderr


def test_an_input_that_grows(tmp_path: Path, server: FakeSGLang) -> None:
    """New files move the shares; rows that another task has done are not done again."""
    write_rows(tmp_path / "in" / "day1.parquet", 30)
    job = job_of(tmp_path, server, input={"path": str(tmp_path / "in")})
    file = write_job(job, tmp_path)
    for shard in ("0/2", "1/2"):
        assert batchrun(file, "-q", "--shard", shard).exit_code == 0
    write_rows(tmp_path / "in" / "day2.parquet", 50, first=30)
    for shard in ("1/2", "0/2"):
        assert batchrun(file, "-q", "--shard", shard).exit_code == 0
    assert [row["row"] for row in results_of(job)] == list(range(80))
    assert len(server.sent) == 80


def test_files_added_while_a_task_works(tmp_path: Path, server: FakeSGLang) -> None:
    """A share of more rows would overlap with that of a task that found fewer: its end is waited for."""
    write_rows(tmp_path / "in" / "day1.parquet", 300)
    job = job_of(tmp_path, server, input={"path": str(tmp_path / "in")}, window=4)
    file = write_job(job, tmp_path)
    server.script = lambda sent: "hold" if sent.tries == 1 and sent.prompt == "row 210" else "answer"
    with started(file, "--shard", "2/3") as task:
        server.wait_for(1)
        write_rows(tmp_path / "in" / "day2.parquet", 300, first=300)
        for shard in ("0/3", "1/3"):
            refused = batchrun(file, "--shard", shard)
            assert refused.exit_code == 2
            assert "the input has 600 rows, and 300 for shard-00002-of-00003" in refused.stderr
            assert "wait for its end" in refused.stderr
        server.script = lambda _: "answer"
        server.ask_again()
        assert task.end() == 1  # its share of the new files is not done
    assert len(server.sent) == 100
    server.script = lambda _: "hold"
    with started(file, "--shard", "0/3") as first, started(file, "--shard", "1/3") as second:
        server.wait_for(100 + 2 * 4)
        server.script = lambda _: "answer"
        server.ask_again()
        assert (first.end(), second.end()) == (0, 0)
    assert batchrun(file, "--shard", "2/3").exit_code == 0
    assert [row["row"] for row in results_of(job)] == list(range(600))
    assert len(server.sent) == 600


def test_a_killed_task_keeps_nobody_waiting(tmp_path: Path, server: FakeSGLang) -> None:
    """What it had found does not count any more, though its name stays."""
    write_rows(tmp_path / "in" / "day1.parquet", 30)
    job = job_of(tmp_path, server, input={"path": str(tmp_path / "in")})
    file = write_job(job, tmp_path)
    server.script = lambda _: "hold"
    with started(file, "--shard", "1/2") as task:
        server.wait_for(1)
        task.process.kill()
        task.process.wait()
    server.script = lambda _: "answer"
    write_rows(tmp_path / "in" / "day2.parquet", 30, first=30)
    for shard in ("0/2", "1/2"):
        assert batchrun(file, "--shard", shard).exit_code == 0
    assert [row["row"] for row in results_of(job)] == list(range(60))
