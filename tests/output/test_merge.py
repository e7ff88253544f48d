"""Merging writes every result once, in the order of the input."""

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
from hypothesis import given
from hypothesis import strategies as st

import batchrunner
from batchrunner.output.merge import CANCELLED, EXPIRED, publish
from batchrunner.output.run_dir import RunDir
from tests.conftest import (
    INSTANT,
    batchrun,
    examples,
    job_of,
    merged_table,
    results_of,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang


@examples(8)
@given(rows=st.integers(1, 60), part_rows=st.integers(1, 20), wanted=st.integers(1, 3))
def test_merge_is_in_input_order(
    rows: int, part_rows: int, wanted: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`merge` writes every result once, in the order of the input, however the parts came to be."""
    tmp_path = tmp_path_factory.mktemp("merge")
    with FakeSGLang(lambda sent: "too long" if sent.prompt.endswith("3") else "answer") as server:
        job = job_of(tmp_path, server, rows=rows, output={"part_rows": part_rows}, window=3)
        job["input"] |= {"columns": ["id"], "filter": f"id % {wanted} == 0"}
        batchrunner.run(job)
    merged = merged_table(tmp_path / "run")
    assert merged.column("row").to_pylist() == [i for i in range(rows) if i % wanted == 0]
    assert merged.to_pylist() == results_of(job)


def test_merge_of_long_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is bounded by its bytes too, where footers hide them: all rows carry the same long text."""
    monkeypatch.setattr("batchrunner.output.merge.BUCKET_BYTES", 1 << 20)
    write_rows(tmp_path / "input.parquet", 40, page=["x" * 100_000] * 40)
    job = job_of(tmp_path, input={"columns": ["page"]}, output={"part_rows": 7})
    batchrunner.run(job)
    assert batchrun("merge", tmp_path / "run").exit_code == 0
    merged = sorted((tmp_path / "run" / "merged").iterdir())
    assert max(pq.read_table(file).nbytes for file in merged) <= 1 << 20
    assert [row for file in merged for row in pq.read_table(file)["row"].to_pylist()] == list(range(40))


def cut_a_part(run: Path) -> None:
    part = next((run / "parts").iterdir())
    part.write_bytes(part.read_bytes()[:-20])


def lose_a_part(run: Path) -> None:
    """Leave a link to nothing in its place, as a file that goes while parts are merged."""
    part = next((run / "parts").iterdir())
    part.unlink()
    part.symlink_to(run / "nothing")


def add_a_part_of_others(run: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), run / "parts" / "part-main-000009.parquet")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (cut_a_part, "is damaged: move it away"),
        (lose_a_part, ".parquet: is gone: run the same command again, which does its rows again"),
        (add_a_part_of_others, "parts: cannot be merged"),
        (lambda run: (run / "merged").write_text(""), "merged: cannot be written"),
    ],
)
def test_what_cannot_be_merged(tmp_path: Path, spoil: Callable[[Path], object], told: str) -> None:
    """Damage and whatever stands in the way are said in one line."""
    batchrunner.run(job_of(tmp_path))
    spoil(tmp_path / "run")
    refused = batchrun("merge", tmp_path / "run")
    assert refused.exit_code == 2
    assert told in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_merge_does_not_outlive_the_next_start(tmp_path: Path) -> None:
    """What was merged is gone as soon as there are more rows."""
    job = job_of(tmp_path, rows=30)
    batchrunner.run(job, overrides=["input.limit=10"])
    assert batchrun("merge", tmp_path / "run").exit_code == 0
    batchrunner.run(job, overrides=["input.limit=20"])
    assert not (tmp_path / "run" / "merged").exists()


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
    """An object on each line: lists and structs as they are, dates by ISO 8601, durations in seconds."""
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
    """Characters that some readers take for the end of a line are escaped, in names of columns too."""
    pq.write_table(pa.table({"text": ["a"] * 3, BREAKS: [[BREAKS]] * 3}), tmp_path / "input.parquet")
    batchrunner.run(job_of(tmp_path, INSTANT, input={"columns": [BREAKS]}))
    text = written(tmp_path / "run", "a.jsonl").decode()
    assert [json.loads(line)[BREAKS] for line in text.splitlines()] == [[BREAKS]] * 3


@pytest.mark.parametrize(
    ("name", "delimiter", "opened"),
    [("a.csv", ",", bytes), ("a.tsv", "\t", bytes), ("a.csv.gz", ",", gzip.decompress)],
)
def test_csv(run: Path, name: str, delimiter: str, opened: Callable[[bytes], bytes]) -> None:
    """A header and a record for each row; lists and structs are JSON, null is an empty field."""
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
    """Carried times of an unknown zone are written in UTC; a far date and bad UTF-8 are texts."""
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
    """It is replaced with --force only, and never by half a file; the run may be where nothing is written."""
    file, written_at = run.parent / "answers.csv", run.stat().st_mtime_ns
    file.write_text("mine")
    result = batchrun("merge", run, file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "answers.csv: exists: take another name, or --force to replace it" in result.stderr
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
    (["answers.txt"], "its ending names no format: give one of .parquet, .csv"),
    (["answers.parquet.gz"], "its ending names no format"),
    (["nowhere/answers.csv"], "there is no directory"),
    (["in.csv"], "is a directory: give a file"),
]


@pytest.mark.parametrize(("arguments", "problem"), REFUSALS)
def test_refusals(run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str) -> None:
    """One line says what is wrong, with exit code 2, and nothing is written."""
    monkeypatch.chdir(run.parent)
    (run.parent / "in.csv").mkdir()
    before = sorted(run.parent.rglob("*"))
    result = batchrun("merge", run, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert problem in line
    assert sorted(run.parent.rglob("*")) == before


def test_a_batch_that_ended_before_its_run(tmp_path: Path) -> None:
    """Each request fails with the reason of the end or its own error; a second time makes equal lines."""
    results, errors = tmp_path / "results.jsonl", tmp_path / "errors.jsonl"
    unanswered = [("a", CANCELLED), (None, "line 2: not a request"), ("c", EXPIRED)]
    published = publish(RunDir(tmp_path / "run"), results, errors, unanswered=unanswered)
    assert published is not None
    assert (published.completed, published.failed, published.usage["total_tokens"]) == (0, 3, 0)
    assert results.read_bytes() == b""
    first = errors.read_bytes()
    lines = [json.loads(line) for line in first.splitlines()]
    assert [(line["custom_id"], line["error"]["code"], line["response"]) for line in lines] == [
        ("a", "batch_cancelled", None), (None, "invalid_request", None), ("c", "batch_expired", None)
    ]  # fmt: skip
    assert len({line["id"] for line in lines}) == 3
    publish(RunDir(tmp_path / "run"), results, errors, unanswered=unanswered)
    assert errors.read_bytes() == first
