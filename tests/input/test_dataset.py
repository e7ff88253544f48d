"""Rows of files: which files a path names, their ordinals, columns and values, and the leases of rows."""

import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

import batchrunner
from batchrunner.input import text_files
from batchrunner.input.dataset import Dataset, rows_of
from batchrunner.input.job_input import MOST_LEASE_ROWS, cut_into_leases
from batchrunner.job.spec import InputSpec
from tests.conftest import (
    INSTANT,
    batchrun,
    job_of,
    results_of,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang


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


def test_copies_of_a_killed_process_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary copies of a CSV file vanish with their process, at the latest at a later start."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "rows.csv").write_text("a\n1\n")
    (tmp_path / "batchrunner-copies-killed").mkdir()
    spec = InputSpec.model_validate({"path": str(tmp_path / "rows.csv")})
    running = Dataset(spec)
    (in_use, *_), abandoned = tmp_path.glob("batchrunner-copies-*/*.parquet"), "batchrunner-copies-killed"
    for directory in (in_use.parent, tmp_path / abandoned):
        os.utime(directory, (0, 0))
    later = Dataset(spec)
    assert {file.parent for file in tmp_path.glob("batchrunner-copies-*/*.parquet")} > {in_use.parent}
    assert not (tmp_path / abandoned).exists()
    del running, later
    assert list(tmp_path.glob("batchrunner-copies-*")) == []


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


ODD: dict[str, tuple[Any, Any, str]] = {
    "text for a list": ({"tags": ["a"], "by": {"name": "n"}}, {"tags": "a, b"}, "a.tags is text, but list"),
    "text for an object": ({"by": {"name": "n"}}, {"by": "n"}, "a.by is text, but struct"),
    "an object for a list": ([{"role": "user"}], {"role": "user"}, "a is an object, but list"),
    "a number for a text in a list": ([{"role": "user"}], [{"role": 5}], "a[0].role is a number, but string"),
    "a number of more than 64 bits": ({"n": 1}, {"n": 1 << 70}, "a.n is a number, but int64"),
}
"""A value of most rows, the value of one row, and what is said of that."""


@pytest.mark.parametrize(("value", "odd", "cause"), ODD.values(), ids=ODD)
@pytest.mark.parametrize("rows_at_once", [1, 7, 1000])
def test_one_row_with_an_odd_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, odd: Any, cause: str, rows_at_once: int
) -> None:
    """It fails alone, and a line names it: all others keep their lists and objects."""
    monkeypatch.setattr(text_files, "BATCH_ROWS", rows_at_once)
    path = tmp_path / "a.jsonl"
    values = [value] * 300
    values[216] = odd
    path.write_text(
        "".join(json.dumps({"text": f"t{at}", "a": each}) + "\n" for at, each in enumerate(values))
    )
    job = job_of(tmp_path, INSTANT, input={"path": str(path), "columns": ["a"]})
    file = write_job(job, tmp_path)
    problem = f"{path}: line 217: {cause}"
    for command in (["check", file], ["init", path], [file]):
        assert f"1 of 300 records cannot be sent: {problem}" in batchrun(*command).output
    rows = results_of(job)
    assert [row["a"] for row in rows if row["error"] is None] == [value] * 299
    assert rows[216]["error"].startswith(problem)


def test_many_odd_values(tmp_path: Path) -> None:
    """With more of them than a tenth the column is text, and a line says why."""
    values = [{"tags": ["a"]}, {"tags": ["b"]}, {"tags": "c"}]
    content = "".join(json.dumps({"a": value}) + "\n" for value in values)
    texts = ['{"tags":["a"]}', '{"tags":["b"]}', '{"tags":"c"}']
    assert values_in(tmp_path / "a.jsonl", content) == texts
    cause = (
        "line 3: a.tags is text, but list<item: string> in other records: so the column is read as JSON text"
    )
    assert cause in batchrun("init", tmp_path / "a.jsonl").output


@given(ends=st.lists(st.integers(1, 60_000), min_size=1, max_size=6, unique=True), data=st.data())
def test_leases_part_the_rows(ends: list[int], data: st.DataObject) -> None:
    """They cover the input without gaps, and none is larger than allowed."""
    rows = BitMap64()
    for end in ends:
        rows.add_range(max(0, end - data.draw(st.integers(1, 9000))), end)
    cuts = cut_into_leases(rows, max(ends))
    assert (cuts[0], cuts[-1]) == (0, max(ends))
    assert cuts == sorted(set(cuts))
    counts = [rows.range_cardinality(start, stop) for start, stop in pairwise(cuts)]
    assert sum(counts) == len(rows)
    assert max(counts) <= MOST_LEASE_ROWS
