"""Tasks on several machines that share only a store: each row is done once, whatever becomes of them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchrunner.output.parts import read_journal
from tests.conftest import (
    ROOT,
    Started,
    batchrun,
    eventually,
    job_of,
    started_python,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang, Sent
from tests.support.other_machine import CLOCK_OFF_S, GONE_AFTER_S
from tests.support.refusals import refusal, told
from tests.support.server_thread import PATIENCE_S
from tests.support.store_server import Fault, StoreBucket, StoreProxy


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disks of all machines: each has a folder of its name."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory


@pytest.fixture
def all_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine is taken for gone that only stands still for a while."""
    monkeypatch.setenv(GONE_AFTER_S, str(PATIENCE_S))


@contextlib.contextmanager
def machine(name: str, *arguments: object, **environ: str) -> Iterator[Started]:
    """Run the command on a machine."""
    script = ROOT / "tests" / "support" / "other_machine.py"
    with started_python(script, name, *arguments, **environ) as running:
        yield running


def rows_in(bucket: StoreBucket) -> list[int]:
    """Return the ordinals of the rows of all parts, as any reader of the bucket finds them."""
    keys = [key for key in bucket.keys("run/parts/") if key.endswith(".parquet")]
    rows = [row for key in keys for row in pq.read_table(io.BytesIO(bucket.get(key)))["row"].to_pylist()]
    return sorted(rows)


def job_in(directory: Path, bucket: StoreBucket, server: FakeSGLang, **changes: Any) -> Path:
    """Write a job with its results in the bucket."""
    output = {"path": f"{bucket.uri}/run", "durable": 0.3, **changes.pop("output", {})}
    return write_job(job_of(directory, server, output=output, **changes), directory)


def sent_rows(server: FakeSGLang) -> Counter[int]:
    return Counter(int(prompt.split()[1]) for prompt in server.prompts)


def row_of(sent: Sent) -> int:
    return int(sent.prompt.split()[1])


@pytest.mark.usefixtures("all_live")
def test_machines_do_a_run_together(
    tmp_path: Path, store_bucket: StoreBucket, server: FakeSGLang, cache: Path
) -> None:
    """Three starts write one data set, a later one does what was added; no disk keeps anything.

    The clock of one machine is an hour ahead, that of another one an hour behind.
    """
    source = tmp_path / "in"
    write_rows(source / "a.parquet", 90)
    job = job_in(
        tmp_path, store_bucket, server, input={"path": str(source), "columns": ["id"]}, order="prefix"
    )
    with contextlib.ExitStack() as stack:
        clocks = {"a": "0", "b": "3600", "c": "-3600"}
        tasks = [
            stack.enter_context(machine(name, job, "--join", **{CLOCK_OFF_S: off_s}))
            for name, off_s in clocks.items()
        ]
        assert [task.end() for task in tasks] == [0, 0, 0]
    assert rows_in(store_bucket) == list(range(90))
    assert len(server.prompts) == 90
    uri = f"{store_bucket.uri}/run"
    state = json.loads(batchrun("status", uri, "--json").stdout)
    assert (state["rows_total"], state["rows_on_disk"], state["finished"]) == (90, 90, True)
    write_rows(source / "b.parquet", 10, first=90)
    with machine("d", job, "--join") as late:
        assert late.end() == 0
    assert rows_in(store_bucket) == list(range(100))
    again = batchrun(job, "--join")
    assert "done: 100 of 100 rows ok" in again.stderr
    merged = batchrun("merge", uri)
    assert merged.exit_code == 0, merged.stderr
    assert not [*cache.glob("*/batchrunner/runs/*"), *cache.glob("batchrunner/runs/*")]
    told(refusal(job.read_text(), tmp_path), "done with --join")


def _rows_stored(cache: Path, bucket: StoreBucket) -> int:
    """Return the rows that are in parts of the store, or in journals."""
    journals = 0
    with contextlib.suppress(FileNotFoundError):  # it has just become a part
        journals = sum(table.num_rows for path in cache.rglob("journal-*") for table in read_journal(path))
    return len(rows_in(bucket)) + journals


@pytest.mark.parametrize("is_lost", [False, True], ids=["same-machine", "lost-machine"])
def test_a_task_dies(tmp_path: Path, store_bucket: StoreBucket, cache: Path, is_lost: bool) -> None:
    """Its rows that were uploaded are done once; on the same machine all that it had finished."""
    with FakeSGLang(lambda sent: "answer" if row_of(sent) % 4 else "hold") as server:
        job = job_in(tmp_path, store_bucket, server, rows=60, window=60)
        with machine("a", job, "--join") as first:
            eventually(lambda: rows_in(store_bucket) and _rows_stored(cache, store_bucket) == 45)
            first.process.kill()
            first.process.wait()
        if is_lost:
            shutil.rmtree(cache / "a")
        server.script = lambda _: "answer"
        server.answer_held()
        with machine("b" if is_lost else "a", job, "--join") as second:
            second.wait_for_line("took over from")
            assert second.end() == 0
        twice = sum(count > 1 for count in sent_rows(server).values())
    assert rows_in(store_bucket) == list(range(60))
    assert not [*cache.glob("*/batchrunner/runs/*")]
    assert twice == 15 if not is_lost else 15 <= twice < 60


def test_a_task_that_was_paused(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """It comes back after its lease was taken, finds that out, and writes nothing any more."""
    with FakeSGLang(lambda _: "hold") as server:
        job = job_in(tmp_path, store_bucket, server, rows=30, window=30)
        with machine("a", job, "--join") as first:
            eventually(lambda: len(server.prompts) == 30)
            first.process.send_signal(signal.SIGSTOP)
            server.script = lambda _: "answer"
            with machine("b", job, "--join") as second:
                second.wait_for_line("took over from")
                assert second.end() == 0
            server.answer_held()
            first.process.send_signal(signal.SIGCONT)
            first.wait_for_line("took this task over")
            assert first.end() == 1
    assert rows_in(store_bucket) == list(range(30))


def test_a_write_that_arrives_late(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """A write was under way when its machine died, and arrives when the task was taken over."""

    def hold(method: str, path: str, _: int) -> Fault:
        return "held" if method == "PUT" and "/parts/" in path else "none"

    with FakeSGLang() as server, StoreProxy(store_bucket.endpoint, hold) as proxy:
        job = job_in(tmp_path, store_bucket, server, rows=30, output={"part_rows": 10})
        with machine("a", job, "--join", AWS_ENDPOINT_URL=proxy.url) as first:
            eventually(lambda: proxy.held)
            first.process.kill()
        server.script = lambda _: "answer"
        with machine("b", job, "--join") as second:
            second.wait_for_line("took over from")
            proxy.let_go()
            eventually(lambda: proxy.passed == proxy.held)
            assert second.end() == 0
        with machine("c", job, "--join") as third:
            assert third.end() == 0
    assert rows_in(store_bucket) == list(range(30))
    merged = batchrun("merge", f"{store_bucket.uri}/run")
    assert merged.exit_code == 0, merged.stderr
    assert rows_in(store_bucket) == list(range(30))


def test_a_store_that_cannot_keep_tasks_apart(
    tmp_path: Path, store_bucket: StoreBucket, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tasks need conditional writes; that is said before anything is sent, and nothing is left."""
    with StoreProxy(store_bucket.endpoint, lambda *_: "no conditions") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        job = job_of(tmp_path, server, output={"path": f"{store_bucket.uri}/run"})
        told(refusal(job, tmp_path, "--join"), "the store has no conditional writes", "run one task")
    assert store_bucket.keys() == []
    assert not server.sent
