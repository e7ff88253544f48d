"""The writer of results while the disk takes nothing, or takes its time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import batchrunner
from batchrunner.core.timing import TIMING
from tests.conftest import (
    batchrun,
    job_of,
    report_of,
    write_job,
)
from tests.support.runs import rows_once

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk makes the run pause and say so; with room again it goes on, and nothing is lost."""
    refused: list[int] = []
    real = os.pwrite

    def pwrite(descriptor: int, content: bytes, offset: int) -> int:
        if len(content) > 1000 and len(refused) < 3:  # not the line that says who writes
            refused.append(len(content))
            real(descriptor, content[: len(content) // 2], offset)  # some of it still fits
            raise OSError(28, "No space left on device")
        return real(descriptor, content, offset)

    monkeypatch.setattr("os.pwrite", pwrite)
    engine = {"kind": "simulated", "step_s": 0.01}
    job = job_of(tmp_path, engine, rows=500, output={"durable": 0.05})
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 0
    assert "No space left on device: the run pauses until it can be written" in result.stderr
    assert report_of(job)["rows_ok"] == 500
    rows_once(job, 500)


def test_a_part_that_is_due_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part whose time is over while rows end is written: the loop gives such a timer no time of its own."""
    monkeypatch.setattr(TIMING, "part", 0.0)
    job = job_of(tmp_path, rows=2000)
    assert batchrunner.run(job).exit_code == 0
    rows_once(job, 2000)
