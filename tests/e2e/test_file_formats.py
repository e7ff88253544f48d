"""CSV, JSON Lines and Arrow files are input like Parquet: the same rows in the same order."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64

import batchrunner
from batchrunner.core.errors import InputError, JobError, ResumeError, TaskHeldError
from batchrunner.core.timing import TIMING
from batchrunner.input import parquet_copy, text_files
from batchrunner.job.load import load_job
from batchrunner.output.task_lock import hold_task
from batchrunner.runner.prepare import drop_copies, new_task, prepare
from tests.conftest import INSTANT, column_of, job_of, results_of, write_rows
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

ROWS = 3000


def texts(rows: range) -> list[str]:
    """Return texts with all that a format has to quote."""
    return [f'row {n}, "quoted"\nline two\r\n\u00fc\u65e5 \\ {n % 7}' for n in rows]


def as_csv(rows: range, delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerows([("id", "text"), *zip(rows, texts(rows), strict=True)])
    return out.getvalue().encode()


def as_json_lines(rows: range) -> bytes:
    lines = (json.dumps({"id": n, "text": text}) for n, text in zip(rows, texts(rows), strict=True))
    return "\n".join(lines).encode()


def as_arrow(rows: range, new: Callable[..., Any], **options: Any) -> bytes:
    table = pa.table({"id": list(rows), "text": texts(rows)})
    sink = io.BytesIO()
    with new(sink, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=700)
    return sink.getvalue()


def compressed(data: bytes, codec: str) -> bytes:
    return bytes(pa.Codec(codec).compress(data, asbytes=True))


def lz4(rows: range) -> bytes:
    return as_arrow(rows, pa.ipc.new_file, options=pa.ipc.IpcWriteOptions(compression="lz4"))


FORMATS: dict[str, Callable[[range], bytes]] = {
    "a.csv": as_csv,
    "a.CSV": lambda rows: b"\xef\xbb\xbf" + as_csv(rows),
    "a.tsv": lambda rows: as_csv(rows, "\t"),
    "a.csv.gz": lambda rows: gzip.compress(as_csv(rows)),
    "a.jsonl": as_json_lines,
    "a.ndjson": lambda rows: b"\xef\xbb\xbf\n" + as_json_lines(rows).replace(b"\n", b"\r\n\n") + b"\n",
    "a.jsonl.gz": lambda rows: (
        gzip.compress(as_json_lines(rows)[:999]) + gzip.compress(as_json_lines(rows)[999:])
    ),
    "a.jsonl.zst": lambda rows: compressed(as_json_lines(rows), "zstd"),
    # compressed, whatever the name says
    "gzip.jsonl": lambda rows: gzip.compress(as_json_lines(rows)),
    "zstd.csv": lambda rows: compressed(as_csv(rows), "zstd"),
    "lz4.jsonl.gz": lambda rows: compressed(as_json_lines(rows), "lz4"),
    "bz2.tsv": lambda rows: bz2.compress(as_csv(rows, "\t")),
    "plain.csv.zst": as_csv,
    "gzip.arrow": lambda rows: gzip.compress(as_arrow(rows, pa.ipc.new_file)),
    "padded.csv.gz": lambda rows: gzip.compress(as_csv(rows)) + b"\0" * 999,
    "a.arrow": lambda rows: as_arrow(rows, pa.ipc.new_file),
    "a.feather": lz4,
    "a.ipc": lambda rows: as_arrow(rows, pa.ipc.new_stream),
}
"""Files of rows by their names."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of many blocks, so that most reads begin in the middle of one."""
    monkeypatch.setattr(text_files, "BATCH_ROWS", 100)


def job_on(directory: Path, name: str, engine: Any = INSTANT, **changes: Any) -> dict[str, Any]:
    """Return a job on a new file of this name."""
    path = directory / name
    path.write_bytes(FORMATS[name](range(ROWS)))
    changes["input"] = {
        "path": str(path),
        "columns": ["id", "text"],
        **({"types": {"id": "int64"}} if "sv" in name.lower() else {}),
        **changes.get("input", {}),
    }
    return job_of(directory, engine, **changes)


def carried(job: dict[str, Any]) -> list[tuple[int, int, str]]:
    """Return what the results carry, all of which went well."""
    rows = results_of(job)
    assert {row["error"] for row in rows} <= {None}
    return [(row["row"], row["id"], row["text"]) for row in rows]


def rows_of(numbers: list[int]) -> list[tuple[int, int, str]]:
    return [(n, n, texts(range(n, n + 1))[0]) for n in numbers]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(tmp_path: Path, name: str) -> None:
    """A run has every row once, with its place in the file; a filter and a limit choose as in Parquet."""
    job = job_on(tmp_path, name, order="prefix")
    assert batchrunner.run(job).rows_ok == ROWS
    assert carried(job) == rows_of(list(range(ROWS)))
    job["input"] |= {"filter": "id % 1000 == 7", "limit": 2}
    assert batchrunner.run(job, fresh=True).rows_ok == 2
    assert carried(job) == rows_of([7, 1007])


