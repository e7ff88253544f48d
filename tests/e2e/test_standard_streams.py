"""Standard input, output and error may be closed, full, or read by nobody: exit codes hold."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ended, job_of, results_of, rows_in, write_job

COMMAND = f"{sys.executable} -m batchrunner"


def shell(line: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash."""
    return ended("bash", "-c", line, cwd=directory)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    """Sockets would get their descriptors, which libuv does not close: it would end the process."""
    job = job_of(tmp_path, rows=20)
    write_job(job, tmp_path)
    done = shell(f"{COMMAND} job.yaml --json {closed}", tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert rows_in(job) == list(range(20))
    if "2>" in closed:  # to which a refusal is told
        assert shell(f"{COMMAND} job.yaml --set limits=7 {closed}", tmp_path).returncode == 2
    if " >" in f" {closed}":  # where the state is shown
        assert shell(f"{COMMAND} status run {closed}", tmp_path).returncode == 0


def test_standard_output_that_is_full(tmp_path: Path) -> None:
    """Who asked for JSON and did not get it is told so, in one line, by exit code 1; the rows are done."""
    job = job_of(tmp_path)
    write_job(job, tmp_path)
    done = shell(f"{COMMAND} job.yaml --json --quiet > /dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr == "batchrun: standard output: cannot be written: No space left on device\n"
    assert len(results_of(job)) == 10
    for command in ("schema", "--help", "check job.yaml", "status run --json"):
        done = shell(f"{COMMAND} {command} > /dev/full", tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), command
    # what was wrong before stays the more important news
    assert shell(f"{COMMAND} check nothing.yaml > /dev/full", tmp_path).returncode == 2
    assert shell(f"{COMMAND} run --nonsense 2> /dev/full", tmp_path).returncode == 2


def test_a_reader_that_closes_the_pipe(tmp_path: Path) -> None:
    """`batchrun … | head -1` has what it wants: that is no failure."""
    write_job(job_of(tmp_path), tmp_path)
    for command in ("schema", "job.yaml --json --quiet"):
        done = shell(f"set -o pipefail; {COMMAND} {command} | true", tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), command
