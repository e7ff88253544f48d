"""The rows of the trials are like the whole input."""

import contextlib
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.job.load import load_job
from batchrunner.runner.prepare import prepare
from batchrunner.runner.tuning_sample import BLOCK_ROWS, write_sample
from tests.conftest import job_of


def sampled(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[int]:
    monkeypatch.setattr("batchrunner.runner.tuning_sample.MOST_ROWS", 512)
    job = load_job(job_of(tmp_path, rows=rows, **changes))
    sample = write_sample(prepare(job), tmp_path / "tune")
    texts: list[str] = pq.read_table(sample.path)["text"].to_pylist()
    assert sample.rows == len(texts)
    return [int(text.split()[-1]) for text in texts]


def test_the_sample_is_like_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made of blocks of neighbours from all over the input, and so is its first quarter."""
    rows = sampled(tmp_path, 20_000, monkeypatch)
    assert len(rows) == 512
    assert len(set(rows)) == 512
    blocks = [rows[at : at + BLOCK_ROWS] for at in range(0, 512, BLOCK_ROWS)]
    assert all(block == list(range(block[0], block[0] + BLOCK_ROWS)) for block in blocks)
    for part in (blocks, blocks[: len(blocks) // 4]):
        places = sorted(block[0] / 20_000 for block in part)
        gaps = [after - before for before, after in zip([0, *places], [*places, 1], strict=True)]
        assert max(gaps) < 2.5 / len(part)


@pytest.mark.parametrize(
    "prompt",
    [
        {"user": "Tell me a story."},
        {"python": lambda row: f"{row['text']} is number {row['id']}"},
    ],
    ids=["no column", "all columns"],
)
def test_a_job_on_the_sample_sends_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: dict[str, Any]
) -> None:
    """Rows that all ask the same are sampled too, and those whose function may read all columns."""
    monkeypatch.setattr("batchrunner.runner.tuning_sample.MOST_ROWS", 512)
    job = job_of(tmp_path, rows=600, prompt=prompt, sampling={"temperature": 1})
    with contextlib.closing(prepare(load_job(job))) as prepared:
        sample = write_sample(prepared, tmp_path / "tune")
    assert sample.rows == 512
    report = batchrunner.run(job | {"input": {"path": str(sample.path)}})
    assert report.rows_ok == sample.rows


def test_rows_that_begin_alike_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the job sorts its rows by prefix the blocks are taken from the sorted order."""
    prompt = {"text": '{{ ("document %d " % (id % 40)) * 40 }}: row {{ id }}'}
    monkeypatch.setattr("batchrunner.runner.tuning_sample.MOST_ROWS", 512)
    job = load_job(job_of(tmp_path, rows=8000, prompt=prompt, order="prefix"))
    sample = write_sample(prepare(job), tmp_path / "tune")
    documents = [row % 40 for row in pq.read_table(sample.path)["id"].to_pylist()]
    assert len(set(documents)) > 10
    assert sum(1 for _ in groupby(documents)) <= 2 * 512 / BLOCK_ROWS
    assert sorted(path.name for path in (tmp_path / "tune").iterdir()) == ["sample.parquet"]
