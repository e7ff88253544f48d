"""Servers that somebody else runs go away and come back, with another model at times: no row is blamed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import batchrunner
from batchrunner.core.errors import AnotherModelError, EngineLostError, ResumeError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.connections import free_port
from tests.conftest import batchrun, eventually, job_of, results_of, write_job
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.runs import rows_once
from tests.support.server_thread import PATIENCE_S, ServerThread, is_free

pytestmark = pytest.mark.usefixtures("quick_retries")

AWAY_S = 1.5
LIMITS = {"max_attempts": 1, "engine_wait": PATIENCE_S}


def serve_again(stack: contextlib.ExitStack, port: int) -> None:
    """Start a server on this port, which the one before may still have."""
    eventually(lambda: is_free(port))
    stack.enter_context(FakeSGLang(port=port))


def test_a_key_that_is_refused_in_mid_run(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is blamed: the run ends and names the key, and goes on with a key that is taken."""
    monkeypatch.setenv("SGLANG_API_KEY", "right")
    server.api_key = "right"

    def script(sent: Sent) -> Behaviour:
        if sent.prompt == "row 3":
            server.api_key = "another"
        return "answer"

    server.script = script
    job = job_of(tmp_path, server, rows=200, limits={**LIMITS, "engine_wait": 0.1})
    with pytest.raises(EngineLostError, match=r"refuses the API key \(401.*\): see engine\.api_key_env"):
        batchrunner.run(job)
    server.script = lambda _: "answer"
    server.api_key = "right"
    assert batchrunner.run(job).exit_code == 0
    rows_once(job, 200)


def test_a_server_that_is_killed_and_started_again(tmp_path: Path) -> None:
    """Connections are cut, then refused; when it is back on its port the run goes on."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        again = threading.Timer(AWAY_S, serve_again, (stack, port))

        def script(_: Sent) -> Behaviour:
            if len(mortal.sent) == 40:
                again.start()
            return "die" if len(mortal.sent) >= 40 else "answer"

        mortal = stack.enter_context(FakeSGLang(script, port=port))
        job = job_of(tmp_path, mortal, rows=200, window=8, limits=LIMITS)
        report = batchrunner.run(job)
    assert (report.exit_code, report.rows_failed) == (0, 0)
    assert report.retries > 0
    assert report.wall_s > AWAY_S
    rows_once(job, 200)


def test_a_row_that_was_taken_is_waited_for(tmp_path: Path, server: FakeSGLang) -> None:
    """While the engine has one, it may refuse all others for longer than `engine_wait`."""
    refused: list[float] = []

    def script(_: Sent) -> Behaviour:
        if len(server.sent) == 1:
            return "hold"
        refused.append(time.monotonic())
        if refused[-1] - refused[0] < 3:
            return "busy 503"
        server.answer_held()
        return "answer"

    server.script = script
    job = job_of(tmp_path, server, rows=4, window=4, limits={"max_attempts": 1, "engine_wait": 1})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_failed) == (0, 0)
    assert report.retries > 0


def test_a_host_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection comes about and none is refused: no row is blamed, and `engine_wait` ends the run."""
    connect = aiohttp.TCPConnector.connect
    window = 4
    all_try = asyncio.Barrier(window)

    async def try_to_connect(*args: Any, **options: Any) -> Any:
        if len(server.sent) >= 8:  # packets are dropped: whatever is tried in vain takes its time
            await all_try.wait()
            raise TimeoutError
        return await connect(*args, **options)

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", try_to_connect)
    monkeypatch.setattr(TIMING, "longest_retry", 0.1)
    with FakeSGLang() as server:
        job = job_of(tmp_path, server, rows=40, window=window, limits={"max_attempts": 1, "engine_wait": 2})
        with pytest.raises(EngineLostError, match="no connection to") as lost:
            batchrunner.run(job)
    assert lost.value.report is not None
    assert lost.value.report.rows_ok >= 8
    assert lost.value.report.rows_failed == 0


def test_one_of_several_that_goes_for_good(tmp_path: Path, server: FakeSGLang) -> None:
    """The others go on, past `engine_wait`, without it."""
    server.delay_s = 0.1
    with FakeSGLang(lambda _: "die" if len(mortal.sent) >= 10 else "answer") as mortal:
        server.script = lambda _: "answer" if len(mortal.sent) >= 10 else "hold"
        mortal.on_poll = server.on_poll = server.ask_again
        engine = {"kind": "attach", "urls": [mortal.url, server.url]}
        job = job_of(tmp_path, engine, rows=100, window=8, limits={"max_attempts": 1, "engine_wait": 0.5})
        report = batchrunner.run(job)
        assert len(mortal.sent) >= 10
    assert (report.exit_code, report.rows_failed) == (0, 0)
    assert report.wall_s > 1
    rows_once(job, 100)


