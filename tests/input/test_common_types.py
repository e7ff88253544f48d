"""Files of one input whose types differ are read as one data set, up to the merged results."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.output.merge import merge
from tests.conftest import INSTANT, batchrun, column_of, job_of, merged_table, results_of, write_job
from tests.support.refusals import refusal, told

NOON = dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC)
LOCAL = NOON.replace(tzinfo=None)
A = pa.struct([("a", pa.int32())])
AB = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])
DICTIONARY = pa.dictionary(pa.int8(), pa.string())
PAIRS: list[tuple[pa.DataType, list[Any], pa.DataType, list[Any], pa.DataType, list[Any]]] = [
    # a type and values of the first file, of the second file, and of the results
    (pa.string(), ["a"], pa.large_string(), ["b"], pa.string(), ["a", "b"]),
    (pa.large_string(), ["a"], pa.string(), ["b"], pa.large_string(), ["a", "b"]),
    (pa.string(), ["a"], pa.string_view(), ["b"], pa.string(), ["a", "b"]),
    (pa.string(), ["a"], DICTIONARY, ["b"], pa.string(), ["a", "b"]),
    (DICTIONARY, ["a"], pa.large_string(), ["b"], pa.dictionary(pa.int32(), pa.string()), ["a", "b"]),
    (
        pa.dictionary(pa.int8(), pa.int32()), [7], pa.int64(), [1 << 40],
        pa.int64(), [7, 1 << 40],  # a Parquet file keeps dictionaries of texts only
    ),
    (pa.binary(), [b"a"], pa.large_binary(), [b"b"], pa.binary(), [b"a", b"b"]),
    (pa.binary(2), [b"ab"], pa.binary(3), [b"abc"], pa.binary(), [b"ab", b"abc"]),
    (pa.int32(), [1], pa.int64(), [1 << 40], pa.int64(), [1, 1 << 40]),
    (pa.int64(), [1], pa.uint8(), [2], pa.int64(), [1, 2]),
    (pa.int64(), [1], pa.float64(), [2.5], pa.float64(), [1.0, 2.5]),
    (pa.float32(), [0.5], pa.float64(), [0.25], pa.float64(), [0.5, 0.25]),
    (pa.list_(pa.int64()), [[1]], pa.large_list(pa.int32()), [[2]], pa.list_(pa.int64()), [[1], [2]]),
    (pa.list_(pa.int64(), 1), [[1]], pa.list_(pa.int64(), 2), [[2, 3]], pa.list_(pa.int64()), [[1], [2, 3]]),
    (pa.list_(pa.null()), [[]], pa.list_(A), [[{"a": 1}]], pa.list_(A), [[], [{"a": 1}]]),
    (
        pa.decimal128(5, 2), [Decimal("1.25")], pa.decimal128(20, 4), [Decimal("0.0001")],
        pa.decimal128(20, 4), [Decimal("1.2500"), Decimal("0.0001")],
    ),
    (
        pa.decimal128(5, 2), [Decimal("1.25")], pa.int64(), [1 << 60],
        pa.decimal128(21, 2), [Decimal("1.25"), Decimal(1 << 60)],
    ),
    (
        pa.timestamp("ms"), [LOCAL], pa.timestamp("us"), [LOCAL.replace(microsecond=1)],
        pa.timestamp("us"), [LOCAL, LOCAL.replace(microsecond=1)],
    ),
    (
        pa.timestamp("us", "UTC"), [NOON], pa.timestamp("us", "+00:00"), [NOON],
        pa.timestamp("us", "UTC"), [NOON] * 2,
    ),
    (
        pa.timestamp("us", "Europe/Berlin"), [NOON], pa.timestamp("us", "UTC"), [NOON],
        pa.timestamp("us", "UTC"), [NOON] * 2,
    ),
    (pa.time32("ms"), [dt.time(1)], pa.time64("us"), [dt.time(2)], pa.time64("us"), [dt.time(1), dt.time(2)]),
    (pa.null(), [None], A, [{"a": 1}], A, [None, {"a": 1}]),
    (A, [{"a": 1}], AB, [{"a": 2, "b": ["x"]}], AB, [{"a": 1, "b": None}, {"a": 2, "b": ["x"]}]),
    (
        pa.list_(pa.struct([("in", A)])), [[{"in": {"a": 1}}]], pa.list_(pa.struct([("in", AB)])), [None],
        pa.list_(pa.struct([("in", AB)])), [[{"in": {"a": 1, "b": None}}], None],
    ),
    (
        pa.map_(pa.string(), pa.int32()), [[("k", 1)]], pa.map_(pa.large_string(), pa.int64()), [[("k", 2)]],
        pa.map_(pa.string(), pa.int64()), [[("k", 1)], [("k", 2)]],
    ),
    (pa.null(), [None], pa.null(), [None], pa.string(), [None, None]),
]  # fmt: skip


def write_file(path: Path, kind: pa.DataType, values: list[Any]) -> None:
    """Write a file with a text and a value on each row."""
    path.parent.mkdir(exist_ok=True)
    texts = [f"{path.stem}{at}" for at in range(len(values))]
    pq.write_table(pa.table({"text": texts, "x": pa.array(values, kind)}), path)


@pytest.mark.parametrize(
    ("one", "of_one", "other", "of_other", "kind", "values"), PAIRS, ids=[f"{p[0]}|{p[2]}" for p in PAIRS]
)
def test_types_of_two_files(
    tmp_path: Path,
    one: pa.DataType,
    of_one: list[Any],
    other: pa.DataType,
    of_other: list[Any],
    kind: pa.DataType,
    values: list[Any],
) -> None:
    """They are read with the type that holds the values of both, also by a later start and by a merge."""
    write_file(tmp_path / "in" / "a.parquet", one, of_one)
    write_file(tmp_path / "in" / "b.parquet", other, of_other)
    source = {"path": str(tmp_path / "in"), "columns": ["x"], "filter": "x is none or x is not undefined"}
    job = job_of(tmp_path, INSTANT, input=source, order="prefix")
    assert batchrunner.run(job, overrides=["input.limit=1"]).rows_ok == 1
    assert batchrunner.run(job).rows_resumed == 1
    assert column_of(job, "x") == values
    merge(tmp_path / "run")
    merged = merged_table(tmp_path / "run").column("x")
    assert (merged.type, merged.to_pylist()) == (kind, values)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.string(), pa.int64()),
        (pa.bool_(), pa.int64()),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.list_(pa.int64()), A),
        (A, pa.struct([("a", pa.string())])),
        (pa.map_(pa.string(), pa.int64()), pa.map_(pa.int64(), pa.int64())),
    ],
)
def test_types_without_a_common_one(tmp_path: Path, one: pa.DataType, other: pa.DataType) -> None:
    """They are refused in one line with both files."""
    write_file(tmp_path / "in" / "a.parquet", one, [None])
    write_file(tmp_path / "in" / "b.parquet", other, [None])
    job = job_of(tmp_path, input={"path": str(tmp_path / "in"), "columns": ["x"]})
    told(refusal(job, tmp_path), f"{tmp_path}/in/b.parquet: column 'x' is", f"in {tmp_path}/in/a.parquet")


@pytest.mark.parametrize("order", ["input", "prefix"])
def test_a_value_that_does_not_fit(tmp_path: Path, order: str) -> None:
    """It fails its row with its file and its place: no value changes silently, and no other row fails."""
    write_file(tmp_path / "in" / "a.parquet", pa.int64(), [1, (1 << 53) + 1, 3])
    write_file(tmp_path / "in" / "b.parquet", pa.float64(), [0.5])
    job = job_of(
        tmp_path,
        INSTANT,
        input={"path": str(tmp_path / "in"), "columns": ["x"]},
        limits={"max_failed_rows": 1},
        order=order,
    )
    batchrunner.run(job)
    errors = [row["error"] for row in results_of(job)]
    assert column_of(job, "x") == [1.0, None, 3.0, 0.5]
    assert errors[1] == f"{tmp_path}/in/a.parquet: row 1: column 'x': 9007199254740993 is not float64"
    assert errors.count(None) == 3


def test_a_column_that_a_file_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is null there, and a line names the file; a value in the path of the file counts."""
    for year, columns in ((2023, {"x": [1.5], "year": [1999]}), (2024, {})):
        path = tmp_path / "in" / f"year={year}" / "a.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table({"text": ["t"], **columns}), path)
    job = job_of(tmp_path, INSTANT, input={"path": str(tmp_path / "in"), "columns": ["x", "year"]})
    batchrunner.run(job)
    assert [(row["x"], row["year"]) for row in results_of(job)] == [(1.5, 1999), (None, 2024)]
    assert (
        f"{tmp_path}/in/year=2024/a.parquet: has no column 'x', so the column is null in its rows"
        in caplog.text
    )
    assert "'year'" not in caplog.text


