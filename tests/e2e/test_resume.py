"""Stopped in whatever way and started again: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import json
import operator
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchrunner
from batchrunner.core.errors import EngineStartError, OutputError, ResumeError
from tests.conftest import (
    INSTANT,
    batchrun,
    eventually,
    job_of,
    parts_of,
    report_of,
    results_of,
    started,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

if TYPE_CHECKING:
    from collections.abc import Callable


def rows_in(job: dict[str, Any]) -> list[int]:
    return [row["row"] for row in results_of(job)]


def rows_sent(server: FakeSGLang) -> list[int]:
    return sorted(int(sent.prompt.split()[1]) for sent in server.sent)


def held_from(row: int) -> Callable[[Sent], Behaviour]:
    return lambda sent: "hold" if int(sent.prompt.split()[1]) >= row else "answer"


def some_done(directory: Path, server: FakeSGLang, **changes: Any) -> dict[str, Any]:
    """Do the first 4 of 10 rows of a job; return the whole job."""
    job = job_of(directory, server, **changes)
    batchrunner.run(job, overrides=["input.limit=4"])
    server.forget()
    return job


# --- what goes on ---


def test_a_finished_run_sends_nothing(tmp_path: Path, server: FakeSGLang) -> None:
    """Starting a run that is done is free, even when its engine is gone."""
    job = job_of(tmp_path, server)
    batchrunner.run(job)
    report = batchrunner.run({**job, "engine": {"kind": "attach", "urls": ["http://127.0.0.1:9"]}})
    assert (report.exit_code, report.rows_ok, report.rows_resumed) == (0, 10, 10)
    assert len(server.sent) == 10


def test_a_larger_limit_goes_on(tmp_path: Path, server: FakeSGLang) -> None:
    """A run that was tried with a few rows is continued with all of them."""
    job = some_done(tmp_path, server)
    report = batchrunner.run(job)
    assert (report.rows_total, report.rows_ok, report.rows_resumed) == (10, 10, 4)
    assert rows_sent(server) == list(range(4, 10))
    assert rows_in(job) == list(range(10))


@pytest.mark.parametrize(
    "change",
    [
        "window=2",
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


def test_dates_are_the_same_dates(tmp_path: Path) -> None:
    """What YAML reads as a date, and run.json keeps as a text, makes no other run."""
    job = job_of(
        tmp_path, prompt={"user": "{{ text }}", "chat_template_kwargs": {"date": dt.date(2024, 7, 26)}}
    )
    batchrunner.run(job, overrides=["input.limit=4"])
    assert batchrunner.run(job).rows_resumed == 4


def test_another_address_of_the_same_model(tmp_path: Path, server: FakeSGLang) -> None:
    """An engine that was restarted elsewhere goes on with the run."""
    job = some_done(tmp_path, server)
    with FakeSGLang() as another:
        batchrunner.run(job, overrides=[f"engine.urls=[{another.url}]"])
        assert rows_sent(another) == list(range(4, 10))
    assert server.sent == []


def test_moved_files_are_the_same_files(tmp_path: Path, server: FakeSGLang) -> None:
    """An input that was moved with its content unchanged is the same input."""
    job = some_done(tmp_path, server)
    (tmp_path / "input.parquet").rename(tmp_path / "moved.parquet")
    assert batchrunner.run(job, overrides=[f"input.path={tmp_path}/moved.parquet"]).rows_resumed == 4


def test_files_that_were_added(tmp_path: Path, server: FakeSGLang) -> None:
    """An input that grows by files after the known ones is continued with their rows."""
    source = tmp_path / "in"
    write_rows(source / "day1.parquet", 3)
    job = job_of(tmp_path, server, input={"path": str(source), "columns": ["id"]})
    batchrunner.run(job)
    server.forget()
    write_rows(source / "day2.parquet", 4, first=3)
    report = batchrunner.run(job)
    assert (report.rows_total, report.rows_resumed) == (7, 3)
    assert rows_sent(server) == [3, 4, 5, 6]
    assert [(row["row"], row["id"]) for row in results_of(job)] == [(i, i) for i in range(7)]


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
    with pytest.raises(ResumeError, match=r"'day', .* was int64 .* make it string"):
        batchrunner.run(job)
    assert batchrun(write_job(job, tmp_path)).exit_code == 2
    assert server.sent == []
    assert batchrunner.run(other).rows_total == 6
    assert batchrun("merge", tmp_path / "run").exit_code == 0


READS = [
    ("batchrunner.input.dataset.Dataset.open_group", "input"),
    ("batchrunner.input.row_reader.SortedCopy._read_group", "prefix"),
]


def fail(monkeypatch: pytest.MonkeyPatch, read: str, calls: range) -> None:
    """Let these calls of a function that reads fail, as those of a network do."""
    monkeypatch.setattr("batchrunner.runner.row_source.READ_PAUSES_S", (0.01, 0.01))
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
    job = job_of(tmp_path, order=order)
    assert batchrunner.run(job).rows_ok == 10
    assert rows_in(job) == list(range(10))
    assert caplog.text.count("cannot be read: [Errno 5] Input/output error: tried again in") == 2


@pytest.mark.parametrize(("read", "order"), READS)
def test_input_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str, order: str) -> None:
    """Where it stays away the run stops, and goes on when it is there again."""
    job = job_of(tmp_path, order=order)
    with monkeypatch.context() as lost:
        fail(lost, read, range(1, 1000))
        result = batchrun(write_job(job, tmp_path), "-q")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith("Input/output error: run the same command again")
    assert batchrun(write_job(job, tmp_path)).exit_code == 0
    assert rows_in(job) == list(range(10))


# --- what is refused ---


def change_the_input(directory: Path) -> list[str]:
    write_rows(directory / "input.parquet", 10, first=1)
    return []


def put_a_file_before(directory: Path) -> list[str]:
    write_rows(directory / "a.parquet", 10, first=1)
    return [f"input.path=[{directory}/a.parquet, {directory}/input.parquet]"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (change_the_input, "the input file"),
        (put_a_file_before, "input.parquet: name it to come last"),
        (["prompt.text='Say {{ text }}'"], "prompt.text was 'text' and is 'Say {{ text }}'"),
        (["prompt={user: '{{ text }}'}"], "prompt.text was 'text' and is unset"),
        (["sampling.temperature=0.5"], "sampling.temperature was unset and is 0.5"),
        (["sampling.n=2"], "sampling.n was 1 and is 2"),
        (["input.filter=id > 2"], "input.filter was unset and is 'id > 2'"),
        (["input.columns=[id]"], "input.columns was [] and is ['id']"),
        (["input.limit=2"], "input.limit was 4 and is 2: it can only grow"),
    ],
)
def test_another_run_is_refused(
    tmp_path: Path,
    server: FakeSGLang,
    change: list[str] | Callable[[Path], list[str]],
    told: str,
) -> None:
    """Results of two different jobs never mix: what differs is said in one line, with the way out."""
    job = some_done(tmp_path, server)
    overrides = change if isinstance(change, list) else change(tmp_path)
    arguments = [argument for override in overrides for argument in ("--set", override)]
    before = results_of(job)
    result = batchrun(write_job(job, tmp_path), *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"batchrun: {tmp_path}/run holds another run: ")
    assert told in line
    assert "take another output.path, or discard what is there with --fresh (with --join" in line
    assert (server.sent, results_of(job)) == ([], before)


def test_a_refused_start_binds_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job that was refused once the engine was there can be corrected."""
    job = job_of(tmp_path)
    with pytest.raises(EngineStartError, match="no tokenizer that we know of"):
        batchrunner.run(job, overrides=["prompt.truncate=head"])
    assert caplog.records == []
    assert batchrunner.run(job).rows_ok == 10


