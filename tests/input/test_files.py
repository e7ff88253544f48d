"""Input paths and patterns name files, in an order of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import batchrunner
from tests.conftest import (
    job_of,
    results_of,
    write_rows,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


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
