"""Input from the Hugging Face Hub, here a stand-in on this machine (`HF_ENDPOINT`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conftest import job_of, results_of, started, write_job, write_rows
from tests.support.hub_server import REPO, HubServer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("path", ["data/a.parquet", "data", "data/*.parquet"])
def test_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A file, a directory and a pattern are read, and the same command resumes."""
    pytest.importorskip("huggingface_hub")
    files = {f"data/{name}.parquet": write_rows(tmp_path / "x.parquet", 5).read_bytes() for name in "a"}
    with HubServer(files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        job = job_of(tmp_path, input={"path": f"hf://datasets/{REPO}/{path}", "columns": ["id"]})
        file = write_job(job, tmp_path)
        for _ in range(2):
            with started(file) as run:
                assert run.end() == 0
    assert [row["id"] for row in results_of(job)] == list(range(5))
