"""What a run shows: a bar, lines, calls of a program."""

import asyncio
import itertools
import logging
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import JobError
from batchrunner.core.timing import TIMING
from tests.conftest import ROOT, job_of, write_job
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent


def read_all(descriptor: int) -> str:
    """Return what comes from a terminal until nobody writes to it any more."""
    pieces: list[bytes] = []
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # the other end was closed
            piece = b""
        if not piece:
            os.close(descriptor)
            return b"".join(pieces).decode()
        pieces.append(piece)


def run_on_terminal(columns: int, words: list[str], directory: Path) -> str:
    """Return what the command prints to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    given = {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "batchrunner", *words],
        cwd=directory, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **given},
    ):  # fmt: skip
        os.close(theirs)
        return read_all(ours)


def test_a_run_on_a_terminal(tmp_path: Path) -> None:
    """It opens with the rows and the order; the bar and the engine fit into its width."""
    write_job(job_of(tmp_path, output={"path": "run"}), tmp_path)
    printed = run_on_terminal(100, ["job.yaml"], tmp_path)
    lines = [line for line in re.split(r"[\r\n]+", printed) if line.strip()]
    assert any(line.startswith("10 rows to do, 0 done before; window ") for line in lines)
    assert any(line.startswith("order: ") for line in lines)
    bars = [line for line in lines if "%|" in line]
    assert max(map(len, bars)) <= 100
    assert "10/10" in bars[-1]
    assert "0 failed, #running-req" in bars[-1]
    assert lines[-1] == "run/parts"


def test_calls_are_a_second_apart(tmp_path: Path, server: FakeSGLang) -> None:
    """A program that writes each call to a log or a database is not flooded; the last call comes at once."""
    told: list[tuple[float, batchrunner.Progress]] = []
    enough = threading.Event()

    def listen(progress: batchrunner.Progress) -> None:
        told.append((time.monotonic(), progress))
        if [progress.rows_in_flight for _, progress in told].count(10) == 2:
            enough.set()
            server.answer_held()

    def script(sent: Sent) -> Behaviour:
        return "answer" if enough.is_set() else "hold"

    server.script = script
    report = batchrunner.run(job_of(tmp_path, server), on_progress=listen)
    assert report.rows_ok == 10
    times = [at for at, _ in told[:-1]]
    assert all(later - earlier > TIMING.progress * 0.9 for earlier, later in itertools.pairwise(times))
    assert [progress.rows_in_flight for _, progress in told].count(10) >= 2
    assert told[-1][1].rows_done == 10


def test_a_listener_that_has_to_be_awaited_is_refused(tmp_path: Path) -> None:
    """Nothing would await it, so that it would show nothing."""
    with pytest.raises(JobError, match="on_progress: an `async def` function cannot be used"):
        batchrunner.run(job_of(tmp_path), on_progress=asyncio.Queue[Any]().put)


def test_a_listener_that_fails_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A slip in what shows a run costs no rows: it is logged once."""

    def listen(progress: batchrunner.Progress) -> None:
        raise KeyError(progress.rows_done)

    with caplog.at_level(logging.ERROR, logger="batchrunner"):
        assert batchrunner.run(job_of(tmp_path), on_progress=listen).exit_code == 0
    assert caplog.text.count("on_progress raised an exception") == 1


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str], *, progress: bool) -> None:
    """The bar is written to standard error, and only where it is asked for."""
    options: dict[str, Any] = {"progress": True} if progress else {}
    batchrunner.run(job_of(tmp_path), **options)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert ("10/10" in shown.err) == progress
