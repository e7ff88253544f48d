"""Merging writes each result once, in input order."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchrunner
from batchrunner.output.files import scratch_directory
from batchrunner.output.merge import WORK_PREFIX
from tests.conftest import (
    batchrun,
    examples,
    job_of,
    merged_table,
    results_of,
    rows_in,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.refusals import told


@examples(8)
@given(rows=st.integers(1, 60), part_rows=st.integers(1, 20), wanted=st.integers(1, 3))
def test_merge_is_in_input_order(
    rows: int, part_rows: int, wanted: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`merge` writes each result once, in input order, whatever the order of sending and sizes of parts."""
    tmp_path = tmp_path_factory.mktemp("merge")
    with FakeSGLang(lambda sent: "too long" if sent.prompt.endswith("3") else "answer") as server:
        job = job_of(tmp_path, server, rows=rows, output={"part_rows": part_rows}, window=3)
        job["input"] |= {"columns": ["id"], "filter": f"id % {wanted} == 0"}
        batchrunner.run(job)
    merged = merged_table(tmp_path / "run")
    assert merged.column("row").to_pylist() == [i for i in range(rows) if i % wanted == 0]
    assert merged.to_pylist() == results_of(job)


def test_merge_of_long_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are bounded in bytes even if footers hide them because all rows carry the same long text."""
    monkeypatch.setattr("batchrunner.output.merge.BUCKET_BYTES", 1 << 20)
    write_rows(tmp_path / "input.parquet", 40, page=["x" * 100_000] * 40)
    job = job_of(tmp_path, input={"columns": ["page"]}, output={"part_rows": 7})
    batchrunner.run(job)
    assert batchrun("merge", tmp_path / "run").exit_code == 0
    merged = sorted((tmp_path / "run" / "merged").iterdir())
    assert max(pq.read_table(file).nbytes for file in merged) <= 1 << 20
    assert [row for file in merged for row in pq.read_table(file)["row"].to_pylist()] == list(range(40))


def cut_a_part(run: Path) -> None:
    part = next((run / "parts").iterdir())
    part.write_bytes(part.read_bytes()[:-20])


def lose_a_part(run: Path) -> None:
    """Replace a part by a dangling link, like a file that is deleted during the merge."""
    part = next((run / "parts").iterdir())
    part.unlink()
    part.symlink_to(run / "nothing")


def add_a_part_of_others(run: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), run / "parts" / "part-main-000009.parquet")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (cut_a_part, "is damaged: move the file away"),
        (lose_a_part, ".parquet: is missing: run the job again, which sends the rows of this file again"),
        (add_a_part_of_others, "parts: cannot be merged"),
        (lambda run: (run / "merged").write_text(""), "merged: cannot be written"),
    ],
)
def test_what_cannot_be_merged(tmp_path: Path, spoil: Callable[[Path], object], problem: str) -> None:
    """Damaged parts and obstacles are reported in one line."""
    batchrunner.run(job_of(tmp_path))
    spoil(tmp_path / "run")
    refused = batchrun("merge", tmp_path / "run")
    assert refused.exit_code == 2
    assert problem in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["run/parts/part-main-000000.parquet", "run/parts/x.csv", "link/run.jsonl"])
def test_files_of_the_run_are_no_target(tmp_path: Path, name: str) -> None:
    """A merge replaces no part and adds no file beside the parts; other files may lie in the directory."""
    run = tmp_path / "run"
    batchrunner.run(job_of(tmp_path))
    (tmp_path / "link").symlink_to(run / "parts")
    before = sorted(run.rglob("*"))
    refused = batchrun("merge", run, tmp_path / name, "--force")
    assert refused.exit_code == 2
    told(refused.stderr, f"{name}: belongs to the run {run}: give a path outside of it")
    assert sorted(run.rglob("*")) == before
    assert rows_in(job_of(tmp_path)) == list(range(10))
    assert batchrun("merge", run, run / "results.csv").exit_code == 0


@pytest.mark.parametrize("file", [[], ["results.csv"]], ids=["dataset", "file"])
def test_a_killed_merge_leaves_no_files_for_ever(tmp_path: Path, file: list[str]) -> None:
    """The next merge deletes the temporary files of a killed one, and leaves those of a running one alone."""
    batchrunner.run(job_of(tmp_path, rows=30))
    run, target = tmp_path / "run", [str(tmp_path / name) for name in file]
    place = tmp_path if file else run
    names = {path.name for path in place.iterdir()}
    # It is killed when all rows lie in temporary files.
    killed = (
        "import os, signal, sys; from batchrunner.cli import app; from batchrunner.output import merge;"
        "merge.with_counts = lambda *_: os.kill(os.getpid(), signal.SIGKILL); app(sys.argv[1:])"
    )
    subprocess.run([sys.executable, "-c", killed, "merge", str(run), *target], check=False)
    (of_killed,) = (path for path in place.iterdir() if path.name not in names)
    running, delete = scratch_directory(WORK_PREFIX, place)
    for directory in (of_killed, running):
        os.utime(directory, (0, 0))  # a new directory may be one that is about to be locked
    assert batchrun("merge", run, *target).exit_code == 0
    assert {path.name for path in place.iterdir()} - names == {*(file or ["merged"]), running.name}
    delete()


def test_a_merge_does_not_outlive_the_next_start(tmp_path: Path) -> None:
    """A merged dataset is deleted when the run gets more rows."""
    job = job_of(tmp_path, rows=30)
    batchrunner.run(job, overrides=["input.limit=10"])
    assert batchrun("merge", tmp_path / "run").exit_code == 0
    batchrunner.run(job, overrides=["input.limit=20"])
    assert not (tmp_path / "run" / "merged").exists()
