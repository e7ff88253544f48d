"""Run directories of earlier versions go on: kept as they were left by a kill -9."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import batchrun, parts_of

RUNS = Path(__file__).parent.parent / "support" / "runs_0_1_0.tar.gz"
"""Runs of 240 rows that version 0.1.0 (commit e534c56) began: by one task, by `--join`, by two shards. Each
was killed with finished rows in a part and in a journal. Their lock files name a process that is dead."""
ROWS = 240


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Unpack the runs and work beside them: their paths are relative."""
    with tarfile.open(RUNS) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_in_parts(run: str) -> list[int]:
    return sorted(row for part in parts_of(run) for row in part["row"].to_pylist())


@pytest.mark.parametrize(
    ("run", "options"), [("alone", []), ("joined", ["--join"]), ("sharded", ["--shard", "1/2"])]
)
def test_a_run_of_an_earlier_version_goes_on(earlier: Path, run: str, options: list[str]) -> None:
    """It resumes without doing a durable row again, merges in input order, and can be looked at."""
    before = set(rows_in_parts(run))
    assert 0 < len(before) < ROWS
    looked = json.loads(batchrun("status", run, "--json").stdout)
    assert len(before) < looked["rows_on_disk"] < ROWS  # the journal's rows count

    report = json.loads(batchrun(f"{run}.yaml", *options, "--set", "engine.step_s=0", "--json").stdout)
    assert report["exit_code"] == 0
    if run == "alone":
        assert report["rows_resumed"] == looked["rows_on_disk"]
    assert rows_in_parts(run) == list(range(ROWS))

    assert batchrun("merge", run).exit_code == 0
    merged = pq.read_table(earlier / run / "merged")
    assert merged["row"].to_pylist() == list(range(ROWS))
    assert merged["id"].to_pylist() == [f"doc-{row}" for row in range(ROWS)]
    assert merged["error"].null_count == ROWS
    assert json.loads(batchrun("status", run, "--json").stdout)["finished"]
    assert batchrun("report", run).exit_code == 0
    assert (earlier / run / "report.html").stat().st_size > 10_000
    assert batchrun("advise", run).exit_code == 0


def test_an_interrupted_run_of_an_earlier_version_can_be_looked_at(earlier: Path) -> None:
    """Before it goes on too: report and advice read the events that the earlier version wrote."""
    assert batchrun("report", "alone").exit_code == 0
    page = (earlier / "alone" / "report.html").read_text()
    assert "not finished" in page or "interrupted" in page
    assert batchrun("advise", "alone").exit_code == 0


def test_another_job_is_refused_on_a_run_of_an_earlier_version(earlier: Path) -> None:
    """What makes two jobs the same run is compared with what the earlier version wrote down."""
    refused = batchrun("alone.yaml", "--set", "sampling.max_new_tokens=17")
    assert refused.exit_code == 2
    assert "sampling.max_new_tokens was 16 and is 17" in refused.stderr
