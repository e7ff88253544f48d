"""Ctrl-C, SIGTERM, SIGKILL and time limits: a run drains or stops, and nothing is lost."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import (
    Started,
    batchrun,
    eventually,
    job_of,
    report_of,
    rows_in,
    run_job,
    started,
    started_python,
    write_job,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.runs import held_from, rows_once, rows_sent, status_of, until_stored


@contextlib.contextmanager
def at_work(job: dict[str, Any], directory: Path, server: FakeSGLang) -> Iterator[Started]:
    """Run the command on a job of 40 rows: ten are answered, and four are in flight."""
    server.script = held_from(10)
    with started(write_job(job, directory)) as process:
        server.wait_for(14)
        yield process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)]
)
def test_one_signal_drains(tmp_path: Path, server: FakeSGLang, number: signal.Signals, code: int) -> None:
    """No row is sent any more, those in flight are waited for and counted; the run can be resumed."""
    job = job_of(tmp_path, server, rows=40, window=4)
    with at_work(job, tmp_path, server) as process:
        process.process.send_signal(number)
        process.wait_for_line("waiting for the rows in flight")
        again = "; a second Ctrl-C stops now, and the next start sends these rows again"
        assert (again in process.lines[-1]) == (number == signal.SIGINT)
        process.wait_for_line("10/40 rows, stopping: 4 in flight, 0 failed, ")
        shown = ("status", tmp_path / "run")
        eventually(lambda: "10/40 rows, stopping: 4 in flight, " in batchrun(*shown).stdout)
        assert status_of(tmp_path / "run")["time_left_s"] is None
        server.answer_held()
        assert process.end() == code
    assert rows_in(job) == list(range(14))
    assert (report_of(job)["exit_code"], report_of(job)["rows_ok"]) == (code, 14)
    server.forget()
    run_job(job, tmp_path)
    assert rows_sent(server) == list(range(14, 40))


def test_a_drain_has_an_end(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows that do not end within limits.drain of a SIGUSR1 are cut; what had ended is kept."""
    job = job_of(tmp_path, server, rows=40, window=4, limits={"drain": 0.2})
    with at_work(job, tmp_path, server) as process:
        process.process.send_signal(signal.SIGUSR1)
        assert process.end() == 138
    assert rows_in(job) == list(range(10))
    assert report_of(job)["reason"] == "the time limit is near"


def test_a_second_sigterm_changes_nothing(tmp_path: Path, server: FakeSGLang) -> None:
    """Slurm's SIGTERM comes twice, to us and through our script: that is no wish to stop now."""
    job = job_of(tmp_path, server, rows=40, window=4)
    with at_work(job, tmp_path, server) as process:
        process.process.send_signal(signal.SIGTERM)
        process.wait_for_line("waiting for the rows in flight")
        process.process.send_signal(signal.SIGTERM)
        process.process.send_signal(signal.SIGUSR1)
        server.answer_held()
        assert process.end() == 143
    assert rows_in(job) == list(range(14))


def test_two_interrupts_stop_now(tmp_path: Path, server: FakeSGLang) -> None:
    """The second Ctrl-C waits for nobody; what had ended is kept and the rest is resumed."""
    job = job_of(tmp_path, server, rows=40, window=4)
    with at_work(job, tmp_path, server) as process:
        process.process.send_signal(signal.SIGINT)
        process.wait_for_line("interrupted: waiting for the rows in flight")
        process.process.send_signal(signal.SIGINT)
        assert process.end() == 130
    assert "Traceback" not in "".join(process.lines)
    assert rows_in(job) == list(range(10))
    server.forget()
    server.script = lambda _: "answer"
    run_job(job, tmp_path)
    assert rows_sent(server) == list(range(10, 40))


