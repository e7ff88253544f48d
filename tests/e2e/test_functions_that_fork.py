"""Python functions that fork: what their children do is no answer to a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import batchrunner
from tests.conftest import job_of, results_of
from tests.support.functions import write_module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("end", ["return {'number': -1}", "raise ValueError('no')", "raise SystemExit"])
def test_a_child_that_comes_back_from_the_function(tmp_path: Path, end: str) -> None:
    """It ends there: its answers would be taken for those of other rows."""
    write_module(
        tmp_path,
        f"""
        import os
        from typing import TypedDict

        class Number(TypedDict):
            number: int

        def parse(answer, row) -> Number:
            if os.fork() == 0:
                {end}
            return {{"number": row["id"]}}
        """,
    )
    job = job_of(
        tmp_path, rows=60, parse="hooks:parse", input={"columns": ["id"]}, python_path=[str(tmp_path)],
        limits={"python_processes": 1},
    )  # fmt: skip
    report = batchrunner.run(job)
    assert (report.rows_ok, report.rows_failed) == (60, 0), report.failures
    assert [row["number"] for row in results_of(job)] == list(range(60))
