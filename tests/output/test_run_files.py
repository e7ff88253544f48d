"""A pipe, a socket or a directory in place of a file of a run is one clear line, and nobody waits for it."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest

import batchrunner
from tests.conftest import batchrun, job_of, results_of, write_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType

PATIENCE_S = 120
FILES = [
    "run.json", "events.jsonl", "parts/part-main-000000.parquet", "parts/part-main-000009.parquet",
    "tasks/main/journal-000009-x", "tasks/main/owner", "tasks/main/heartbeat", "leases/plan-000000",
    "engine.log",
]  # fmt: skip
SOME = ["run.json", "parts/part-main-000000.parquet", "tasks/main/journal-000009-x"]
NO_PATH = "is a pipe, a socket or a device, and no file: move it away"


@pytest.fixture(autouse=True)
def _nobody_waits() -> Iterator[None]:
    """A command that waits for a pipe fails."""

    def fail(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(name="job")
def _job(tmp_path: Path) -> dict[str, object]:
    """A job whose run has done a part of its rows."""
    job = job_of(tmp_path)
    batchrunner.run(job, overrides=["input.limit=4"])
    return job


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.open(path.parent, os.O_RDONLY)  # the path of a socket has 107 bytes at most
        try:
            listening.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def put(path: Path, make: Callable[[Path], None]) -> None:
    """Put something in the place of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe(tmp_path: Path, job: dict[str, object], name: str) -> None:
    """Each command that reads a run says so; once it is away, the run goes on."""
    run = tmp_path / "run"
    kept = (run / name).read_bytes() if (run / name).is_file() else None
    put(run / name, os.mkfifo)
    file = write_job(job, tmp_path)
    commands = [
        ("merge", run), ("status", run), ("merge", run, tmp_path / "x.csv"), ("report", run),
        ("advise", run), (file,), (file, "--join"), ("check", file),
    ]  # fmt: skip
    for command in commands:
        result = batchrun(*command)
        assert result.exit_code == 2, (command, result.output)
        assert f"{run / name}: {NO_PATH}" in result.stderr.replace("\n", " "), command
    (run / name).unlink()
    if kept is not None:
        (run / name).write_bytes(kept)
    report = batchrunner.run(job)
    assert report.exit_code == 0, report.reason
    assert [row["row"] for row in results_of(job)] == list(range(10))


def test_a_link_to_a_pipe(tmp_path: Path, job: dict[str, object]) -> None:
    """A symbolic link is what it leads to."""
    os.mkfifo(tmp_path / "pipe")
    put(tmp_path / "run" / "report.json", lambda path: path.symlink_to(tmp_path / "pipe"))
    assert batchrun(write_job(job, tmp_path)).exit_code == 2


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("make", [a_socket, os.mkdir])
def test_a_socket_or_a_directory(
    tmp_path: Path, job: dict[str, object], name: str, make: Callable[[Path], None]
) -> None:
    """The same for what else is no file."""
    put(tmp_path / "run" / name, make)
    for command in (("merge", tmp_path / "run"), ("status", tmp_path / "run"), (write_job(job, tmp_path),)):
        result = batchrun(*command)
        assert result.exit_code == 2, (command, result.output)
        assert str(tmp_path / "run" / name) in result.stderr.replace("\n", " "), command


def test_a_pipe_beside_the_files(tmp_path: Path, job: dict[str, object]) -> None:
    """What has none of a run's names is nobody's."""
    os.mkfifo(tmp_path / "run" / "mine")
    os.mkfifo(tmp_path / "run" / "parts" / "mine")
    assert batchrun(write_job(job, tmp_path)).exit_code == 0
    assert batchrun("merge", tmp_path / "run").exit_code == 0
