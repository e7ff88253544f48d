"""`{{ fields }}` shows the named columns of a row as a block."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import JobError
from batchrunner.job.load import load_job
from tests.conftest import batchrun, job_of, results_of, write_job

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang

ROW = {
    "name": "Ada", "born": date(1815, 12, 10), "score": 2.5, "sum": Decimal("1.10"), "alive": False,
    "note": None, "tags": ["a", "ö"], "place": {"city": "London"}, "n": 3, "two": "one\ntwo",
}  # fmt: skip
BLOCK = """name: Ada
born: 1815-12-10
score: 2.5
sum: 1.10
alive: false
note: null
tags: ["a", "ö"]
place: {"city": "London"}
n: 3
two: one
two"""


def a_job(directory: Path, server: FakeSGLang, prompt: dict[str, Any], **row: Any) -> dict[str, Any]:
    pq.write_table(pa.Table.from_pylist([{**ROW, "note": "x"}, {**ROW, **row}]), directory / "input.parquet")
    return job_of(directory, server, prompt=prompt)


@pytest.mark.parametrize("where", ["user", "system", "text", "messages"])
def test_where_it_stands(where: str, tmp_path: Path, server: FakeSGLang) -> None:
    """Each kind of template shows it, beside columns of the row; values are written as people do, or JSON."""
    template = "Look:\n{{ fields }}\nand {{ n }}."
    prompt: dict[str, Any] = {where: template}
    if where == "system":
        prompt["user"] = "{{ name }}?"
    if where == "messages":
        prompt = {"messages": [{"role": "user", "content": template}]}
    job = a_job(tmp_path, server, {**prompt, "fields": {"columns": [*ROW], "order": "written"}})
    batchrunner.run(job)
    bodies = [str(sent.body.get("text") or sent.body["messages"][0]["content"]) for sent in server.sent]
    assert f"Look:\n{BLOCK}\nand 3." in bodies


def test_a_part_of_an_expression(tmp_path: Path, server: FakeSGLang) -> None:
    """It is a text like any other: filters take it."""
    prompt = {"text": "{{ fields | upper }}", "fields": {"columns": ["name"]}}
    batchrunner.run(a_job(tmp_path, server, prompt))
    assert {sent.prompt for sent in server.sent} == {"NAME: ADA"}


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ({"text": "{{ name }}"}, "prompt.fields: no template shows them: write {{ fields }} into prompt"),
        ({"text": "name"}, "prompt.fields: no template shows them: write {{ fields }} into prompt.text"),
        ({"input_ids": "n"}, "`fields` has no effect beside `input_ids`"),
        ({"messages": "name"}, "`fields` has no effect beside `messages`"),
    ],
)
def test_templates_must_show_it(
    prompt: dict[str, Any], told: str, tmp_path: Path, server: FakeSGLang
) -> None:
    """Fields that no prompt has are a mistake, which is told before a row is sent."""
    job = a_job(tmp_path, server, {**prompt, "fields": {"columns": ["name", "n"]}})
    refused = batchrun(write_job(job, tmp_path))
    assert refused.exit_code == 2
    assert told in refused.stderr
    assert server.sent == []


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"columns": ["name", "nmae"]}, "prompt.fields: unknown column 'nmae'; did you mean 'name'?"),
        ({"columns": ["name", "name"]}, "`columns` has 'name' twice"),
        ({"columns": []}, "prompt.fields.columns"),
        ({"columns": ["name"], "order": "best"}, "prompt.fields.order"),
        ({"columns": ["raw"]}, "prompt.fields: column 'raw' holds bytes (binary), which are no text"),
    ],
)
def test_columns_that_cannot_be(
    fields: dict[str, Any], told: str, tmp_path: Path, server: FakeSGLang
) -> None:
    """Unknown columns, doubled ones, bytes: one line, exit code 2."""
    pq.write_table(pa.table({"name": ["a"], "raw": [b"x"]}), tmp_path / "input.parquet")
    job = job_of(tmp_path, server, prompt={"text": "{{ fields }}", "fields": fields})
    refused = batchrun(write_job(job, tmp_path))
    assert refused.exit_code == 2
    assert told in refused.stderr


def test_a_column_of_that_name(tmp_path: Path, server: FakeSGLang) -> None:
    """Which of the two is meant nobody can know; without `prompt.fields` it is a column like any other."""
    pq.write_table(pa.table({"fields": ["a column"], "name": ["b"]}), tmp_path / "input.parquet")
    job = job_of(tmp_path, server, prompt={"text": "{{ fields }}"})
    batchrunner.run(job)
    assert [sent.prompt for sent in server.sent] == ["a column"]
    job["prompt"]["fields"] = {"columns": ["name"]}
    with pytest.raises(JobError, match=r"prompt\.fields: the input has a column 'fields'"):
        batchrunner.run({**job, "output": {"path": str(tmp_path / "other")}})


def test_a_row_that_cannot_be_read(tmp_path: Path, server: FakeSGLang) -> None:
    """A bad value of a field fails its own row; the sample leaves it out."""
    lines = "\n".join(f'{{"a": {n % 2}, "b": "{n}"}}' for n in range(20))
    (tmp_path / "rows.jsonl").write_text(f'{lines}\n{{"a": "no number", "b": "x"}}\n')
    source = {"path": str(tmp_path / "rows.jsonl"), "types": {"a": "int64"}}
    prompt = {"text": "{{ fields }}", "fields": {"columns": ["b", "a"]}}
    job = job_of(tmp_path, server, input=source, prompt=prompt, limits={"max_failed_rows": 1})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_failed) == (0, 1)
    assert {sent.prompt.split("\n")[0] for sent in server.sent} == {"a: 0", "a: 1"}
    assert len(results_of(job)) == 21


def test_old_jobs_are_as_they_were() -> None:
    """A job without fields has none in what run.json keeps of its prompt: old runs resume."""
    job = load_job(
        {
            "input": {"path": "x"}, "prompt": {"text": "t"}, "output": {"path": "y"},
            "engine": {"kind": "simulated"},
        },
    )  # fmt: skip
    assert job.prompt.model_dump(mode="json", exclude_none=True) == {"text": "t"}
