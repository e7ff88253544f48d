"""The run directory: its files, the absence of secrets, and its separation from the input."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    batchrun,
    job_of,
    log_of,
    merged_table,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.launchable import launchable
from tests.support.runs import status_of


def test_the_run_directory(tmp_path: Path, server: FakeSGLang) -> None:
    """The files that later tools read have their documented paths."""
    job = job_of(tmp_path, server)
    batchrunner.run(job)
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["job"]["prompt"] == {"text": "text"}
    assert found["fingerprint"]["model"] == "fake/model"
    assert found["versions"]["engine"] == "0.5.23"
    told = [event["event"] for event in log_of(job) if event["event"] != "sample"]
    assert told == ["start", "window", "tokenize", "order", "end"]


ANSWERS = """
class Handler(Server):
    known = {"/ready": {}, "/model_info": {"model_path": "answers"}, "/server_info": {"version": "0.5.23"}}
    def asked(self, body):
        self.answer("to " + body["text"])
"""


def test_no_secret_of_the_engine_is_written_down(tmp_path: Path) -> None:
    """The engine's environment, and arguments with names of secrets, are not written."""
    engine = launchable(tmp_path, ANSWERS, HF_TOKEN="s3cret-1")
    engine["args"] = {"admin-api-key": "s3cret-2", "tokenizer-path": "shown"}
    assert batchrunner.run(job_of(tmp_path, engine)).rows_ok == 10
    run = (tmp_path / "run" / "run.json").read_text()
    assert "shown" in run
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cret" in path.read_bytes()]


def test_files_that_are_no_parts(tmp_path: Path) -> None:
    """Copies and foreign files beside the parts are not counted, not merged and not deleted."""
    job = job_of(tmp_path)
    batchrunner.run(job, overrides=["input.limit=4"])
    parts = tmp_path / "run" / "parts"
    copy = parts / "part-main-000000-bak.parquet"
    copy.write_bytes((parts / "part-main-000000.parquet").read_bytes())
    pq.write_table(pa.table({"a": [1]}), parts / "part-x.parquet")
    assert batchrunner.run(job).rows_resumed == 4
    assert [task["task"] for task in status_of(tmp_path / "run")["tasks"]] == ["main"]
    assert merged_table(tmp_path / "run").num_rows == 10
    assert batchrunner.run(job, fresh=True).rows_resumed == 0
    assert sorted(path.name for path in parts.glob("*-[bx]*")) == [copy.name, "part-x.parquet"]


def test_results_are_never_read_as_input(tmp_path: Path) -> None:
    """An output path that contains the input is refused: results would become new rows."""
    write_rows(tmp_path / "in" / "a.parquet", 5)
    job = job_of(tmp_path, input={"path": str(tmp_path / "in")}, output={"path": str(tmp_path / "in")})
    refused = batchrun(write_job(job, tmp_path))
    assert refused.exit_code == 2
    assert "lies in this directory: give another directory" in refused.stderr
    assert sorted(p.name for p in (tmp_path / "in").iterdir()) == ["a.parquet"]


@pytest.mark.parametrize("path", [".", "**/*.parquet", ["x", "."]])
def test_an_output_within_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | list[str]
) -> None:
    """The files of a run below the input are no input, so the run resumes."""
    write_rows(tmp_path / "x" / "input.parquet", 5)
    monkeypatch.chdir(tmp_path)
    job = job_of(tmp_path, input={"path": path, "limit": 3}, output={"path": "out"})
    assert batchrunner.run(job).rows_ok == 3
    report = batchrunner.run(job, overrides=["input.limit=5"])
    assert (report.rows_ok, report.rows_resumed) == (5, 3)
