"""CSV, JSON Lines and Arrow files are input like Parquet: the same rows in the same order."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import InputError, ResumeError
from batchrunner.input import text_files
from tests.conftest import INSTANT, job_of, results_of
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
    "a.csv.zst": lambda rows: compressed(b"\xef\xbb\xbf" + as_csv(rows), "zstd"),
    "a.jsonl": as_json_lines,
    "a.ndjson": lambda rows: b"\xef\xbb\xbf\n" + as_json_lines(rows).replace(b"\n", b"\r\n\n") + b"\n",
    "a.jsonl.gz": lambda rows: (
        gzip.compress(as_json_lines(rows)[:999]) + gzip.compress(as_json_lines(rows)[999:])
    ),
    "a.jsonl.zst": lambda rows: compressed(as_json_lines(rows), "zstd"),
    "a.arrow": lambda rows: as_arrow(rows, pa.ipc.new_file),
    "a.feather": lz4,
    "a.ipc": lambda rows: as_arrow(rows, pa.ipc.new_stream),
    "a.arrows.zst": lambda rows: compressed(as_arrow(rows, pa.ipc.new_stream), "zstd"),
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
    """A run has every row once, with its place in the file."""
    job = job_on(tmp_path, name, order="prefix")
    assert batchrunner.run(job).rows_ok == ROWS
    assert carried(job) == rows_of(list(range(ROWS)))


@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl", "a.arrow"])
def test_filter_and_limit(tmp_path: Path, name: str) -> None:
    """A filter and a limit choose the same rows as in Parquet."""
    job = job_on(tmp_path, name, input={"filter": "id % 1000 == 7", "limit": 2})
    assert batchrunner.run(job).rows_ok == 2
    assert carried(job) == rows_of([7, 1007])


@pytest.mark.parametrize(("name", "join"), [("a.csv", False), ("a.jsonl.zst", True), ("a.arrow", False)])
def test_a_file_that_changes(
    tmp_path: Path, server: FakeSGLang, caplog: pytest.LogCaptureFixture, name: str, join: bool
) -> None:
    """A run reads the copy that it has of its file, also when that changes, and tells of it at the end."""
    job = job_on(tmp_path, name, server, order="input", window=8)
    path = tmp_path / name

    def answer(_: Sent) -> Behaviour:
        if len(server.sent) == 3:
            path.write_bytes(FORMATS[name](range(1, ROWS + 1)))
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
    for at in range(100_000, 100_010):
        data[at] = ord("y")
    path.write_bytes(data)
    with pytest.raises(ResumeError, match="changed"):
        batchrunner.run(job)


def test_one_directory_of_one_kind(tmp_path: Path) -> None:
    """A directory is read where its files are of one kind, with Parquet files before all others."""
    source = tmp_path / "in"
    (source / "lang=de").mkdir(parents=True)
    (source / "lang=de" / "b.csv.gz").write_bytes(FORMATS["a.csv.gz"](range(2)))
    (source / "a.csv").write_bytes(as_csv(range(2, 4)))
    (source / "notes.txt").write_text("no input")
    (source / "_hidden.json").write_text("{}")
    job = job_of(
        tmp_path,
        INSTANT,
        input={"path": str(source), "columns": ["id"]},
        output={"path": str(source / "run")},
    )
    batchrunner.run(job)
    assert batchrunner.run(job).rows_resumed == 4  # it does not take its own files for input
    assert [row["id"] for row in results_of(job)] == ["2", "3", "0", "1"]
    (source / "c.jsonl").write_bytes(as_json_lines(range(2)))
    with pytest.raises(
        InputError, match=r"has CSV and JSON Lines files: name those of one kind, such as .*/\*.csv"
    ):
        batchrunner.run(job)
    shutil.rmtree(source / "run")
    pq.write_table(pa.table({"id": [9], "text": ["t"]}), source / "d.parquet")
    assert batchrunner.run({**job, "output": {"path": str(tmp_path / "r")}}).rows_total == 1


def test_files_of_several_formats_that_are_named(tmp_path: Path) -> None:
    """Named files may differ in their formats; in the types of used columns they may not."""
    paths = [tmp_path / name for name in ("a.jsonl", "b.arrow", "c.csv")]
    for number, (path, rows) in enumerate(
        zip(paths, (as_json_lines, FORMATS["a.arrow"], as_csv), strict=True)
    ):
        path.write_bytes(rows(range(number * 5, number * 5 + 5)))
    job = job_of(tmp_path, INSTANT, input={"path": [str(path) for path in paths], "columns": ["text"]})
    batchrunner.run(job)
    assert [row["text"] for row in results_of(job)] == texts(range(15))
    with pytest.raises(
        InputError, match=r"column 'id' is string, but int64 in .* or give its type in input.types"
    ):
        batchrunner.run(job, overrides=["input.columns=[id]"], fresh=True)
    batchrunner.run(job, overrides=["input.columns=[id]", "input.types={id: int64}"], fresh=True)
    assert [row["id"] for row in results_of(job)] == list(range(15))


def of_excel(encoding: str, delimiter: str) -> bytes:
    """Return a CSV file as Excel writes it in half of the world."""
    cells = [["Nr", "Preis", "Notiz"], ["R-1", "1,50", f"schön{delimiter}\ngut"], ["R-2", "", "übel"]]
    cells += [["R-3", "1.234", "é"]]
    lines = [delimiter.join(f'"{cell}"' if "\n" in cell else cell for cell in row) for row in cells]
    return "\r\n".join([*lines, ""]).encode(encoding)


@pytest.mark.parametrize(("encoding", "delimiter"), [("cp1252", ";"), ("utf-16", "\t"), ("utf-8-sig", "|")])
def test_csv_of_excel(tmp_path: Path, encoding: str, delimiter: str) -> None:
    """Delimiter, encoding and decimal commas are the job's; a point is then no decimal point."""
    path = tmp_path / "a.csv"
    path.write_bytes(of_excel(encoding, delimiter))
    source = {"path": str(path), "columns": ["Nr", "Preis", "Notiz"], "types": {"Preis": "float64"}}
    source |= {"encoding": encoding, "delimiter": delimiter, "decimal": ","}
    job = job_of(tmp_path, INSTANT, input=source, prompt={"text": "Notiz"})
    batchrunner.run(job)
    one, two, three = results_of(job)
    assert (one["Nr"], one["Preis"], one["Notiz"]) == ("R-1", 1.5, f"schön{delimiter}\ngut")
    assert (two["Preis"], two["Notiz"], two["error"]) == (None, "übel", None)
    assert three["error"].endswith("line 5: column 'Preis': '1.234' is not float64")
    with pytest.raises(ResumeError, match="decimal"):
        batchrunner.run(job, overrides=["input.decimal=."])


