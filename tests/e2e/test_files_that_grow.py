"""Rows appended to a file of the input are done, and those before keep their results."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import ResumeError
from tests.conftest import batchrun, job_of, results_of, run_job, write_job
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.runs import rows_sent


def lines(name: str, rows: range) -> str:
    if name.endswith(".csv"):
        head = "id,text\n" if not rows.start else ""
        return head + "".join(f"{row},row {row}\n" for row in rows)
    return "".join(f'{{"id": {row}, "text": "row {row}"}}\n' for row in rows)


def grown(path: Path, rows: range) -> None:
    with path.open("a") as file:
        file.write(lines(path.name, rows))


def job_on(path: Path, server: FakeSGLang, **changes: Any) -> dict[str, Any]:
    path.write_text(lines(path.name, range(10)))
    given = {"path": str(path), "columns": ["id"], **changes.pop("input", {})}
    return job_of(path.parent, server, input=given, **changes)


def done(job: dict[str, Any], rows: int) -> bool:
    """Tell whether so many rows have their results, once, each with its own."""
    found = [(row["row"], int(row["id"]), row["error"]) for row in results_of(job)]
    return found == [(row, row, None) for row in range(rows)]


@pytest.mark.parametrize("options", [[], ["--join"]], ids=["alone", "join"])
@pytest.mark.parametrize("order", ["input", "prefix"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_rows_that_were_appended(
    tmp_path: Path, server: FakeSGLang, name: str, order: str, options: list[str]
) -> None:
    """Again and again they are done, and one line tells what was found."""
    path = tmp_path / name
    job = job_on(path, server, order=order)
    run_job(job, tmp_path, *options)
    for known, rows in ((10, 13), (13, 14)):
        server.forget()
        grown(path, range(known, rows))
        result = run_job(job, tmp_path, *options)
        assert f"{path} grew: its first {known} rows are those of this run" in result.stderr
        assert sorted(rows_sent(server)) == [*range(known, rows)]
        assert done(job, rows)
    assert batchrun("merge", tmp_path / "run").exit_code == 0
    server.forget()
    assert "grew" not in run_job(job, tmp_path, *options).stderr
    assert not server.sent


def test_rows_of_a_run_that_was_not_done(tmp_path: Path, server: FakeSGLang) -> None:
    """A filter and a limit hold for all rows, old and new, in their order."""
    path = tmp_path / "rows.csv"
    job = job_on(path, server, input={"filter": "id|int % 2", "limit": 3, "types": {"id": "int64"}})
    assert batchrunner.run(job).rows_ok == 3
    grown(path, range(10, 14))
    assert batchrunner.run(job).rows_resumed == 3
    report = batchrunner.run(job, overrides=["input.limit=6"])
    assert (report.rows_resumed, report.rows_ok) == (3, 6)
    assert sorted(rows_sent(server)) == [1, 3, 5, 7, 9, 11]


CHANGES = {
    "an edit": lambda text: text.replace("row 3", "row X") + lines("a.csv", range(10, 12)),
    "a row before": lambda text: text.replace("0,", "7,row 7\n0,", 1) + "8,row 8\n",
    "no end of line": lambda text: text + "more of the last one\n",
    "fewer rows": lambda text: text[: text.index("9,")],
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_are_refused(tmp_path: Path, server: FakeSGLang, change: str) -> None:
    """Where a known row may be another one, nothing is sent."""
    path = tmp_path / "rows.csv"
    job = job_on(path, server)
    if change == "no end of line":
        path.write_text(path.read_text().rstrip())
    batchrunner.run(job)
    server.forget()
    path.write_text(CHANGES[change](path.read_text()))
    assert f"the input file {path} changed" in run_job(job, tmp_path, code=2).stderr
    assert not server.sent


def test_only_the_last_file_may_grow(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows of a file before the last would move those after them; files that come after it may be new."""
    one, two, three = (tmp_path / f"{name}.csv" for name in ("one", "two", "zzz"))
    job = job_on(one, server)
    two.write_text(lines("a.csv", range(4)))
    job["input"]["path"] = str(tmp_path / "*.csv")
    batchrunner.run(job)
    kept = one.read_text()
    grown(one, range(10, 11))
    with pytest.raises(ResumeError, match=f"the input file {one} changed"):
        batchrunner.run(job)
    one.write_text(kept)
    grown(two, range(4, 6))
    three.write_text(lines("a.csv", range(1)))
    server.forget()
    report = batchrunner.run(job)
    assert (report.rows_resumed, report.rows_ok, len(server.sent)) == (14, 17, 3)
    assert [int(row["id"]) for row in results_of(job)] == [*range(10), *range(6), 0]


def test_a_compressed_file_is_not_looked_into(tmp_path: Path, server: FakeSGLang) -> None:
    """Where it ends in the middle of a line cannot be seen."""
    path = tmp_path / "rows.csv.gz"
    job = job_on(tmp_path / "rows.csv", server)
    path.write_bytes(gzip.compress(lines("a.csv", range(10)).encode()))
    job["input"]["path"] = str(path)
    batchrunner.run(job)
    path.write_bytes(path.read_bytes() + gzip.compress(lines("a.csv", range(10, 11)).encode()))
    with pytest.raises(ResumeError, match="changed"):
        batchrunner.run(job)


def test_a_file_that_grows_during_the_run(tmp_path: Path, server: FakeSGLang) -> None:
    """The run does what it found, and says that there is more."""
    path = tmp_path / "rows.jsonl"
    job = job_on(path, server)

    def answer(sent: Sent) -> Behaviour:
        if sent.prompt == "row 3":
            grown(path, range(10, 12))
        return "answer"

    server.script = answer
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 1
    assert f"{path} came into the input, or grew, during the run: run the same command again" in result.stderr
    server.script = lambda _: "answer"
    assert batchrunner.run(job).rows_resumed == 10
    assert done(job, 12)
