"""What the report says of checked answers covers the whole run: kills, resumes, tasks, failed rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    batchrun,
    batchrun_merge,
    eventually,
    job_of,
    report_of,
    results_of,
    started,
    write_job,
    write_rows,
)
from tests.e2e.test_checked_answers import says, script
from tests.support.functions import HOOKED, check_hooked, write_hooks
from tests.support.runs import status_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.answers import Body
    from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

pytestmark = pytest.mark.usefixtures("quick_retries")

CHECK = {"regex": "good", "tries": 2}


def every_third_fails(sent: Sent) -> Body:
    """The first answer is bad, the second good but for every third row."""
    number = int(sent.prompt.split()[1])
    return says(sent, "good" if sent.tries > 1 and number % 3 else "bad")


def counts_of(rows: int) -> dict[str, Any]:
    """What is counted for so many rows, a multiple of 3, with that script."""
    failed = rows // 3
    return {
        "rows_asked_again": rows,
        "asked_again": rows,
        "continued": 0,
        "rows_mended": rows - failed,
        "rows_failed": failed,
        "output_tokens": rows + failed,
        "prompt_tokens": 2 * rows,
    }


def numbers(checks: dict[str, Any]) -> dict[str, Any]:
    """The counts without the causes, of which there is one."""
    (cause,) = checks["causes"]
    assert cause["rows"] == checks["output_tokens"]
    assert cause["example"] == "the answer has no match of check.regex 'good'"
    return {name: count for name, count in checks.items() if name != "causes"}


def test_a_run_that_was_killed(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows in parts and in journals count with the start that resumes, each once."""

    def held(sent: Sent) -> Behaviour | Body:
        return "hold" if int(sent.prompt.split()[1]) >= 50 else every_third_fails(sent)

    server.script = held
    job = job_of(
        tmp_path, server, rows=90, window=90, check=CHECK, output={"part_rows": 20, "durable": 0.05},
        order="input",
        limits={"max_failed_rows": 1.0, "abort_failed_share": 1.0},
    )  # fmt: skip
    run = tmp_path / "run"
    with started(write_job(job, tmp_path)):
        eventually(lambda: len(list(run.glob("parts/*.parquet"))) == 2)
        eventually(lambda: status_of(run).get("rows_on_disk") == 50)
    server.forget()
    server.script = every_third_fails
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 0, result.stderr
    assert report_of(job)["rows_resumed"] == 50
    assert numbers(report_of(job)["checks"]) == counts_of(90)
    assert "90 rows were asked again 90 times: 60 then had a good answer, 30 failed" in result.stderr
    merged = json.loads(batchrun("merge", run, "--json").stdout)
    assert numbers(merged["report"]["checks"]) == counts_of(90)
    metadata = pq.read_schema(run / "merged" / "merged-000000.parquet").metadata
    assert not [key for key in metadata if b"checks" in key]


def test_failed_rows_that_are_sent_again(tmp_path: Path, server: FakeSGLang) -> None:
    """What their first answers cost is no part of the counts any more, as it is none of the others."""
    server.script = every_third_fails
    job = job_of(tmp_path, server, rows=30, check=CHECK, limits={"abort_failed_share": 1.0})
    assert batchrunner.run(job).exit_code == 3
    server.forget()
    server.script = script("good")
    report = batchrunner.run(job, retry_failed=True)
    assert report.exit_code == 0
    checks = report.checks
    assert (checks["rows_asked_again"], checks["rows_mended"], checks["rows_failed"]) == (20, 20, 0)
    assert (checks["output_tokens"], checks["prompt_tokens"]) == (20, 40)
    assert checks["causes"][0]["rows"] == 20
    assert batchrunner.run(job).checks == checks  # nothing is left to do


def test_the_samples_of_a_row_count_once(tmp_path: Path, server: FakeSGLang) -> None:
    """Also where each is a row of the results, and where equal rows share an answer."""
    write_rows(tmp_path / "input.parquet", 6, same=["equal"] * 6)
    server.script = script("bad", "good")
    sampling = {"n": 3, "temperature": 0}
    job = job_of(
        tmp_path, server, prompt={"text": "same"}, check=CHECK, sampling=sampling, output={"explode": True}
    )
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_deduplicated, len(results_of(job))) == (0, 5, 18)
    checks = batchrunner.run(job).checks
    assert (checks["rows_asked_again"], checks["asked_again"], checks["output_tokens"]) == (1, 1, 3)
    assert checks == report.checks


def test_a_part_has_so_many_rows_of_the_input(tmp_path: Path, server: FakeSGLang) -> None:
    """`part_rows` counts rows of the input, however many samples of each are rows of the results."""
    server.script = lambda sent: "hold" if int(sent.prompt.split()[1]) >= 2 else "answer"
    job = job_of(
        tmp_path,
        server,
        rows=10,
        sampling={"n": 3},
        output={"explode": True, "part_rows": 4, "durable": 0.05},
    )
    run = tmp_path / "run"
    with started(write_job(job, tmp_path)) as command:
        eventually(lambda: [path for path in run.glob("tasks/*/journal-*") if path.stat().st_size])
        server.answer_held()
        assert command.end() == 0
    parts = [pq.read_table(path, columns=["row"]) for path in sorted(run.glob("parts/*.parquet"))]
    assert [len(part["row"].unique()) for part in parts] == [4, 4, 2]
    assert [part.num_rows for part in parts] == [12, 12, 6]
    assert batchrun_merge(run)


def test_tasks_share_checks_functions_and_samples(tmp_path: Path, server: FakeSGLang) -> None:
    """Two tasks of a run: each row once, with all its samples; their counts come together."""
    write_hooks(tmp_path)
    write_rows(tmp_path / "input.parquet", 600)
    job = job_of(
        tmp_path, server, sampling={"n": 2}, output={"explode": True}, input={"columns": ["id"]}, **HOOKED
    )
    file = write_job(job, tmp_path)
    with started(file, "--join") as first:
        server.wait_for(20)
        with started(file, "--join") as second:
            assert first.end() == 0
            assert second.end() == 0
    merged = json.loads(batchrun("merge", tmp_path / "run", "--json").stdout)
    check_hooked(pq.read_table(merged["path"]).to_pylist(), 600)
    checks = merged["report"]["checks"]
    assert (checks["rows_mended"], checks["asked_again"], checks["causes"][0]["rows"]) == (600, 600, 600)
