"""The HTTP sessions of one client: one for rows, one for loads, one for questions about the model."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from batchrunner.engines.http.connections import SocketFactory
from batchrunner.engines.http.model_guard import GuardedConnector, ModelGuard
from batchrunner.engines.http.poster import CONNECT_TIMEOUT_S

KEEPALIVE_S = 3.0
"""Seconds; SGLang (uvicorn) closes an idle connection after 5 s, so the client drops it before that."""
LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class HttpSessions:
    """Keeps apart the connections of rows, of polls and of questions."""

    def __init__(
        self, urls: Iterable[str], *, api_key: str | None, guard: ModelGuard, sources: SocketFactory | None
    ) -> None:
        """Connect to these URLs alone; `sources` makes the sockets of rows, None as usual."""
        hosts = {urlsplit(url).hostname for url in urls}
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._by_proxy = not hosts <= LOOPBACK  # a proxy is for hosts elsewhere: it cannot reach our loopback
        kept: dict[str, Any] = {"limit": 0, "keepalive_timeout": KEEPALIVE_S}
        self.rows = self._session(GuardedConnector(guard, socket_factory=sources, **kept))
        self.status = self._session(aiohttp.TCPConnector(**kept))
        # a question gets a connection of its own: one from before may lead to a server that is on its way out
        self.questions = self._session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        """Close all connections."""
        for session in (self.rows, self.status, self.questions):
            await session.close()

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S),
            trust_env=self._by_proxy,
        )
