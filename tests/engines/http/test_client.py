"""What is posted to a server, and its answers: whatever comes is read, or is a failed attempt."""

import asyncio
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from batchrunner.core.errors import (
    BundleRefusedError,
    EngineAwayError,
    EngineDownError,
)
from batchrunner.core.timing import TIMING
from batchrunner.engines.hang_detector import Hang, HangDetector
from batchrunner.engines.http.client import AttachedServers
from batchrunner.engines.http.connections import HeldPort, free_port
from batchrunner.engines.http.replies import EventLines
from batchrunner.engines.http.wire import PostedAnswer, PostSender
from batchrunner.engines.registry import make_engine
from batchrunner.job.engine import GatewayEngine
from batchrunner.job.spec import LimitsSpec
from tests.conftest import eventually
from tests.support.fake_sglang import FakeSGLang
from tests.support.prompts import request
from tests.support.reader_checks import (
    ANY_JSON,
    KINDS,
    check_answer,
    check_bundle,
    check_error,
    json_of,
    some_odd,
)
from tests.support.server_thread import serving

ROWS = 4
META = {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": 2}
BEGUN = {**META, "finish_reason": None}
EVENTS: list[Any] = [
    *({"text": f"text {n}", "meta_info": META, "index": n} for n in range(ROWS)),
    {"text": "a", "meta_info": BEGUN, "index": 0},
    {"error": {"message": "m", "code": 400}},
]
ANY_EVENT = some_odd(EVENTS).map(json_of) | ANY_JSON.map(json_of) | st.binary()


def test_good_events_answer_their_rows() -> None:
    """The property below is tried with events that are read, not only with those that count for nothing."""
    found = check_bundle([json_of(event) for event in reversed(EVENTS)], ROWS)
    assert found == {n: [f"text {n}"] for n in range(ROWS)}


@given(events=st.lists(ANY_EVENT, max_size=12))
def test_any_events_can_be_read(events: list[bytes]) -> None:
    """Whatever comes, a row is answered once at most, and only one that was sent."""
    check_bundle(events, ROWS)


@given(
    events=st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"").strip())),
    end=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    data=st.data(),
)
def test_events_in_any_pieces(events: list[bytes], end: bytes, data: st.DataObject) -> None:
    wire = b": a comment\n" + b"".join(b"data: " + event + end for event in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=20)))
    lines = EventLines()
    found = []
    for begin, until in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        found += lines.feed(wire[begin:until])
    assert found == events


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchrunner.engines.http.replies.MOST_EVENT_BYTES", 100)
    lines = EventLines()
    lines.feed(b"data: " + b"x" * 90)
    with pytest.raises(BundleRefusedError, match="an event is larger than"):
        lines.feed(b"x" * 90)


def test_ports_where_connections_may_have_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchrunner.engines.http.connections._port_range", lambda: (1024, 65535))
    assert len({free_port() for _ in range(20)}) > 1


def test_a_held_port_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks of a node that draw the same port do not both start a server on it."""
    one, other = free_port(), free_port()
    drawn = iter([one, one, other, one])
    monkeypatch.setattr("batchrunner.engines.http.connections.free_port", lambda: next(drawn))
    ours = HeldPort()
    theirs = HeldPort()
    ours.release()
    later = HeldPort()
    assert (ours.number, theirs.number, later.number) == (one, other, one)
    theirs.release()
    later.release()


KEY = {"Authorization": "Bearer secret"}
"""Headers of all requests of a session."""


class Seen:
    """A server that keeps what comes."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.connections: set[Any] = set()
        self.moved = 307, "/elsewhere"

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = dict(request.headers)
        self.requests.append((request.method, request.raw_path, headers, await request.read()))
        self.connections.add(request.transport)
        if request.raw_path.endswith("/moved"):
            status, location = self.moved
            headers = {"Location": location, "Content-Type": "application/json"}
            return web.Response(status=status, headers=headers)
        return web.Response(text="x" * 3_000_000 if request.raw_path.endswith("/long") else "answer")


