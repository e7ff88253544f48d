"""An output path that cannot be written, or has links in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from batchrunner.core.errors import JobError, StorageError
from tests.conftest import INSTANT, job_of, write_rows
from tests.support.refusals import refusal, told

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("below", ["", "/run", "/deep/run"])
def test_output_is_a_file(tmp_path: Path, below: str) -> None:
    """An output path that is a file, or lies under one, is refused."""
    (tmp_path / "out").write_text("precious")
    job = job_of(tmp_path, output={"path": f"{tmp_path}/out{below}"})
    told(refusal(job, tmp_path), tmp_path / "out", "is a file: give a directory")


def test_output_where_nothing_can_be_made(tmp_path: Path) -> None:
    """An output path where even root cannot make a directory is refused, and not for a full disk."""
    message = refusal(job_of(tmp_path, output={"path": "/proc/run"}), tmp_path)
    told(message, "output.path /proc/run", "cannot be written")


@pytest.mark.parametrize("section", ["input", "output"])
def test_a_path_that_is_no_text(tmp_path: Path, section: str) -> None:
    """A path of bytes that are no UTF-8, as a shell passes them on, is refused in one line."""
    changes: dict[str, Any] = {section: {"path": f"{tmp_path}/\udce9"}}
    with pytest.raises(JobError, match=f"{section}.path.*not valid UTF-8"):
        batchrunner.run(job_of(tmp_path, **changes))


def test_a_directory_in_the_logs_place(tmp_path: Path) -> None:
    """Where the event log cannot be written the run does not begin."""
    (tmp_path / "run" / "events.jsonl").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"events\.jsonl: cannot be written: Is a directory"):
        batchrunner.run(job_of(tmp_path))


def test_an_existing_run_is_left_alone(tmp_path: Path) -> None:
    """A mistake in the job does not cost the results that are there, with --fresh neither."""
    job = job_of(tmp_path, INSTANT)
    batchrunner.run(job)
    refusal({**job, "prompt": {"text": "txt"}}, tmp_path, "--fresh")
    url = "http://127.0.0.1:9"
    refusal({**job, "engine": {"kind": "attach", "urls": [url]}}, tmp_path, "--fresh")


def test_a_link_to_a_run(tmp_path: Path) -> None:
    """A link to a run is that run: it is resumed, and refused to another job; a circle is refused."""
    job = job_of(tmp_path)
    assert batchrunner.run(job, overrides=["input.limit=4"]).rows_ok == 4
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert batchrunner.run({**job, "output": {"path": str(tmp_path / "link")}}).rows_resumed == 4
    other = job_of(tmp_path, output={"path": str(tmp_path / "link")}, sampling={"temperature": 0.5})
    told(refusal(other, tmp_path), "sampling.temperature")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert refusal(job_of(tmp_path, output={"path": f"{tmp_path}/circle/run"}), tmp_path)


@pytest.mark.parametrize("pattern", ["", "/**/*.parquet", "/*/*/*.parquet"])
def test_results_of_another_run_in_the_input(tmp_path: Path, pattern: str) -> None:
    """A directory or a pattern that also names the results of another run is refused."""
    write_rows(tmp_path / "data" / "day" / "x" / "a.parquet", 10)
    source = {"path": f"{tmp_path}/data{pattern}"}
    job = job_of(tmp_path, input=source, output={"path": f"{tmp_path}/data/run1"})
    for limit in (5, 10):  # its own results do not count
        assert batchrunner.run(job, overrides=[f"input.limit={limit}"]).rows_ok == limit
    second = {**job, "output": {"path": f"{tmp_path}/data/run2"}}
    told(refusal(second, tmp_path), f"names files of the run {tmp_path}/data/run1 too")
    meant = {**second, "input": {"path": f"{tmp_path}/data/run1/parts"}, "prompt": {"text": "output"}}
    assert batchrunner.run(meant).rows_ok == 10
