"""An input file that changes during a run: no row of the new content is sent, and the run says so."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import InputChangedError
from tests.conftest import batchrun, job_of, report_of, results_of, write_job, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

ROWS = 2400
"""In three row groups: the first one fills the queue, so the others are read after the change."""


def another(path: Path) -> Path:
    """Write a file beside the input that has as many rows, and other texts."""
    return write_rows(path.with_name("another.pq"), ROWS, first=ROWS)


def replace(path: Path) -> None:
    another(path).replace(path)


def rewrite_in_place(path: Path) -> None:
    path.write_bytes(another(path).read_bytes())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def change_at(path: Path, change: Callable[[Path], object], prompt: str) -> Callable[[Sent], Behaviour]:
    """Return a script that changes the file when this prompt is asked."""

    def answer(sent: Sent) -> Behaviour:
        if sent.prompt == prompt and sent.tries == 1:
            change(path)
        return "answer"

    return answer


def carried_right(job: dict[str, Any]) -> list[int]:
    """Return the rows of the results, which are all of the first content."""
    results = results_of(job)
    assert all(row["text"] == f"row {row['row']}" for row in results)
    return [row["row"] for row in results]


@pytest.mark.parametrize(
    ("change", "join", "order"),
    [
        (replace, [], "input"),
        (rewrite_in_place, [], "input"),
        (truncate, ["--join"], "input"),
        (empty, [], "prefix"),
    ],
)
def test_a_file_that_changes(
    tmp_path: Path, server: FakeSGLang, change: Callable[[Path], object], join: list[str], order: str
) -> None:
    """The run ends with exit code 2 and one line; what it wrote is of the first content."""
    job = job_of(tmp_path, server, rows=ROWS, input={"columns": ["text"]}, order=order, window=8)
    path = tmp_path / "input.parquet"
    kept = path.read_bytes()
    server.script = change_at(path, change, "row 3")
    file = write_job(job, tmp_path)
    result = batchrun(file, "-q", *join)
    assert result.exit_code == 2
    assert f"the input file {path} changed during the run" in result.stderr.splitlines()[-1]
    assert len(carried_right(job)) < ROWS or order == "prefix"  # which reads all rows to sort them
    assert {int(prompt.split()[1]) for prompt in server.prompts} <= set(range(ROWS))
    path.write_bytes(kept)  # as the line says
    assert batchrun(file, "-q", *join).exit_code == 0
    assert carried_right(job) == list(range(ROWS))


def test_a_file_that_was_not_opened_yet(tmp_path: Path, server: FakeSGLang) -> None:
    """The second file is replaced while the first one is read: none of its rows is sent."""
    source = tmp_path / "in"
    write_rows(source / "a.parquet", ROWS)
    second = write_rows(source / "b.parquet", 10, first=ROWS)
    job = job_of(tmp_path, server, input={"path": str(source), "columns": ["text"]}, order="input", window=8)
    server.script = change_at(second, lambda path: write_rows(path, 10, first=9 * ROWS), "row 3")
    with pytest.raises(InputChangedError, match=f"{second} changed during the run"):
        batchrunner.run(job)
    assert f"row {9 * ROWS}" not in server.prompts
    assert report_of(job)["exit_code"] == 2


def replace_by_a_copy(path: Path) -> None:
    copy = path.with_name("copy.pq")
    shutil.copy(path, copy)
    copy.replace(path)


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.touch(), replace_by_a_copy])
def test_what_is_no_change(tmp_path: Path, server: FakeSGLang, change: Callable[[Path], object]) -> None:
    """Its name is gone, its time is another, or it was replaced by a copy: it is read to its end."""
    job = job_of(tmp_path, server, rows=ROWS, input={"columns": ["text"]}, order="input", window=8)
    server.script = change_at(tmp_path / "input.parquet", change, "row 3")
    assert batchrunner.run(job).exit_code == 0
    assert carried_right(job) == list(range(ROWS))


def test_a_few_bytes_of_a_large_file(tmp_path: Path, server: FakeSGLang) -> None:
    """Its digest covers blocks of it only: the time of its last change tells of an edit between them."""
    path = tmp_path / "large.parquet"
    texts = pa.table({"text": [f"row {row}".ljust(2000, ".") for row in range(ROWS)]})
    pq.write_table(texts, path, compression="none", use_dictionary=False, row_group_size=500)

    def edit(file: Path) -> None:
        content = file.read_bytes()
        with file.open("r+b") as opened:
            opened.seek(content.index(f"row {ROWS - 1} ".strip().encode() + b"."))
            opened.write(b"ROW")

    job = job_of(tmp_path, server, input={"path": str(path), "columns": ["text"]}, order="input", window=8)
    server.script = change_at(path, edit, "row 3".ljust(2000, "."))
    with pytest.raises(InputChangedError, match=f"{path} changed during the run"):
        batchrunner.run(job)
    assert not any(prompt.startswith("ROW") for prompt in server.prompts)


@pytest.mark.parametrize("join", [[], ["--join"]])
def test_a_file_that_is_added(tmp_path: Path, server: FakeSGLang, join: list[str]) -> None:
    """A run ends with exit code 1 if the input has more files at its end than at its start."""
    source = tmp_path / "in"
    first = write_rows(source / "a.parquet", 10)
    job = job_of(tmp_path, server, input={"path": str(source), "columns": ["text"]})
    server.script = change_at(first.with_name("b.parquet"), lambda path: write_rows(path, 5, 10), "row 3")
    file = write_job(job, tmp_path)
    result = batchrun(file, *join)
    assert result.exit_code == 1
    assert "b.parquet came into the input during the run: run the same command again" in result.stderr
    assert batchrun(file, *join).exit_code == 0
    assert carried_right(job) == list(range(15))
