"""Tasks that join a run take its rows lease by lease: whatever becomes of them, every row is done once."""

import contextlib
import errno
import json
import signal
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
from aiohttp import web

import batchrunner
from batchrunner.core.errors import StorageError
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.queue import READ_AHEAD_ROWS
from batchrunner.output.resume import read_done
from batchrunner.output.run_dir import RunDir
from tests.conftest import (
    batchrun,
    eventually,
    job_of,
    merged_table,
    printed,
    results_of,
    rows_in,
    run_job,
    started,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.refusals import told
from tests.support.runs import Task, held_from, rows_once, rows_sent, status_of, until_stored


def test_tasks_do_a_run_together(tmp_path: Path, server: FakeSGLang) -> None:
    """Four starts at the same time write one dataset: every row once, and status tells of the whole."""
    write_rows(tmp_path / "input.parquet", 400)
    job = job_of(tmp_path, server, input={"columns": ["id"], "filter": "id != 50"})
    file = write_job(job, tmp_path)
    with contextlib.ExitStack() as stack:
        tasks = [stack.enter_context(started(file, "--join")) for _ in range(4)]
        assert [task.end() for task in tasks] == [0, 0, 0, 0]
    assert rows_in(job) == [n for n in range(400) if n != 50]
    assert len(server.sent) == 399
    state = status_of(tmp_path / "run")
    assert (state["rows_total"], state["rows_on_disk"], state["finished"]) == (399, 399, True)
    assert "done: 399 of 399 rows ok" in run_job(job, tmp_path, "--join").stderr


def test_a_dead_task_is_replaced(tmp_path: Path, server: FakeSGLang) -> None:
    """What a killed task held is done by one that lives, and what it had finished is not done again."""
    server.script = lambda _: "hold"
    rows = 4 * READ_AHEAD_ROWS  # more than one takes while the other still starts
    job = job_of(tmp_path, server, rows=rows, output={"durable": 0.1}, window=64)
    file = write_job(job, tmp_path)
    with started(file, "--join") as first, started(file, "--join") as second:
        eventually(lambda: len((status_of(tmp_path / "run").get("leases") or {}).get("held", {})) == 2)
        server.script = lambda sent: "hold" if sent.row % 30 == 29 else "answer"
        server.ask_again()
        eventually(lambda: status_of(tmp_path / "run").get("rows_on_disk", 0) > rows // 2)
        kept = {row for task in RunDir(tmp_path / "run").all_tasks() for row in read_done(task).rows}
        first.kill()
        server.answer_held()
        second.wait_for_line("took over from")
        assert second.end() == 0
    assert rows_in(job) == list(range(rows))
    sent = Counter(rows_sent(server))
    assert all(sent[row] == 1 for row in kept)


def test_merge_while_tasks_work(tmp_path: Path, server: FakeSGLang) -> None:
    """What is done is merged, whoever did it: a task that was killed, or one that goes on."""
    server.script = lambda _: "hold"
    run, rows = tmp_path / "run", 4 * READ_AHEAD_ROWS
    job = job_of(tmp_path, server, rows=rows, output={"durable": 0.1}, window=rows // 3)
    file = write_job(job, tmp_path)
    with started(file, "--join") as first, started(file, "--join") as second:
        eventually(lambda: len((status_of(run).get("leases") or {}).get("held", {})) == 2)
        server.script = lambda sent: "hold" if sent.row % 4 == 3 else "answer"
        server.ask_again()
        eventually(lambda: len(_tasks_with_rows(run)) == 2)
        first.kill()
        second.wait_for_line("took over from")
        until_stored(run, 3 * rows // 4)
        assert len(_tasks_with_rows(run)) == 2
        merged = printed("merge", run, code=1)
        assert merged["report"]["rows_ok"] == merged["rows"] == 3 * rows // 4
        table = pq.read_table(run / "merged")
        assert table.column("row").to_pylist() == [row for row in range(rows) if row % 4 != 3]
        server.answer_held()
        assert second.end() == 0
    assert merged_table(run).column("row").to_pylist() == list(range(rows))


def _tasks_with_rows(run: Path) -> list[str]:
    """Return the tasks of a run that have rows on disk."""
    return [task["task"] for task in status_of(run).get("tasks", []) if task["rows_on_disk"]]


def test_a_stopped_task_gives_back(tmp_path: Path, server: FakeSGLang) -> None:
    """A task that is told to stop ends what is in flight and leaves the rest to the others, at once."""
    server.script = lambda _: "hold"
    job = job_of(tmp_path, server, rows=100, window=8)
    file = write_job(job, tmp_path)
    with started(file, "--join") as first:
        eventually(lambda: len(server.sent) == 8)
        first.process.send_signal(signal.SIGTERM)
        first.wait_for_line("interrupted")
        server.answer_held()
        assert first.end() == 143, "".join(first.lines)
    run_job(job, tmp_path, "--join")
    assert rows_in(job) == list(range(100))
    assert len(server.sent) == 100


def test_nothing_is_free(tmp_path: Path, server: FakeSGLang) -> None:
    """A start that finds all rows held by a task that lives starts no engine and ends, well.

    `--fresh` without --join discards what all tasks did, but never under the hands of one that works.
    """
    server.script = lambda _: "hold"
    job = job_of(tmp_path, server, rows=20, window=20)
    file = write_job(job, tmp_path)
    with started(file, "--join") as first:
        eventually(lambda: len(server.sent) == 20)
        refused = run_job(job, tmp_path, "--join").stderr
        told(
            refused,
            "no rows can be leased: other workers have leased the rest: 0 of 20 rows ok, 0 failed, 20 left",
        )
        assert "was started with --join" in run_job(job, tmp_path, code=2).stderr
        assert "is writing this run" in run_job(job, tmp_path, "--fresh", code=2).stderr
        server.answer_held()
        assert first.end() == 0
    run_job(job, tmp_path, "--fresh")
    assert len(server.sent) == 40
    run_job(job, tmp_path)
    assert rows_in(job) == list(range(20))


def test_what_is_added_later(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the end of a run a start does what has been added, failed rows if asked to, and lost parts."""
    write_rows(tmp_path / "in" / "day1.parquet", 30)
    server.script = lambda sent: "too long" if sent.prompt == "row 7" and sent.tries == 1 else "answer"
    job = job_of(tmp_path, server, input={"path": str(tmp_path / "in")}, limits={"max_failed_rows": 1})
    run_job(job, tmp_path, "--join")
    write_rows(tmp_path / "in" / "day2.parquet", 50, first=30)
    run_job(job, tmp_path, "--join")
    assert len(server.sent) == 80
    run_job(job, tmp_path, "--join", "--retry-failed")
    rows_once(job, 80)
    assert len(server.sent) == 81
    next((tmp_path / "run" / "parts").glob("*.parquet")).unlink()
    monkeypatch.setattr(TIMING, "parts_appear", 0.0)  # nobody waits for another host's parts to be seen
    task = Task(job, "later")
    assert "finished rows are in no part file" in caplog.text
    task.work(10_000)
    assert rows_in(job) == list(range(80))


def test_the_last_worker_judges_the_run(tmp_path: Path, server: FakeSGLang) -> None:
    """Failed rows of earlier workers count for each later one, so no start of a run contradicts another."""
    source = tmp_path / "in"
    write_rows(source / "a.parquet", 20)
    server.script = lambda sent: "too long" if sent.row < 5 else "answer"
    job = job_of(
        tmp_path, server, input={"path": str(source)}, limits={"max_failed_rows": 4, "abort_failed_share": 1}
    )
    told(run_job(job, tmp_path, "--join", code=3).stderr, "done, but 5 rows of the run failed, more than")
    write_rows(source / "b.parquet", 20, first=20)
    told(run_job(job, tmp_path, "--join", code=3).stderr, "done, but 5 rows of the run failed, more than")
    told(run_job(job, tmp_path, "--join", code=3).stderr, "35 of 40 rows ok, 5 failed")
    write_rows(source / "c.parquet", 20, first=40)
    run_job(job, tmp_path, "--join", "--set", "limits.max_failed_rows=10%")
    assert rows_in(job) == list(range(60))


def test_a_part_that_is_moved_away_from_a_running_worker(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker does not call the run done, and the next one does the rows of that part."""
    parts = tmp_path / "run" / "parts"
    server.script = lambda sent: "hold" if sent.row >= 35 else "answer"
    job = job_of(tmp_path, server, rows=40, output={"part_rows": 5, "durable": 0.1}, order="input", window=40)
    with started(write_job(job, tmp_path), "--join") as worker:
        eventually(lambda: [*parts.glob("part-*")])
        part = min(parts.glob("part-*"))
        rows = pq.read_table(part)["row"].to_pylist()
        part.rename(tmp_path / "moved")
        server.answer_held()
        missing = f"{len(rows)} rows of the run are missing from all result files"
        worker.wait_for_line(f"{missing}: run the same command again")
        assert worker.end() == 1
    server.forget()
    monkeypatch.setattr(TIMING, "parts_appear", 0.0)  # nobody waits for another host's parts to be seen
    run_job(job, tmp_path, "--join")
    assert rows_sent(server) == rows
    rows_once(job, 40)


def test_a_run_in_one_piece_is_joined(tmp_path: Path, server: FakeSGLang) -> None:
    """What one start has done of a run is left out when several go on with it."""
    server.script = held_from(20)
    job = job_of(tmp_path, server, rows=60, window=8, output={"durable": 0.1})
    file = write_job(job, tmp_path)
    with started(file) as alone:
        until_stored(tmp_path / "run", 20)
        assert "is writing this run" in run_job(job, tmp_path, "--join", code=2).stderr
        alone.kill()
    server.answer_held()
    server.forget()
    run_job(job, tmp_path, "--join")
    assert rows_in(job) == list(range(60))
    assert len(server.sent) == 40


def test_a_task_that_failed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that could not write its rows counts as dead though its process lives: a notebook's, say."""
    job = job_of(tmp_path, rows=500, limits={"disk_wait": 0.1})
    with monkeypatch.context() as full:
        no_room = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        full.setattr("pyarrow.parquet.write_table", no_room)
        with pytest.raises(StorageError, match="No space left"):
            batchrunner.run(job, join=True)
    assert status_of(tmp_path / "run")["running"] is None
    assert batchrunner.run(job, join=True).rows_left == 0
    assert rows_in(job) == list(range(500))


def test_a_discard_that_did_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `--fresh` was ended in the middle of its work, whoever comes next ends it, and does all rows."""
    job = job_of(tmp_path, rows=300)
    run_job(job, tmp_path, "--join")
    with monkeypatch.context() as patch:
        patch.setattr("batchrunner.output.store.Store.clear", Mock(side_effect=OSError(errno.EIO, "gone")))
        run_job(job, tmp_path, "--fresh", code=1)
    assert "--fresh was stopped while it discarded this run" in batchrun("merge", tmp_path / "run").stderr
    result = run_job(job, tmp_path, "--join")
    assert "an earlier start with --fresh was stopped: discarding the remaining files" in result.stderr
    rows_once(job, 300)


class SleepyServer(FakeSGLang):
    """A server that the runner's machine falls asleep on: another one takes its task over meanwhile."""

    owner: Path | None = None

    async def _model_info(self, request: web.Request) -> web.Response:
        if self.owner is not None:
            holder = json.loads(self.owner.read_text()) | {"token": "of another", "host": "elsewhere"}
            self.owner.write_text(json.dumps(holder))
            self.owner = None
        return await super()._model_info(request)


@pytest.mark.parametrize("option", ["--fresh", "--retry-failed"])
def test_a_start_that_wakes_late(tmp_path: Path, option: str) -> None:
    """It discards nothing of what another one may have finished, and says that its task is taken over."""
    with SleepyServer(lambda sent: "too long" if sent.row == 7 else "answer") as server:
        job = job_of(tmp_path, server, limits={"max_failed_rows": 1})
        run_job(job, tmp_path)
        batchrun("merge", tmp_path / "run")
        before = results_of(job)
        server.owner = tmp_path / "run" / "tasks" / "main" / "owner"
        result = run_job(job, tmp_path, option, code=1)
    assert "on elsewhere took this task over; stored rows are kept" in result.stderr
    assert results_of(job) == before
    assert list((tmp_path / "run" / "merged").glob("*.parquet"))
