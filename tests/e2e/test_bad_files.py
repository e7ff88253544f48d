"""What is wrong in a CSV or JSON Lines file: a bad record fails alone, a bad file is one line."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from tests.conftest import INSTANT, batchrun, job_of, results_of, write_job
from tests.support.refusals import refusal

if TYPE_CHECKING:
    from pathlib import Path


def job_on(directory: Path, name: str, content: bytes, **source: Any) -> dict[str, Any]:
    path = directory / name
    path.write_bytes(content)
    source = {"path": str(path), "columns": ["id"], **source}
    return job_of(directory, INSTANT, input=source, limits={"max_failed_rows": 9, "abort_failed_share": 1})


RECORDS = [
    ("a.csv", b"9,a,b", "line 3: 3 value(s), but the header has 2"),
    ("a.csv", b"9,caf\xe9", "line 3: is not UTF-8: write the file as UTF-8"),
    ("a.tsv", b"9", "line 3: 1 value(s), but the header has 2"),
    ("a.jsonl", b'{"id": 9', "line 2: not valid JSON: unexpected end of data"),
    ("a.jsonl", b"[9]", "line 2: not a JSON object"),
    ("a.jsonl", b'{"text": "caf\xe9"}', "line 2: not valid JSON: "),
    ("a.jsonl", b'{"text": "\\ud800"}', "line 2: not valid JSON: "),
    ("a.jsonl", b'{"x": ' + b'{"a":[' * 400 + b"1" + b"]}" * 400 + b"}", "line 2: nested deeper than 48"),
]
"""A record that cannot be read, in its file, and what its row says."""


@pytest.mark.parametrize(("name", "record", "problem"), RECORDS)
def test_a_bad_record(tmp_path: Path, name: str, record: bytes, problem: str) -> None:
    """It fails with the line and the reason; the rows around it are done, and no filter hides it."""
    lines = [b'{"id": "7", "text": "a"}', record, b'{"id": "8", "text": "b"}']
    if name != "a.jsonl":
        lines = [b"id,text", b"7,a", record, b"8,b"]
    content = b"\n".join(lines) + b"\n"
    if name == "a.tsv":
        content = content.replace(b",", b"\t")
    for order, chosen in (("input", None), ("prefix", "id == '7' or text == 'none'")):
        report = batchrunner.run(
            {**job_on(tmp_path, name, content, filter=chosen), "order": order}, fresh=True
        )
        assert report.rows_failed == 1
        rows = {row["row"]: row for row in results_of(job_on(tmp_path, name, content))}
        assert rows[1]["error"].startswith(f"{tmp_path / name}: {problem}")
        assert {rows[number]["id"] for number in rows if number != 1} == ({"7"} if chosen else {"7", "8"})


def test_types(tmp_path: Path) -> None:
    """CSV keeps texts as they stand; a type makes values of them, and one that does not fit fails its row."""
    content = b"id,text,n,x,b,d\n007,a,5,0.5,true,2024-02-29\n008,b,,,,\n009,c,1.5,nan,no,2024-13-01\n"
    types = {"n": "int64", "x": "float64", "b": "bool", "d": "date"}
    job = job_on(tmp_path, "a.csv", content, types=types, columns=["id", "n", "x", "b"])
    job["prompt"] = {"text": "{{ text }}{% if n is not none %} {{ n + 1 }} {{ d.year }}{% endif %}"}
    batchrunner.run(job)
    one, two, three = results_of(job)
    assert (one["id"], one["n"], one["x"], one["b"], one["error"]) == ("007", 5, 0.5, True, None)
    assert (two["id"], two["n"], two["x"], two["b"], two["error"]) == ("008", None, None, None, None)
    assert "line 4: column 'n': '1.5' is not int64" in three["error"]


def test_types_decide_about_a_resume(tmp_path: Path) -> None:
    """Other types would make other prompts: that is another run."""
    job = job_on(tmp_path, "a.csv", b"id,text\n1,a\n")
    batchrunner.run(job)
    line = refusal_of(job, tmp_path, "--set", "input.types={id: int64}")
    assert "input.types.id was unset and is 'int64'" in line


def refusal_of(job: dict[str, Any], directory: Path, *arguments: str) -> str:
    result = batchrun(write_job(job, directory), *arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_json_lines_files_have_one_schema(tmp_path: Path) -> None:
    """A key, or a wider type, that only one file has is known in all; an added file may not change it."""
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text('{"text": "a", "n": 1}\n')
    (source / "b.jsonl").write_text('{"text": "b", "n": 1.5, "more": "m"}\n')
    job = job_of(tmp_path, INSTANT, input={"path": str(source), "columns": ["n", "more"]})
    batchrunner.run(job)
    assert [(row["n"], row["more"]) for row in results_of(job)] == [(1.0, None), (1.5, "m")]
    (source / "c.jsonl").write_text('{"text": "c", "n": "many"}\n')
    line = refusal_of(job, tmp_path)
    assert "'n'" in line
    assert "was double" in line
    assert "input.types" in line


FILES = [
    ("a.csv", b"", "the header is missing"),
    ("a.csv", b"id,text\n", "no rows in 1 file(s)"),
    ("a.csv", "id,text\n1,a\n".encode("utf-16"), "line 1: the header is not UTF-8"),
    ("a.csv", gzip.compress(b"id,text\n1,a\n", mtime=0), "line 1: the header is not UTF-8"),
    ("a.csv", b"id;text\n1;a\n", "unknown column 'text'; write the file with commas"),
    ("a.csv", b'id,"text\n1,a\n', "the record at line 1: unexpected end of data"),
    ("a.csv", b'id,text\n9,"a"b\n8,b\n', "the record at line 2: ',' expected after '\"'"),
    ("a.csv", b"id,text\n9,a\rb\n", "the record at line 2: new-line character seen"),
    ("a.csv", b"id,text,text\n1,a,b\n", "line 1: the header has 'text' twice"),
    (
        "a.csv.gz",
        gzip.compress(b"id,text\n" + b"1,a\n" * 99, mtime=0)[:-9],
        "not a readable CSV file: Truncated",
    ),
    ("a.csv.gz", b"id,text\n1,a\n", "not a readable CSV file: zlib"),
    ("a.json", b'[{"id": 1,\n"text": "a"}]', "no line is a JSON object (line 1: "),
    ("a.jsonl", b'\n{"id": NaN}\n', "no line is a JSON object (line 2: not valid JSON: "),
    ("a.arrow", b"ARROW1\0\0abc", "not a readable Arrow file"),
    ("a.feather", b"FEA1....FEA1", "not a readable Arrow file"),
]


@pytest.mark.parametrize(("name", "content", "problem"), FILES)
def test_a_bad_file(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    """It is refused in one line, before anything is sent."""
    line = refusal(job_on(tmp_path, name, content), tmp_path)
    assert str(tmp_path / name) in line or "column" in line
    assert problem in line


@pytest.mark.parametrize(
    ("types", "problem"),
    [
        ({"txt": "int64"}, "input.types: unknown column 'txt'; did you mean 'text'?"),
        ({"id": "integer"}, "input.types.id: "),
    ],
)
def test_bad_types(tmp_path: Path, types: dict[str, str], problem: str) -> None:
    """A type is one of the list, of a column that is there."""
    assert problem in refusal(job_on(tmp_path, "a.csv", b"id,text\n1,a\n", types=types), tmp_path)


def test_types_of_parquet(tmp_path: Path) -> None:
    """Parquet has types of its own."""
    job = job_of(tmp_path, INSTANT, input={"types": {"id": "string"}})
    assert "input.types: is for CSV and JSON Lines" in refusal(job, tmp_path)
