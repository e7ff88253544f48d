"""What a run shows: a bar, lines, calls of a program."""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.progress import Snapshot
from batchrunner.runner.progress import ProgressBar
from tests.conftest import ROOT, job_of, write_job

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

LOAD = SchedulerLoad("http://127.0.0.1:30000", running=256, queue=1234, token_usage=0.87, source="loads")
BUSY = Snapshot(
    1_234_567, 700_123, 1234, 123.4, 23_456, 200_000, 126_000, 1356, 1350, 12, 3,
    (LOAD,), {LOAD.scheduler: (100, 2000)}, {}, simulated=False,
)  # fmt: skip
COLOUR = re.compile(r"\x1b\[\d*m")


class Terminal:
    """A terminal of so many columns, which reads back what was written to it."""

    def __init__(self, columns: int) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, columns))
        self.stream = os.fdopen(theirs, "w", encoding="utf-8")

    def read(self) -> str:
        """Return all that was written, to the end."""
        self.stream.close()
        return read_all(self._ours)


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


def shown(printed: str) -> list[str]:
    """Return the lines that were drawn, in order, without colours and movements of the cursor."""
    plain = re.sub(r"\x1b\[[A-Z]", "\r", COLOUR.sub("", printed))
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_two_lines_fit(columns: int) -> None:
    """The bar has room even for a long run, and nothing is cut."""
    terminal = Terminal(columns)
    bar = ProgressBar(terminal.stream)
    bar.show(BUSY)
    bar.close()
    printed = terminal.read()
    lines = shown(printed)
    assert max(map(len, lines)) <= columns
    progress = next(line for line in lines if "%|" in line)
    (cells,) = re.findall(r"\|(.*)\|", progress)
    assert len(cells) >= 10
    assert progress.endswith("700123/1234567 rows · 123.4 rows/s · 1 h 12 min left")
    engine = next(line for line in lines if "#running" in line)
    assert engine.startswith("#running-req 256 · #queue-req 1,234 (100-2,000) · usage 0.87 · ")
    assert engine.rstrip().endswith("1,234 failed")
    assert ("cache 63%" in engine) == (columns == 120)


def test_a_run_on_a_terminal(tmp_path: Path) -> None:
    """It opens with what, how and where in three lines; the rest needs `-v`."""
    write_job(job_of(tmp_path, output={"path": "run"}), tmp_path)
    printed = run_on_terminal(80, ["job.yaml"], tmp_path)
    assert not COLOUR.search(printed)
    lines = shown(printed)
    first = next(i for i, line in enumerate(lines) if line.startswith("rows:"))
    what, how, where = lines[first : first + 3]
    assert what.startswith("rows:    10 to do, model ")
    assert re.match(r"engine:  simulated, \d+ requests in flight, adapted to its load", how)
    assert where.startswith("results: run/parts (")
    assert max(map(len, (what, how, where))) <= 80
    assert "10/10 rows" in printed
    assert "order: " not in printed
    assert lines[-1] == "run/parts"
    verbose = run_on_terminal(80, ["job.yaml", "-v", "--fresh"], tmp_path)
    assert "order: " in verbose


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


def test_a_listener_that_fails_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A slip in what shows a run costs no rows: it is logged once."""

    def listen(progress: batchrunner.Progress) -> None:
        raise KeyError(progress.rows_done)

    with caplog.at_level(logging.ERROR, logger="batchrunner"):
        assert batchrunner.run(job_of(tmp_path), on_progress=listen).exit_code == 0
    assert caplog.text.count("on_progress failed") == 1


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str], *, progress: bool) -> None:
    """The bar is written to standard error, and only where it is asked for."""
    options: dict[str, Any] = {"progress": True} if progress else {}
    batchrunner.run(job_of(tmp_path), **options)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert ("10/10" in shown.err) == progress


async def _asynchronous(progress: batchrunner.Progress) -> None:
    """Do nothing."""


@pytest.mark.parametrize("given", [5, _asynchronous])
def test_what_cannot_be_called_is_refused_before_the_run(tmp_path: Path, given: Any) -> None:
    """A listener that no call could reach is a JobError in every function that takes one; nothing is sent."""
    for call in (
        lambda: batchrunner.run(job_of(tmp_path), on_progress=given),
        lambda: batchrunner.generate([], engine="simulated", on_progress=given),
        lambda: batchrunner.stream(["a"], engine="simulated", on_progress=given),
    ):
        with pytest.raises(batchrunner.JobError, match=r"^on_progress: .* a plain function of one argument"):
            call()
    assert not (tmp_path / "run").exists()
