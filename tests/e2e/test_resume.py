"""Stopped in whatever way and started again: nothing is lost, nothing is done twice."""

import asyncio
import itertools
import operator
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchrunner
from batchrunner.core.errors import EngineStartError, ResumeError
from batchrunner.core.timing import TIMING
from tests.conftest import (
    batchrun,
    examples,
    job_of,
    report_of,
    results_of,
    rows_in,
    run_job,
    write_rows,
)
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.runs import is_control, rows_once, rows_sent, some_done


def test_a_finished_run_sends_nothing(tmp_path: Path, server: FakeSGLang) -> None:
    """Starting a run that is done is free, even when its engine is gone, and keeps its report."""
    job = job_of(tmp_path, server)
    batchrunner.run(job)
    before = report_of(job)
    report = batchrunner.run({**job, "engine": "http://127.0.0.1:9"})
    assert (report.exit_code, report.rows_ok, report.rows_resumed) == (0, 10, 10)
    assert report_of(job) == before
    assert len(server.sent) == 10


@pytest.mark.parametrize(
    "change",
    [
        "output.part_rows=3",
        "limits={deadline: 1h, max_failed_rows: 1, max_attempts: 9}",
        "engine.api_key_env=OTHER_KEY",
    ],
)
def test_what_may_change(tmp_path: Path, server: FakeSGLang, change: str) -> None:
    """How a run is done may change between starts: limits, window, part size, the engine's options."""
    job = some_done(tmp_path, server)
    assert batchrunner.run(job, overrides=[change]).rows_resumed == 4
    assert rows_in(job) == list(range(10))


def test_moved_files_are_the_same_files(tmp_path: Path, server: FakeSGLang) -> None:
    """An input that was moved with its content unchanged is the same input."""
    job = some_done(tmp_path, server)
    (tmp_path / "input.parquet").rename(tmp_path / "moved.parquet")
    assert batchrunner.run(job, overrides=[f"input.path={tmp_path}/moved.parquet"]).rows_resumed == 4


def test_a_partition_that_becomes_another_type(tmp_path: Path, server: FakeSGLang) -> None:
    """Parts of two types could not be merged: the start is refused, unless no row carries the column."""
    source = tmp_path / "in"
    write_rows(source / "day=01" / "a.parquet", 2)
    job = job_of(tmp_path, server, input={"path": str(source), "columns": ["day"], "rename": {"day": "d"}})
    other = {**job, "input": {"path": str(source)}, "output": {"path": str(tmp_path / "other")}}
    batchrunner.run(job)
    batchrunner.run(other)
    write_rows(source / "day=02" / "a.parquet", 2)
    assert batchrunner.run(job).rows_resumed == 2
    server.forget()
    write_rows(source / "day=late" / "a.parquet", 2)
    assert "columns.d was 'int64' and is 'string'" in run_job(job, tmp_path, code=2).stderr
    assert server.sent == []
    assert batchrunner.run(other).rows_total == 6


READS = [
    ("batchrunner.input.dataset.DatasetReader._next_batch", "input"),
    ("batchrunner.input.sorted_copy.batch_rows", "prefix"),
]


def fail(monkeypatch: pytest.MonkeyPatch, read: str, calls: range) -> None:
    """Let these calls of a function that reads fail, as those of a network do."""
    monkeypatch.setattr(TIMING, "read_retries", (0.01, 0.01))
    function = operator.attrgetter(read.removeprefix("batchrunner."))(batchrunner)
    numbers = itertools.count()

    def flaky(*arguments: Any) -> Any:
        if next(numbers) in calls:
            raise OSError(5, "Input/output error")
        return function(*arguments)

    monkeypatch.setattr(read, flaky)


@pytest.mark.parametrize(("read", "order"), READS)
def test_input_that_cannot_be_read_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, read: str, order: str
) -> None:
    """What a mount or a store denies in mid-run is asked for again, from where it was."""
    fail(monkeypatch, read, range(1, 3))
    job = job_of(tmp_path, order=order, rows=900)
    assert batchrunner.run(job).rows_ok == 900
    assert rows_in(job) == list(range(900))
    assert caplog.text.count("cannot be read: [Errno 5] Input/output error: tried again in") == 2


@pytest.mark.parametrize(("read", "order"), READS)
def test_input_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str, order: str) -> None:
    """Where it stays away the run stops, and goes on when it is there again."""
    job = job_of(tmp_path, order=order, rows=900)
    with monkeypatch.context() as lost:
        fail(lost, read, range(1, 1000))
        result = run_job(job, tmp_path, "-q", code=1)
    assert result.stderr.splitlines()[-1].endswith("Input/output error: run the same command again")
    run_job(job, tmp_path)
    assert rows_in(job) == list(range(900))


