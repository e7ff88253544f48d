"""Rows have ordinals whatever is selected, and partitions of a path are columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import batchrunner
from batchrunner.core.errors import InputError
from tests.conftest import (
    INSTANT,
    job_of,
    results_of,
    write_rows,
)

if TYPE_CHECKING:
    from pathlib import Path

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


def test_only_partitions_are_needed(tmp_path: Path, server: FakeSGLang) -> None:
    """A job may use nothing that stands in the files themselves."""
    for year in (2023, 2024):
        write_rows(tmp_path / "in" / f"year={year}" / "x.parquet", 2)
    job = job_of(tmp_path, server, input={"path": str(tmp_path / "in")}, prompt={"user": "In {{ year }}?"})
    batchrunner.run(job)
    assert sorted(server.prompts) == ["In 2023?"] * 2 + ["In 2024?"] * 2


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
