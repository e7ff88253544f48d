"""Servers that somebody else runs go away and come back, with another model at times: no row is blamed."""

import asyncio
import contextlib
import re
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import batchrunner
from batchrunner.core.errors import AnotherModelError, EngineLostError, EngineStartError, ResumeError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http import proxies
from batchrunner.engines.http.connections import free_port
from tests.conftest import batchrun, eventually, job_of, results_of, rows_in, run_job
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.refusals import told
from tests.support.runs import failed_rows, is_control, rows_once, rows_sent
from tests.support.server_thread import PATIENCE_S, is_free

pytestmark = pytest.mark.usefixtures("quick_retries")

AWAY_S = 1.5
LIMITS = {"max_attempts": 1, "engine_wait": PATIENCE_S}


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
    batchrunner.run(job)
    rows_once(job, 200)


def test_a_server_that_is_killed_and_started_again(tmp_path: Path) -> None:
    """Connections are cut, then refused; when it is back on its port the run goes on."""
    with contextlib.ExitStack() as stack:
        relay = Relay(stack, 40, AWAY_S, **FIRST)
        job = job_of(tmp_path, relay.first, rows=200, window=8, limits=LIMITS)
        report = batchrunner.run(job)
    assert report.wall_s > AWAY_S
    rows_once(job, 200)


