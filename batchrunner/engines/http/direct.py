"""Posts written to, and answers read from, a connection of aiohttp's pool.

For each row `aiohttp.ClientSession.post` makes a request, a writer with a task of its own and a response:
a plain row costs 44 % more instructions by it (852 against 593 thousand, the whole runner). Here the head of
the request is made once. Connecting, TLS, the pool and the reading of HTTP are aiohttp's own.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import aiohttp
from aiohttp.connector import Connection
from aiohttp.helpers import get_env_proxy_for_url
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

JSON = "application/json"
_OK = 200
_REDIRECTS = {301, 302, 303, 307, 308}
_NEWEST_KNOWN = (3, 14)
"""Newest aiohttp whose pool is known. The pool is no public interface: newer ones send by the session."""


class DirectAnswer(NamedTuple):
    """An answer on a connection of the pool, whose head has come."""

    status: int
    headers: Mapping[str, str]
    content: aiohttp.StreamReader
    connection: Connection

    def release(self) -> None:
        """Give the connection back to the pool; close it where the body was not read to its end."""
        self.connection.release()


PostedAnswer = DirectAnswer | aiohttp.ClientResponse


class PostSender:
    """Posts JSON to one URL: directly, or by the session where a proxy or a redirect needs it."""

    def __init__(self, session: aiohttp.ClientSession, url: URL) -> None:
        assert session.connector is not None
        self._session = session
        self._connector = session.connector
        self._url = url
        # tells the connector where to connect, and has the headers that aiohttp adds
        self._request = aiohttp.ClientRequest("POST", url, headers={**session.headers, "Content-Type": JSON})
        self._head = f"POST {url.raw_path_qs} HTTP/1.1\r\n{_lines(self._request.headers)}".encode()
        is_known = tuple(int(part) for part in aiohttp.__version__.split(".")[:2]) <= _NEWEST_KNOWN
        self.is_direct = is_known and not (session.trust_env and _has_proxy(url))

    async def post(self, body: bytes, headers: Mapping[str, str] | None) -> PostedAnswer:
        """Send a body with further `headers`, and wait for the head of the answer.

        Raises aiohttp.ClientError, or OSError.
        """
        if self.is_direct:
            answer = await self._post(body, headers)
            if answer.status not in _REDIRECTS:
                return answer
            answer.release()
        # a payload of bytes: aiohttp would look up how to send them, which takes 5 % of the client's time
        payload = aiohttp.BytesPayload(body, content_type=JSON)
        return await self._session.post(self._url, data=payload, headers=headers)

    async def _post(self, body: bytes, headers: Mapping[str, str] | None) -> DirectAnswer:
        more = _lines(headers).encode() if headers else b""
        try:
            connection = await self._connector.connect(self._request, [], self._session.timeout)
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {self._url}") from None
        try:
            protocol = connection.protocol
            assert protocol is not None
            assert protocol.transport is not None
            protocol.set_response_params(read_until_eof=True)
            protocol.transport.write(
                b"%b%bContent-Length: %d\r\n\r\n%b" % (self._head, more, len(body), body)
            )
            message, content = await protocol.read()
            while message.code < _OK:  # it only announces an answer, such as 100 Continue
                message, content = await protocol.read()
        except BaseException as failure:
            connection.close()
            if isinstance(failure, HttpProcessingError):
                raise aiohttp.ClientPayloadError(failure.message) from None
            raise
        return DirectAnswer(message.code, message.headers, content, connection)


def _has_proxy(url: URL) -> bool:
    """Tell whether the environment has a proxy for a URL."""
    with suppress(LookupError):
        return bool(get_env_proxy_for_url(url))
    return False


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items() if name != "Content-Length")
