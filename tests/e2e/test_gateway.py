"""A real Model Gateway, `smg`: rows go directly to the workers that it lists, or through it."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import AnotherModelError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.connections import free_port
from tests.conftest import eventually, job_of, results_of, rows_in, run_job, write_rows
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.real_gateway import KEY_VARIABLE, RealGateway, two_workers

pytestmark = [
    *(pytest.mark.gateway, pytest.mark.filterwarnings("default")),
    pytest.mark.usefixtures("quiet_fakes"),
]


@pytest.fixture(scope="module")
def gateway() -> Iterator[RealGateway]:
    """A gateway that reads requests and prompts, and takes out what is busy: that is no matter."""
    made = RealGateway("--policy", "cache_aware")
    yield made
    made.end()


@pytest.fixture
def workers(gateway: RealGateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeSGLang, FakeSGLang]]:
    """Two workers on the gateway's list."""
    with two_workers(gateway, monkeypatch) as workers:
        yield workers


def engine_of(gateway: RealGateway) -> dict[str, Any]:
    return {"kind": "gateway", "url": gateway.url}


def test_a_slower_worker_gets_fewer_rows(
    tmp_path: Path, gateway: RealGateway, workers: tuple[FakeSGLang, FakeSGLang]
) -> None:
    """Each worker has a window of its own, and what ended there makes room for the next rows."""
    fast, slow = workers
    fast.delay_s, slow.delay_s = 0.1, 0.4
    job = job_of(tmp_path, engine_of(gateway), rows=240, prompt={"user": "{{ text }}"}, window=16)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 240, 0)
    assert len(fast.sent) > 1.5 * len(slow.sent)
    assert (report.engine["kind"], report.engine["model"]) == ("gateway", "fake/model")
    assert set(report.engine["routes"]) == {fast.url, slow.url}
    assert any("2 workers of the gateway" in note for note in report.engine["notes"])


@pytest.mark.usefixtures("quick_retries")
def test_the_list_of_workers_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is listed gets rows, one that is listed no more gets none; rows need no gateway."""
    monkeypatch.setattr(TIMING, "model_check", 0.1)
    own = RealGateway()
    monkeypatch.setenv(KEY_VARIABLE, own.key)
    with (
        FakeSGLang(api_key=own.key) as first,
        FakeSGLang(api_key=own.key) as second,
        ThreadPoolExecutor(1) as thread,
    ):
        own.use(first.url)
        first.delay_s = second.delay_s = 0.02
        striking: list[Future[int]] = []

        def change() -> int:
            own.use(first.url, second.url)
            eventually(lambda: len(second.sent) > 20)
            own.use(second.url)
            eventually(lambda: len(second.sent) > 60)
            left = len(first.sent)
            own.end()
            return left

        def script(_: Sent) -> Behaviour:
            if len(first.sent) == 20 and not striking:
                striking.append(thread.submit(change))
            return "answer"

        first.script = script
        job = job_of(tmp_path, engine_of(own), rows=600, window=4, limits={"max_attempts": 1})
        report = batchrunner.run(job)
        left = striking[0].result()
        assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 600, 0)
        assert rows_in(job) == list(range(600))
        assert len(first.sent) <= left + 4
        assert len(second.sent) > 200


def test_a_worker_of_another_model(
    tmp_path: Path,
    gateway: RealGateway,
    workers: tuple[FakeSGLang, FakeSGLang],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gets no row, and the run ends."""
    monkeypatch.setattr(TIMING, "model_check", 0.05)
    one, _ = workers
    one.delay_s = 0.01
    with FakeSGLang(model="fake/other", api_key=gateway.key) as other, ThreadPoolExecutor(1) as thread:

        def script(_: Sent) -> Behaviour:
            if len(one.sent) == 20:
                thread.submit(gateway.use, one.url, other.url)
            return "answer"

        one.script = script
        job = job_of(tmp_path, engine_of(gateway), rows=4000, window=8)
        with pytest.raises(AnotherModelError, match="'fake/model' and is 'fake/other'"):
            batchrunner.run(job)
    assert not other.prompts


def test_what_stands_in_the_way(
    gateway: RealGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A gateway that is away, is none, has no workers, wants a key or is attached to: a sentence each."""

    def said(url: str) -> str:
        job = job_of(tmp_path, {"kind": "gateway", "url": url})
        return run_job(job, tmp_path, code=2).stderr.splitlines()[-1]

    monkeypatch.setenv(KEY_VARIABLE, gateway.key)
    assert "has no workers" in said(gateway.url)
    with FakeSGLang() as server:
        assert "is not SGLang's Model Gateway" in said(server.url)
    assert "start the gateway, or correct engine.url" in said(f"http://127.0.0.1:{free_port()}")
    with FakeSGLang(api_key=gateway.key) as worker:
        gateway.use(worker.url)
        monkeypatch.setenv(KEY_VARIABLE, "wrong")
        assert "refuses the API key" in said(gateway.url)
    monkeypatch.setenv(KEY_VARIABLE, gateway.key)
    assert "no worker of the gateway answers" in said(gateway.url)
    direct = job_of(tmp_path, {"kind": "gateway", "url": gateway.url, "route": "workers"})
    assert "make the workers reachable from this machine" in run_job(direct, tmp_path, code=2).stderr
    job = job_of(tmp_path, {"kind": "attach", "urls": [gateway.url, "http://127.0.0.1:9"]})
    told = run_job(job, tmp_path, code=2).stderr
    assert f"is a Model Gateway, not a server: write `engine: {{kind: gateway, url: {gateway.url}}}`" in told
    gateway.use()


@pytest.mark.usefixtures("full_requests")
def test_rows_with_a_prefix_stay_on_one_worker(
    tmp_path: Path, gateway: RealGateway, workers: tuple[FakeSGLang, FakeSGLang]
) -> None:
    """Also where several rows are sent in a request; the groups are shared out evenly."""
    ids = [[document] * 300 + [row] for row in range(240) for document in [row % 12]]
    path = write_rows(tmp_path / "ids.parquet", len(ids), ids=ids)
    job = job_of(
        tmp_path, engine_of(gateway), input={"path": str(path)}, prompt={"input_ids": "ids"}, window=64,
        bundle=8, sampling={"max_new_tokens": 16},
    )  # fmt: skip
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 240, 0)
    assert [row["output"] for row in results_of(job)] == [f"answer 0 to {row}" for row in ids]
    assert report.bundles["most_rows"] > 1
    at = [{sent.body["input_ids"][0] for sent in worker.sent} for worker in workers]
    assert at[0] | at[1] == set(range(12))
    assert len(at[0]) + len(at[1]) <= 14  # at the end one may help the other
    assert min(map(len, at)) >= 5
