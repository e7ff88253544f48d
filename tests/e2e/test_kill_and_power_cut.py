"""What is finished stays, whatever dies; exit code 0 means that all rows are done, none of them twice."""

import json
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.output.task_lock import TaskLock
from batchrunner.runner.join import LeasedRows
from batchrunner.runner.run import give_back
from tests.conftest import (
    INSTANT,
    batchrun,
    job_of,
    printed,
    rows_in,
    run_job,
    started,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.runs import Task, held_from, rows_once, until_stored


def test_a_kill_loses_a_second_at_most(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows that ended a second before a SIGKILL are merged and not sent again, though no part was written."""
    server.script = held_from(30)
    job = job_of(tmp_path, server, rows=100, window=8)
    with started(write_job(job, tmp_path)) as running:
        until_stored(tmp_path / "run", 30)
        running.kill()
    assert list((tmp_path / "run" / "parts").glob("*.parquet")) == []
    assert batchrun("merge", tmp_path / "run").exit_code == 1  # what reads it may want all of it
    assert pq.read_table(tmp_path / "run" / "merged").num_rows == 30
    server.answer_held()
    assert batchrunner.run(job).rows_resumed == 30
    rows_once(job, 100)
    assert list((tmp_path / "run" / "tasks" / "main").glob("journal-*")) == []


def test_rows_that_trickle_in(tmp_path: Path, server: FakeSGLang) -> None:
    """A row that ends after a quiet while is durable as soon as any other, and not only with its part."""
    ready = 4
    server.script = lambda sent: "answer" if sent.row < ready else "hold"
    job = job_of(tmp_path, server, rows=40, window=4)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(batchrunner.run, job)
        try:
            for ready in (4, 8, 12):
                server.ask_again()
                until_stored(tmp_path / "run", ready)
            assert list((tmp_path / "run" / "parts").glob("*.parquet")) == []
        finally:
            server.answer_held()
        assert running.result().rows_ok == 40


class PowerCuts:
    """Takes note of what is durable: of each file and directory what its last fsync has seen, and no more."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._files: dict[int, bytes] = {}
        self._directories: dict[int, dict[str, tuple[int, bool]]] = {}
        self._kept: list[int] = []  # descriptors, so that no inode is used again
        self._lock = threading.Lock()
        self.images: list[dict[Path, bytes | None]] = []
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            with self._lock:
                self._note(os.dup(descriptor))

        monkeypatch.setattr("os.fsync", fsync)

    def _note(self, descriptor: int) -> None:
        self._kept.append(descriptor)
        found = os.fstat(descriptor)
        place = f"/proc/self/fd/{descriptor}"
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(place) as entries:
                self._directories[found.st_ino] = {
                    entry.name: (entry.inode(), entry.is_dir()) for entry in entries
                }
        else:
            self._files[found.st_ino] = Path(place).read_bytes()
        self.images.append(dict(self._walk(self._root.stat().st_ino, Path())))

    def _walk(self, inode: int, path: Path) -> Iterator[tuple[Path, bytes | None]]:
        for name, (below, is_directory) in self._directories.get(inode, {}).items():
            if is_directory:
                yield path / name, None
                yield from self._walk(below, path / name)
            else:
                yield path / name, self._files.get(below, b"")

    def close(self) -> None:
        for descriptor in self._kept:
            os.close(descriptor)


def test_power_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the power goes, and with it what was not synced, the next start loses and doubles nothing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    source = write_rows(tmp_path / "input.parquet", 60)
    job = job_of(disk, INSTANT, input={"path": str(source)}, output={"part_rows": 15, "durable": 0.001})
    with monkeypatch.context() as patch:
        cuts = PowerCuts(disk, patch)
        batchrunner.run(job)
    cuts.close()
    assert len(cuts.images) > 15
    kept = 0
    for number, image in enumerate(cuts.images):
        after = tmp_path / f"after-{number}"
        after.mkdir()
        for path, content in image.items():
            if content is None:
                (after / path).mkdir(exist_ok=True)
            else:
                (after / path).write_bytes(content)
        owner = after / "run" / "tasks" / "main" / "owner"
        if owner.exists() and owner.stat().st_size:  # the machine was started again since
            owner.write_text(json.dumps(json.loads(owner.read_text()) | {"boot": "the one before"}))
        again = {**job, "output": {**job["output"], "path": str(after / "run")}}
        report = batchrunner.run(again)
        rows_once(again, 60)
        assert report.rows_resumed >= kept  # what was durable once stays so
        kept = report.rows_resumed
    assert kept == 60


def kill(task: Task) -> None:
    """Let a task look as if its process had been killed."""
    owner = task.run_dir.task_directory / "owner"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "started": "long ago"}))


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
    rows = 500 if change == "a file" else 400
    more = {**job, "engine": server.url, "input": {**job["input"], "limit": rows}}
    report = printed(write_job(more, tmp_path), "--join")
    assert (report["rows_ok"], report["rows_left"]) == (rows - 300, 300)
    assert rows_in(job) == list(range(300, rows))
    kill(first)
    run_job(more, tmp_path, "--join")
    rows_once(job, rows)


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
    assert batchrun("merge", tmp_path / "run").exit_code == 1
    if dies:
        assert result.exit_code == 1
        assert f"{len(lease.rows)} rows remain that no running worker has leased: run" in report["reason"]
        run_job(job, tmp_path, "--join")
        rows_once(job, 60)
    else:
        assert (result.exit_code, report["rows_left"]) == (0, len(lease.rows))
