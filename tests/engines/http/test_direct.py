"""What is posted without aiohttp's session is what the session would post, and goes where it would go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from batchrunner.engines.http.direct import PostedAnswer, PostSender

if TYPE_CHECKING:
    pass

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
            return web.Response(status=status, headers={"Location": location})
        return web.Response(text="x" * 3_000_000 if request.raw_path.endswith("/long") else "answer")


@asynccontextmanager
async def serving(answer: Callable[[Any], Any]) -> AsyncIterator[URL]:
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield URL.build(scheme="http", host="127.0.0.1", port=runner.addresses[0][1])
    await runner.cleanup()


async def body_of(answer: PostedAnswer) -> bytes:
    try:
        return await answer.content.read()
    finally:
        answer.release()


async def test_the_request_of_the_session() -> None:
    """The server sees the same method, path, headers and body."""
    seen = Seen()
    async with serving(seen.answer) as url, aiohttp.ClientSession(headers=KEY) as session:
        target = url / "generate"
        for by_session in (False, True):
            sender = PostSender(session, target)
            sender.is_direct = not by_session
            answer = await sender.post(b'{"text": "a"}', {"X-SMG-Routing-Key": "7"})
            assert (answer.status, await body_of(answer)) == (200, b"answer")
    direct, other = seen.requests
    assert direct == other
    assert direct[2]["X-SMG-Routing-Key"] == "7"
    assert direct[2]["Authorization"] == "Bearer secret"


async def test_connections_are_used_again() -> None:
    """One after the other they share a connection, unless an answer was not read to its end."""
    seen = Seen()
    async with serving(seen.answer) as url, aiohttp.ClientSession() as session:
        short, long = PostSender(session, url / "short"), PostSender(session, url / "long")
        for _ in range(3):
            assert await body_of(await short.post(b"{}", None)) == b"answer"
        assert len(seen.connections) == 1
        (await long.post(b"{}", None)).release()
        assert await body_of(await short.post(b"{}", None)) == b"answer"
        assert len(seen.connections) == 2
        assert len(await body_of(await long.post(b"{}", None))) == 3_000_000
        assert len(seen.connections) == 2


async def test_redirects_are_followed() -> None:
    """The session follows them: another server than the one that redirects does not get the key."""
    seen, others = Seen(), Seen()
    async with serving(others.answer) as other, serving(seen.answer) as url:
        for location, asked in (("/elsewhere", seen), (str(other / "elsewhere"), others)):
            for status, method in ((302, "GET"), (307, "POST")):
                seen.moved = status, location
                async with aiohttp.ClientSession(headers=KEY) as session:
                    answer = await PostSender(session, url / "moved").post(b'{"text": "a"}', None)
                    assert (answer.status, await body_of(answer)) == (200, b"answer")
                found = asked.requests[-1]
                assert found[:2] == (method, "/elsewhere")
                assert found[2].get("Authorization") == ("Bearer secret" if asked is seen else None)
                assert found[3] == (b'{"text": "a"}' if method == "POST" else b"")


async def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    async with serving(seen.answer) as proxy, aiohttp.ClientSession(trust_env=True) as session:
        monkeypatch.setenv("http_proxy", str(proxy))
        monkeypatch.delenv("no_proxy", raising=False)
        answer = await PostSender(session, URL("http://engine.invalid:1234/generate")).post(b"{}", None)
        assert await body_of(answer) == b"answer"
    assert seen.requests[0][1] == "http://engine.invalid:1234/generate"


async def test_a_cancelled_post_ends_its_connection() -> None:
    """So the server learns that nobody waits any more."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        begun.set()
        await reader.read()
        ended.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, aiohttp.ClientSession() as session:
        port = server.sockets[0].getsockname()[1]
        sender = PostSender(session, URL.build(scheme="http", host="127.0.0.1", port=port))
        post = asyncio.ensure_future(sender.post(b"{}", None))
        await begun.wait()
        post.cancel()
        await ended.wait()
        assert post.cancelled()
