"""The command: what it prints, and to where."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.conftest import (
    batchrun,
    job_of,
    report_of,
    write_job,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang


def test_json_output_is_the_report(tmp_path: Path, server: FakeSGLang) -> None:
    """A script that calls the command reads its result from standard output and nothing else."""
    job = job_of(tmp_path, server)
    result = batchrun(write_job(job, tmp_path), "--json")
    assert json.loads(result.stdout) == report_of(job)


def test_quiet_says_nothing(tmp_path: Path) -> None:
    """`--quiet` leaves a log empty where all went well."""
    result = batchrun(write_job(job_of(tmp_path), tmp_path), "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_what_a_person_reads(tmp_path: Path, server: FakeSGLang) -> None:
    """At the end stands how many rows went well, how many not and why, and where the results are."""
    server.script = lambda sent: "bad schema" if sent.prompt == "row 7" else "answer"
    result = batchrun(write_job(job_of(tmp_path, server), tmp_path))
    assert result.exit_code == 3
    assert "9 of 10 rows ok, 1 failed" in result.stderr
    assert "failed: 1 rows: 400: Failed to compile json grammar" in result.stderr
    assert f"results: {tmp_path / 'run'}/parts" in result.stderr


@pytest.mark.parametrize("command", ["status", "report", "merge"])
def test_a_job_is_no_run(tmp_path: Path, command: str) -> None:
    """A job file in a run's place is refused in one line."""
    refused = batchrun(command, write_job(job_of(tmp_path), tmp_path))
    assert refused.exit_code == 2
    assert "not a run's output path" in refused.stderr


def test_version() -> None:
    """`--version` says which batchrunner this is."""
    assert batchrun("--version").stdout.startswith("batchrun 0.")