async def body_of(answer: PostedAnswer) -> bytes:
    try:
        return await answer.content.read()
    finally:
        answer.release()


@pytest.mark.parametrize("turns", range(4))
async def test_a_poll_as_an_engine_is_closed(turns: int) -> None:
    """It leaves no task behind, whichever step of the closing it meets."""
    with FakeSGLang() as server:
        engine = AttachedServers([server.url], api_key=None, limits=LimitsSpec())
        await engine.open()
        engine.serving = []  # no server is asked
        closing = asyncio.create_task(engine.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.loads()
        await closing
        assert not [task for task in asyncio.all_tasks() if "_watch" in repr(task)]


class HangingNow(HangDetector):
    """A server that hangs, whatever its load."""

    def poll(self, *_: Any, **__: Any) -> Hang:
        return Hang(90.0, "did nothing for 90 s")


async def test_a_redirect_to_a_server_with_a_key() -> None:
    """The API key is not sent on, so the reason is the redirect and not the key."""
    with FakeSGLang(api_key="key") as server:

        async def redirect(request: web.BaseRequest) -> web.Response:
            return web.Response(status=308, headers={"Location": server.url + request.path})

        async with serving(redirect) as address:
            engine = AttachedServers([address], api_key="key", limits=LimitsSpec())
            try:
                with pytest.raises(
                    EngineAwayError, match=f"it redirects to {server.url}, which does not get"
                ):
                    await engine.open()
            finally:
                await engine.close()


@pytest.mark.parametrize("route", ["auto", "workers"])
async def test_headers_for_a_gateway_whose_workers_are_reached_directly(
    tmp_path: Path, route: Literal["auto", "workers"]
) -> None:
    """The gateway gets the job's headers, also where rows do not go through it; its workers do not."""
    with FakeSGLang() as worker:

        async def workers(request: web.BaseRequest) -> web.Response:
            if request.headers.get("x-ingress") != "sesame":
                return web.Response(status=403)
            return web.json_response({"workers": [{"url": worker.url}]})

        async with serving(workers) as gateway:
            spec = GatewayEngine(kind="gateway", url=gateway, route=route, headers={"x-ingress": "sesame"})
            engine = await make_engine(spec, log_dir=tmp_path, limits=LimitsSpec())
            try:
                assert isinstance(engine, AttachedServers)
                assert (await engine.open()).routes == (worker.url,)
                assert "x-ingress" not in engine._headers
            finally:
                await engine.close()


async def test_a_gateway_lists_a_worker_that_hangs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is paused for a hang gets no rows when its gateway removes it and lists it again."""
    monkeypatch.setattr(TIMING, "model_check", 0.01)
    with FakeSGLang() as first, FakeSGLang() as second:
        listed = [first.url, second.url]

        async def workers(_: web.BaseRequest) -> web.Response:
            return web.json_response({"workers": [{"url": url} for url in listed]})

        async with serving(workers) as gateway:
            spec = GatewayEngine(kind="gateway", url=gateway)
            engine = AttachedServers([], gateway=spec, api_key=None, limits=LimitsSpec())
            await engine.open()
            try:
                engine.endpoints[first.url].hang_detector = HangingNow(0.0)
                await engine.loads()
                listed.remove(first.url)
                await asyncio.to_thread(eventually, lambda: len(engine.replicas) == 1)
                listed.append(first.url)
                await asyncio.to_thread(eventually, lambda: len(engine.replicas) == 2)
                with pytest.raises(EngineDownError, match="did nothing for 90 s"):
                    await engine.generate(request(0, "a"), first.url)
                assert (await engine.generate(request(0, "a"), second.url)).texts
            finally:
                await engine.close()


async def test_the_request_of_the_session() -> None:
    """The server sees the same method, path, headers and body."""
    seen = Seen()
    async with serving(seen.answer) as address, aiohttp.ClientSession(headers=KEY) as session:
        target = URL(address) / "generate"
        for by_session in (False, True):
            sender = PostSender(session, target)
            sender.is_direct = not by_session
            answer = await sender.post(b'{"text": "a"}')
            assert (answer.status, await body_of(answer)) == (200, b"answer")
    direct, other = seen.requests
    assert direct == other
    assert direct[2]["Authorization"] == "Bearer secret"


async def test_connections_are_used_again() -> None:
    """One after the other they share a connection, unless an answer was not read to its end."""
    seen = Seen()
    async with serving(seen.answer) as address, aiohttp.ClientSession() as session:
        short, long = PostSender(session, URL(address) / "short"), PostSender(session, URL(address) / "long")
        for _ in range(3):
            assert await body_of(await short.post(b"{}")) == b"answer"
        assert len(seen.connections) == 1
        (await long.post(b"{}")).release()
        assert await body_of(await short.post(b"{}")) == b"answer"
        assert len(seen.connections) == 2
        assert len(await body_of(await long.post(b"{}"))) == 3_000_000
        assert len(seen.connections) == 2


@pytest.mark.parametrize("by_session", [False, True])
@pytest.mark.parametrize("place", ["/elsewhere", "http://127.0.0.1:1/generate", "http://["])
async def test_a_redirect_is_refused(place: str, *, by_session: bool) -> None:
    """The message has the address, and nobody else gets the key."""
    seen = Seen()
    seen.moved = 307, place
    async with serving(seen.answer) as address, aiohttp.ClientSession(headers=KEY) as session:
        sender = PostSender(session, URL(address) / "moved")
        sender.is_direct = not by_session
        with pytest.raises(EngineDownError) as refused:
            await sender.post(b'{"text": "a"}')
    assert str(refused.value).startswith("http://127.0.0.1:")
    assert str(refused.value).endswith(f"redirects to {place} (status 307): correct engine.urls")
    assert len(seen.requests) == 1


REASON = {"type": "stop", "matched": 2, "message": "m", "status_code": 500}
META_INFO: dict[str, Any] = {
    "finish_reason": REASON, "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0,
    "num_retractions": 0, "weight_version": "default",
}  # fmt: skip
SAMPLE = {"text": "a text", "meta_info": META_INFO}
CHOICE = {
    "index": 0, "message": {"role": "assistant", "content": "a text", "reasoning_content": None},
    "finish_reason": "stop", "meta_info": META_INFO,
}  # fmt: skip
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
ANSWERS: list[Any] = [
    SAMPLE, [SAMPLE], [SAMPLE, SAMPLE], {"choices": [CHOICE], "usage": USAGE},
    {"choices": [CHOICE, {**CHOICE, "index": 1}], "usage": USAGE}, {"tokens": [1, 2]},
]  # fmt: skip


def test_good_answers_pass_the_check() -> None:
    """The property below is tried with answers that are read, not only with those that are refused."""
    assert check_answer(json_of(SAMPLE))
    assert check_answer(json_of([SAMPLE, SAMPLE]), samples=2)
    assert check_answer(json_of(ANSWERS[3]), "messages")
    assert check_answer(json_of(ANSWERS[4]), "messages", 2)


@given(
    reply=some_odd(ANSWERS).map(json_of) | ANY_JSON.map(json_of) | st.binary(),
    kind=st.sampled_from(KINDS),
    samples=st.sampled_from([1, 2, 4]),
)
def test_any_answer_can_be_read_and_written(reply: bytes, kind: str, samples: int) -> None:
    """Whatever comes is an answer that the results can hold, or a failed attempt."""
    check_answer(reply, kind, samples)


@given(
    code=st.integers(201, 999),
    body=some_odd([{"error": {"code": "x", "message": "m"}, "detail": ["d"]}]).map(json_of) | st.binary(),
    retry_after=st.none() | st.text(max_size=9),
)
def test_any_error_can_be_read(code: int, body: bytes, retry_after: str | None) -> None:
    """Whatever an error's body and headers are, it is an error of the row."""
    check_error(code, body, retry_after)