OTHERS: list[dict[str, Any]] = [
    {"model": "fake/other"},
    {"arguments": {"served_model_name": "other"}},
    {"arguments": {"weight_version": "v2"}},
    {"arguments": {"revision": "v2"}},
]
FIRST: dict[str, Any] = {"arguments": {"revision": "v1"}}


class Relay:
    """A server that dies after `rows` rows, and the one that takes its port, at once or after a while."""

    def __init__(self, stack: contextlib.ExitStack, rows: int, away_s: float, **other: Any) -> None:
        self.stack = stack
        self.rows = rows
        self.other = other
        self.later: FakeSGLang | None = None
        self.first = stack.enter_context(FakeSGLang(self.script, port=free_port(), **FIRST))
        self.port = int(self.first.url.rpartition(":")[2])
        self.timer = threading.Timer(away_s, self.replace)
        stack.callback(self.timer.join)

    def script(self, _: Sent) -> Behaviour:
        if len(self.first.sent) == self.rows:
            self.timer.start()
        return "die" if len(self.first.sent) >= self.rows else "answer"

    def replace(self) -> None:
        eventually(lambda: is_free(self.port))
        self.later = FakeSGLang(port=self.port, **self.other)  # known before it answers
        self.stack.enter_context(self.later)


def ok_rows(job: dict[str, Any]) -> set[int]:
    return {row["row"] for row in results_of(job) if row["error"] is None}


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_model_on_the_port(tmp_path: Path, other: dict[str, Any]) -> None:
    """It gets no row, the message says what it was and is, and the first model resumes the run."""
    with contextlib.ExitStack() as stack:
        relay = Relay(stack, 40, 0.3, **other)
        job = job_of(tmp_path, relay.first, rows=200, window=8, limits=LIMITS)
        result = batchrun(write_job(job, tmp_path))
        assert relay.later is not None
        assert relay.later.prompts == []
    assert result.exit_code == 1
    line = result.stderr.strip().splitlines()[-1]
    assert "serves another model now" in line
    assert " was " in line
    assert "run the job again" in line
    done = ok_rows(job)
    assert 0 < len(done) < 200
    with FakeSGLang(port=relay.port, **FIRST) as server:
        report = batchrunner.run(job)
        assert (report.exit_code, report.rows_ok) == (0, 200)
        assert not {int(prompt.split()[1]) for prompt in server.prompts} & done


def test_weights_that_change_in_place(tmp_path: Path, server: FakeSGLang, monkeypatch: Any) -> None:
    """Answers tell the version of their weights: those of another one are not written."""
    monkeypatch.setattr(TIMING, "model_check", 600.0)

    def script(_: Sent) -> Behaviour:
        if len(server.sent) == 21:
            server.weights = "v2"
        return "answer"

    server.script = script
    job = job_of(tmp_path, server, rows=100, window=1)
    with pytest.raises(AnotherModelError, match="'default' and is 'v2'"):
        batchrunner.run(job)
    assert len(ok_rows(job)) == 20


def test_a_later_start_with_other_weights(tmp_path: Path, server: FakeSGLang) -> None:
    """A run is not resumed with another model, nor with other weights of it."""
    job = job_of(tmp_path, server)
    batchrunner.run(job, overrides=["input.limit=4"])
    server.weights = "v2"
    with pytest.raises(ResumeError, match="weight_version was 'default' and is 'v2'"):
        batchrunner.run(job)
    server.weights, server.model = "default", "fake/other"
    with pytest.raises(ResumeError, match="model was 'fake/model' and is 'fake/other'"):
        batchrunner.run(job)
    server.model = "fake/model"
    assert batchrunner.run(job).rows_ok == 10


class FakeGateway(ServerThread):
    """`with FakeGateway(urls) as gateway: ... gateway.url`; `workers` may change at any time."""

    def __init__(self, workers: list[str]) -> None:
        super().__init__()
        self.workers = workers

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/workers", self._list)

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": url, "id": url} for url in self.workers]})


def test_a_worker_that_is_added(tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets rows once it serves the run's model: another one ends the run, and gets none."""
    monkeypatch.setattr(TIMING, "model_check", 0.05)
    server.delay_s = 0.01
    with FakeSGLang(model="fake/other") as other, FakeGateway([server.url]) as gateway:

        def script(_: Sent) -> Behaviour:
            if len(server.sent) == 20:
                gateway.workers = [server.url, other.url]
            return "answer"

        server.script = script
        job = job_of(tmp_path, {"kind": "gateway", "url": gateway.url}, rows=2000, window=8)
        with pytest.raises(AnotherModelError, match="'fake/model' and is 'fake/other'"):
            batchrunner.run(job)
    assert results_of(job)
    assert not other.prompts
