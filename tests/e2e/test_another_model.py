"""A server that is back with another model: none of its answers is written, and the run can be resumed."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from batchrunner.core.errors import AnotherModelError, ResumeError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.connections import free_port
from tests.conftest import batchrun, eventually, job_of, results_of, write_job
from tests.support.fake_sglang import Behaviour, FakeGateway, FakeSGLang, Sent
from tests.support.server_thread import PATIENCE_S, is_free

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("quick_retries")

LIMITS = {"max_attempts": 1, "engine_wait": PATIENCE_S}
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


def test_one_of_two_servers(tmp_path: Path, server: FakeSGLang) -> None:
    """The other one's answers count; the run ends all the same."""
    server.arguments, server.delay_s = FIRST["arguments"], 0.02
    with contextlib.ExitStack() as stack:
        relay = Relay(stack, 10, 0.2, model="fake/other")
        server.script = lambda _: "answer" if len(server.sent) <= 1000 else "hold"  # the run cannot end
        engine = {"kind": "attach", "urls": [relay.first.url, server.url]}
        job = job_of(tmp_path, engine, rows=2000, window=8, limits=LIMITS)
        with pytest.raises(AnotherModelError, match="fake/other"):
            batchrunner.run(job)
        assert relay.later is not None
        assert relay.later.prompts == []


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


def behind_gateway(gateway: FakeGateway, directory: Path) -> dict[str, Any]:
    return job_of(
        directory,
        {"kind": "gateway", "url": gateway.url},
        rows=2000,
        window=8,
        limits={"engine_wait": PATIENCE_S},
    )


def test_a_worker_that_is_added(tmp_path: Path, server: FakeSGLang) -> None:
    """A gateway may give it rows at once; none of its answers is written."""
    with FakeSGLang(model="fake/other") as other, FakeGateway([server.url]) as gateway:

        def script(_: Sent) -> Behaviour:
            if len(server.sent) == 20:
                gateway.workers = [server.url, other.url]
            return "answer"

        server.script = script
        job = behind_gateway(gateway, tmp_path)
        with pytest.raises(AnotherModelError, match="'fake/model' and is 'fake/other'"):
            batchrunner.run(job)
    written = results_of(job)
    assert written
    assert not {row["row"] for row in written} & {int(prompt.split()[1]) for prompt in other.prompts}


def test_a_worker_that_is_replaced(tmp_path: Path, server: FakeSGLang) -> None:
    """It goes away and is back on its port between two reads of the load: no answer is written unasked."""
    with contextlib.ExitStack() as stack:
        relay = Relay(stack, 20, 0.0, model="fake/other")
        server.arguments = FIRST["arguments"]
        gateway = stack.enter_context(FakeGateway([server.url, relay.first.url]))
        job = behind_gateway(gateway, tmp_path)
        with pytest.raises(AnotherModelError, match="'fake/model' and is 'fake/other'"):
            batchrunner.run(job)
        assert relay.later is not None
        theirs = {int(prompt.split()[1]) for prompt in relay.later.prompts}
    assert not {row["row"] for row in results_of(job)} & theirs
