"""Rows of files: which files a path names, their ordinals, columns and values, and the leases of rows."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

import batchrunner
from batchrunner.core.errors import InputError
from batchrunner.input import text_files
from batchrunner.input.dataset import Dataset, rows_of
from batchrunner.input.job_input import MOST_LEASE_ROWS, cut_into_leases
from batchrunner.job.arrow_types import PLAIN_TYPES
from batchrunner.job.spec import InputSpec
from tests.conftest import (
    INSTANT,
    job_of,
    results_of,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang


def test_row_counts_before_filter_and_limit(tmp_path: Path, server: FakeSGLang) -> None:
    """`row` is the place in the input, so a result can be joined back whatever was selected."""
    job = job_of(tmp_path, server, rows=10, input={"filter": "id % 3 == 1", "limit": 2, "columns": ["id"]})
    assert batchrunner.run(job).rows_total == 2
    assert [(row["row"], row["id"]) for row in results_of(job)] == [(1, 1), (4, 4)]


def test_hive_partitions_are_columns(tmp_path: Path, server: FakeSGLang) -> None:
    """The partitions of a directory can be carried, put into prompts and filtered by."""
    for year in (2023, 2024):
        for language in ("de", "en%2FGB"):
            write_rows(tmp_path / "in" / f"year={year}" / f"language={language}" / "x.parquet", 1)
    job = job_of(
        tmp_path,
        server,
        input={"path": str(tmp_path / "in"), "columns": ["year", "language"], "filter": "year > 2023"},
        prompt={"text": "{{ language }} {{ year + 1 }}"},
    )
    batchrunner.run(job)
    assert sorted(server.prompts) == ["de 2025", "en/GB 2025"]
    assert [(row["row"], row["year"], row["language"]) for row in results_of(job)] == [
        (2, 2024, "de"),
        (3, 2024, "en/GB"),
    ]


def test_a_stored_column_wins_over_the_path(tmp_path: Path, server: FakeSGLang) -> None:
    """What the file says counts: a writer may keep a partition's column, as a text, or not mean the path."""
    write_rows(tmp_path / "lang=3" / "zip=123" / "x.parquet", 2, zip=["0123"] * 2, lang=["en", "de"])
    job = job_of(
        tmp_path,
        server,
        input={"path": str(tmp_path / "lang=3"), "columns": ["zip"], "filter": "lang == 'de'"},
        prompt={"text": "Where is {{ zip }}?"},
    )
    batchrunner.run(job)
    assert server.prompts == ["Where is 0123?"]
    assert [(row["row"], row["zip"]) for row in results_of(job)] == [(1, "0123")]


def test_files_must_agree_on_columns_that_are_used_only(tmp_path: Path) -> None:
    """Files may differ in columns that the job does not use; in one that it uses they may not."""
    write_rows(tmp_path / "in" / "a.parquet", 2, extra=[1, 2])
    write_rows(tmp_path / "in" / "b.parquet", 2, extra=["x", "y"])
    job = job_of(tmp_path, INSTANT, input={"path": str(tmp_path / "in")})
    assert batchrunner.run(job).rows_ok == 4
    with pytest.raises(InputError, match="column 'extra' is string, but int64 in"):
        batchrunner.run(job, overrides=["input.columns=[extra]"], fresh=True)


ABC = [("c", 6), ("a", 0), ("b", 3)]


