"""Input paths, patterns and URIs name files, in an order of their own."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pyarrow.fs as pafs
import pytest

import batchrunner
from batchrunner.core.errors import InputError
from tests.conftest import (
    job_of,
    results_of,
    write_rows,
)
from tests.support.bucket_paths import BUCKET_PATHS

if TYPE_CHECKING:
    from pathlib import Path


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


class Bucket:
    """Stands for `pyarrow.fs.FileSystem`, with directories as buckets: s3://NAME/… is TOP/NAME/…."""

    def __init__(self, top: Path) -> None:
        self._top = top

    def from_uri(self, uri: str) -> tuple[pafs.FileSystem, str]:
        bucket, _, path = uri.removeprefix("s3://").partition("/")
        return pafs.SubTreeFileSystem(str(self._top / bucket), pafs.LocalFileSystem()), path


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bucket with what a failed Spark job leaves behind beside what another wrote; pyarrow reads it."""
    monkeypatch.setattr("batchrunner.input.files.has_client", lambda: False)
    remote = SimpleNamespace(**{**vars(pafs), "FileSystem": Bucket(tmp_path)})
    monkeypatch.setattr("batchrunner.input.files.pafs", remote)
    for number, name in enumerate(["year=1/a", "year=2/b", "_temporary/0/year=2/b", "other"]):
        top = tmp_path / "bucket" / ("in" if "/" in name else "")
        write_rows(top / f"{name}.parquet", 1, first=number)
    (tmp_path / "bucket" / "in" / "_SUCCESS").touch()
    return tmp_path / "bucket"


@pytest.mark.parametrize(("path", "ids"), BUCKET_PATHS)
def test_uris(tmp_path: Path, bucket: Path, path: str, ids: list[int]) -> None:
    """A URI names a file, a directory, in which hidden ones do not count, or files by a pattern."""
    job = job_of(tmp_path, input={"path": f"s3://bucket/{path}", "columns": ["id"]})
    batchrunner.run(job)
    assert [row["id"] for row in results_of(job)] == ids


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (["s3://bucket/on"], "s3://bucket/on: no Parquet file there"),
        (["s3://bucket/in/*.csv"], "s3://bucket/in/*.csv: no Parquet file there"),
        (
            ["s3://bucket/in", "s3://bucket2/in"],
            "s3://bucket2/in: lies on another file system than s3://buck",
        ),
        (["s3://bucket/in", "in.parquet"], "in.parquet: lies on another file system than s3://bucket/in"),
    ],
)
def test_uris_that_name_no_input(tmp_path: Path, bucket: Path, paths: list[str], problem: str) -> None:
    """A URI without files is refused, and so are paths that one file system does not have all of."""
    with pytest.raises(InputError) as refused:
        batchrunner.run(job_of(tmp_path, input={"path": paths}))
    assert problem in str(refused.value)