@pytest.mark.parametrize("what", ["gateway 504", "timeout 524", "disconnect", "hold"])
def test_a_request_that_ends_without_an_answer(
    tmp_path: Path, server: FakeSGLang, what: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is aborted before its row is sent again; where a proxy ends them all after one time, a line says so.

    From then on that counts as an attempt, as a row does that is not answered within `request_timeout`.
    """
    monkeypatch.setattr(proxies, "LEAST_AGE_S", 0.0)
    monkeypatch.setattr(proxies, "SAME_AGE_S", PATIENCE_S)
    monkeypatch.setattr(proxies, "BETWEEN_S", 0.0)
    monkeypatch.setattr(TIMING, "status_timeout", PATIENCE_S)
    computed_on: list[Sent] = []

    def script(sent: Sent) -> Behaviour:
        before = [each for each in server.sent[:-1] if each.prompt == sent.prompt]
        computed_on.extend(each for each in before if each.body["rid"] not in server.aborted)
        return "answer" if is_control(sent) else what

    server.script, server.refusal_s = script, 0.05
    limits = {"engine_wait": PATIENCE_S, "request_timeout": 0.3 if what == "hold" else PATIENCE_S}
    job = job_of(tmp_path, server, rows=4, limits={**limits, "max_attempts": 4})
    result = run_job(job, tmp_path, code=3)
    assert computed_on == []
    assert len(rows_sent(server)) <= 4 * 4 + proxies.REQUESTS - 1
    lines = [line for line in result.stderr.splitlines() if "a proxy between this machine and" in line]
    assert len(lines) == (what != "hold")
    word = "no answer within 0.3 s" if what == "hold" else "the limit of a proxy"
    assert all(word in row["error"] for row in results_of(job))


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
    batchrunner.run(job)
    rows_once(job, 4)


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
        with pytest.raises(EngineLostError, match="no connection to"):
            batchrunner.run(job)
    assert len(results_of(job)) >= 8
    assert failed_rows(job) == []


def test_one_of_several_that_goes_for_good(tmp_path: Path, server: FakeSGLang) -> None:
    """The others go on, past `engine_wait`, without it."""
    server.delay_s = 0.1
    with FakeSGLang(lambda _: "die" if len(mortal.sent) >= 10 else "answer") as mortal:
        server.script = lambda _: "answer" if len(mortal.sent) >= 10 else "hold"
        mortal.on_poll = server.on_poll = server.ask_again
        limits = {"max_attempts": 1, "engine_wait": 0.5}
        job = job_of(tmp_path, [mortal, server], rows=100, window=8, limits=limits)
        report = batchrunner.run(job)
        assert len(mortal.sent) >= 10
    assert report.wall_s > 1
    rows_once(job, 100)


def test_one_of_several_that_is_not_there(tmp_path: Path, server: FakeSGLang) -> None:
    """The run begins without it, says so, and sends it rows once it is there."""
    port = free_port()
    absent = f"http://127.0.0.1:{port}"

    def script(_: Sent) -> Behaviour:
        if len(server.sent) == 10:
            starter.start()
        return "answer" if len(server.sent) < 10 or len(late.sent) >= 10 else "hold"

    with contextlib.ExitStack() as stack:
        late = FakeSGLang(port=port)
        late.on_poll = server.on_poll = server.ask_again
        starter = threading.Thread(target=lambda: stack.enter_context(late))
        stack.callback(starter.join)
        server.script = script
        engine = {"kind": "attach", "urls": [absent, server.url]}
        limits = {"max_attempts": 1, "engine_wait": PATIENCE_S}
        job = job_of(tmp_path, engine, rows=100, window=8, limits=limits)
        stderr = run_job(job, tmp_path).stderr
        assert len(late.sent) >= 10
    assert f"no connection to {absent}" in stderr
    assert "the run goes on without this server until the server answers" in stderr
    rows_once(job, 100)


def test_none_of_several_is_there(tmp_path: Path) -> None:
    """The run does not begin."""
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    job = job_of(tmp_path, {"kind": "attach", "urls": urls})
    with pytest.raises(EngineStartError, match=f"no connection to {urls[0]}"):
        batchrunner.run(job)


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a proxy to which the environment leads, and which does not answer."""
    proxy = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    return proxy


def elsewhere(server: FakeSGLang) -> str:
    """Return a URL of a server whose address is not on the loopback, although it leads there."""
    return server.url.replace("127.0.0.1", "0.0.0.0")


@pytest.mark.usefixtures("dead_proxy")
@pytest.mark.parametrize("no_proxy", ["0.0.0.0/8", "10.0.0.0/8, 0.0.0.0", "0.0.0.0:PORT", "*"])
def test_a_server_that_no_proxy_has(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, no_proxy: str
) -> None:
    """Its network, address or port there is enough; one on the loopback beside it needs no entry."""
    monkeypatch.setenv("no_proxy", no_proxy.replace("PORT", server.url.rpartition(":")[2]))
    with FakeSGLang() as beside:
        urls = [elsewhere(server), beside.url]
        job = job_of(tmp_path, {"kind": "attach", "urls": urls}, rows=40, window=8)
        batchrunner.run(job)
    rows_once(job, 40)


def test_a_dead_proxy_is_named(tmp_path: Path, server: FakeSGLang, dead_proxy: str) -> None:
    """The message says by which proxy the server was asked, and why, at the start and for advice."""
    url = elsewhere(server)
    why = f"{url} by the proxy {dead_proxy} (no_proxy lacks 0.0.0.0)"
    job = job_of(tmp_path, {"kind": "attach", "urls": [url]})
    with pytest.raises(EngineStartError, match=re.escape(f"no connection to {why}")):
        batchrunner.run(job)
    told = batchrun("advise", url)
    assert told.exit_code == 2
    assert f"by the proxy {dead_proxy} (no_proxy lacks 0.0.0.0)" in told.stderr


def test_a_proxy_that_works(tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and questions go by it: the server's name need not be known here."""
    monkeypatch.setenv("http_proxy", server.url)
    job = job_of(tmp_path, {"kind": "attach", "urls": ["http://engine.invalid:30000"]})
    batchrunner.run(job)
    rows_once(job, 10)
    assert len(server.sent) == 10


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


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_model_on_the_port(tmp_path: Path, other: dict[str, Any]) -> None:
    """It gets no row, the message says what it was and is, and the first model resumes the run."""
    with contextlib.ExitStack() as stack:
        relay = Relay(stack, 40, 0.3, **other)
        job = job_of(tmp_path, relay.first, rows=200, window=8, limits=LIMITS)
        result = run_job(job, tmp_path, code=1)
        assert relay.later is not None
        assert relay.later.prompts == []
    told(result.stderr.splitlines()[-1], "serves another model now", " was ", "run the job again")
    done = rows_in(job)
    with FakeSGLang(port=relay.port, **FIRST) as server:
        batchrunner.run(job)
        rows_once(job, 200)
        assert not {*rows_sent(server)} & {*done}


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
    assert len(rows_in(job)) == 20


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