@pytest.mark.parametrize("samples", [1, 2])
def test_failed_rows_are_final_unless_asked_for(tmp_path: Path, server: FakeSGLang, samples: int) -> None:
    """Failed rows are not sent again by another start, and are by `--retry-failed`, and only they."""
    server.script = lambda sent: "too long" if sent.prompt in {"row 2", "row 7"} else "answer"
    job = job_of(tmp_path, server, output={"part_rows": 3}, sampling={"n": samples})
    run_job(job, tmp_path, code=3)
    server.forget()
    run_job(job, tmp_path, code=3)
    assert server.sent == []
    server.script = lambda sent: "too long" if sent.prompt == "row 7" else "answer"
    run_job(job, tmp_path, "--retry-failed", code=3)
    assert rows_sent(server) == [2, 7]
    report = report_of(job)
    assert (report["rows_ok"], report["rows_failed"], report["rows_resumed"]) == (9, 1, 8)
    server.script = lambda _: "answer"
    run_job(job, tmp_path, "--retry-failed")
    rows_once(job, 10)


def test_a_finished_run_is_judged_by_the_limits_of_its_last_start(tmp_path: Path, server: FakeSGLang) -> None:
    """Its report and `merge` say what that start said, although it had nothing to do."""
    server.script = lambda sent: "too long" if sent.prompt == "row 3" else "answer"
    job = job_of(tmp_path, server)
    run_job(job, tmp_path, code=3)
    run_job(job, tmp_path, "--set", "limits.max_failed_rows=50%")
    report = report_of(job)
    assert (report["exit_code"], report["reason"], report["starts"]) == (0, "done", 1)
    assert "tolerates" not in batchrun("merge", tmp_path / "run").stderr
    run_job(job, tmp_path, code=3)
    assert "tolerates" in batchrun("merge", tmp_path / "run").stderr


def test_retry_failed_costs_nothing_when_it_cannot_start(tmp_path: Path, server: FakeSGLang) -> None:
    """The errors of failed rows stay where they are until there is an engine that takes the rows again."""
    server.script = lambda sent: "too long" if sent.prompt == "row 2" else "answer"
    job = job_of(tmp_path, server)
    batchrunner.run(job)
    before = results_of(job)
    with pytest.raises(EngineStartError):
        batchrunner.run(job, retry_failed=True, overrides=["engine.urls=['http://127.0.0.1:9']"])
    assert results_of(job) == before
    server.model = "other/model"
    with pytest.raises(ResumeError):
        batchrunner.run(job, retry_failed=True)
    assert results_of(job) == before


FAULTS: list[Behaviour] = [
    "busy 429", "busy 503", "broken 500", "abort", "abort 503", "empty", "disconnect", "no answer",
]  # fmt: skip
ENDS: list[Behaviour] = ["answer", "answer", "too long", "abort 400", "broken 500"]
fates = st.tuples(st.lists(st.sampled_from(FAULTS), max_size=2), st.sampled_from(ENDS))


@pytest.mark.usefixtures("quick_retries")
@examples(20)
@given(
    rows=st.lists(fates, min_size=1, max_size=60),
    window=st.integers(1, 8),
    part_rows=st.integers(1, 12),
    stops=st.lists(st.integers(1, 40), max_size=3),
    torn=st.booleans(),
)
def test_every_row_ends_once_over_all_starts(
    rows: list[tuple[list[Behaviour], Behaviour]],
    window: int,
    part_rows: int,
    stops: list[int],
    *,
    torn: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whatever fails, and however often a run is cut off: each row ends once, as its own last try went.

    None that has ended is sent again.
    """
    tmp_path = tmp_path_factory.mktemp("starts")

    async def one_start(stop_at: int) -> None:
        """Run the job; cancel it at the request with this number."""
        running = asyncio.create_task(batchrunner.arun(job))
        loop = asyncio.get_running_loop()

        def script(sent: Sent) -> Behaviour:
            if len(server.sent) == stop_at:
                loop.call_soon_threadsafe(running.cancel)
            if is_control(sent):
                return "answer"
            before, at_last = rows[sent.row]
            return before[sent.tries - 1] if sent.tries <= len(before) else at_last

        server.script = script
        await asyncio.wait([running])
        assert running.cancelled() or running.result().rows_left == 0

    with FakeSGLang() as server:
        job = job_of(
            tmp_path, server, rows=len(rows), window=window, output={"part_rows": part_rows},
            limits={"abort_failed_share": 1, "max_attempts": 4},
        )  # fmt: skip
        for stop_at in [*stops, 10**9]:
            before = set(rows_in(job))
            server.forget()
            asyncio.run(one_start(stop_at))
            assert before.isdisjoint(rows_sent(server))
            assert before <= set(rows_in(job))
            if torn and (tmp_path / "run" / "parts").is_dir():
                (tmp_path / "run" / "parts" / ".part-main-999999.parquet.tmp").write_bytes(b"torn")
        tries = Counter(rows_sent(server))
    found = results_of(job)
    assert [row["row"] for row in found] == list(range(len(rows)))
    assert [row["error"] is None for row in found] == [at_last == "answer" for _, at_last in rows]
    assert stops or [row["attempts"] for row in found] == [tries[row] for row in range(len(rows))]
    report = report_of(job)
    failed = sum(row["error"] is not None for row in found)
    assert (report["rows_ok"], report["rows_failed"]) == (len(rows) - failed, failed)