@pytest.mark.parametrize(("name", "join"), [("a.jsonl.zst", True), ("a.arrow", False)])
def test_a_file_that_changes(
    tmp_path: Path, server: FakeSGLang, caplog: pytest.LogCaptureFixture, name: str, join: bool
) -> None:
    """A run reads the copy that it has of its file, also when that changes, and tells of it at the end."""
    job = job_on(tmp_path, name, server, order="input", window=8)
    path = tmp_path / name

    def answer(_: Sent) -> Behaviour:
        path.write_bytes(b"another")
        return "answer"

    server.script = answer
    assert batchrunner.run(job, join=join).exit_code == 0
    assert f"{path} changed during the run, after it was read" in caplog.text
    assert carried(job) == rows_of(list(range(ROWS)))
    assert len(server.sent) == ROWS


def test_a_change_of_one_byte_in_a_large_file(tmp_path: Path) -> None:
    """A text file has no footer that tells of a change: every byte counts at a resume."""
    path = tmp_path / "a.csv"
    path.write_text("id,text\n" + "".join(f"{n},{'x' * 100}\n" for n in range(30_000)))
    job = job_of(tmp_path, INSTANT, input={"path": str(path), "limit": 5})
    batchrunner.run(job)
    data = bytearray(path.read_bytes())
    data[100_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ResumeError, match="changed"):
        batchrunner.run(job)


def test_a_second_start_leaves_the_copy_of_the_input(tmp_path: Path) -> None:
    """A run whose engine is starting reads it later; what no run has begun leaves nothing."""
    path = tmp_path / "a.csv"
    path.write_bytes(as_csv(range(2)))
    job = load_job(job_of(tmp_path, INSTANT, input={"path": str(path)}))
    first = prepare(job, keeps_copies=True)
    with hold_task(first.run_dir), pytest.raises(TaskHeldError):
        batchrunner.run(job)
    assert [len(batch) for batch in first.batches(BitMap64([0, 1]))] == [2]
    with pytest.raises(JobError):
        batchrunner.run(job, overrides=["prompt.text={{ no }}"])
    assert not first.run_dir.copies.exists()


def test_another_worker_ends_the_run_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It deletes the copies of the input; a worker that was starting makes those that it needs again."""
    path = tmp_path / "a.csv"
    path.write_bytes(as_csv(range(2)))
    job = load_job(job_of(tmp_path, INSTANT, input={"path": str(path)}))
    worker = prepare(job, new_task(), keeps_copies=True)
    assert batchrunner.run(job, join=True).exit_code == 0
    assert not worker.run_dir.copies.exists()
    assert [len(batch) for batch in worker.batches(BitMap64([0, 1]))] == [2]
    drop_copies(worker.run_dir, is_done=True)

    def written_into_nothing(*arguments: Any) -> None:
        monkeypatch.undo()
        parquet_copy.write_parquet(*arguments)
        shutil.rmtree(worker.run_dir.copies)

    monkeypatch.setattr("batchrunner.input.files.write_parquet", written_into_nothing)
    assert batchrunner.run(job, join=True).exit_code == 0


def test_the_copies_of_a_run_at_work(tmp_path: Path) -> None:
    """A worker that ends leaves them to the others."""
    path = tmp_path / "a.csv"
    path.write_bytes(as_csv(range(2)))
    job = load_job(job_of(tmp_path, INSTANT, input={"path": str(path)}))
    worker = prepare(job, new_task(), keeps_copies=True)
    with hold_task(worker.run_dir):
        batchrunner.run(job, join=True)
        assert worker.run_dir.copies.exists()
    batchrunner.run(job, join=True)
    assert not worker.run_dir.copies.exists()


def test_a_copy_whose_maker_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that sleeps while it makes the copy holds up no other one."""
    path = tmp_path / "a.csv"
    path.write_bytes(as_csv(range(2)))
    job = job_of(tmp_path, INSTANT, input={"path": str(path)})
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=BlockingIOError))
    monkeypatch.setattr(TIMING, "silent_copy", 0.1)
    assert batchrunner.run(job).rows_ok == 2


