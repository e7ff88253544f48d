"""report.json says how a run ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.report.totals import report_of_all
from tests.conftest import (
    batchrun,
    job_of,
    report_of,
    write_job,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang


def test_report(tmp_path: Path, server: FakeSGLang) -> None:
    """report.json has what later tools read, and says the same as the returned report."""
    server.script = lambda sent: "too long" if sent.prompt in {"row 3", "row 4"} else "answer"
    job = job_of(tmp_path, server, limits={"max_failed_rows": 2})
    report = batchrunner.run(job)
    saved = report_of(job)
    assert saved == json.loads(json.dumps(report.as_dict(), default=str))
    expected = {
        "rows_total": 10,
        "rows_ok": 8,
        "rows_failed": 2,
        "rows_resumed": 0,
        "output_tokens": 40,
        "prompt_tokens": 16,
        "cached_tokens": 8,
        "retries": 0,
        "exit_code": 0,
        "starts": 1,
        "finish_reasons": {"stop": 8},
        "simulated": False,
    }
    assert {name: saved[name] for name in expected} == expected
    (group,) = saved["failures"]
    assert group["rows"] == 2
    assert "longer than the model's context length" in group["example"]
    assert saved["wall_s"] > 0
    assert saved["output_tokens_per_s"] == pytest.approx(40 / saved["wall_s"], rel=0.1)
    assert saved["engine"]["model"] == "fake/model"
    assert saved["versions"]["engine"] == "0.5.23"


def test_answers_without_a_reason_are_counted(tmp_path: Path, server: FakeSGLang) -> None:
    """The report of a whole run counts them as that of a start does; failed rows have no reason to end."""
    server.script = lambda sent: "too long" if sent.prompt == "row 3" else "answer"
    batchrunner.run(job_of(tmp_path, server))
    (part,) = (tmp_path / "run" / "parts").iterdir()
    table = pq.read_table(part)
    column = table.schema.get_field_index("finish_reason")
    pq.write_table(table.set_column(column, "finish_reason", pa.nulls(10, pa.string())), part)
    assert report_of_all(tmp_path / "run").finish_reasons == {"unknown": 9}


def test_a_finished_run_keeps_its_report(tmp_path: Path) -> None:
    """Starting a finished job again does nothing, and does not put zeros over its figures."""
    job = job_of(tmp_path)
    batchrunner.run(job)
    before = report_of(job)
    again = batchrunner.run(job)
    assert (again.exit_code, again.rows_ok, again.rows_resumed) == (0, 10, 10)
    assert report_of(job) == before


def test_a_lost_engine_leaves_a_report(tmp_path: Path, server: FakeSGLang) -> None:
    """`--json` prints the report whatever ended the run."""
    server.script = lambda _: "busy 503"
    job = job_of(tmp_path, server, limits={"engine_wait": 0.3})
    result = batchrun(write_job(job, tmp_path), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["rows_total"] == 10
