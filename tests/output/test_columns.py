"""Columns of results and their types, carried columns included."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    batchrun,
    job_of,
    merged_table,
    parts_of,
    report_of,
    results_of,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.inputs import CARRIED


def test_columns_and_types(tmp_path: Path, server: FakeSGLang) -> None:
    """Parts have the documented columns, in their order and with their types."""
    job = job_of(tmp_path, server, input={"columns": ["id"]})
    batchrunner.run(job)
    (part,) = parts_of(job["output"]["path"])
    assert {field.name: str(field.type) for field in part.schema} == {
        "row": "int64",
        "id": "int64",
        "output": "string",
        "finish_reason": "string",
        "prompt_tokens": "int32",
        "cached_tokens": "int32",
        "completion_tokens": "int32",
        "latency_s": "double",
        "attempts": "int32",
        "error": "string",
    }
    first = results_of(job)[0]
    assert first.pop("latency_s") > 0
    assert first == {
        "row": 0,
        "id": 0,
        "output": "answer 0 to row 0",
        "finish_reason": "stop",
        "prompt_tokens": 2,
        "cached_tokens": 1,
        "completion_tokens": 5,
        "attempts": 1,
        "error": None,
    }


@pytest.mark.parametrize("name", CARRIED)
def test_carried_columns_keep_their_types(tmp_path: Path, name: str) -> None:
    """A carried column keeps its type and values through several parts and `merge`."""
    source = pa.table({"text": ["row 0", "row 1", "row 2"], name: CARRIED[name]})
    pq.write_table(source, tmp_path / "input.parquet", row_group_size=1)
    job = job_of(tmp_path, input={"columns": [name]}, output={"part_rows": 2})
    batchrunner.run(job)
    expected = pq.read_table(tmp_path / "input.parquet").column(name)
    parts = pa.concat_tables(parts_of(tmp_path / "run")).sort_by("row").column(name)
    merged = merged_table(tmp_path / "run").column(name)
    assert parts.type == merged.type == expected.type
    assert parts.to_pylist() == merged.to_pylist() == expected.to_pylist()


DECLARED: dict[str, tuple[pa.DataType, pa.DataType, list[Any], list[Any]]] = {
    "number": (pa.int64(), pa.int64(), [1, 2], [None, 3]),
    "list": (
        pa.list_(pa.field("item", pa.string(), nullable=False)),
        pa.list_(pa.field("item", pa.string(), metadata={"of": "another"})),
        [["a"], []],
        [None, [None]],
    ),
}


@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize("column", DECLARED)
def test_one_file_says_that_it_has_no_nulls(tmp_path: Path, column: str, names: str) -> None:
    """Input files may differ in the nullability and metadata of a carried column."""
    full, holey, *both = DECLARED[column]
    fields = [pa.field("of", full, nullable=False, metadata={"by": "a"}), pa.field("of", holey)]
    (tmp_path / "in").mkdir()
    for name, field, values in zip(names, fields, both, strict=True):
        schema = pa.schema([pa.field("text", pa.string()), field], metadata={"file": name})
        columns = [pa.array(["row 0", "row 1"]), pa.array(values, field.type)]
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), tmp_path / "in" / f"{name}.parquet")
    job = job_of(tmp_path, input={"path": str(tmp_path / "in"), "columns": ["of"]}, order="prefix")
    batchrunner.run(job)
    expected = [value for _, values in sorted(zip(names, both, strict=True)) for value in values]
    assert [row["of"] for row in results_of(job)] == expected
    assert merged_table(tmp_path / "run").column("of").to_pylist() == expected


def test_rename(tmp_path: Path) -> None:
    """A carried column whose name a result column has can be renamed."""
    write_rows(tmp_path / "input.parquet", 3, output=["a", "b", "c"])
    job = job_of(tmp_path, input={"columns": ["output", "id"], "rename": {"output": "reference"}})
    batchrunner.run(job)
    (part,) = parts_of(tmp_path / "run")
    assert part.schema.names[:4] == ["row", "reference", "id", "output"]
    assert part.column("reference").to_pylist() == ["a", "b", "c"]


def test_simulated_results_are_marked(tmp_path: Path) -> None:
    """Synthetic answers are marked everywhere: in the output, the files, the report and on the screen."""
    job = job_of(tmp_path)
    result = batchrun(write_job(job, tmp_path))
    assert all(row["output"].startswith("[simulated] ") for row in results_of(job))
    (part,) = parts_of(tmp_path / "run")
    for table in (part, merged_table(tmp_path / "run")):
        assert (table.schema.metadata or {})[b"simulated"] == b"true"
    assert report_of(job)["simulated"] is True
    assert "simulated" in result.stderr
    assert "simulated" in batchrun("status", tmp_path / "run").stdout
