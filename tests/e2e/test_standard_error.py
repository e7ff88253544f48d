"""Standard error may fail without a loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import (
    job_of,
    results_of,
    write_job,
)
from tests.support.server_thread import PATIENCE_S


def test_a_log_that_cannot_be_written_costs_no_row(tmp_path: Path) -> None:
    """Nor does it change the exit code: standard error may be on a full disk, or a pipe that nobody reads."""
    job = job_of(tmp_path, rows=300)
    command = [sys.executable, "-m", "batchrunner", str(write_job(job, tmp_path))]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stderr=full, timeout=PATIENCE_S, check=False)
        wrong = subprocess.run([*command, "--set", "limits=7"], stderr=full, timeout=PATIENCE_S, check=False)
    assert (done.returncode, wrong.returncode) == (0, 2)
    assert [row["row"] for row in results_of(job)] == list(range(300))
