"""A disk that is full, and a low limit on open files."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import (
    batchrun,
    ended,
    job_of,
    report_of,
    run_job,
    started_python,
    write_job,
)
from tests.support.fake_sglang import Behaviour, FakeSGLang
from tests.support.refusals import AS_ROOT, refusal, told
from tests.support.runs import rows_once
from tests.support.server_thread import PATIENCE_S


@contextlib.contextmanager
def tiny_disk(size: str) -> Iterator[Path]:
    """Mount a small disk, outside of pytest's directories: one that stayed there could not be removed."""
    if not AS_ROOT:
        pytest.skip("only root may mount a small disk")
    place = Path(tempfile.mkdtemp(prefix="batchrunner-disk-"))
    made = ended("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place)
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


def test_a_disk_that_fills_up(tmp_path: Path, server: FakeSGLang) -> None:
    """A disk that is full in mid-run ends it in one line, exit 1; with room again it goes on."""
    with tiny_disk("20m") as disk:
        with (disk / "ballast").open("wb", buffering=0) as ballast:

            def fill(_: object) -> Behaviour:
                if len(server.sent) == 30:
                    with contextlib.suppress(OSError):
                        while ballast.write(bytes(4096)):
                            pass
                return "answer"

            server.script = fill
            output = {"path": str(disk / "run"), "part_rows": 10}
            job = job_of(tmp_path, server, rows=100, output=output, window=2, limits={"disk_wait": 2})
            result = run_job(job, tmp_path, "-q", code=1)
            (line,) = [line for line in result.stderr.splitlines() if line.startswith("batchrun: ")]
            told(line, disk / "run" / "parts", "No space left", "free disk space and run the same")
            assert result.stderr.count("Traceback") == 0
        (disk / "ballast").unlink()
        run_job(job, tmp_path)
        rows_once(job, 100)
        assert report_of(job)["rows_resumed"] > 0


LIMITED = """
import resource, sys
sys.dont_write_bytecode = True  # the interpreter would keep a truncated file
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from batchrunner.cli import main
main()
"""


@pytest.mark.parametrize("file", [None, "x.csv", "x.parquet"])
def test_merged_files_that_do_not_fit(tmp_path: Path, file: str | None) -> None:
    """One line that says what to do, exit code 2; what an earlier call wrote is as it was."""
    job = job_of(tmp_path, rows=2000)
    run_job(job, tmp_path, "-q")
    run, out = tmp_path / "run", tmp_path / (file or "run/merged")
    command = ("merge", run) if file is None else ("merge", run, out, "--force")
    assert batchrun(*command).exit_code == 0
    before = [path.read_bytes() for path in ([out] if file else out.iterdir())]
    with started_python("-c", LIMITED, 4000, *command) as process:
        assert process.end() == 2
    (line,) = process.lines
    told(line, "cannot be written: File too large", "run the same command again")
    assert line.startswith((f"batchrun: {out}: ", f"batchrun: {run}: "))
    assert [path.read_bytes() for path in ([out] if file else out.iterdir())] == before
    assert not [path for path in run.iterdir() if path.name.startswith((".", "merged."))]


FEW_FILES = """
import resource, sys
sys.dont_write_bytecode = True  # the interpreter would keep a truncated file
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


@pytest.mark.parametrize("limit", [20, 255])
def test_too_few_files(tmp_path: Path, limit: int) -> None:
    """The limit is told in one line at the start."""
    with started_python("-c", FEW_FILES, limit, limit, write_job(job_of(tmp_path), tmp_path)) as process:
        assert process.end() == 2
    (line,) = process.lines
    told(line, f"only {limit} files can be open at once (ulimit -n)", "raise the limit (ulimit -n 4096)")


def test_most_files_are_for_connections(tmp_path: Path) -> None:
    """No connection fails for want of a file, and one line says what the limit is and costs."""
    limit, least = 256, 220
    with FakeSGLang(max_running=512) as server:
        said = run_limited(tmp_path, server, limit, limit, None)
        most = server.most_in_flight
    assert least <= most < limit
    (line,) = [line for line in said.splitlines() if "can be in flight" in line]
    assert f"at most {most} requests can be in flight, but the engine can run 512" in line
    assert f"ulimit -n {limit}" in line
    assert f"up to {1 - most / 512:.0%} of the speed is lost" in line


def test_the_soft_limit_is_raised(tmp_path: Path) -> None:
    """The hard limit is high: the soft one costs nothing, and nothing is said of it."""
    with FakeSGLang(max_running=100) as server:
        said = run_limited(tmp_path, server, 64, 1024, 100)
    assert "can be in flight" not in said


def test_the_page_of_many_parts(tmp_path: Path) -> None:
    """A run of more parts than files may be open has its page."""
    run_job(job_of(tmp_path, rows=900, output={"part_rows": 3}), tmp_path)
    with started_python("-c", FEW_FILES, 256, 256, "report", tmp_path / "run") as process:
        assert process.end() == 0
    assert "<td>Prompts, tokens" in (tmp_path / "run" / "report.html").read_text()  # of the parts