def test_one_directory_of_one_kind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory is read where its files are of one kind; beside Parquet files it is said what is not."""
    source = tmp_path / "in"
    (source / "lang=de").mkdir(parents=True)
    (source / "lang=de" / "b.csv.gz").write_bytes(FORMATS["a.csv.gz"](range(2)))
    (source / "a.csv").write_bytes(as_csv(range(2, 4)))
    (source / "notes.txt").write_text("no input")
    (source / "_hidden.json").write_text("{}")
    job = job_of(tmp_path, INSTANT, input={"path": str(source), "columns": ["id"]})
    batchrunner.run(job)
    assert column_of(job, "id") == ["2", "3", "0", "1"]
    (source / "c.jsonl").write_bytes(as_json_lines(range(2)))
    with pytest.raises(InputError, match=r"has CSV and JSON Lines files: give files of one kind, such as"):
        batchrunner.run(job)
    pq.write_table(pa.table({"id": [9], "text": ["t"]}), source / "d.parquet")
    assert batchrunner.run(job, fresh=True).rows_total == 1
    assert (
        f"{source}: only the Parquet files are read; files of other kinds, such as {source}/a.csv"
        in caplog.text
    )


def test_files_of_several_formats_that_are_named(tmp_path: Path) -> None:
    """Named files may differ in their formats; in the types of used columns they may not."""
    paths = [tmp_path / name for name in ("a.arrow", "a.csv", "a.jsonl")]
    for number, path in enumerate(paths):
        path.write_bytes(FORMATS[path.name](range(number * 5, number * 5 + 5)))
    job = job_of(tmp_path, INSTANT, input={"path": [str(path) for path in paths], "columns": ["id"]})
    with pytest.raises(InputError, match=r"column 'id' is string, but int64 in .* its type in input.types"):
        batchrunner.run(job)
    batchrunner.run(job, overrides=["input.types={id: int64}"])
    assert column_of(job, "id") == list(range(15))


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"\r', "SEP=;"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_the_delimiter_on_the_first_line(tmp_path: Path, first: str, encoding: str) -> None:
    """What Excel is told there is the delimiter, and the header is the second line."""
    path = tmp_path / "a.csv"
    path.write_bytes(f"{first}\nid;text\n1;a,b\n2;c;d\n".encode(encoding))
    source = {"path": str(path), "columns": ["id"], "encoding": encoding}
    job = job_of(tmp_path, INSTANT, input=source, limits={"max_failed_rows": 1})
    batchrunner.run(job)
    good, bad = results_of(job)
    assert (good["id"], good["error"]) == ("1", None)
    assert bad["error"].endswith("line 4: has 3 value(s), but the header has 2")


def of_excel(encoding: str, delimiter: str) -> bytes:
    """Return a CSV file as Excel writes it in half of the world."""
    lines = ["Nr;Preis;Notiz", 'R-1;1.50;"schön\ngut"', "R-2;;übel", "R-3;1-2;é", ""]
    return "\r\n".join(lines).replace(";", delimiter).encode(encoding)


@pytest.mark.parametrize(("encoding", "delimiter"), [("cp1252", ";"), ("utf-16", "\t"), ("utf-8-sig", "|")])
def test_csv_of_excel(tmp_path: Path, encoding: str, delimiter: str) -> None:
    """Delimiter and encoding are the job's."""
    path = tmp_path / "a.csv"
    path.write_bytes(of_excel(encoding, delimiter))
    source = {"path": str(path), "columns": ["Nr", "Preis", "Notiz"], "types": {"Preis": "float64"}}
    source |= {"encoding": encoding, "delimiter": delimiter}
    job = job_of(tmp_path, INSTANT, input=source, prompt={"text": "Notiz"})
    batchrunner.run(job)
    one, two, three = results_of(job)
    assert (one["Nr"], one["Preis"], one["Notiz"]) == ("R-1", 1.5, "schön\ngut")
    assert (two["Preis"], two["Notiz"], two["error"]) == (None, "übel", None)
    assert three["error"].endswith("line 5: column 'Preis': '1-2' is not float64")


UNUSUAL = {
    "views of lists": pa.array(
        [[{"n": 1, "nothing": None}], None, []],
        pa.list_view(pa.struct([("n", pa.int64()), ("nothing", pa.null())])),
    ),
    "texts in lists": pa.array([["a"], None, []], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    "pairs": pa.array([[("k", [None])], None, []], pa.map_(pa.string(), pa.list_view(pa.null()))),
}
"""Columns of types that Arrow cannot do everything with."""


@pytest.mark.parametrize("values", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("order", ["input", "prefix"])
def test_unusual_types(tmp_path: Path, values: pa.Array[Any], order: str) -> None:
    """Valid Parquet is read, and its columns are carried as they are."""
    table = pa.table({"text": pa.array(["a", "b", "c"], pa.string_view()), "x": values})
    pq.write_table(table, tmp_path / "input.parquet", row_group_size=2)
    job = job_of(
        tmp_path, INSTANT, input={"columns": ["x"], "filter": "x is none or text != 'c'"}, order=order
    )
    batchrunner.run(job)
    assert column_of(job, "x") == values.to_pylist()[:2]


def test_dictionaries_with_more_values_than_one_holds(tmp_path: Path) -> None:
    """Each file has 100 categories, whose numbers have 8 bits: the results have all 200."""
    for part in (0, 100):
        names = pa.array([f"c{part + n}" for n in range(100)])
        column = pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), names)
        write_rows(tmp_path / "in" / f"{part}.parquet", 100, c=column)
    job = job_of(tmp_path, INSTANT, input={"path": str(tmp_path / "in"), "columns": ["c"]}, order="prefix")
    batchrunner.run(job)
    assert column_of(job, "c") == [f"c{n}" for n in range(200)]