BLOCKS = """
open({mark!r}, "w").write("up")
import time
time.sleep(600)

def prompt(row):
    return row["text"]
"""
"""A module of a job's Python function whose import does not end."""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A pipe into which what blocks says that it does."""
    path = tmp_path / "blocks"
    os.mkfifo(path)
    return path


@pytest.fixture
def blocking_job(tmp_path: Path, mark: Path) -> Path:
    """A job whose input cannot be prepared for ten minutes."""
    (tmp_path / "blocking.py").write_text(BLOCKS.format(mark=str(mark)))
    prompt = {"python": "blocking:prompt"}
    return write_job(job_of(tmp_path, prompt=prompt, python_path=[str(tmp_path)]), tmp_path)


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "interrupted"),
        (signal.SIGUSR1, 1, "the time limit is near"),
    ],
)
@pytest.mark.parametrize("waits_for", ["input", "version"])
def test_a_signal_before_the_first_row(
    tmp_path: Path,
    mark: Path,
    blocking_job: Path,
    waits_for: str,
    number: signal.Signals,
    code: int,
    told: str,
) -> None:
    """A run that prepares its input, or asks for the version of SGLang, ends with one line."""
    when = "before the first row was sent"
    if waits_for == "version":
        slow = tmp_path / "slow-python"
        slow.write_text(f'#!/bin/sh\necho up > "{mark}"\nexec sleep 600\n')
        slow.chmod(0o755)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("{}")
        engine = {"kind": "server", "model": str(tmp_path / "model"), "python": str(slow)}
        blocking_job, when = write_job(job_of(tmp_path, engine), tmp_path), "while the engine was starting"
    with started(blocking_job) as process:
        assert mark.read_text().strip() == "up"
        process.process.send_signal(number)
        assert process.end() == code
    assert [line for line in process.lines if told in line] == [f"batchrun: {told} {when}\n"]


def test_an_interrupt_of_a_blocked_main_thread() -> None:
    """A call that never returns, such as one to a dead mount, does not keep the command."""
    blocked = """
import signal, sys, time
from batchrunner.cli import main
from batchrunner.report import merged

def merge_run(*args, **options):
    # as in a call that does not return to Python: its handler of the signal does not run
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    print("blocked", file=sys.stderr, flush=True)
    time.sleep(600)

merged.merge_run = merge_run
sys.argv = ["batchrun", "merge", "run"]
main()
"""
    with started_python("-c", blocked) as process:
        process.wait_for_line("blocked")
        process.process.send_signal(signal.SIGINT)
        assert process.end() == 130
    assert process.lines == ["blocked\n", "batchrun: interrupted\n"]


@pytest.mark.parametrize(("words", "times"), [(["check"], 1), ([], 2)], ids=["check", "run"])
def test_interrupts_of_what_blocks(mark: Path, blocking_job: Path, words: list[str], times: int) -> None:
    """The process of the job's Python functions ends too; a second one waits for nothing."""
    with started(*words, blocking_job) as process:
        assert mark.read_text() == "up"
        for _ in range(times):
            process.process.send_signal(signal.SIGINT)
        assert process.end() == 130
    assert process.lines[-1].startswith("batchrun: interrupted")


def leave_a_zombie(task: Started) -> None:
    """Kill a process and do not ask for its exit status, as the first process of many containers."""
    task.process.kill()
    place = Path(f"/proc/{task.process.pid}")
    state = place / "stat"
    eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z")
    eventually(lambda: len(list((place / "task").iterdir())) == 1)  # other threads keep its files open


def test_the_next_start_goes_on(tmp_path: Path, server: FakeSGLang) -> None:
    """A start on the output path of a zombie is not refused, and `status` does not call it running."""
    server.script = held_from(20)
    job = job_of(tmp_path, server, rows=60, window=8, output={"durable": 0.1})
    file = write_job(job, tmp_path)
    with started(file) as killed:
        until_stored(tmp_path / "run", 20)
        assert status_of(tmp_path / "run")["running"]
        leave_a_zombie(killed)
        assert status_of(tmp_path / "run")["running"] is None
        server.answer_held()
        run_job(job, tmp_path)
    rows_once(job, 60)
