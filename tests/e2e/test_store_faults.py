"""A store that fails in the ways that stores do: every row is there once, or the run says why it stopped."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import INSTANT, batchrun, job_of, write_job, write_rows
from tests.support.fake_sglang import Behaviour, FakeSGLang
from tests.support.store_server import Fault, Refusal, StoreProxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.store_server import StoreBucket


@pytest.fixture
def proxy(
    store_bucket: StoreBucket, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreProxy]:
    """A proxy before the store, to which the environment leads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    with StoreProxy(store_bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def rows_in(bucket: StoreBucket) -> list[int]:
    """Return the ordinals of the rows of all parts."""
    parts = [pq.read_table(io.BytesIO(bucket.get(key))) for key in bucket.keys("run/parts/")]
    return sorted(row for part in parts for row in part.column("row").to_pylist())


FAULTS: list[tuple[Fault, set[str]]] = [
    ("slow down", {"GET", "PUT", "HEAD", "POST", "DELETE"}),
    ("reset", {"GET", "PUT", "HEAD"}),
    ("lost reply", {"PUT"}),
    ("half answer", {"GET"}),
    ("late", {"PUT"}),
]


@pytest.mark.parametrize(("fault", "methods"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_each_request_fails_once(
    tmp_path: Path, store_bucket: StoreBucket, proxy: StoreProxy, fault: Fault, methods: set[str]
) -> None:
    """Input, results, lock, logs, `merge`: what fails once is repeated, and done once."""
    store_bucket.put("in/a.parquet", write_rows(tmp_path / "a.parquet", 30))
    run = {"path": f"{store_bucket.uri}/run", "durable": 0.2, "part_rows": 10}
    job = job_of(tmp_path, INSTANT, input={"path": f"{store_bucket.uri}/in"}, output=run)
    proxy.faults = lambda method, _, before: fault if method in methods and not before else "none"
    assert batchrunner.run(job).rows_ok == 30
    proxy.asked.clear()
    store_bucket.put("in/b.parquet", write_rows(tmp_path / "b.parquet", 30, first=30))
    report = batchrunner.run(job)
    assert (report.rows_ok, report.rows_resumed) == (60, 30)
    assert rows_in(store_bucket) == list(range(60))
    assert batchrunner.run(job).rows_resumed == 60
    proxy.asked.clear()
    assert batchrun("merge", run["path"]).exit_code == 0
    proxy.asked.clear()
    assert batchrun("merge", run["path"], tmp_path / "all.parquet").exit_code == 0
    (key,) = (key for key in store_bucket.keys("run/merged/") if key.endswith(".parquet"))
    for whole in (io.BytesIO(store_bucket.get(key)), tmp_path / "all.parquet"):
        assert pq.read_table(whole).column("row").to_pylist() == list(range(60))


def test_the_requests_of_a_run(tmp_path: Path, store_bucket: StoreBucket, proxy: StoreProxy) -> None:
    """A start, a part and an end cost a few dozen requests, whatever the number of rows."""
    job = job_of(tmp_path, INSTANT, rows=300, output={"path": f"{store_bucket.uri}/run"})
    batchrunner.run(job)
    assert proxy.asked.total() < 40, proxy.asked


MID_RUN: dict[str, Fault | Refusal] = {
    "slow-down": "slow down",
    "reset": "reset",
    "no-rights": Refusal(403, "AccessDenied"),
    "no-bucket": Refusal(404, "NoSuchBucket"),
    "old-token": Refusal(400, "ExpiredToken"),
}


@pytest.mark.parametrize("join", [False, True], ids=["alone", "join"])
@pytest.mark.parametrize("fault", MID_RUN.values(), ids=list(MID_RUN))
def test_a_store_that_fails_for_good(
    tmp_path: Path, store_bucket: StoreBucket, proxy: StoreProxy, fault: Fault | Refusal, join: bool
) -> None:
    """One line, exit code 1, a report on this machine; the next start sends no row again."""
    options = ["--join"] if join else []
    with FakeSGLang(lambda _: _fails(proxy, server, fault)) as server:
        run = {"path": f"{store_bucket.uri}/run", "durable": 0.2}
        job = job_of(tmp_path, server, rows=40, output=run, limits={"disk_wait": 0.5}, window=4)
        failed = batchrun(write_job(job, tmp_path), *options)
        assert failed.exit_code == 1, (failed.stderr, failed.exception)
        (error,) = (line for line in failed.stderr.splitlines() if line.startswith("batchrun: "))
        assert "what is stored is kept" in error
        assert "Traceback" not in failed.stderr
        (report,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("report.json")
        assert json.loads(report.read_text())["exit_code"] == 1
        sent = len(server.prompts)
        proxy.faults = lambda *_: "none"
        server.script = lambda _: "answer"
        assert batchrun(tmp_path / "job.yaml", *options).exit_code == 0
    assert rows_in(store_bucket) == list(range(40))
    assert sent >= 20
    assert len(server.prompts) - 40 <= 4  # in flight when it ended


def _fails(proxy: StoreProxy, server: FakeSGLang, fault: Fault | Refusal) -> Behaviour:
    """Let the store refuse everything from the 20th prompt on, and let the last rows wait until then."""
    if len(server.prompts) > 20:
        proxy.faults = lambda *_: fault
        return "hold"
    return "answer"
