"""Jobs and run directories that are damaged, edited or meant to harm: one line each, and exit code 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import batchrunner
from tests.conftest import batchrun, job_of
from tests.support.refusals import refusal, told

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n\tb: 1", "cannot start any token"),
        ("a: \0", "not valid YAML"),
        ("a: 1\na: 2", "given twice"),
    ],
)
def test_yaml_that_is_no_job(tmp_path: Path, text: str, problem: str) -> None:
    """It is refused at once."""
    told(refusal(text, tmp_path), "job.yaml", problem)


def test_a_store_that_cannot_be_reached(tmp_path: Path) -> None:
    """Packages that open a store raise errors of their own."""
    job = job_of(tmp_path, input={"path": "hf://datasets/no/such/x.parquet"})
    told(refusal(job, tmp_path), "hf://datasets/no/such/x.parquet")


def test_report_names_the_damaged_part(tmp_path: Path) -> None:
    """The line has the file and the reason, whichever of its columns is damaged."""
    batchrunner.run(job_of(tmp_path))
    (part,) = (tmp_path / "run" / "parts").iterdir()
    content = bytearray(part.read_bytes())
    content[8 : len(content) // 3] = b"\xff" * (len(content) // 3 - 8)
    part.write_bytes(content)
    result = batchrun("report", tmp_path / "run")
    assert result.exit_code == 2
    told(result.stderr, f"{part}: is damaged", "(")