NULLS = pa.struct([("n", pa.int64()), ("nothing", pa.null())])
UNUSUAL = {
    "views of lists of nulls": pa.list_view(NULLS),
    "large views of lists": pa.large_list_view(pa.list_view(pa.string_view())),
    "lists of nulls": pa.list_(NULLS),
    "lists in a struct": pa.struct([("items", pa.list_view(NULLS))]),
    "texts in lists": pa.list_(pa.dictionary(pa.int8(), pa.string())),
    "pairs": pa.map_(pa.string(), pa.list_view(pa.null())),
}
"""Types of columns that Arrow cannot do everything with."""


def value_of(kind: pa.DataType, size: int) -> Any:
    """Return a value of a type, whose lists have so many items."""
    if pa.types.is_null(kind):
        return None
    if pa.types.is_struct(kind):
        return {field.name: value_of(field.type, size) for field in kind}
    if pa.types.is_map(kind):
        return [(str(key), value_of(kind.item_type, size)) for key in range(size)]
    if pa.types.is_nested(kind):
        return [value_of(kind.value_type, size)] * size
    return size if pa.types.is_integer(kind) else f"t{size}"


@pytest.mark.parametrize("kind", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_types(tmp_path: Path, kind: pa.DataType) -> None:
    """Valid Parquet is read, and its columns are carried as they are, from row groups of any size."""
    values = [None if n % 5 == 0 else value_of(kind, n % 4) for n in range(30)]
    texts = pa.array([f"t{n}" for n in range(30)], pa.string_view())
    table = pa.table({"text": texts, "x": pa.array(values, kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    job = job_of(tmp_path, INSTANT, input={"path": str(tmp_path / "a.parquet"), "columns": ["x"]})
    job["input"]["filter"] = "text != 't9' and (x is none or x)"
    for order in ("input", "prefix"):
        batchrunner.run({**job, "order": order}, fresh=True)
        found = [row["x"] for row in results_of(job)]
        assert found == [value for n, value in enumerate(values) if n != 9 and (value is None or value)]


def test_dictionaries_with_more_values_than_one_holds(tmp_path: Path) -> None:
    """Each file has 100 categories, whose numbers have 8 bits: the results have all 200."""
    for part in (0, 1):
        names = pa.array([f"c{part * 100 + n}" for n in range(100)])
        column = pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), names)
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": names, "c": column}), tmp_path / "in" / f"{part}.parquet")
    job = job_of(tmp_path, INSTANT, input={"path": str(tmp_path / "in"), "columns": ["c"]}, order="prefix")
    batchrunner.run(job)
    assert [row["c"] for row in results_of(job)] == [f"c{n}" for n in range(200)]
