"""`batchrun merge` pushes to the Hugging Face Hub, here a stand-in on this machine (`HF_ENDPOINT`)."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import INSTANT, batchrun, job_of
from tests.support.hub_server import BIG, REPO, TOKEN, Branch, HubServer
from tests.support.refusals import refusal, told
from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("huggingface_hub")
ADDRESS = f"hf://datasets/{REPO}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # the stand-in has the older storage for large files
    with HubServer({"README.md": b"of mine"}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def run_of(directory: Path, push: str | None = ADDRESS, rows: int = 10) -> Path:
    """Do a run; return its directory."""
    output = {"path": str(directory / "run"), **({"push": push} if push else {})}
    assert batchrunner.run(job_of(directory, INSTANT, rows=rows, output=output)).exit_code == 0
    return directory / "run"


def pushed_rows(content: bytes) -> list[int]:
    rows: list[int] = pq.read_table(io.BytesIO(content))["row"].to_pylist()
    return rows


def test_a_push(tmp_path: Path, hub: HubServer) -> None:
    """The merged files are one commit; the same again is none; what is there beside them stays."""
    run = run_of(tmp_path, f"{ADDRESS}/data")
    hub.files["data/merged-000007.parquet"] = b"of a longer run of before"
    hub.files["data/mine.parquet"] = b"mine"
    done = batchrun("merge", run)
    assert done.exit_code == 0, done.stderr
    told(done.stderr, f"pushed to {ADDRESS}/data: {hub.url}/datasets/{REPO}/commit/")
    assert sorted(hub.files) == ["README.md", "data/merged-000000.parquet", "data/mine.parquet"]
    assert pushed_rows(hub.files["data/merged-000000.parquet"]) == list(range(10))
    again = batchrun("merge", run, "--json")
    assert json.loads(again.stdout)["pushed"].endswith(hub.branches["main"].sha)
    assert hub.commits == 1


def test_large_files_and_a_branch(tmp_path: Path, hub: HubServer) -> None:
    """Large files are uploaded before the commit, once; `--push` counts before the job's field."""
    hub.branches["next"] = Branch({})
    run = run_of(tmp_path, rows=3000)
    command = [sys.executable, "-m", "batchrunner", "merge", str(run), "--push", f"{ADDRESS}@next"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        assert "HTTP" not in done.stderr
    content = hub.branches["next"].files["merged-000000.parquet"]
    assert len(content) > BIG
    assert pushed_rows(content) == list(range(3000))
    assert (hub.commits, [*hub.files]) == (1, ["README.md"])


@pytest.mark.parametrize(
    ("closed", "address", "words"),
    [
        ((401, ""), ADDRESS, ["the token may not write", "HF_TOKEN"]),
        ((403, ""), ADDRESS, ["the token may not write", "right to write owner/rows"]),
        ((400, ""), ADDRESS, ["it answered 400", "merge again once it works"]),
        (
            None,
            "hf://datasets/owner/nothing",
            ["there is no data set owner/nothing", "hf repo create"],
        ),
        (None, f"{ADDRESS}@nothing", ["there is no branch nothing"]),
    ],
)
def test_a_push_that_is_refused(
    tmp_path: Path, hub: HubServer, closed: tuple[int, str] | None, address: str, words: list[str]
) -> None:
    """One line says why, with exit code 1; the merged files are here, and the next merge pushes them."""
    run = run_of(tmp_path)
    hub.closed = closed
    done = batchrun("merge", run, "--push", address)
    assert (done.exit_code, done.stdout) == (1, "")
    told(done.stderr.splitlines()[-1], f"batchrun: {address}: not pushed: ", *words)
    told(done.stderr, "done: 10 of 10 rows ok")
    assert len(pq.read_table(run / "merged")) == 10
    hub.closed = None
    assert batchrun("merge", run).exit_code == 0
    assert hub.commits == 1


def test_without_a_token(tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said without asking the Hub."""
    run = run_of(tmp_path)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    done = batchrun("merge", run)
    assert done.exit_code == 1
    told(done.stderr, f"{ADDRESS}: not pushed: there is no token; export HF_TOKEN")
    assert (run / "merged").is_dir()


def test_rows_are_missing(tmp_path: Path, hub: HubServer) -> None:
    """Half a data set is not pushed."""
    output = {"path": str(tmp_path / "run"), "push": ADDRESS, "part_rows": 5}
    run = tmp_path / "run"
    assert batchrunner.run(job_of(tmp_path, INSTANT, rows=10, output=output)).exit_code == 0
    next((run / "parts").iterdir()).unlink()
    done = batchrun("merge", run)
    assert done.exit_code == 1
    told(done.stderr, f"not pushed to {ADDRESS}: rows are missing")
    assert hub.commits == 0


@pytest.mark.parametrize(
    "address", ["owner/rows", "hf://owner/rows", "hf://datasets/rows", f"{ADDRESS}/../x", "s3://bucket/x", ""]
)
def test_what_is_no_data_set(tmp_path: Path, address: str) -> None:
    """It is refused before the run, and by `merge` before anything is merged."""
    job = job_of(tmp_path, INSTANT, output={"path": str(tmp_path / "run"), "push": address})
    words = f"{address!r} is no data set of the Hugging Face Hub", "hf://datasets/OWNER/NAME"
    told(refusal(job, tmp_path), "output.push", *words)
    run = run_of(tmp_path, None)
    done = batchrun("merge", run, "--push", address)
    assert done.exit_code == 2
    told(done.stderr, "--push", *words)
    assert not (run / "merged").exists()