def test_another_model_is_refused(tmp_path: Path, server: FakeSGLang) -> None:
    """An address where another model answers now does not continue the run."""
    job = some_done(tmp_path, server)
    server.model = "other/model"
    with pytest.raises(ResumeError, match="model was 'fake/model' and is 'other/model'"):
        batchrunner.run(job)
    assert server.sent == []


def test_parts_without_a_run_are_refused(tmp_path: Path, server: FakeSGLang) -> None:
    """Parts of which nobody knows where they come from are not added to."""
    job = some_done(tmp_path, server)
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(ResumeError, match=r"has results but no run\.json"):
        batchrunner.run(job)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"format": 1}'])
def test_a_broken_run_file_is_refused(tmp_path: Path, server: FakeSGLang, content: str) -> None:
    """A run file that cannot be read is named with the way out."""
    job = some_done(tmp_path, server)
    (tmp_path / "run" / "run.json").write_text(content)
    with pytest.raises(ResumeError, match=r"run\.json: not a run file of this version: .* --fresh"):
        batchrunner.run(job)


def cut_off(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-20])


def leave_out_the_errors(part: Path) -> None:
    pq.write_table(pq.read_table(part).drop_columns("error"), part)


@pytest.mark.parametrize("damage", [cut_off, leave_out_the_errors])
def test_a_damaged_part(tmp_path: Path, server: FakeSGLang, damage: Callable[[Path], None]) -> None:
    """A part that cannot be read is named, and moved away its rows are done again."""
    job = some_done(tmp_path, server)
    (part,) = (tmp_path / "run" / "parts").iterdir()
    damage(part)
    with pytest.raises(ResumeError) as caught:
        batchrunner.run(job)
    assert f"{part}: is damaged: move it away, and its rows will be done again" in str(caught.value)
    part.rename(tmp_path / "damaged")
    assert batchrunner.run(job).rows_ok == 10
    assert rows_sent(server) == list(range(10))


