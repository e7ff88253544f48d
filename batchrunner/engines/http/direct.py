"""Posts written to, and answers read from, a connection of aiohttp's pool.

For each row `aiohttp.ClientSession.post` makes a request, a writer with a task of its own and a response.
That takes longer than all else that we do for it. Here the head of the request is made once. Connecting, TLS,
the pool and the reading of HTTP are aiohttp's own.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

import aiohttp
from aiohttp.connector import Connection
from aiohttp.helpers import basicauth_from_netrc, get_env_proxy_for_url, netrc_from_env
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

JSON = "application/json"
_BEFORE_THE_ANSWER = {*range(100, 200)} - {101}
"""Statuses that only announce an answer, such as 100 Continue; after 101 there is none."""
_REDIRECTS = {301: "GET", 302: "GET", 303: "GET", 307: "POST", 308: "POST"}
"""Statuses of redirects, and the method with which aiohttp's session follows each."""
_NEWEST_KNOWN = (3, 14)
"""Newest aiohttp whose pool is known. The pool is no public interface: newer ones send by the session."""


class PostedAnswer(Protocol):
    """An answer whose head has come; `aiohttp.ClientResponse` is one."""

    @property
    def status(self) -> int:
        """Status of the answer."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer."""

    @property
    def content(self) -> aiohttp.StreamReader:
        """Body of the answer, as it comes."""

    def release(self) -> object:
        """Give the connection back to the pool; close it where the body was not read to its end."""


class PostSender(Protocol):
    """Posts JSON to one URL."""

    async def post(self, body: bytes, headers: Mapping[str, str] | None) -> PostedAnswer:
        """Send a body with further `headers`, and wait for the head of the answer.

        Raises aiohttp.ClientError, or OSError.
        """


class SessionPosts(PostSender):
    """Posts by aiohttp's session, which knows proxies, passwords in `~/.netrc` and redirects."""

    def __init__(self, session: aiohttp.ClientSession, url: URL) -> None:
        self._session = session
        self._url = url

    async def post(self, body: bytes, headers: Mapping[str, str] | None) -> PostedAnswer:
        """Send a body; see `PostSender.post`."""
        # a payload of bytes: aiohttp would look up how to send them, which takes 5 % of the client's time
        payload = aiohttp.BytesPayload(body, content_type=JSON)
        return await self._session.post(self._url, data=payload, headers=headers)


class DirectAnswer(NamedTuple):
    """An answer on a connection of the pool; see `PostedAnswer`."""

    status: int
    headers: Mapping[str, str]
    content: aiohttp.StreamReader
    connection: Connection

    def release(self) -> None:
        """Give the connection back; see `PostedAnswer.release`."""
        self.connection.release()


class DirectPosts(PostSender):
    """Posts by itself; where a redirect leads, a session asks."""

    def __init__(self, session: aiohttp.ClientSession, url: URL) -> None:
        assert session.connector is not None
        self._connector = session.connector
        self._timeout = session.timeout
        self._trust_env = session.trust_env
        self._url = url
        self._headers = {**session.headers, "Content-Type": JSON}
        # tells the connector where to connect, and has the headers that aiohttp adds
        self._request = aiohttp.ClientRequest("POST", url, headers=self._headers)
        self._head = f"POST {url.raw_path_qs} HTTP/1.1\r\n{_lines(self._request.headers)}".encode()

    async def post(self, body: bytes, headers: Mapping[str, str] | None) -> PostedAnswer:
        """Send a body; see `PostSender.post`."""
        more = _lines(headers).encode() if headers else b""
        try:
            connection = await self._connector.connect(self._request, [], self._timeout)
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
            while message.code in _BEFORE_THE_ANSWER:
                message, content = await protocol.read()
        except BaseException as failure:
            connection.close()
            if isinstance(failure, HttpProcessingError):
                raise aiohttp.ClientPayloadError(failure.message) from None
            raise
        answer = DirectAnswer(message.code, message.headers, content, connection)
        if answer.status in _REDIRECTS and "Location" in answer.headers:
            answer.release()
            return await self._follow(answer, body, headers or {})
        return answer

    async def _follow(self, answer: DirectAnswer, body: bytes, headers: Mapping[str, str]) -> PostedAnswer:
        """Ask where a redirect leads, which gets the API key only if it has the same origin."""
        location = answer.headers["Location"]
        try:
            target = self._url.join(URL(location))
            is_ours = target.origin() == self._url.origin()
        except ValueError:
            raise aiohttp.InvalidUrlRedirectClientError(location, "no address to redirect to") from None
        session = aiohttp.ClientSession(
            connector=self._connector,
            connector_owner=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self._timeout,
            trust_env=self._trust_env,
        )
        method = _REDIRECTS[answer.status]
        try:
            return await session.request(
                method,
                target,
                data=body if method == "POST" else None,
                headers={**(self._headers if is_ours else {"Content-Type": JSON}), **headers},
            )
        finally:
            session.detach()


def post_sender(session: aiohttp.ClientSession, url: URL) -> PostSender:
    """Return what posts to a URL: directly, where nothing needs aiohttp's session."""
    is_known = tuple(int(part) for part in aiohttp.__version__.split(".")[:2]) <= _NEWEST_KNOWN
    has_password = url.raw_user or url.raw_password
    if not is_known or has_password or (session.trust_env and _named_in_environment(url)):
        return SessionPosts(session, url)
    return DirectPosts(session, url)


def _named_in_environment(url: URL) -> bool:
    """Tell whether the environment has a proxy for a URL, or `~/.netrc` a password."""
    with suppress(LookupError):
        return bool(get_env_proxy_for_url(url))
    with suppress(LookupError):
        return bool(basicauth_from_netrc(netrc_from_env(), url.host or ""))
    return False


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items() if name != "Content-Length")
