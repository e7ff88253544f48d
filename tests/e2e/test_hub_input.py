"""Input from the Hugging Face Hub, here a stand-in on this machine (`HF_ENDPOINT`)."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from tests.conftest import job_of, results_of, started, started_python, write_job, write_rows
from tests.support.fake_sglang import FakeSGLang
from tests.support.hub_server import REPO, Branch, HubServer
from tests.support.refusals import told

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.fake_sglang import Behaviour, Sent

pytest.importorskip("huggingface_hub")


def rows(directory: Path, first: int, count: int = 5) -> bytes:
    """Return the content of a file with rows."""
    return write_rows(directory / "x.parquet", count, first=first).read_bytes()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A data set with two splits below a configuration, and a branch with one file."""
    splits = {f"en/{split}/0.parquet": rows(tmp_path, first) for split, first in (("test", 0), ("train", 5))}
    with HubServer({**splits, "README.md": b"a data set"}) as running:
        running.branches["old"] = Branch({"en/test/0.parquet": rows(tmp_path, 90)})
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield running


PATHS = {
    "/en/train/0.parquet": range(5, 10),
    "/en": range(10),
    "/en/*/0.parquet": range(10),
    "@old/en/test": range(90, 95),
}
"""Paths in the data set, and what the column `id` of their rows has."""
COMMANDS = """
import sys
from batchrunner.cli import main
for file in sys.argv[1:]:
    sys.argv = ["batchrun", file]
    try:
        main()
    except SystemExit as ended:
        print("ended with", ended.code, file=sys.stderr)
"""
"""The command for one job after the other, in a process that learns of the stand-in."""


def test_a_data_set(tmp_path: Path, hub: HubServer) -> None:
    """A file, a directory, a pattern, and another branch are read, and the same command resumes."""
    jobs, files = [], []
    for number, path in enumerate(PATHS):
        directory = tmp_path / str(number)
        directory.mkdir()
        job = job_of(directory, input={"path": f"hf://datasets/{REPO}{path}", "columns": ["id"]})
        jobs.append(job)
        files += [write_job(job, directory)] * 2
    with started_python("-c", COMMANDS, *files) as runs:
        assert runs.end() == 0
    ends = [line.split()[-1] for line in runs.lines if line.startswith("ended with")]
    assert ends == ["0"] * len(files), runs.lines
    assert [[row["id"] for row in results_of(job)] for job in jobs] == [list(ids) for ids in PATHS.values()]


@pytest.mark.parametrize(
    ("path", "closed", "words"),
    [
        ("datasets/owner/nothing/a.parquet", None, "owner/nothing"),
        (f"datasets/{REPO}@nothing/en", None, "nothing"),
        (f"datasets/{REPO}/fr", None, "fr"),
        (f"datasets/{REPO}/en", (403, "GatedRepo"), "403"),
        (f"datasets/{REPO}/en", (401, "RepoNotFound"), REPO),
    ],
)
def test_what_cannot_be_read(
    tmp_path: Path, hub: HubServer, path: str, closed: tuple[int, str] | None, words: str
) -> None:
    """One line names the address and why, with exit code 2, before anything is sent."""
    hub.closed = closed
    file = write_job(job_of(tmp_path, input={"path": f"hf://{path}"}), tmp_path)
    with started(file) as run:
        assert run.end() == 2
    (line,) = run.lines
    told(line, f"batchrun: hf://{path}", words)


def test_a_commit_during_the_run(tmp_path: Path, hub: HubServer) -> None:
    """The run reads the files as they were when it began; the next start says which one changed since."""
    pad = [secrets.token_bytes(200_000) for _ in range(60)]  # later row groups are fetched later
    old = write_rows(tmp_path / "x.parquet", 60, pad=pad).read_bytes()
    new = write_rows(tmp_path / "x.parquet", 60, first=500, pad=pad).read_bytes()
    hub.replace("en/train/0.parquet", old)

    def replacing(_: Sent) -> Behaviour:
        if hub.files["en/train/0.parquet"] == old:
            hub.replace("en/train/0.parquet", new)
        return "answer"

    with FakeSGLang(replacing) as server:
        job = job_of(
            tmp_path, server, input={"path": f"hf://datasets/{REPO}/en/train", "columns": ["id", "pad"]}
        )
        file = write_job(job, tmp_path)
        for code in (0, 2):
            with started(file) as run:
                assert run.end() == code
        told(run.lines[-1], "en/train/0.parquet changed")
    assert [row["id"] for row in results_of(job)] == list(range(60))