def test_files_are_taken_in_sorted_path_order(tmp_path: Path) -> None:
    """`row` does not depend on the order in which a file system or a list names the files."""
    source = tmp_path / "in"
    c, a, b = (write_rows(source / f"{name}.parquet", 3, first) for name, first in ABC)
    for number, path in enumerate([[str(c), str(a), str(b)], str(source / "*.parquet"), str(source)]):
        run = tmp_path / f"run{number}"
        job = job_of(tmp_path, input={"path": path, "columns": ["id"]}, output={"path": str(run)})
        batchrunner.run(job)
        assert [(row["row"], row["id"]) for row in results_of(job)] == [(i, i) for i in range(9)]


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its directory is called; it is shown by the first name that was given."""
    write_rows(tmp_path / "in" / "a.parquet", 3)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    names = [
        "in/a.parquet",
        f"{tmp_path}/in/a.parquet",
        "link/a.parquet",
        "in/../in",
        f"file://{tmp_path}/in",
    ]
    job = job_of(tmp_path, input={"path": names, "columns": ["id"]})
    batchrunner.run(job)
    assert [row["id"] for row in results_of(job)] == [0, 1, 2]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [file["path"] for file in run["fingerprint"]["files"]] == ["in/a.parquet"]


def values_in(path: Path, content: str, name: str = "a", types: dict[str, str] | None = None) -> list[Any]:
    path.write_text(content)
    dataset = Dataset(InputSpec.model_validate({"path": str(path), "types": types or {}}))
    batches = dataset.read(BitMap64(range(dataset.total_rows)), [name])
    return [row[name] for batch in batches for row in rows_of(batch, [name]) if isinstance(row, dict)]


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
    assert found == [pa.scalar(text).cast(PLAIN_TYPES[kind]).as_py(), "" if kind == "string" else None]
    assert values_in(tmp_path / "a.jsonl", json.dumps({"a": text}) + "\n", types=types) == found[:1]


def test_a_copy_is_kept_until_the_run_is_done(tmp_path: Path) -> None:
    """It is in the run's directory, is made once, and goes with the last row."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n')
    copies = tmp_path / "copies"
    first = Dataset(InputSpec(path=str(path)), copies=copies)
    (copy,) = copies.glob("*.parquet")
    made = copy.stat().st_mtime_ns
    assert Dataset(InputSpec(path=str(path)), copies=copies).facts() == first.facts()
    assert copy.stat().st_mtime_ns == made
    batchrunner.run(job_of(tmp_path, INSTANT, input={"path": str(path)}))
    assert not (tmp_path / "run" / ".input").exists()


def test_a_refused_file_leaves_nothing(tmp_path: Path) -> None:
    """No copy, and no run directory."""
    (tmp_path / "a.csv").write_text('text\n"open\n')
    with pytest.raises(InputError, match="line 2: unexpected end of data"):
        batchrunner.run(job_of(tmp_path, INSTANT, input={"path": str(tmp_path / "a.csv")}))
    assert not (tmp_path / "run").exists()


@given(groups=st.lists(st.integers(1, 30_000), min_size=1, max_size=30), data=st.data())
def test_leases_part_the_rows(groups: list[int], data: st.DataObject) -> None:
    """They cover the input without gaps, and none is larger than allowed."""
    ends = [sum(groups[: n + 1]) for n in range(len(groups))]
    rows = BitMap64()
    for end in data.draw(st.lists(st.sampled_from(ends), max_size=5)):
        rows.add_range(max(0, end - data.draw(st.integers(1, 9000))), end)
    cuts = cut_into_leases(rows, ends)
    assert (cuts[0], cuts[-1]) == (0, ends[-1])
    assert cuts == sorted(set(cuts))
    counts = [rows.range_cardinality(start, stop) for start, stop in pairwise(cuts)]
    assert sum(counts) == len(rows)
    assert max(counts) <= MOST_LEASE_ROWS


def test_leases_follow_row_groups() -> None:
    """Small row groups are put together, large ones parted evenly, and none is needlessly read by two."""
    rows = BitMap64()
    rows.add_range(0, 64_000)
    assert cut_into_leases(rows, range(100, 64_001, 100))[:4] == [0, 100, 200, 300]
    assert cut_into_leases(rows, range(10, 64_001, 10))[:3] == [0, 120, 240]
    assert cut_into_leases(rows, [300, 64_000])[:4] == [0, 100, 200, 300]
