"""The HTTP client of one SGLang server, or of several replicas of one model, behind a gateway or not."""

import dataclasses
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.core.errors import (
    EngineDownError,
    NoAnswerError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import PlacedRequest, RowAnswers
from batchrunner.engines.http import replies, wire
from batchrunner.engines.http.body_replies import completion_of_body
from batchrunner.engines.http.bundles import BundlePoster
from batchrunner.engines.http.connections import loopback_sources, open_connections
from batchrunner.engines.http.endpoint import Endpoint
from batchrunner.engines.http.failures import DeathVerdicts, in_words
from batchrunner.engines.http.lists import ListSender, WholeReplies
from batchrunner.engines.http.load_poller import LoadPoller
from batchrunner.engines.http.model_guard import Model, ModelGuard, common_model, model_in
from batchrunner.engines.http.poster import RowPoster, content_of
from batchrunner.engines.http.questions import ModelOfServer, ModelsOfWorkers, ServerQuestions
from batchrunner.engines.http.reply_errors import error_of
from batchrunner.engines.http.server_info import describe, events_of_tokens
from batchrunner.engines.http.sessions import LOOPBACK, HttpSessions
from batchrunner.engines.http.task_replies import answer_of
from batchrunner.engines.http.worker_list import WorkerList
from batchrunner.engines.model_files import vocabulary_of
from batchrunner.engines.model_names import ModelNames
from batchrunner.engines.vector_facts import pooling_note
from batchrunner.input.request_bodies import with_model
from batchrunner.input.tokenize.detokenizer import Detokenizer
from batchrunner.job.tasks.table import EMBED, GENERATE, TaskName

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
