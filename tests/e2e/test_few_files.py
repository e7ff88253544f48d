"""A low limit on open files: what the run does not need is for connections, and a line says the cost."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import batchrunner
from batchrunner.input.dataset import Dataset
from tests.conftest import INSTANT, job_of, report_of, started_python, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv.pop(1)), int(sys.argv.pop(1))))
from batchrunner.cli import main
main()
"""


def run_limited(directory: Path, server: FakeSGLang, soft: int, hard: int, in_flight: int | None) -> str:
    """Run a job in a process with this limit on open files; return its standard error.

    No row is answered before so many are in flight, or as many as the process says.
    """
    rows = 400
    server.script = lambda _: "hold"
    job = job_of(directory, server, rows=rows, output={"path": str(directory / "run"), "part_rows": 100})
    with started_python("-c", LIMITED, soft, hard, write_job(job, directory)) as running:
        if in_flight is None:
            running.wait_for_line("can be in flight")
            in_flight = int(running.lines[-1].partition("at most ")[2].split()[0])
        server.wait_for(in_flight)
        server.answer_held()
        assert running.end() == 0
    assert report_of(job)["rows_ok"] == rows
    assert report_of(job)["retries"] == 0
    return "".join(running.lines)


@pytest.mark.parametrize(("limit", "least"), [(64, 28), (40, 4)])
def test_most_files_are_for_connections(tmp_path: Path, limit: int, least: int) -> None:
    """No connection fails for want of a file, and one line says what the limit is and costs."""
    with FakeSGLang(max_running=128) as server:
        said = run_limited(tmp_path, server, limit, limit, None)
        most = server.most_in_flight
    assert least <= most < limit
    (line,) = [line for line in said.splitlines() if "can be in flight" in line]
    assert f"at most {most} requests can be in flight, and the engine can run 128" in line
    assert f"ulimit -n {limit}" in line
    assert f"up to {1 - most / 128:.0%} of the speed is lost" in line


def test_the_soft_limit_is_raised(tmp_path: Path) -> None:
    """The hard limit is high: the soft one costs nothing, and nothing is said of it."""
    with FakeSGLang(max_running=100) as server:
        said = run_limited(tmp_path, server, 64, 1024, 100)
    assert "can be in flight" not in said


def test_the_page_of_many_parts(tmp_path: Path) -> None:
    """A run of more parts than files may be open has its page."""
    job = job_of(tmp_path, INSTANT, rows=300, output={"path": str(tmp_path / "run"), "part_rows": 3})
    page = tmp_path / "run" / "report.html"
    for arguments in ([write_job(job, tmp_path)], ["report", tmp_path / "run"]):
        command = [sys.executable, "-c", LIMITED, "64", "64", *map(str, arguments)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
        assert ended.returncode == 0, ended.stderr
    assert ">Prompts <small>tokens" in page.read_text()  # of the parts
    assert len(list((tmp_path / "run" / "parts").iterdir())) > 64


def test_the_limit_is_no_fault_of_the_input(tmp_path: Path) -> None:
    """An input file that cannot be opened for want of files says so."""
    job_of(tmp_path, rows=1)
    path = "input.parquet"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(batchrunner.InputError) as refused:
            Dataset(str(tmp_path / path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    told = f"{path}: not a readable Parquet file: too many open files: this process may open {free}: raise"
    assert told in str(refused.value)