# --- fresh and retry-failed ---


def test_fresh_starts_again(tmp_path: Path, server: FakeSGLang) -> None:
    """`--fresh` discards what is there and takes any job."""
    job = some_done(tmp_path, server)
    file = write_job(job, tmp_path)
    assert batchrun(file, "--fresh", "--set", "prompt={text: 'Say {{ text }}'}").exit_code == 0
    assert len(server.sent) == 10
    report = report_of(job)
    assert (report["rows_resumed"], report["rows_ok"], report["starts"]) == (0, 10, 1)
    assert all(row["output"].startswith("answer 0 to Say row") for row in results_of(job))


@pytest.mark.parametrize("samples", [1, 2])
def test_failed_rows_are_final_unless_asked_for(tmp_path: Path, server: FakeSGLang, samples: int) -> None:
    """Failed rows are not sent again by another start, and are by `--retry-failed`, and only they."""
    server.script = lambda sent: "too long" if sent.prompt in {"row 2", "row 7"} else "answer"
    job = job_of(tmp_path, server, output={"part_rows": 3}, sampling={"n": samples})
    file = write_job(job, tmp_path)
    assert batchrun(file).exit_code == 3
    server.forget()
    assert batchrun(file).exit_code == 3
    assert server.sent == []
    server.script = lambda sent: "too long" if sent.prompt == "row 7" else "answer"
    assert batchrun(file, "--retry-failed").exit_code == 3
    assert rows_sent(server) == [2, 7]
    report = report_of(job)
    assert (report["rows_ok"], report["rows_failed"], report["rows_resumed"]) == (9, 1, 8)
    server.script = lambda _: "answer"
    assert batchrun(file, "--retry-failed").exit_code == 0
    assert rows_in(job) == list(range(10))
    assert all(row["error"] is None for row in results_of(job))


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


# --- one writer ---


def test_a_second_writer_is_refused(tmp_path: Path, server: FakeSGLang) -> None:
    """Two starts on one path cannot both write; the second one is told who does, --fresh or not."""
    server.script = held_from(5)
    job = job_of(tmp_path, server)
    with started(write_job(job, tmp_path)) as process:
        server.wait_for(10)
        for options in ([], ["--fresh"]):
            result = batchrun(tmp_path / "job.yaml", *options)
            assert result.exit_code == 2
            assert f"batchrun with pid {process.process.pid}" in result.stderr
            assert "is writing this run" in result.stderr
        server.answer_held()
        assert process.end() == 0
    assert rows_in(job) == list(range(10))
    assert len(server.sent) == 10


async def test_a_second_writer_in_the_same_process(tmp_path: Path, server: FakeSGLang) -> None:
    """The same holds for two runs of one program."""
    server.script = lambda _: "hold"
    job = job_of(tmp_path, server)
    first = asyncio.create_task(batchrunner.arun(job))
    await asyncio.to_thread(server.wait_for, 10)
    with pytest.raises(OutputError, match="is writing this run"):
        await batchrunner.arun(job)
    server.answer_held()
    assert (await first).rows_ok == 10


# --- the account over all starts ---


def test_times_add_up(tmp_path: Path, server: FakeSGLang) -> None:
    """The report tells this start's time and tokens apart from those of all starts."""
    job = some_done(tmp_path, server)
    first = report_of(job)
    second = batchrunner.run(job)
    assert (first["starts"], second.starts) == (1, 2)
    assert first["wall_s_all_starts"] == first["wall_s"]
    assert second.wall_s_all_starts == pytest.approx(first["wall_s"] + second.wall_s, abs=0.05)
    assert (second.output_tokens, second.output_tokens_all_starts) == (30, 50)
    third = batchrunner.run(job)
    assert third.wall_s_all_starts == pytest.approx(second.wall_s_all_starts, abs=0.05)