def test_files_of_several_formats(tmp_path: Path) -> None:
    """CSV, JSON Lines, Arrow and Parquet are one input: nulls and narrow types of one fit the others."""
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": 1, "s": null, "l": []}\n')
    (tmp_path / "b.csv").write_text("text,n\nb,2\n")
    struct = pa.array([{"a": 1}], A)
    table = pa.table({"text": ["c"], "n": [2.5], "s": struct, "l": pa.array([[{"a": 1}]])})
    with pa.OSFile(f"{tmp_path}/c.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    texts = pa.array(["d"], pa.large_string())
    pq.write_table(pa.table({"text": texts, "n": pa.array([3], pa.int16())}), tmp_path / "d.parquet")
    paths = [f"{tmp_path}/{name}" for name in ("a.jsonl", "b.csv", "c.arrow", "d.parquet")]
    source = {"path": paths, "columns": ["n", "s", "l"], "types": {"n": "int64"}}
    job = job_of(tmp_path, INSTANT, input=source)
    batchrunner.run(job)
    rows = [(row["n"], row["s"], row["l"]) for row in results_of(job)]
    assert rows == [(1, None, []), (2, None, None), (2.5, {"a": 1}, [{"a": 1}]), (3, None, None)]
    answers = batchrunner.generate(
        [Path(path) for path in paths[2:]], prompt="{{ n }}", engine=INSTANT, columns=["n"]
    )
    assert answers.column("n").to_pylist() == [2.5, 3]


def test_a_file_that_is_added_later(tmp_path: Path) -> None:
    """A run goes on with one in another layout; a carried column of another type is another run."""
    write_file(tmp_path / "in" / "a.parquet", pa.string(), ["a"])
    job = job_of(tmp_path, INSTANT, input={"path": str(tmp_path / "in"), "columns": ["x"]})
    batchrunner.run(job)
    write_file(tmp_path / "in" / "b.parquet", pa.large_string(), ["b"])
    assert batchrunner.run(job).rows_resumed == 1
    assert column_of(job, "x") == ["a", "b"]
    write_file(tmp_path / "in" / "c.parquet", pa.binary(), [b"c"])
    told(batchrun(write_job(job, tmp_path)).stderr, "columns.x was 'string' and is 'binary'")
