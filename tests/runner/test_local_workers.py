"""Several processes of one run on this machine: `batchrun JOB --processes N`."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from batchrunner.runner.leases import Leases
from tests.conftest import batchrun, eventually, job_of, rows_in, started, write_job, write_rows
from tests.support.fake_sglang import FakeSGLang
from tests.support.runs import status_of


def processes_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in children for child in path.read_text().split()]


def holders_of_leases(run: Path) -> list[int]:
    """Return the processes that hold rows of a run."""
    leases = Leases(run / "leases")
    leases.refresh()
    owners = [run / "tasks" / task / "owner" for task in leases.held().values()]
    return [json.loads(owner.read_bytes())["pid"] for owner in owners]


def test_processes_share_the_rows(tmp_path: Path, server: FakeSGLang) -> None:
    """Of three processes, one is killed while it has rows; the others do them, and one report counts all."""
    server.script = lambda _: "hold"
    job = job_of(tmp_path, server, rows=300, window=8)
    with started(write_job(job, tmp_path), "--processes", 3) as running:
        eventually(lambda: server.sent and len(processes_of(running.process.pid)) == 3)
        os.kill(holders_of_leases(tmp_path / "run")[0], signal.SIGKILL)
        server.script = lambda _: "answer"
        server.answer_held()
        assert running.end() == 0
    assert rows_in(job) == list(range(300))
    assert len(status_of(tmp_path / "run")["tasks"]) >= 2
    assert any("the others take over its rows: signal 9 killed a process" in line for line in running.lines)
    assert any("300" in line for line in running.lines)


def test_a_signal_kills_all_processes(tmp_path: Path, server: FakeSGLang) -> None:
    """The command ends with one line that says what was killed, and promises no take-over."""
    server.script = lambda _: "hold"
    job = job_of(tmp_path, server, rows=300, window=8)
    with started(write_job(job, tmp_path), "--processes", 1) as running:
        eventually(lambda: server.sent)
        os.kill(holders_of_leases(tmp_path / "run")[0], signal.SIGKILL)
        assert running.end() == 1
    warning, error = [line.strip() for line in running.lines if "signal 9" in line]
    assert warning.endswith("a process ended: signal 9 killed a process of the run")
    assert error == "batchrun: signal 9 killed a process of the run"


def test_an_interrupt_ends_all_processes(tmp_path: Path, server: FakeSGLang) -> None:
    """A Ctrl-C lets the rows in flight of all processes end, and the next start does the other rows."""
    answered: set[str] = set()
    server.script = lambda sent: "answer" if sent.prompt in answered else "hold"
    job = job_of(tmp_path, server, rows=2000, window=4)
    with started(write_job(job, tmp_path), "--processes", 2) as running:
        eventually(lambda: len(server.sent) >= 4 and len(processes_of(running.process.pid)) == 2)
        processes = processes_of(running.process.pid)
        running.process.send_signal(signal.SIGINT)

        def ends() -> bool:
            """Answer the rows in flight; a process that the signal has not reached yet sends more."""
            answered.update(server.prompts)
            server.ask_again()
            return running.process.poll() is not None

        eventually(ends)
        assert running.end() == 130
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    assert 4 <= len(rows_in(job)) < 2000
    server.script = lambda _: "answer"
    assert batchrun(write_job(job, tmp_path), "--processes", 2).exit_code == 0
    assert rows_in(job) == list(range(2000))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": {"text": "Another {{ text }}"}}, "prompt.text"),
        ({"input": {"path": "not-there.parquet"}}, "not-there.parquet"),
    ],
)
def test_a_finished_run_does_not_hide_a_refusal(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A job that all processes refuse is not done, although the run at its path is."""
    job = job_of(tmp_path, rows=20)
    assert batchrun(write_job(job, tmp_path), "--processes", 2).exit_code == 0
    result = batchrun(write_job(job | change, tmp_path), "--processes", 2)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]


def test_failed_rows_are_no_failed_process(tmp_path: Path, server: FakeSGLang) -> None:
    """Processes whose rows fail have done their rows: nobody takes them over."""
    server.script = lambda _: "too long"
    job = job_of(tmp_path, server, rows=300, limits={"abort_failed_share": 1.0})
    result = batchrun(write_job(job, tmp_path), "--processes", 2)
    assert result.exit_code == 3
    assert "a process ended" not in result.stderr


def test_a_file_that_appears_during_the_run(tmp_path: Path, server: FakeSGLang) -> None:
    """The run is not done: the next start does the rows of the new file."""
    server.script = lambda _: "hold"
    write_rows(tmp_path / "docs" / "0.parquet", 20)
    job = job_of(tmp_path, server, input={"path": str(tmp_path / "docs")})
    with started(write_job(job, tmp_path), "--processes", 1) as running:
        eventually(lambda: server.sent)
        write_rows(tmp_path / "docs" / "1.parquet", 5)
        server.script = lambda _: "answer"
        server.answer_held()
        assert running.end() == 1
    assert any("1.parquet appeared in the input" in line for line in running.lines)
    assert batchrun(write_job(job, tmp_path), "--processes", 2).exit_code == 0
    assert rows_in(job) == list(range(25))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"engine": {"kind": "server", "model": "m"}}, (), "each process would start SGLang"),
        ({}, ("--fresh",), "--fresh would discard"),
        ({}, ("--metrics", ":9400"), "--metrics"),
        ({"prompt": {"text": "no_such_column"}}, (), "no_such_column"),
    ],
)
def test_what_processes_cannot_share(
    tmp_path: Path, changes: dict[str, Any], options: tuple[str, ...], message: str
) -> None:
    """An engine that each process would start, and a wrong job, end the command with one line."""
    job = job_of(tmp_path) | changes
    result = batchrun(write_job(job, tmp_path), "--processes", 2, *options)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]