def test_times_of_killed_starts_add_up(tmp_path: Path) -> None:
    """A start that was killed, its last line torn, counts up to the last event that it wrote."""
    job = job_of(tmp_path)
    batchrunner.run(job)
    log = tmp_path / "run" / "events.jsonl"
    *others, last = log.read_bytes().splitlines(keepends=True)
    lasts = [re.sub(rb'"elapsed_s":[0-9.]+', b'"elapsed_s":%d.5' % s, last) for s in (100, 200, 300)]
    log.write_bytes(b"".join([*others, lasts[0], *others, lasts[1], *others, lasts[2], last[:20]]))
    report = batchrunner.run(job)
    assert (report.starts, report.wall_s_all_starts) == (3, 601.5)


# --- interrupts ---


def test_one_interrupt_drains(tmp_path: Path, server: FakeSGLang) -> None:
    """The first Ctrl-C sends no row any more, waits for those in flight, and it is exit 130, resumable."""
    check_drain(tmp_path, server, signal.SIGINT, 130)


def test_termination_drains(tmp_path: Path, server: FakeSGLang) -> None:
    """SIGTERM, which batch systems send, does the same with exit 143."""
    check_drain(tmp_path, server, signal.SIGTERM, 143)


def test_a_warning_of_the_time_limit_drains(tmp_path: Path, server: FakeSGLang) -> None:
    """SIGUSR1, which batch systems send before a time limit, does the same with exit 138."""
    check_drain(tmp_path, server, signal.SIGUSR1, 138)


def check_drain(directory: Path, server: FakeSGLang, number: signal.Signals, code: int) -> None:
    server.script = held_from(10)
    job = job_of(directory, server, rows=40, window=4)
    file = write_job(job, directory)
    with started(file) as process:
        server.wait_for(14)
        process.process.send_signal(number)
        process.wait_for_line("waiting for the rows in flight")
        server.answer_held()
        assert process.end() == code
    assert rows_in(job) == list(range(14))
    report = report_of(job)
    assert (report["exit_code"], report["rows_ok"]) == (code, 14)
    server.forget()
    assert batchrun(file).exit_code == 0
    assert rows_sent(server) == list(range(14, 40))
    assert rows_in(job) == list(range(40))


def test_a_drain_has_an_end(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows that do not end within limits.drain of a SIGUSR1 are cut; what had ended is kept."""
    server.script = held_from(10)
    job = job_of(tmp_path, server, rows=40, window=4, limits={"drain": 0.2})
    with started(write_job(job, tmp_path)) as process:
        server.wait_for(14)
        process.process.send_signal(signal.SIGUSR1)
        assert process.end() == 138
    assert rows_in(job) == list(range(10))
    assert report_of(job)["reason"] == "time is nearly up"


def test_a_second_sigterm_changes_nothing(tmp_path: Path, server: FakeSGLang) -> None:
    """Slurm's SIGTERM comes twice, to us and through our script: that is no wish to stop now."""
    server.script = held_from(10)
    job = job_of(tmp_path, server, rows=40, window=4)
    with started(write_job(job, tmp_path)) as process:
        server.wait_for(14)
        process.process.send_signal(signal.SIGTERM)
        process.wait_for_line("waiting for the rows in flight")
        process.process.send_signal(signal.SIGTERM)
        process.process.send_signal(signal.SIGUSR1)
        server.answer_held()
        assert process.end() == 143
    assert rows_in(job) == list(range(14))


def test_two_interrupts_stop_now(tmp_path: Path, server: FakeSGLang) -> None:
    """The second Ctrl-C waits for nobody; what had ended is kept and the rest is resumed."""
    server.script = held_from(10)
    job = job_of(tmp_path, server, rows=40, window=4)
    file = write_job(job, tmp_path)
    with started(file) as process:
        server.wait_for(14)
        process.process.send_signal(signal.SIGINT)
        process.wait_for_line("interrupted: waiting for the rows in flight")
        process.process.send_signal(signal.SIGINT)
        assert process.end() == 130
    assert "Traceback" not in "".join(process.lines)
    assert rows_in(job) == list(range(10))
    assert report_of(job)["rows_ok"] == 10
    server.forget()
    server.script = lambda _: "answer"
    assert batchrun(file).exit_code == 0
    assert rows_sent(server) == list(range(10, 40))


def test_a_kill_leaves_whole_parts(tmp_path: Path, server: FakeSGLang) -> None:
    """After SIGKILL the parts are whole, none of their rows is sent again, and all others are."""
    server.script = held_from(23)
    job = job_of(tmp_path, server, rows=40, window=4, output={"part_rows": 5})
    file = write_job(job, tmp_path)
    with started(file) as process:
        server.wait_for(27)
        eventually(lambda: len(parts_of(tmp_path / "run")) >= 2)
        process.process.kill()
        assert process.end() == -signal.SIGKILL
    survived = rows_in(job)
    assert len(survived) >= 10
    state = json.loads(batchrun("status", tmp_path / "run", "--json").stdout)
    assert state["running"] is None
    assert len(survived) <= state["rows_on_disk"] <= 23  # those in the journal too
    # what a kill in mid-write would leave
    (tmp_path / "run" / "parts" / ".part-main-000099.parquet.tmp").write_bytes(b"PAR1 torn")
    server.forget()
    server.script = lambda _: "answer"
    assert batchrun(file).exit_code == 0
    assert len(rows_sent(server)) == 40 - state["rows_on_disk"]
    assert not set(rows_sent(server)) & set(survived)
    assert rows_in(job) == list(range(40))
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert report_of(job)["starts"] == 2


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGUSR1, 1, "time is nearly up")],
)
def test_a_signal_while_the_engine_starts(
    tmp_path: Path, number: signal.Signals, code: int, told: str
) -> None:
    """It ends the wait and leaves no results behind; a start that eats its time limit asks for no requeue."""
    fifo = tmp_path / "python-is-running"
    os.mkfifo(fifo)
    slow = tmp_path / "slow-python"
    slow.write_text(f'#!/bin/sh\necho up > "{fifo}"\ncat > /dev/null\n')
    slow.chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    engine = {"kind": "server", "model": str(tmp_path / "model"), "python": str(slow)}
    with started(write_job(job_of(tmp_path, engine), tmp_path)) as process:
        assert fifo.read_text() == "up\n"
        process.process.send_signal(number)
        assert process.end() == code
    assert "Traceback" not in "".join(process.lines)
    assert f"batchrun: {told} while the engine was starting\n" in process.lines


