"""A disk that is full, or turns read-only."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import batchrun, job_of, report_of, results_of, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.refusals import AS_ROOT, refusal, told
from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


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

            def fill(_: object) -> Any:
                if len(server.sent) == 30:
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

        def turn_read_only(_: object) -> Any:
            if len(server.sent) == 30:
                stack.enter_context(mounted_read_only(run))
                threading.Timer(2.0, stack.close).start()
            return "answer"

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


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """No wait makes room for a file that is larger than any may be: the run ends, and says what to do."""
    job = job_of(tmp_path, rows=3000)
    file = str(write_job(job, tmp_path))
    command = [sys.executable, "-c", LIMITED, "30000", file, "-q"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1
    told(ended.stderr.splitlines()[-1], "what is on disk is kept", "allow larger files (ulimit -f)")
    assert batchrun(file, "-q").exit_code == 0
    assert [row["row"] for row in results_of(job)] == list(range(3000))
