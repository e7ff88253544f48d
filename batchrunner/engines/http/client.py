"""The HTTP client of one SGLang server, or of several replicas of one model, behind a gateway or not."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from batchrunner.core.errors import (
    EngineBusyError,
    EngineDownError,
    NoAnswerError,
    RowRefusedError,
)
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Completion, EngineInfo, Incident, Request, RequestBody, SchedulerLoad
from batchrunner.engines.base import Engine, IncidentQueue, PlacedRequest, RowAnswers
from batchrunner.engines.http import replies, wire
from batchrunner.engines.http.body_replies import completion_of_body
from batchrunner.engines.http.bundles import BundlePoster
from batchrunner.engines.http.connections import SocketFactory, loopback_sources, open_connections
from batchrunner.engines.http.endpoint import Endpoint
from batchrunner.engines.http.failures import DeathVerdicts, FailureClassifier
from batchrunner.engines.http.model_guard import GuardedConnector, Model, ModelGuard, common_model, model_in
from batchrunner.engines.http.poster import CONNECT_TIMEOUT_S, RowPoster, content_of
from batchrunner.engines.http.questions import OPEN_TIMEOUT_S, ModelOfServer, ModelsOfWorkers, ServerQuestions
from batchrunner.engines.http.server_info import describe
from batchrunner.engines.http.status import (
    LOADS,
    METRICS,
    MODEL_INFO,
    NOT_REACHED,
    NOT_SGLANG,
    ServerStatus,
)
from batchrunner.engines.http.worker_list import WorkerList
from batchrunner.engines.model_files import vocabulary_of
from batchrunner.engines.model_names import ModelNames
from batchrunner.input.request_bodies import with_model
from batchrunner.input.tokenize.detokenizer import Detokenizer

log = logging.getLogger(__name__)

KEEPALIVE_S = 3.0
"""Seconds; SGLang (uvicorn) closes an idle connection after 5 s, so the client drops it before that."""
_OK = HTTPStatus.OK.value  # a look into an enumeration takes as long as ten other lines
_JSON = {"Content-Type": "application/json"}
_NO_SUCH_PATH = {404, 405}
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
GATEWAY_ROUTE = "gateway"
AFFINITY_HEADER = "X-SMG-Routing-Key"
"""With sglang_router's policy `manual` requests with the same value go to the same replica."""
NOT_THROUGH_GATEWAY = (
    "the gateway passes on one set of sampling parameters a request, without stream_interval"
)
"""sglang_router 0.3.2: each token would be an event."""


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
    ) -> None:
        """Take a `detokenizer` if the replicas have no tokenizer, and `verdicts` if we started them."""
        self.endpoints: dict[str, Endpoint] = {}
        """Where requests are sent, by route."""
        self.replicas: list[str] = []
        """URLs of the servers that are polled."""
        self.failures = FailureClassifier(self, verdicts)
        self._detokenizer = detokenizer
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = request_timeout_s
        self.guard = ModelGuard()
        self._session: aiohttp.ClientSession | None = None
        self._status_session: aiohttp.ClientSession | None = None
        self._question_session: aiohttp.ClientSession | None = None
        self._poster: RowPoster | None = None
        self._bundles: BundlePoster | None = None
        self._gateway: str | None = None
        self._checks_answers = False
        self._load_path: str | None = None
        self._vocabulary: int | None = None
        self._names: ModelNames | None = None

    async def open(
        self, urls: Sequence[str], gateway: str | None = None, workers: WorkerList | None = None
    ) -> EngineInfo:
        """Connect to the replicas, and to their gateway; read the description of every replica.

        With the list of `workers` of a gateway that others started, no answer counts before all of them have
        said that they serve the run's model. Raises EngineStartError where a replica cannot be reached or
        cannot do the work.
        """
        self._gateway = gateway
        self.replace_replicas(urls)
        routes = {GATEWAY_ROUTE: gateway} if gateway else {url: url for url in urls}
        self.endpoints = {route: Endpoint(url, self._timeout_s) for route, url in routes.items()}
        addresses, near = len(urls), False
        if gateway:
            # A gateway has one address. If it is on this machine, the client connects from as many loopback
            # addresses as the gateway has replicas: then both sides have the same number of ports.
            near = urlsplit(gateway).hostname in _LOOPBACK
            addresses = len(urls) if near else 1
        connections, limited_by = open_connections(addresses, servers=len(urls), through_gateway=near)
        questions = self._connect(loopback_sources(addresses) if gateway and addresses > 1 else None)
        models = [await questions.model_info(url) for url in urls]
        servers = [await questions.server_info(url) for url in urls]
        source = await self._find_load_path(urls[0])
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
            one_by_one=NOT_THROUGH_GATEWAY if gateway else info.one_by_one,
            notes=(f"{source}; connections limited by {limited_by}", *info.notes),
        )

    def replace_replicas(self, urls: Sequence[str]) -> None:
        """Poll these replicas from now on: those behind a gateway may change."""
        self.replicas = list(urls)

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`."""
        request = self._checked(request)
        assert self._names is not None
        whole = isinstance(request.prompt, RequestBody)
        body = (
            with_model(request.prompt, self._names.sent(request.prompt))
            if whole
            else wire.bytes_of(wire.body_of(request))
        )
        key = {AFFINITY_HEADER: request.affinity} if self._gateway and request.affinity else None
        reply = await self._post(self.endpoints[route], wire.path_of(request), body, key)
        if whole:
            completion = completion_of_body(request.prompt, reply)
        else:
            completion = replies.completion_of(request, reply, self._detokenizer)
        url = self.endpoints[route].url
        if self._checks_answers:
            await self.guard.confirm(url)
        if not self.guard.accepts(url, completion.weights):
            await self.guard.settle(url)
            await self.guard.check_answer(url, completion.weights)
        return completion

    async def generate_many(self, requests: Sequence[Request], route: str, answers: RowAnswers) -> None:
        """Send several requests in one; see `Engine.generate_many`."""
        assert self._bundles is not None
        rows: list[PlacedRequest] = []
        for place, request in enumerate(requests):
            try:
                rows.append(PlacedRequest(place, self._checked(request)))
            except RowRefusedError as refusal:
                answers.ended(place, refusal)
        if rows:
            await self._bundles.post(self.endpoints[route], rows, answers)

    async def tokens_of(self, request: Request) -> list[int] | None:
        """Ask the first replica; see `Engine.tokens_of`."""
        assert self._session is not None
        url, body = self.replicas[0] + wire.TOKENIZE_PATH, wire.bytes_of(wire.tokenize_body(request))
        timeout = aiohttp.ClientTimeout(total=OPEN_TIMEOUT_S)
        try:
            async with self._session.post(url, data=body, headers=_JSON, timeout=timeout) as response:
                content = await content_of(response.content)
        except TimeoutError:
            raise NoAnswerError(f"no answer within {OPEN_TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as failure:
            raise EngineDownError(f"connection lost: {failure or type(failure).__name__}") from None
        if response.status in _NO_SUCH_PATH:
            return None
        if response.status != HTTPStatus.OK:
            raise replies.error_of(response.status, content)
        return replies.tokens_in(content)

    async def loads(self) -> list[SchedulerLoad]:
        """Poll every replica's load; one that does not answer in 2 s is left out."""
        if self._status_session is None or self._load_path is None:
            return []
        polls = await asyncio.gather(*(self._poll(url, self._load_path) for url in self.replicas))
        return [load for loads in polls for load in loads]

    @property
    def reports_load(self) -> bool:
        """Whether the first server reported its load when the client was opened."""
        return self._load_path is not None

    async def is_alive(self, url: str) -> bool:
        """Tell whether a replica answers within 2 s, with whatever status."""
        try:
            await self._status(url).get(MODEL_INFO[0], TIMING.status_timeout)
        except (*NOT_REACHED, AssertionError):
            return False
        return True

    async def close(self) -> None:
        """Close all connections."""
        sessions = self._session, self._status_session, self._question_session
        self._session = self._status_session = self._question_session = None
        for session in filter(None, sessions):
            await session.close()

    def _connect(self, sources: SocketFactory | None) -> ServerQuestions:
        """Make the sessions for rows, polls and questions; `sources` makes the sockets of rows."""
        kept: dict[str, Any] = {"limit": 0, "keepalive_timeout": KEEPALIVE_S}
        rows = GuardedConnector(self.guard, socket_factory=sources, **kept)
        self._session = self._make_session(rows)
        self._status_session = self._make_session(aiohttp.TCPConnector(**kept))
        # a question gets a connection of its own: one from before may lead to a server that is on its way out
        self._question_session = self._make_session(aiohttp.TCPConnector(limit=0, force_close=True))
        behind_gateway = self._gateway is not None
        self._poster = RowPoster(
            self._session, self.guard, self.failures, behind_gateway=behind_gateway, timeout_s=self._timeout_s
        )
        self._bundles = BundlePoster(self._poster, self.guard, self.failures, self._detokenizer)
        return ServerQuestions(
            self._question_session,
            behind_gateway=behind_gateway,
            has_detokenizer=self._detokenizer is not None,
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

    def _guard_model(self, model: Model, questions: ServerQuestions, workers: WorkerList | None) -> None:
        """Guard the model of every address that takes rows; that of replicas that we started too."""
        self.guard.begin(model)
        self._checks_answers = workers is not None
        if workers is not None:
            pause_s = TIMING.worker_check * len(self.replicas)
            self.guard.watch(workers.url, ModelsOfWorkers(questions, workers, model), pause_s=pause_s)
        for url in self.replicas if self._gateway is None else ():
            self.guard.watch(url, ModelOfServer(questions, url, model))

    def _make_session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        hosts = {urlsplit(url).hostname for url in [*self.replicas, self._gateway or self.replicas[0]]}
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S),
            trust_env=not hosts <= _LOOPBACK,  # a proxy is for hosts elsewhere: it cannot reach our loopback
        )

    async def _post(
        self, endpoint: Endpoint, path: str, body: bytes, headers: dict[str, str] | None
    ) -> bytes:
        """Send a body and return the whole reply; raises what a refusal or a failure means."""
        assert self._poster is not None
        if endpoint.closed:
            raise EngineDownError(endpoint.closed)
        sent_at = time.monotonic()
        answer = await self._poster.post(endpoint, path, body, headers, sent_at)
        endpoint.answers += 1
        self.failures.record(endpoint.url, alive=True)
        if answer.status == _OK:
            return answer.content
        error = replies.error_of(*answer)
        if isinstance(error, EngineBusyError) and answer.status != HTTPStatus.TOO_MANY_REQUESTS:
            self.guard.doubt(endpoint.url)
        named = next((url for url in self.replicas if f"{url}/" in str(error)), None)
        if named is not None and isinstance(error, EngineDownError):
            raise await self.failures.classify(named, sent_at, str(error))
        raise error

    def _status(self, url: str) -> ServerStatus:
        assert self._status_session is not None
        return ServerStatus(self._status_session, url)

    async def _poll(self, url: str, path: str) -> list[SchedulerLoad]:
        """Return the loads that one replica reports; empty if it does not answer."""
        try:
            route = GATEWAY_ROUTE if self._gateway else url
            loads = await self._status(url).load(path, TIMING.status_timeout, route)
        except (*NOT_REACHED, *NOT_SGLANG) as failure:
            log.debug("the load of %s could not be read: %r", url, failure)
            if isinstance(failure, NOT_REACHED):
                self.guard.doubt(url)
            return []
        self.failures.record(url, alive=True)
        return loads

    async def _find_load_path(self, url: str) -> str:
        """Find the path at which a replica reports its load; return a note for the log."""
        for path in (LOADS, METRICS):
            if await self._poll(url, path):
                self._load_path = path
                return f"load from {path.partition('?')[0]}"
        return "the server tells no load (no /v1/loads, no /metrics)"


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

    async def tokens_of(self, request: Request) -> list[int] | None:
        """Ask the first server; see `Engine.tokens_of`."""
        return await self._client.tokens_of(request)

    def incidents(self) -> list[Incident]:
        """Return what happened to the servers; see `Engine.incidents`."""
        return self._incidents.take()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()
