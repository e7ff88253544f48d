"""Ctrl-C and SIGTERM where a command waits for what may never come: before the first row, or without any."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.conftest import job_of, started, started_python, write_job

if TYPE_CHECKING:
    from pathlib import Path

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
        (signal.SIGUSR1, 1, "time is nearly up"),
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
from batchrunner.cli import results
from batchrunner.cli.command import main
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


def test_an_interrupt_of_a_check_that_blocks(mark: Path, blocking_job: Path) -> None:
    """The process of the job's Python functions ends too."""
    with started("check", blocking_job) as process:
        assert mark.read_text() == "up"
        process.process.send_signal(signal.SIGINT)
        assert process.end() == 130
    assert process.lines[-1] == "batchrun: interrupted\n"


def test_the_second_interrupt_ends_a_blocked_start(mark: Path, blocking_job: Path) -> None:
    """Whatever the first one does, the second one waits for nothing."""
    with started(blocking_job) as process:
        assert mark.read_text() == "up"
        process.process.send_signal(signal.SIGINT)
        process.process.send_signal(signal.SIGINT)
        assert process.end() == 130
