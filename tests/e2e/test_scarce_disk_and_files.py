"""A disk that is full, or turns read-only, and a low limit on open files."""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.output import writer
from tests.conftest import INSTANT, batchrun, job_of, report_of, results_of, started_python, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.refusals import AS_ROOT, refusal, told
from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def tiny_disk(size: str) -> Iterator[Path]:
    """Mount a small disk, outside of pytest's directories: one that stayed there could not be removed."""
    if not AS_ROOT:
        pytest.skip("only root may mount a small disk")
    place = Path(tempfile.mkdtemp(prefix="batchrunner-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    made = subprocess.run(mount, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    if made.returncode:
        place.rmdir()
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=PATIENCE_S)
        place.rmdir()


def test_full_disk(tmp_path: Path, server: FakeSGLang) -> None:
    """A disk without room is refused before work is done for nothing."""
    with tiny_disk("1m") as disk:
        message = refusal(job_of(tmp_path, server, output={"path": str(disk / "run")}), tmp_path)
        told(message, disk / "run", "the disk is full")
    assert server.sent == []


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """A disk that is full in mid-run ends it in one line, exit 1; with room again it goes on."""
    with tiny_disk("20m") as disk:
        with (disk / "ballast").open("wb", buffering=0) as ballast, FakeSGLang() as server:
            arrived = count(1)

            def fill(_: object) -> Any:
                if next(arrived) == 30:
                    with contextlib.suppress(OSError):
                        while ballast.write(bytes(4096)):
                            pass
                return "answer"

            server.script = fill
            path = str(disk / "run")
            job = job_of(tmp_path, server, rows=100, output={"path": path, "part_rows": 10}, window=2)
            job["limits"] = {"disk_wait": 2}
            result = batchrun(write_job(job, tmp_path), "-q")
            assert result.exit_code == 1, result.stderr
            (line,) = [line for line in result.stderr.splitlines() if line.startswith("batchrun: ")]
            told(line, disk / "run" / "parts", "No space left", "run the same command again")
            assert result.stderr.count("Traceback") == 0
        (disk / "ballast").unlink()
        with FakeSGLang() as another:
            urls = f"engine.urls=[{another.url}]"
            assert batchrun(write_job(job, tmp_path), "--set", urls).exit_code == 0
        assert report_of(job)["rows_ok"] == 100
        assert 0 < report_of(job)["rows_resumed"] < 100


def test_a_disk_that_turns_read_only(tmp_path: Path, server: FakeSGLang) -> None:
    """While nothing can be created under the output path the run pauses, and goes on when it can again."""
    run = Path(tempfile.mkdtemp(prefix="batchrunner-disk-"))  # as for a small disk
    with mounted_read_only(run):
        pass  # or this test is skipped
    job = job_of(tmp_path, server, rows=100, output={"path": str(run), "part_rows": 10}, window=2)
    with contextlib.ExitStack() as stack:
        arrived = count(1)

        def turn_read_only(_: object) -> Any:
            if next(arrived) == 30:
                stack.enter_context(mounted_read_only(run))
            return "answer"

        class TurnBack(logging.Handler):
            """Lets the directory be written again once the run has said that it pauses."""

            def emit(self, record: logging.LogRecord) -> None:
                if "the run pauses" in record.getMessage():
                    stack.close()

        log = logging.getLogger(writer.__name__)
        log.addHandler(turn_back := TurnBack())
        stack.callback(log.removeHandler, turn_back)
        server.script = turn_read_only
        result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 0, result.stderr
    told(result.stderr, "Read-only file system: the run pauses until it can be written", "written after")
    assert [row["row"] for row in results_of(job)] == list(range(100))
    shutil.rmtree(run)


@contextlib.contextmanager
def mounted_read_only(place: Path) -> Iterator[None]:
    """Mount a directory over itself, read-only; skips where that is not allowed."""
    for options in (["--bind", str(place), str(place)], ["-o", "remount,ro,bind", str(place)]):
        made = subprocess.run(
            ["mount", *options], check=False, capture_output=True, text=True, timeout=PATIENCE_S
        )
        if made.returncode:
            pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=PATIENCE_S)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from batchrunner.cli import main
main()
"""


def limited(size: int, *args: object) -> subprocess.CompletedProcess[str]:
    """Run the command where no file may become larger."""
    command = [sys.executable, "-c", LIMITED, str(size), *map(str, args)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("file", [None, "x.csv", "x.parquet"])
def test_merged_files_that_do_not_fit(tmp_path: Path, file: str | None) -> None:
    """One line that says what to do, exit code 2; what an earlier call wrote is as it was."""
    job = job_of(tmp_path, rows=2000)
    assert batchrun(write_job(job, tmp_path), "-q").exit_code == 0
    run, out = tmp_path / "run", tmp_path / (file or "run/merged")
    command = ("merge", run) if file is None else ("merge", run, out, "--force")
    assert batchrun(*command).exit_code == 0
    before = [path.read_bytes() for path in ([out] if file else out.iterdir())]
    ended = limited(4000, *command)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    told(line, "cannot be written: File too large", "run the same command again")
    assert line.startswith((f"batchrun: {out}: ", f"batchrun: {run}: "))
    assert [path.read_bytes() for path in ([out] if file else out.iterdir())] == before
    assert not [path for path in run.iterdir() if path.name.startswith((".", "merged."))]


FEW_FILES = """
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
    with started_python("-c", FEW_FILES, soft, hard, write_job(job, directory)) as running:
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
        command = [sys.executable, "-c", FEW_FILES, "64", "64", *map(str, arguments)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
        assert ended.returncode == 0, ended.stderr
    assert ">Prompts <small>tokens" in page.read_text()  # of the parts
    assert len(list((tmp_path / "run" / "parts").iterdir())) > 64
