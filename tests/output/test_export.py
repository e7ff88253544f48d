"""Results are exported to one file of any format, which says the same as the parts."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import INSTANT, batchrun, batchrun_merge, job_of, results_of, write_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang

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


def exported(run: Path, name: str, *options: str) -> bytes:
    file = run.parent / name
    result = batchrun("export", run, file, *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{file}\n"
    return file.read_bytes()


def test_tables(run: Path) -> None:
    """Parquet and Arrow have the merged table itself."""
    merged = pq.read_table(batchrun_merge(run))
    assert pq.read_table(pa.BufferReader(exported(run, "a.parquet"))).equals(merged)
    assert pa.ipc.open_file(exported(run, "a.arrow")).read_all().equals(merged)
    assert pa.ipc.open_stream(exported(run, "a.arrows")).read_all().equals(merged)
    packed = exported(run, "a.feather.zst")
    with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
        assert pa.ipc.open_file(stream.read()).read_all().equals(merged)


@pytest.mark.parametrize(("name", "opened"), [("a.jsonl", bytes), ("a.ndjson.gz", gzip.decompress)])
def test_json_lines(run: Path, name: str, opened: Callable[[bytes], bytes]) -> None:
    """An object on each line: lists and structs as they are, dates as ISO 8601, bytes as Base64."""
    rows = [json.loads(line) for line in opened(exported(run, name)).splitlines()]
    expected = results_of({"output": {"path": str(run)}})
    assert len(rows) == ROWS
    for row, wanted in zip(rows, expected, strict=True):
        assert (row.pop("day"), row.pop("raw")) == (wanted.pop("day").isoformat(), "/wA=")
        del wanted["raw"]
        assert row == wanted


@pytest.mark.parametrize(
    ("name", "delimiter", "opened"),
    [("a.csv", ",", bytes), ("a.tsv", "\t", bytes), ("a.csv.gz", ",", gzip.decompress)],
)
def test_csv(run: Path, name: str, delimiter: str, opened: Callable[[bytes], bytes]) -> None:
    """A header and a record for each row; lists and structs are JSON, null is an empty field."""
    text = opened(exported(run, name)).decode()
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


def test_what_is_exported_can_be_input(run: Path) -> None:
    """A later job reads the answers of an earlier one."""
    for name in ("b.csv", "b.jsonl.zst", "b.arrow", "b.parquet"):
        exported(run, name)
        job = job_of(
            run.parent,
            INSTANT,
            input={"path": str(run.parent / name), "columns": ["id"]},
            output={"path": str(run.parent / f"next-{name}")},
        )
        assert batchrunner.run(job).rows_ok == ROWS
        assert [row["id"] for row in results_of(job)] == [f"{n:03d}" for n in range(ROWS)]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "arrow", "jsonl.gz"])
def test_standard_output(run: Path, form: str) -> None:
    """`-` is standard output, with nothing else in it."""
    written = batchrun("export", run, "-", "--format", form)
    assert written.exit_code == 0
    assert written.stdout_bytes == exported(run, f"same.{form}")


def test_an_existing_file_is_kept(run: Path) -> None:
    """It is replaced with --force only, and never by half a file."""
    file = run.parent / "answers.csv"
    file.write_text("mine")
    result = batchrun("export", run, file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "answers.csv: exists: take another name, or --force to replace it" in result.stderr
    assert file.read_text() == "mine"
    assert exported(run, "answers.csv", "--force").count(b"\n") > ROWS
    (part, *_) = (run / "parts").iterdir()
    part.write_bytes(b"damaged")
    before = file.read_bytes()
    assert batchrun("export", run, file, "--force").exit_code == 2
    assert file.read_bytes() == before
    assert not [path for path in (*run.parent.iterdir(), *run.iterdir()) if path.name.startswith(".")]


REFUSALS: list[tuple[list[Any], str]] = [
    (["answers.txt"], "its ending names no format: give one of parquet, csv"),
    (["answers"], "its ending names no format"),
    (["answers.parquet.gz"], "its ending names no format"),
    (["answers.csv", "--format", "xlsx"], "--format xlsx: give one of parquet, csv"),
    (["-"], "standard output has no ending: give its --format"),
    (["nowhere/answers.csv"], "there is no directory"),
    (["run/parts/answers.csv"], "give a visible name outside of what"),
    (["~nobody-of-that-name/answers.csv"], "no home directory for ~nobody-of-that-name"),
    ([".", "--format", "csv"], "is a directory: give a file"),
]


@pytest.mark.parametrize(("arguments", "problem"), REFUSALS)
def test_refusals(run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str) -> None:
    """One line says what is wrong, with exit code 2, and nothing is written."""
    monkeypatch.chdir(run.parent)
    before = sorted(run.parent.rglob("*"))
    result = batchrun("export", run, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert problem in line
    assert sorted(run.parent.rglob("*")) == before


def test_a_run_that_is_not_done(tmp_path: Path, server: FakeSGLang) -> None:
    """What is there is exported, with exit code 1 and the number of missing rows."""
    job = job_of(tmp_path, server, rows=60, limits={"max_failed_rows": 9})
    server.script = lambda sent: "too long" if sent.prompt == "row 1" else "answer"
    assert batchrun(write_job(job, tmp_path), "-q", "--shard", "0/2").exit_code == 0
    file = tmp_path / "a.csv"
    result = batchrun("export", tmp_path / "run", file)
    assert result.exit_code == 1
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert f"exported: {len(rows)} of 60 rows, {60 - len(rows)} are missing" in result.stderr
    assert [row["row"] for row in rows if row["error"]] == ["1"]
    nothing = batchrun("export", tmp_path / "elsewhere", file, "--force")
    assert nothing.exit_code == 2
    assert "nothing has finished yet" in nothing.stderr


def test_a_reader_that_wants_no_more(run: Path) -> None:
    """`| head` ends the export without an error."""
    command = (
        f"{sys.executable} -m batchrunner export {run} - --format csv | head -c 5; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == '"row"0\n'
    assert "cannot be written" not in done.stderr


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_standard_output_that_is_full(run: Path, form: str) -> None:
    """It is told in one line."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m batchrunner export {run} - --format {form} > /dev/full"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "batchrun: standard output: cannot be written: No space left on device\n"


def test_a_pipe_that_does_not_block(run: Path) -> None:
    """Its reader gets all of it, however slowly it reads."""
    code = (
        f"import os, sys; os.set_blocking(1, False); sys.argv = ['batchrun', 'export', {str(run)!r}, '-', "
        "'--format', 'jsonl']; from batchrunner.cli import main; main()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [json.loads(line) for line in process.stdout]
    assert process.returncode == 0
    assert [line["row"] for line in lines] == list(range(ROWS))
