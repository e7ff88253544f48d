"""Values of CSV and JSON Lines files, as they come into the results; and the Parquet copies behind them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyroaring import BitMap64

import batchrunner
from batchrunner.core.errors import InputError
from batchrunner.input import text_files
from batchrunner.input.dataset import Dataset, rows_of
from tests.conftest import INSTANT, job_of

if TYPE_CHECKING:
    from pathlib import Path


def values_in(path: Path, content: str, name: str = "a", types: dict[str, str] | None = None) -> list[Any]:
    path.write_text(content)
    dataset = Dataset(str(path), types=types)
    batches = dataset.read(BitMap64(range(dataset.total_rows)), [name])
    return [row[name] for batch in batches for row in rows_of(batch, [name])]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None, 2.5], [1.0, None, 2.5]),
        ([1, "b", {"c": [True]}], ["1", "b", '{"c":[true]}']),
        ([{}, {"x": 1}, {"y": "z"}], [{"x": None, "y": None}, {"x": 1, "y": None}, {"x": None, "y": "z"}]),
        ([[], [None], ["a"]], [[], [None], ["a"]]),
        ([1 << 63, 5], ["9223372036854775808", "5"]),
    ],
)
@pytest.mark.parametrize("rows_at_once", [1, 100])
def test_json_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[Any], expected: list[Any], rows_at_once: int
) -> None:
    """A column has the type of all its values, or is JSON text, however they are read."""
    monkeypatch.setattr(text_files, "BATCH_ROWS", rows_at_once)
    content = "".join(json.dumps({"a": value}) + "\n" for value in values)
    assert values_in(tmp_path / "a.jsonl", content) == expected


@pytest.mark.parametrize("kind", ["int32", "float64", "bool", "date", "timestamp", "string"])
def test_types_of_json_lines_and_csv(tmp_path: Path, kind: str) -> None:
    """`input.types` reads texts as values; an empty one is null, but for texts."""
    text = {"bool": "true", "date": "2024-02-29", "timestamp": "2024-02-29 12:00:00"}.get(kind, "7")
    types = {"a": kind}
    found = values_in(tmp_path / "a.csv", f"a,b\n{text},x\n,y\n", types=types)
    assert found == [pa.scalar(text).cast(text_files.TYPES[kind]).as_py(), "" if kind == "string" else None]
    assert values_in(tmp_path / "a.jsonl", json.dumps({"a": text}) + "\n", types=types) == found[:1]


def test_a_copy_is_kept_until_the_run_is_done(tmp_path: Path) -> None:
    """It is in the run's directory, is made once, and goes with the last row."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n')
    copies = tmp_path / "copies"
    first = Dataset(str(path), copies=copies)
    (copy,) = copies.glob("*.parquet")
    made = copy.stat().st_mtime_ns
    assert Dataset(str(path), copies=copies).files == first.files
    assert copy.stat().st_mtime_ns == made
    batchrunner.run(job_of(tmp_path, INSTANT, input={"path": str(path)}))
    assert not (tmp_path / "run" / ".input").exists()


def test_a_refused_file_leaves_nothing(tmp_path: Path) -> None:
    """No copy, and no run directory."""
    (tmp_path / "a.csv").write_text('text\n"open\n')
    with pytest.raises(InputError, match="line 2: unexpected end of data"):
        batchrunner.run(job_of(tmp_path, INSTANT, input={"path": str(tmp_path / "a.csv")}))
    assert not (tmp_path / "run").exists()