# --- and all of it at once ---


@settings(max_examples=25)
@given(
    rows=st.integers(1, 60),
    window=st.integers(1, 8),
    part_rows=st.integers(1, 12),
    stops=st.lists(st.integers(1, 40), max_size=3),
    refused=st.sets(st.integers(0, 59)),
    torn=st.booleans(),
)
def test_every_row_ends_once_over_all_starts(
    rows: int,
    window: int,
    part_rows: int,
    stops: list[int],
    refused: set[int],
    *,
    torn: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """However often a run is cut off, and where, every row is in the parts once and none is resent."""
    tmp_path = tmp_path_factory.mktemp("starts")

    async def one_start(stop_at: int) -> None:
        """Run the job; cancel it at the request with this number."""
        running = asyncio.create_task(batchrunner.arun(job))
        loop = asyncio.get_running_loop()

        def script(sent: Sent) -> Behaviour:
            if len(server.sent) == stop_at:
                loop.call_soon_threadsafe(running.cancel)
            return "too long" if int(sent.prompt.split()[1]) in refused else "answer"

        server.script = script
        await asyncio.wait([running])
        assert running.cancelled() or running.result().rows_left == 0

    with FakeSGLang() as server:
        job = job_of(
            tmp_path,
            server,
            rows=rows,
            window=window,
            output={"part_rows": part_rows},
            limits={"abort_failed_share": 1},
        )
        for stop_at in [*stops, 10**9]:
            before = set(rows_in(job))
            server.forget()
            asyncio.run(one_start(stop_at))
            assert before.isdisjoint(rows_sent(server))
            assert before <= set(rows_in(job))
            if torn and (tmp_path / "run" / "parts").is_dir():
                (tmp_path / "run" / "parts" / ".part-main-999999.parquet.tmp").write_bytes(b"torn")
    found = results_of(job)
    assert [row["row"] for row in found] == list(range(rows))
    assert [row["error"] is None for row in found] == [row not in refused for row in range(rows)]
    report = report_of(job)
    assert (report["rows_ok"], report["rows_failed"]) == (
        len(set(range(rows)) - refused),
        len(set(range(rows)) & refused),
    )


def test_resumed_results_merge(tmp_path: Path) -> None:
    """Parts of several starts make one dataset in input order."""
    job = job_of(tmp_path, INSTANT, rows=30, output={"part_rows": 4})
    for limit in (3, 17, 30):
        batchrunner.run(job, overrides=[f"input.limit={limit}"])
    result = batchrun("merge", tmp_path / "run")
    merged = pq.read_table(Path(result.stdout.strip()))
    assert merged.column("row").to_pylist() == list(range(30))
