"""`batchrun merge RUN FILE`: formats, values that a format lacks, and existing files."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    INSTANT,
    batchrun,
    job_of,
    merged_table,
    results_of,
    write_rows,
)

ROWS = 40


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    """A run of several parts, whose rows carry lists, structs, dates and odd texts."""
    table = pa.table(
        {
            "id": [f"{n:03d}" for n in range(ROWS)],
            "text": [f'say "{n}",\n\u65e5\u672c' for n in range(ROWS)],
            "tags": [["a,b", None]] * (ROWS - 1) + [None],
            "meta": [{"on": n % 2 == 0, "deep": {"x": n / 2}} for n in range(ROWS)],
            "day": pa.array([n * 1000 for n in range(ROWS)], pa.timestamp("ms")),
            "raw": [b"\xff\x00"] * ROWS,
            "took": pa.array([n * 1500 - 5000 for n in range(ROWS)], pa.duration("ms")),
            "long": ["x" * 10_000] * ROWS,  # more than a pipe holds
        }
    )
    pq.write_table(table, tmp_path / "input.parquet")
    job = job_of(
        tmp_path,
        INSTANT,
        input={"columns": table.schema.names},
        output={"part_rows": 7},
        order="longest_first",
    )
    assert batchrunner.run(job).rows_ok == ROWS
    return tmp_path / "run"


def written(run: Path, name: str, *options: str) -> bytes:
    file = run.parent / name
    result = batchrun("merge", run, file, *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{file}\n"
    return file.read_bytes()


def test_tables(run: Path) -> None:
    """Parquet and Arrow have the merged table itself."""
    merged = merged_table(run)
    assert pq.read_table(pa.BufferReader(written(run, "a.parquet"))).equals(merged)
    assert pa.ipc.open_file(written(run, "a.arrow")).read_all().equals(merged)
    assert pa.ipc.open_stream(written(run, "a.arrows")).read_all().equals(merged)
    packed = written(run, "a.feather.zst")
    with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
        assert pa.ipc.open_file(stream.read()).read_all().equals(merged)


@pytest.mark.parametrize(("name", "opened"), [("a.jsonl", bytes), ("a.ndjson.gz", gzip.decompress)])
def test_json_lines(run: Path, name: str, opened: Callable[[bytes], bytes]) -> None:
    """Each line is an object with lists and structs unchanged, dates in ISO 8601, durations in seconds."""
    rows = [json.loads(line) for line in opened(written(run, name)).splitlines()]
    expected = results_of({"output": {"path": str(run)}})
    assert len(rows) == ROWS
    for row, wanted in zip(rows, expected, strict=True):
        assert (row.pop("day"), row.pop("raw")) == (wanted.pop("day").isoformat(), "/wA=")
        assert row.pop("took") == wanted.pop("took").total_seconds()
        del wanted["raw"]
        assert row == wanted


BREAKS = "a\x85b\u2028c\u2029d"
"""A text with all characters beyond ASCII at which `str.splitlines` ends a line."""


def test_a_row_of_json_lines_is_one_line(tmp_path: Path) -> None:
    """Characters that some readers mistake for a line end are escaped, also in names of columns."""
    pq.write_table(pa.table({"text": ["a"] * 3, BREAKS: [[BREAKS]] * 3}), tmp_path / "input.parquet")
    batchrunner.run(job_of(tmp_path, INSTANT, input={"columns": [BREAKS]}))
    text = written(tmp_path / "run", "a.jsonl").decode()
    assert [json.loads(line)[BREAKS] for line in text.splitlines()] == [[BREAKS]] * 3


@pytest.mark.parametrize(
    ("name", "delimiter", "opened"),
    [("a.csv", ",", bytes), ("a.tsv", "\t", bytes), ("a.csv.gz", ",", gzip.decompress)],
)
def test_csv(run: Path, name: str, delimiter: str, opened: Callable[[bytes], bytes]) -> None:
    """A header and a record for each row, with JSON for lists and structs and an empty field for null."""
    text = opened(written(run, name)).decode()
    rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
    expected = results_of({"output": {"path": str(run)}})
    assert len(rows) == ROWS
    for row, wanted in zip(rows, expected, strict=True):
        assert [row[name] for name in ("id", "text", "output")] == [
            wanted[name] for name in ("id", "text", "output")
        ]
        assert row["row"] == str(wanted["row"])
        assert json.loads(row["meta"]) == wanted["meta"]
        assert (json.loads(row["tags"]) if row["tags"] else None) == wanted["tags"]
        assert (row["error"], row["raw"]) == ("", "/wA=")
        assert row["day"] == wanted["day"].isoformat()
        assert float(row["took"]) == wanted["took"].total_seconds()


def test_values_that_python_cannot_represent(tmp_path: Path) -> None:
    """Times of an unknown zone are written in UTC, dates out of range and invalid UTF-8 as texts."""
    far = 400_000_000_000
    columns: dict[str, pa.Array[Any]] = {
        "zone": pa.array([0, 1_000_000, None], pa.timestamp("us", "Mars/Phobos")),
        "year": pa.array([far, 0, None], pa.timestamp("s", "Mars/Phobos")),
        "words": pa.array([b"a\xff", b"b", None]).view(pa.string()),
        "deep": pa.array(
            [{"at": [far]}, {"at": [0, None]}, None], pa.struct([("at", pa.list_(pa.timestamp("s")))])
        ),
        "pairs": pa.array([[("a", far)], [], None], pa.map_(pa.string(), pa.timestamp("s"))),
        "took": pa.array([1 << 62, 1, None], pa.duration("s")),
    }
    write_rows(tmp_path / "input.parquet", 3, **columns)
    batchrunner.run(job_of(tmp_path, INSTANT, input={"columns": [*columns]}))
    late = "14645-06-30T15:06:40.000"
    rows = [json.loads(line) for line in written(tmp_path / "run", "a.jsonl").splitlines()]
    assert [{name: row[name] for name in columns} for row in rows] == [
        {
            "zone": "1970-01-01T00:00:00+00:00",
            "year": f"{late}+00:00",
            "words": "a\ufffd",
            "deep": {"at": [late]},
            "pairs": [["a", late]],
            "took": f"{1 << 62} s",
        },
        {
            "zone": "1970-01-01T00:00:01+00:00",
            "year": "1970-01-01T00:00:00+00:00",
            "words": "b",
            "deep": {"at": ["1970-01-01T00:00:00", None]},
            "pairs": [],
            "took": 1.0,
        },
        dict.fromkeys(columns),
    ]
    records = list(csv.DictReader(io.StringIO(written(tmp_path / "run", "a.csv").decode(errors="replace"))))
    assert [record["zone"] for record in records] == [
        "1970-01-01T00:00:00+00:00",
        "1970-01-01T00:00:01+00:00",
        "",
    ]
    assert json.loads(records[0]["deep"]) == {"at": [late]}


def test_an_existing_file_is_kept(run: Path) -> None:
    """Only --force replaces it, and never with an incomplete file; nothing is written into the run."""
    file, written_at = run.parent / "answers.csv", run.stat().st_mtime_ns
    file.write_text("mine")
    result = batchrun("merge", run, file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "answers.csv: already exists: use another name, or --force to replace it" in result.stderr
    assert file.read_text() == "mine"
    assert written(run, "answers.csv", "--force").count(b"\n") > ROWS
    assert run.stat().st_mtime_ns == written_at
    (part, *_) = (run / "parts").iterdir()
    part.write_bytes(b"damaged")
    before = file.read_bytes()
    assert batchrun("merge", run, file, "--force").exit_code == 2
    assert file.read_bytes() == before
    assert not [path for path in (*run.parent.iterdir(), *run.iterdir()) if path.name.startswith(".")]


REFUSALS: list[tuple[list[Any], str]] = [
    (["answers.txt"], "unknown file format: use one of .parquet, .csv"),
    (
        ["answers.parquet.gz"],
        "answers.parquet.gz: unknown file format",
    ),
    (["nowhere/answers.csv"], "there is no directory"),
    (["in.csv"], "is a directory: give a file"),
]


@pytest.mark.parametrize(("arguments", "problem"), REFUSALS)
def test_refusals(run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str) -> None:
    """A wrong file name gives one line and exit code 2, and nothing is written."""
    monkeypatch.chdir(run.parent)
    (run.parent / "in.csv").mkdir()
    before = sorted(run.parent.rglob("*"))
    result = batchrun("merge", run, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert problem in line
    assert sorted(run.parent.rglob("*")) == before
