"""The HTTP client of one SGLang server, or of several replicas of one model, behind a gateway or not."""

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
from yarl import URL

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import (
    AttemptFailedError,
    BatchrunError,
    BundleRefusedError,
    EngineBusyError,
    EngineDownError,
    NoAnswerError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Completion, Request, RequestBody
from batchrunner.engines.base import Engine, IncidentQueue, PlacedRequest, RowAnswers
from batchrunner.engines.http import replies, wire
from batchrunner.engines.http.connections import SocketFactory, loopback_sources, open_connections
from batchrunner.engines.http.direct import PostedAnswer, PostSender, post_sender
from batchrunner.engines.http.loads import DeathVerdicts, FailureClassifier, LoadPoller, in_words
from batchrunner.engines.http.model_guard import GuardedConnector, Model, ModelGuard, common_model, model_in
from batchrunner.engines.http.replies import EndOfRow, answer_of, answers_of, completion_of_body, error_of
from batchrunner.engines.http.server_info import (
    ModelOfServer,
    ModelsOfWorkers,
    ServerQuestions,
    describe,
    events_of_tokens,
)
from batchrunner.engines.http.worker_list import WorkerList
from batchrunner.engines.model_files import vocabulary_of
from batchrunner.engines.vector_facts import pooling_note
from batchrunner.input.request_bodies import with_model
from batchrunner.input.tokenize.detokenizer import Detokenizer
from batchrunner.job.tasks import EMBED, GENERATE, TaskName

log = logging.getLogger(__name__)

LONGEST_TICK_S = 1.0


class Deadline:
    """`with deadline:` around an await raises TimeoutError after `seconds`, or up to a tick (≤ 1 s) later.

    It works as `asyncio.timeout` does, but with one timer for all tasks: setting and clearing a timer for
    each takes 4 % of the time that the client spends on a row. A task may hold a deadline once at a time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tick_s = min(LONGEST_TICK_S, seconds / 10)
        self._ends: dict[asyncio.Task[object], float] = {}  # ascending: all tasks have the same time
        self._expired: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def holders(self) -> int:
        """Number of tasks that hold the deadline now."""
        return len(self._ends) + len(self._expired)

    def __enter__(self) -> Self:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._ends[task] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_later(self._tick_s, self._expire, loop)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._ends.pop(task, None)
        if task in self._expired:
            self._expired.discard(task)
            # someone else may have cancelled the task too: then it stays cancelled
            if task.uncancel() <= 0 and kind is asyncio.CancelledError:
                raise TimeoutError

    def expire(self) -> None:
        """Raise TimeoutError in every task that holds the deadline now."""
        self._end(list(self._ends))

    def _end(self, late: list[asyncio.Task[object]]) -> None:
        for task in late:
            del self._ends[task]
            self._expired.add(task)
            task.cancel()

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self._end(list(itertools.takewhile(lambda task: self._ends[task] <= now, self._ends)))
        self._timer = loop.call_later(self._tick_s, self._expire, loop) if self._ends else None


class Endpoint:
    """The address of a server or a gateway; a request there may take `timeout_s` at most."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self.paths = {path: URL(url + path) for path in wire.ROW_PATHS}
        self.deadline = Deadline(timeout_s)
        self.answers = 0
        """Requests answered so far, with whatever status."""
        self.closed: str | None = None
        """Why no requests are sent here now; None while they are."""

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered: rows that wait for a server to restart are not among them."""
        return self.deadline.holders

    def close(self, why: str) -> None:
        """End the requests in flight, so that their rows are sent again, and take no more until `reopen`."""
        self.closed = why
        self.deadline.expire()

    def reopen(self) -> None:
        """Take requests again."""
        self.closed = None


_DATA = b"data:"


class EventLines:
    """Cuts an answer into events, wherever its pieces begin and end."""

    def __init__(self, most_bytes: int) -> None:
        """No event may have more than `most_bytes`."""
        self._most_bytes = most_bytes
        self._rest = bytearray()

    def feed(self, part: bytes) -> list[bytes]:
        """Take the next piece; return the data of the events that it completes. Other lines are left out.

        Raises BundleRefusedError for an event that is too large.
        """
        *lines, rest = part.split(b"\n")
        if lines and self._rest:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > self._most_bytes:
            raise BundleRefusedError(f"an event is larger than {self._most_bytes >> 20} MiB")
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]


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


EVENTS_A_ROW = 4
"""Events a row, two of which are usual, above which a server does not heed `stream_interval`."""
_END = b"[DONE]"


class _EventMeta(msgspec.Struct):
    finish_reason: Any = None


class _Event(msgspec.Struct):
    index: int | None = None
    meta_info: _EventMeta | None = None
    error: Any = None


_read_event = msgspec.json.Decoder(_Event)


class BundleAnswer:
    """The answer to a bundle: reads its events, and passes on those that end a row, each once."""

    def __init__(
        self,
        rows: Sequence[PlacedRequest],
        answers: RowAnswers,
        endpoint: Endpoint,
        guard: ModelGuard,
        detokenizer: Detokenizer | None,
        *,
        confirms: bool,
    ) -> None:
        """With `confirms` no answer counts before its servers have said again which model they serve."""
        self._rows = rows
        self._answers = answers
        self._endpoint = endpoint
        self._guard = guard
        self._detokenizer = detokenizer
        self._confirms = confirms
        self._ended: set[int] = set()
        self.events = 0
        """Events that came so far."""
        self.error: bytes | None = None
        """Event that says why the request failed."""

    @property
    def is_over(self) -> bool:
        """Whether each row has its answer."""
        return len(self._ended) == len(self._rows)

    async def take(self, events: Sequence[bytes]) -> None:
        """Take the data of events; one that cannot be read, or of no row that is left, counts for nothing.

        Raises AnotherModelError where the server serves another model.
        """
        if self._confirms:
            await self._guard.confirm(self._endpoint.url)
        for event in events:
            if event == _END:
                continue
            self.events += 1
            end = replies.end_of_row(event) if self._detokenizer is None else None
            index = self._index_in(event) if end is None else end.index
            if index is not None and 0 <= index < len(self._rows) and index not in self._ended:
                self._ended.add(index)
                await self._end(index, end, event)

    def _index_in(self, event: bytes) -> int | None:
        """Return the index of the row that an event ends."""
        try:
            found: _Event = replies.decoded(_read_event, event)
        except Exception:  # noqa: BLE001 - nothing that a server sends may end a run
            log.debug("an event of %s cannot be read: %.200r", self._endpoint.url, event)
            return None
        if found.error is not None and found.index is None:
            self.error = event
        is_end = found.meta_info is not None and found.meta_info.finish_reason is not None
        return found.index if is_end else None

    def refusal(self) -> RequestError | None:
        """Return the error that the answer said instead of rows; None where it said none."""
        if self.error is None:
            return None
        try:
            code = int(msgspec.json.decode(self.error)["error"]["code"])
        except Exception:  # noqa: BLE001 - as above
            code = 0
        known = HTTPStatus.BAD_REQUEST <= code < 600  # noqa: PLR2004
        return error_of(code if known else HTTPStatus.INTERNAL_SERVER_ERROR.value, self.error)

    async def _end(self, index: int, end: EndOfRow | None, event: bytes) -> None:
        self._endpoint.answers += 1
        place, request = self._rows[index]
        url = self._endpoint.url
        try:
            if end is None:
                completion = replies.completion_of(request, event, self._detokenizer)
            else:
                completion = replies.completion_of_end(request, end, event)
            if not self._guard.accepts(url, completion.weights):
                await self._guard.settle(url)
                await self._guard.check_answer(url, completion.weights)
        except RequestError as failure:
            self._answers.ended(place, failure)
        else:
            self._answers.ended(place, completion)


class BundlePoster:
    """Sends bundles to endpoints."""

    def __init__(
        self,
        poster: RowPoster,
        guard: ModelGuard,
        failures: FailureClassifier,
        detokenizer: Detokenizer | None,
        *,
        confirms: bool,
    ) -> None:
        """With `confirms` no answer counts before its servers have said again which model they serve."""
        self._poster = poster
        self._guard = guard
        self._failures = failures
        self._detokenizer = detokenizer
        self._confirms = confirms

    async def post(
        self,
        endpoint: Endpoint,
        rows: Sequence[PlacedRequest],
        answers: RowAnswers,
        headers: dict[str, str] | None,
    ) -> None:
        """Send requests in one body, and pass on the answer of each; see `Engine.generate_many`."""
        if endpoint.closed:
            raise EngineDownError(endpoint.closed)
        answer = BundleAnswer(
            rows, answers, endpoint, self._guard, self._detokenizer, confirms=self._confirms
        )
        whole = await self._poster.post_for_events(
            endpoint, wire.GENERATE_PATH, _body(rows), headers, answer, time.monotonic()
        )
        self._failures.record(endpoint.url, alive=True)
        if answer.events > EVENTS_A_ROW * len(rows):
            answers.discourage(f"the server sent {answer.events} events for {len(rows)} rows")
        error = answer.refusal()
        if whole is not None:
            endpoint.answers += 1
            error = error_of(*whole)
            if whole.status == HTTPStatus.OK:
                error = BundleRefusedError("the answer to several rows is no stream of events")
        if isinstance(error, EngineBusyError):
            if whole is None or whole.status != HTTPStatus.TOO_MANY_REQUESTS:
                self._guard.doubt(endpoint.url)
            raise error
        if error is not None:
            raise BundleRefusedError(str(error))


def _body(rows: Sequence[PlacedRequest]) -> bytes:
    try:
        return wire.bytes_of(wire.bundle_body([row.request for row in rows]))
    except RequestError as failure:  # one row cannot be written: alone it is found
        raise BundleRefusedError(str(failure)) from None


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


_OK = HTTPStatus.OK.value  # a look into an enumeration takes as long as ten other lines


class WholeReplies:
    """Posts bodies and returns whole replies."""

    def __init__(self, poster: RowPoster, guard: ModelGuard, poller: LoadPoller) -> None:
        """Take the `poller`, which knows the replicas: a gateway may name one in an error."""
        self._poster = poster
        self._guard = guard
        self._poller = poller

    async def post(
        self, endpoint: Endpoint, path: str, body: bytes, headers: dict[str, str] | None
    ) -> bytes | RequestError:
        """Send a body; return the reply, or what its status means.

        Raises RequestError where none came, and what a replica's death behind a gateway means.
        """
        if endpoint.closed:
            raise EngineDownError(endpoint.closed)
        sent_at = time.monotonic()
        answer = await self._poster.post(endpoint, path, body, headers, sent_at)
        endpoint.answers += 1
        self._poller.failures.record(endpoint.url, alive=True)
        if answer.status == _OK:
            return answer.content
        error = error_of(*answer)
        if isinstance(error, EngineBusyError) and answer.status != HTTPStatus.TOO_MANY_REQUESTS:
            self._guard.doubt(endpoint.url)
        named = next((url for url in self._poller.replicas if f"{url}/" in str(error)), None)
        if named is not None and isinstance(error, EngineDownError):
            raise await self._poller.failures.classify(named, sent_at, str(error))
        return error

    async def post_all(
        self, endpoint: Endpoint, path: str, bodies: Sequence[bytes], headers: dict[str, str] | None
    ) -> list[bytes] | RequestError:
        """Send bodies one after another; return all replies, or what the first other status means."""
        found: list[bytes] = []
        for body in bodies:
            reply = await self.post(endpoint, path, body, headers)
            if isinstance(reply, RequestError):
                return reply
            found.append(reply)
        return found


class ListSender:
    """Sends a list of rows of one task, all of which end with the one reply."""

    def __init__(self, posts: WholeReplies, guard: ModelGuard, *, confirms: bool) -> None:
        """With `confirms` no reply counts before its servers have said again which model they serve."""
        self._posts = posts
        self._guard = guard
        self._confirms = confirms

    async def send(
        self,
        endpoint: Endpoint,
        rows: Sequence[PlacedRequest],
        answers: RowAnswers,
        headers: dict[str, str] | None,
    ) -> None:
        """Send rows in one body and pass on the answer of each; see `Engine.generate_many`.

        A refused list, or a reply that is none to it, says nothing of a row: raises BundleRefusedError.
        """
        requests = [row.request for row in rows]
        task = requests[0].task
        assert task is not None
        try:
            bodies = wire.bodies_of(requests)
        except RequestError as failure:  # one row cannot be written: alone it is found
            raise BundleRefusedError(str(failure)) from None
        given = await self._posts.post_all(endpoint, task.path, bodies, headers)
        if isinstance(given, EngineBusyError):
            raise given
        if isinstance(given, RequestError):
            raise BundleRefusedError(str(given))
        try:
            results = answers_of(requests, task.whole(given))
        except RequestError as failure:
            raise BundleRefusedError(str(failure)) from None
        if self._confirms:
            await self._guard.confirm(endpoint.url)
        if not self._guard.is_settled(endpoint.url):
            await self._guard.settle(endpoint.url)
        for row, result in zip(rows, results, strict=True):
            answers.ended(row.place, result)


class ModelNames:
    """The names of an engine's model. Any other name in a request is replaced; the log says so once."""

    def __init__(self, names: Collection[str], any_model: str) -> None:
        """Take the model's own names, and the one that the engine takes for whatever model it serves."""
        self._names = frozenset(names)
        self._any_model = any_model
        self._told = False

    def sent(self, body: RequestBody) -> str | None:
        """Return the name that a request is sent with; None where it has none."""
        name = body.model
        if name is None or name in self._names:
            return name
        if any(name.startswith(f"{own}:") for own in self._names):  # with a LoRA adapter
            return name
        if not self._told:
            self._told = True
            served = ", ".join(sorted(self._names))
            log.warning(
                "the requests ask for the model %s: %s answers them, and the results keep the name",
                name,
                served,
            )
        return self._any_model


_JSON = {"Content-Type": "application/json"}
_NO_SUCH_PATH = {404, 405}
GATEWAY_ROUTE = "gateway"
AFFINITY_HEADER = "X-SMG-Routing-Key"
"""With sglang_router's policy `manual` requests with the same value go to the same replica."""


class SGLangClient:
    """Sends requests to replicas of one model, each of whose URLs is a route, and polls their loads.

    Behind a gateway all requests take the one route `gateway`, and the replicas are only polled.
    """

    def __init__(
        self,
        *,
        api_key: str | None,
        request_timeout_s: float,
        detokenizer: Detokenizer | None = None,
        verdicts: DeathVerdicts | None = None,
        task: TaskName = GENERATE,
    ) -> None:
        """Take a `detokenizer` if the replicas have no tokenizer, and `verdicts` if we started them.

        The replicas must have a model for the `task`.
        """
        self._task = task
        self._launched = verdicts is not None
        self.endpoints: dict[str, Endpoint] = {}
        """Where requests are sent, by route."""
        self.guard = ModelGuard()
        self._poller = LoadPoller(self.guard, verdicts)
        self.failures = self._poller.failures
        self._detokenizer = detokenizer
        self._api_key = api_key
        self._timeout_s = request_timeout_s
        self._sessions: HttpSessions | None = None
        self._bundles: BundlePoster | None = None
        self._posts: WholeReplies | None = None
        self._gateway: str | None = None
        self._checks_answers = False
        self._vocabulary: int | None = None
        self._names: ModelNames | None = None
        self._unnamed: str | None = None
        """Name that a whole request is sent with which has none; None for none."""

    async def open(
        self, urls: Sequence[str], gateway: str | None = None, workers: WorkerList | None = None
    ) -> EngineInfo:
        """Connect to the replicas, and to their gateway; read the description of every replica.

        With the list of `workers` of a gateway that others started, no answer counts before all of them have
        said that they serve the run's model. Raises EngineStartError where a replica cannot be reached or
        cannot do the work.
        """
        self._gateway = gateway
        self._checks_answers = workers is not None
        self._unnamed = wire.ANY_MODEL if gateway else None  # sglang_router refuses completions without one
        self.replace_replicas(urls)
        routes = {GATEWAY_ROUTE: gateway} if gateway else {url: url for url in urls}
        self.endpoints = {route: Endpoint(url, self._timeout_s) for route, url in routes.items()}
        addresses, near = len(urls), False
        if gateway:
            # A gateway has one address. If it is on this machine, the client connects from as many loopback
            # addresses as the gateway has replicas: then both sides have the same number of ports.
            near = urlsplit(gateway).hostname in LOOPBACK
            addresses = len(urls) if near else 1
        connections, limited_by = open_connections(addresses, servers=len(urls), through_gateway=near)
        sources = loopback_sources(addresses) if gateway and addresses > 1 else None
        sessions = self._sessions = HttpSessions(
            [*urls, gateway or urls[0]], api_key=self._api_key, guard=self.guard, sources=sources
        )
        questions = self._use(sessions)
        models = [await questions.model_info(url) for url in urls]
        servers = [await questions.server_info(url) for url in urls]
        source = await self._poller.begin(sessions.status, GATEWAY_ROUTE if gateway else None)
        loads = await self.loads()
        info = describe(models, servers, loads if {load.server for load in loads} >= set(urls) else [])
        model = common_model([*map(model_in, models, servers)])
        self._guard_model(model, questions, workers)
        self._vocabulary = vocabulary_of(str(models[0]["model_path"]))
        names = [found.get(key) for found in models for key in ("served_model_name", "model_path")]
        self._names = ModelNames([str(name) for name in names if name], wire.ANY_MODEL)
        return dataclasses.replace(
            info,
            weights=model.get("weight_version"),
            routes=tuple(self.endpoints),
            connections=connections,
            connections_by=limited_by,
            keeps_together=gateway is not None,
            one_by_one=info.one_by_one or (events_of_tokens(servers) if gateway else None),
            notes=(
                f"{source}; connections limited by {limited_by}",
                *info.notes,
                *self._vector_notes(models),
            ),
        )

    def replace_replicas(self, urls: Sequence[str]) -> None:
        """Poll these replicas from now on: those behind a gateway may change."""
        self._poller.replicas = list(urls)

    @property
    def replicas(self) -> Sequence[str]:
        """URLs of the servers that are polled."""
        return self._poller.replicas

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`."""
        request = self._checked(request)
        endpoint = self.endpoints[route]
        if request.task is not None:
            completion = await self._forward(request, endpoint)
        else:
            completion = await self._generate(request, endpoint)
        if self._checks_answers:
            await self.guard.confirm(endpoint.url)
        if not self.guard.accepts(endpoint.url, completion.weights):
            await self.guard.settle(endpoint.url)
            await self.guard.check_answer(endpoint.url, completion.weights)
        return completion

    async def _generate(self, request: Request, endpoint: Endpoint) -> Completion:
        assert self._posts is not None
        if request.kind == "body":
            assert self._names is not None
            body = with_model(request.prompt, self._names.sent(request.prompt) or self._unnamed)
        else:
            body = wire.bytes_of(wire.body_of(request))
        reply = await self._posts.post(endpoint, wire.path_of(request), body, self._key(request))
        if isinstance(reply, RequestError):
            raise reply
        if request.kind == "body":
            return completion_of_body(request.prompt, reply)
        return replies.completion_of(request, reply, self._detokenizer)

    async def _forward(self, request: Request, endpoint: Endpoint) -> Completion:
        assert self._posts is not None
        assert request.task is not None
        bodies = wire.bodies_of([request])
        found = await self._posts.post_all(endpoint, request.task.path, bodies, self._key(request))
        if isinstance(found, RequestError):
            raise found
        return answer_of(request, request.task.whole(found))

    async def generate_many(self, requests: Sequence[Request], route: str, answers: RowAnswers) -> None:
        """Send several requests in one; see `Engine.generate_many`."""
        assert self._bundles is not None
        rows: list[PlacedRequest] = []
        for place, request in enumerate(requests):
            try:
                rows.append(PlacedRequest(place, self._checked(request)))
            except RowRefusedError as refusal:
                answers.ended(place, refusal)
        if rows and rows[0].request.task is None:
            await self._bundles.post(self.endpoints[route], rows, answers, self._key(rows[0].request))
        elif rows:
            assert self._posts is not None
            lists = ListSender(self._posts, self.guard, confirms=self._checks_answers)
            await lists.send(self.endpoints[route], rows, answers, self._key(rows[0].request))

    async def tokens_of(self, request: Request, *, special: bool = True) -> list[int] | None:
        """Ask the first replica; see `Engine.tokens_of`."""
        assert self._sessions is not None
        url = self.replicas[0] + wire.TOKENIZE_PATH
        body = wire.bytes_of(wire.tokenize_body(request, special=special))
        timeout = aiohttp.ClientTimeout(total=TIMING.server_open)
        try:
            async with self._sessions.rows.post(url, data=body, headers=_JSON, timeout=timeout) as response:
                content = await content_of(response.content)
        except TimeoutError:
            raise NoAnswerError(f"no answer within {TIMING.server_open:g} s") from None
        except (aiohttp.ClientError, OSError) as failure:
            raise EngineDownError(f"connection lost: {in_words(failure)}") from None
        if response.status in _NO_SUCH_PATH:
            return None
        if response.status != HTTPStatus.OK:
            raise error_of(response.status, content)
        return replies.tokens_in(content)

    async def loads(self) -> list[SchedulerLoad]:
        """Poll every replica's load; one that does not answer in 2 s is left out."""
        return await self._poller.loads()

    @property
    def reports_load(self) -> bool:
        """Whether the first server reported its load when the client was opened."""
        return self._poller.reports_load

    async def close(self) -> None:
        """Close all connections."""
        self._poller.end()
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            await sessions.close()

    def _use(self, sessions: HttpSessions) -> ServerQuestions:
        """Make what sends rows by these sessions, and what puts questions."""
        behind_gateway = self._gateway is not None
        poster = RowPoster(
            sessions.rows, self.guard, self.failures, behind_gateway=behind_gateway, timeout_s=self._timeout_s
        )
        self._bundles = BundlePoster(
            poster, self.guard, self.failures, self._detokenizer, confirms=self._checks_answers
        )
        self._posts = WholeReplies(poster, self.guard, self._poller)
        return ServerQuestions(
            sessions.questions,
            behind_gateway=behind_gateway,
            has_detokenizer=self._detokenizer is not None,
            task=self._task,
        )

    def _checked(self, request: Request) -> Request:
        """Return a request as it is sent; raises RowRefusedError for one that must not be."""
        wire.refuse_deadly(request, self._vocabulary)
        if self._gateway:
            wire.refuse_dropped(request)
        if self._detokenizer is None:
            return request
        if request.kind == "body":
            raise RowRefusedError("the server has no tokenizer: a whole request needs one")
        return self._detokenizer.with_stop_ids(request)

    def _vector_notes(self, models: Sequence[Mapping[str, Any]]) -> list[str]:
        notes = [pooling_note(model, launched=self._launched) for model in models]
        return [note for note in notes[:1] if note is not None and self._task == EMBED]

    def _key(self, request: Request) -> dict[str, str] | None:
        """Return the header by which a gateway chooses a replica."""
        return {AFFINITY_HEADER: request.affinity} if self._gateway and request.affinity else None

    def _guard_model(self, model: Model, questions: ServerQuestions, workers: WorkerList | None) -> None:
        """Guard the model of every address that takes rows; that of replicas that we started too."""
        self.guard.begin(model)
        if workers is not None:
            pause_s = TIMING.worker_check * len(self.replicas)
            self.guard.watch(workers.url, ModelsOfWorkers(questions, workers, model), pause_s=pause_s)
        for url in self.replicas if self._gateway is None else ():
            self.guard.watch(url, ModelOfServer(questions, url, model))


class HttpEngine(Engine):
    """The part of an engine on HTTP servers that is the same whoever started the servers."""

    def __init__(self, client: SGLangClient) -> None:
        self._client = client
        self._incidents = IncidentQueue()

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`."""
        return await self._client.generate(request, route)

    async def generate_many(self, requests: Sequence[Request], route: str, answers: RowAnswers) -> None:
        """Send several requests in one; see `Engine.generate_many`."""
        await self._client.generate_many(requests, route, answers)

    async def tokens_of(self, request: Request, *, special: bool = True) -> list[int] | None:
        """Ask the first server; see `Engine.tokens_of`."""
        return await self._client.tokens_of(request, special=special)

    def incidents(self) -> list[Incident]:
        """Return what happened to the servers; see `Engine.incidents`."""
        return self._incidents.take()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()
