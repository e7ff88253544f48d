"""Posts rows and reads their answers; raises what a failure on the way means for them."""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import aiohttp
from yarl import URL

from batchrunner.core.errors import (
    AttemptFailedError,
    BatchrunError,
    EngineDownError,
    NoAnswerError,
    RequestError,
)
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.direct import PostedAnswer, PostSender, post_sender
from batchrunner.engines.http.endpoint import Endpoint
from batchrunner.engines.http.event_lines import EventLines
from batchrunner.engines.http.failures import FailureClassifier, in_words
from batchrunner.engines.http.model_guard import ModelGuard

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
MOST_ANSWER_BYTES = 128 << 20
"""Most bytes of an answer, or of an event in one: a part of the results holds 64 MiB."""
EVENTS = "text/event-stream"


class Answer(NamedTuple):
    """An HTTP answer, whole."""

    status: int
    content: bytes
    retry_after: str | None


class EventTaker(Protocol):
    """Takes the events of an answer that comes in pieces."""

    @property
    def is_over(self) -> bool:
        """Whether no event is waited for any more."""

    async def take(self, events: Sequence[bytes]) -> None:
        """Take the data of some events; what it raises ends the request."""


class RowPoster:
    """Sends rows to endpoints whose servers are known to serve the run's model."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        guard: ModelGuard,
        failures: FailureClassifier,
        *,
        behind_gateway: bool,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._senders: dict[URL, PostSender] = {}
        self._guard = guard
        self._failures = failures
        self._behind_gateway = behind_gateway
        self._timeout_s = timeout_s

    async def post(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        headers: dict[str, str] | None,
        sent_at: float,
    ) -> Answer:
        """Send a body and return the whole answer; `sent_at` is the time now, for the judgement of failures.

        Raises RequestError, or AnotherModelError where the server serves another model.
        """
        try:
            with endpoint.deadline:
                if not self._guard.is_settled(endpoint.url):
                    await self._guard.settle(endpoint.url)
                answer = await self._sender(endpoint.paths[path]).post(body, headers)
                try:
                    return await _whole(answer)
                finally:
                    answer.release()
        except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
            raise await self._meaning(endpoint, failure, sent_at) from None

    async def post_for_events(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        headers: dict[str, str] | None,
        taker: EventTaker,
        sent_at: float,
    ) -> Answer | None:
        """Send a body and pass each event of the answer on; return an answer that is not one of events.

        Raises as `post` does, and what the `taker` raises.
        """
        try:
            with endpoint.deadline:
                await self._guard.settle(endpoint.url)
                answer = await self._sender(endpoint.paths[path]).post(body, headers)
                try:
                    if not _is_events(answer):
                        return await _whole(answer)
                    await _pass_on_events(answer.content, taker)
                finally:
                    answer.release()
        except Exception as failure:  # noqa: BLE001 - as above
            raise await self._meaning(endpoint, failure, sent_at) from None
        return None

    def _sender(self, url: URL) -> PostSender:
        sender = self._senders.get(url)
        if sender is None:
            sender = self._senders[url] = post_sender(self._session, url)
        return sender

    async def _meaning(self, endpoint: Endpoint, failure: Exception, sent_at: float) -> Exception:
        """Return the error that a failure means for the rows that were sent."""
        match failure:
            case RequestError() | BatchrunError():
                return failure
            case TimeoutError():
                return self._late(endpoint, failure)
            case aiohttp.ClientError() | OSError():
                self._guard.doubt(endpoint.url)
                return await self._lost(endpoint, failure, sent_at)
        log.debug("an answer of %s", endpoint.url, exc_info=failure)
        return AttemptFailedError(f"the answer cannot be read ({type(failure).__name__})")

    def _late(self, endpoint: Endpoint, failure: TimeoutError) -> RequestError:
        if isinstance(failure, aiohttp.ConnectionTimeoutError):  # a host that is gone: no row is why
            self._guard.doubt(endpoint.url)
            return EngineDownError(f"no connection to {endpoint.url} within {CONNECT_TIMEOUT_S:g} s")
        if endpoint.closed:
            return EngineDownError(endpoint.closed)
        return NoAnswerError(f"no answer within {self._timeout_s:g} s")

    async def _lost(
        self, endpoint: Endpoint, failure: aiohttp.ClientError | OSError, sent_at: float
    ) -> RequestError:
        if isinstance(failure, aiohttp.ClientConnectorError):
            return EngineDownError(f"no connection to {endpoint.url}: {in_words(failure)}")
        what = f"connection lost: {in_words(failure)}"
        if self._behind_gateway:  # it only passes rows on: none of them is why it ended
            return EngineDownError(what)
        return await self._failures.classify(endpoint.url, sent_at, what)


async def _pass_on_events(content: aiohttp.StreamReader, taker: EventTaker) -> None:
    """Pass on the events of an answer until it ends, or for a second after the last one that is wanted."""
    lines = EventLines(MOST_ANSWER_BYTES)
    try:
        async with asyncio.timeout(None) as end:
            async for part in content.iter_any():
                await taker.take(lines.feed(part))
                if taker.is_over and end.when() is None:
                    end.reschedule(asyncio.get_running_loop().time() + TIMING.stream_end)
    except TimeoutError:
        if not taker.is_over:
            raise


def _is_events(answer: PostedAnswer) -> bool:
    return answer.headers.get("Content-Type", "").partition(";")[0].strip().lower() == EVENTS


async def _whole(answer: PostedAnswer) -> Answer:
    content = await content_of(answer.content)
    return Answer(answer.status, content, answer.headers.get("Retry-After"))


async def content_of(content: aiohttp.StreamReader) -> bytes:
    """Return the body of an answer; raises AttemptFailedError for one that is larger than any can be."""
    if content.is_eof() and content.total_bytes <= MOST_ANSWER_BYTES:
        return content.read_nowait()
    found = bytearray()
    async for part in content.iter_any():
        found += part
        if len(found) > MOST_ANSWER_BYTES:
            raise AttemptFailedError(f"the answer is larger than {MOST_ANSWER_BYTES >> 20} MiB")
    return bytes(found)
