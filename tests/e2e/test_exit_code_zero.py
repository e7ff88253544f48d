"""Exit code 0 means that all rows are done, also those of files that were added and of tasks that died."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.output.run_dir import RunDir
from batchrunner.runner.run import give_back
from tests.conftest import batchrun, eventually, job_of, results_of, started, write_job, write_rows
from tests.support.runs import Task, rows_once, status_of

if TYPE_CHECKING:
    from pathlib import Path

    from batchrunner.output.task_lock import TaskLock
    from batchrunner.runner.join import LeasedRows
    from tests.support.fake_sglang import FakeSGLang

NO_ENGINE = "engine={kind: attach, urls: ['http://127.0.0.1:9']}"


def merge_code(job: dict[str, Any]) -> int:
    return batchrun("merge", job["output"]["path"]).exit_code


def kill(task: Task) -> None:
    """Let a task look as if its process had been killed."""
    owner = task.run_dir.task_directory / "owner"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "started": "long ago"}))


def test_a_task_died_and_a_file_was_added(tmp_path: Path, server: FakeSGLang) -> None:
    """The next task does the rows of both, and until then neither `merge` nor `status` calls it done."""
    source = tmp_path / "in"
    write_rows(source / "a.parquet", 600)
    job = job_of(
        tmp_path, server, input={"path": str(source)}, output={"durable": 0.1}, order="prefix", window=8
    )
    file = write_job(job, tmp_path)
    server.script = lambda sent: "answer" if int(sent.prompt.split()[1]) % 30 else "hold"
    with started(file, "--join") as task:
        eventually(lambda: status_of(tmp_path / "run").get("rows_on_disk", 0) > 0)
        task.process.kill()
        task.process.wait()
    server.answer_held()
    server.script = lambda _: "answer"
    write_rows(source / "b.parquet", 300, first=600)
    assert batchrun(file, "--join", "--set", NO_ENGINE).exit_code == 2  # it dies before its first row
    assert status_of(tmp_path / "run")["rows_total"] == 900
    assert merge_code(job) == 1
    result = batchrun(file, "--join", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["rows_left"] == 0
    rows_once(job, 900)
    assert merge_code(job) == 0
    assert status_of(tmp_path / "run")["finished"]


@pytest.mark.parametrize(("change", "order"), [("a file", "input"), ("the limit", "prefix")])
def test_rows_are_added_while_a_task_works(
    tmp_path: Path, server: FakeSGLang, change: str, order: str
) -> None:
    """A task that knows of more rows than the tasks at work does these, and leaves them theirs."""
    source = tmp_path / "in"
    write_rows(source / "a.parquet", 400)
    job = job_of(tmp_path, input={"path": str(source), "limit": 300}, order=order)
    first = Task(job, "first")
    while first.rows.take(wait=False):  # of all of them, for it has no other task to share them with
        pass
    if change == "a file":
        write_rows(source / "b.parquet", 100, first=400)
    more = {**job, "engine": {"kind": "attach", "urls": [server.url]}}
    more["input"] = {**job["input"], "limit": 500 if change == "a file" else 400}
    result = batchrun(write_job(more, tmp_path), "--join", "--json")
    report = json.loads(result.stdout)
    new = 200 if change == "a file" else 100
    assert (result.exit_code, report["rows_ok"], report["rows_left"]) == (0, new, 300)
    assert [row["row"] for row in results_of(job)] == list(range(300, 300 + new))
    kill(first)
    assert batchrun(write_job(more, tmp_path), "--join").exit_code == 0
    rows_once(job, 300 + new)


@pytest.mark.parametrize("dies", [False, True])
def test_a_task_dies_as_another_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, dies: bool) -> None:
    """A task whose rows are done ends with 1 if rows are left that nobody living holds."""
    job = job_of(tmp_path, rows=60)
    other = Task(job, "other")
    lease = other.rows.take(wait=False)
    assert lease

    async def the_other_dies(rows: LeasedRows, lock: TaskLock) -> None:
        await give_back(rows, lock)
        if dies:
            kill(other)

    with monkeypatch.context() as patch:
        patch.setattr("batchrunner.runner.run.give_back", the_other_dies)
        result = batchrun(write_job(job, tmp_path), "--join", "--json")
    report = json.loads(result.stdout)
    assert merge_code(job) == 1
    if dies:
        assert result.exit_code == 1
        assert f"{len(lease.rows)} rows are left that no living task holds: run the same" in report["reason"]
        assert batchrun(write_job(job, tmp_path), "--join").exit_code == 0
        rows_once(job, 60)
    else:
        assert (result.exit_code, report["rows_left"]) == (0, len(lease.rows))


def test_a_row_in_the_parts_of_two_tasks_counts_once(tmp_path: Path) -> None:
    """Rows that are there twice do not make up for others that are missing."""
    job = job_of(tmp_path, rows=40, input={"limit": 30})
    assert batchrun(write_job(job, tmp_path)).exit_code == 0
    run = RunDir(tmp_path / "run")
    (part,) = run.own_parts()
    part.with_name("part-other-000000.parquet").write_bytes(part.read_bytes())
    facts = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**facts, "rows_total": 40}))
    state = status_of(tmp_path / "run")
    assert (state["rows_on_disk"], state["finished"]) == (30, False)
