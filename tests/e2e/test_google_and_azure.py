"""Runs on Google Cloud Storage and Azure: what differs from S3 is in the stand-ins."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT, batchrun, eventually, job_of, started, started_python, write_job, write_rows
from tests.support.cloud_store import AzureStore, CloudStore, GoogleStore
from tests.support.fake_sglang import FakeSGLang
from tests.support.refusals import refusal, told

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=[GoogleStore, AzureStore])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CloudStore]:
    """A store of each cloud, with working copies of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    with request.param() as running:
        for name, value in running.environ.items():
            monkeypatch.setenv(name, value)
        yield running


def job_in(directory: Path, store: CloudStore, *given: Any, **changes: Any) -> Path:
    """Write a job whose results are in the store."""
    output = {"path": f"{store.uri}/run", "durable": 0.3, **changes.pop("output", {})}
    return write_job(job_of(directory, *given, output=output, storage=store.storage, **changes), directory)


def rows_in(store: CloudStore) -> list[int]:
    """Return the ordinals of the rows of all parts."""
    parts = store.keys("run/parts/")
    tables = [pq.read_table(io.BytesIO(store.get(key))) for key in parts]
    return sorted(row for table in tables for row in table["row"].to_pylist())


def test_a_run(tmp_path: Path, store: CloudStore) -> None:
    """Input and results are in the store; a kill, the next start, and every command that reads the run."""
    for name in "ab":
        store.put(f"in/{name}.parquet", write_rows(tmp_path / "x.parquet", 20).read_bytes())
    with FakeSGLang(lambda _: "hold" if len(server.prompts) > 20 else "answer") as server:
        file = job_in(tmp_path, store, server, input={"path": f"{store.uri}/in"}, window=4)
        with started(file) as run:
            eventually(lambda: any("journal" in key for key in store.keys("run/tasks/")))
            run.process.kill()
            run.process.wait()
        server.answer_held()
        server.script = lambda _: "answer"
        done = batchrun(file, "--json")
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["rows_resumed"] > 0
        _read_by_commands(store)
        assert batchrun(file, "--fresh").exit_code == 0
    assert store.keys("run/merged/") == []


def _read_by_commands(store: CloudStore) -> None:
    assert rows_in(store) == list(range(40))
    assert not any("journal" in key for key in store.keys("run/"))
    uri = f"{store.uri}/run"
    state = json.loads(batchrun("status", uri, "--json").stdout)
    assert (state["rows_on_disk"], state["finished"]) == (40, True)
    for _ in range(2):
        merged = batchrun("merge", uri)
        assert (merged.exit_code, merged.stdout.strip()) == (0, f"{uri}/merged"), merged.stderr
    assert "run/merged/_SUCCESS" in store.objects


def test_tasks_that_join(tmp_path: Path, store: CloudStore) -> None:
    """A task that is killed is followed by one on another machine, which knows what the dead one had done."""
    script = ROOT / "tests" / "support" / "other_machine.py"
    with FakeSGLang(lambda sent: "hold" if sent.prompt.endswith("7") else "answer") as server:
        file = job_in(tmp_path, store, server, rows=30, window=30)
        with started_python(script, "a", file, "--join") as first:
            eventually(lambda: any("/journal-" in key or "/parts/" in key for key in store.keys("run/")))
            first.process.kill()
            first.process.wait()
        server.script = lambda _: "answer"
        server.answer_held()
        with started_python(script, "b", file, "--join") as second:
            second.wait_for_line("took over from")
            assert second.end() == 0
    assert rows_in(store) == list(range(30))


def test_what_is_here_is_not_fetched_again(
    tmp_path: Path, store: CloudStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The e_tags of what was written are those of the listing, so a second start fetches no part."""
    file = job_in(tmp_path, store, output={"part_rows": 5})
    assert batchrun(file).exit_code == 0
    asked: list[str] = []
    real = store._get

    def noting(request: Any, key: str) -> Any:
        asked.append(key)
        return real(request, key)

    monkeypatch.setattr(store, "_get", noting)
    assert batchrun(file).exit_code == 0
    assert "run/tasks/main/owner" in asked
    assert not [key for key in asked if "/parts/" in key]


def test_what_is_wrong(tmp_path: Path, store: CloudStore) -> None:
    """A bucket that is not there is one line, with exit code 2."""
    job = job_of(tmp_path, output={"path": f"{store.scheme}://nobody/run"}, storage=store.storage)
    told(refusal(job, tmp_path), f"output.path {store.scheme}://nobody/run", "there is no such")
