"""The HTTP client of SGLang servers: sends the rows of a run to replicas of one model and reads the answers.

A row is sent as one POST and gets one complete reply. A list of rows of a task without decoding (embeddings,
scores) is one POST with one reply too. A bundle is a list of prompts with `stream: true`. SGLang answers a
bundle with server-sent events, each with the `index` of its row: one event when a row ends, and one after the
row's first token if more tokens follow.

`HttpEngine` is the client. `AttachedServers` is the engine of servers that already run, or of a gateway's
workers; the run does not restart them. The engine of servers that the run starts is in `launched/fleet.py`.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import aiohttp
from yarl import URL

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import (
    SECRETS,
    AttemptFailedError,
    BatchrunError,
    BundleRefusedError,
    EngineAwayError,
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    EngineStartError,
    NoAnswerError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.server_replies import error_of, known_status
from batchrunner.core.timing import TIMING
from batchrunner.core.types import CHAT_PATH, RESPONSES_PATH, Completion, Request, RequestBody
from batchrunner.engines.base import Engine, RowEnded
from batchrunner.engines.hang_detector import Hang, HangDetector, progress_of
from batchrunner.engines.http import replies, wire
from batchrunner.engines.http.connections import open_connections
from batchrunner.engines.http.guard import GuardedConnector, ModelGuard, common_model, model_in
from batchrunner.engines.http.proxies import ENDED_BY_PROXY, REQUESTS, by_proxy
from batchrunner.engines.http.server import Endpoint, HangPause, SentRequest
from batchrunner.engines.http.server_info import (
    NO_SUCH_PATH,
    NOT_REACHED,
    NOT_SGLANG,
    ServerQuestions,
    ServerStatus,
    describe,
    in_words,
    pooling_note,
    running_by_states,
    why_incremental,
)
from batchrunner.engines.http.wire import PostedAnswer, PostSender
from batchrunner.input.request_bodies import with_model
from batchrunner.job.engine import GatewayEngine
from batchrunner.job.sampling import THINKING
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import EMBED, GENERATE, TaskName, VectorLength
from batchrunner.sglang.model_files import vocabulary_of

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
"""Maximum seconds to open a TCP connection to a server."""
KEEPALIVE_S = 3.0
"""Seconds after which the client closes an idle connection. SGLang (uvicorn) would close it after 5 s, and a
request sent at that moment would be lost."""
LONGEST_TICK_S = 1.0
"""Maximum seconds between two checks for requests that exceed `limits.request_timeout`."""
REMEDY = "start the server, or correct engine.urls"
"""Advice to a user whose server does not answer."""
_END = b"[DONE]"
"""Data of the event with which SGLang ends every event stream."""
# `HTTPStatus.OK.value` is looked up once, because the lookup is slow and every row needs the value.
_OK = HTTPStatus.OK.value

Answer = TypeVar("Answer")


class ServerDescription(NamedTuple):
    """A server's replies about itself at the start of a run."""

    url: str
    model_info: dict[str, Any]
    """The server's reply to `/model_info`."""
    server_info: dict[str, Any]
    """The server's reply to `/server_info`: its arguments and limits."""


class HttpEngine(Engine):
    """Sends requests to the replicas of one model, and polls their loads. A replica's URL is its route.

    A subclass calls `connect()` once the servers are up.
    """

    starts_servers = False
    """Whether this run starts the servers, and restarts them if they die."""

    def __init__(
        self,
        *,
        api_key: str | None,
        limits: LimitsSpec,
        task: TaskName = GENERATE,
    ) -> None:
        """Prepare a client without servers; `connect` adds them.

        `task` is the task that the servers' model must be able to do.
        """
        self.endpoints: dict[str, Endpoint] = {}
        """All servers that the run has used, by route."""
        self.serving: list[Endpoint] = []
        """The servers that get rows. A gateway may add and remove servers during the run."""
        self.guard = ModelGuard()
        """Checks that the servers that answer serve the run's model."""
        self._incidents: list[Incident] = []
        """Incidents of the servers since the last call of `incidents`."""
        self._task = task
        self.api_key = api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if api_key:
            SECRETS.add(api_key)
        self._limits = limits
        self._row_session: aiohttp.ClientSession | None = None
        """Session for rows; None before `connect`. See `_open_sessions`."""
        self._question_session: aiohttp.ClientSession | None = None
        """Session for polls and for requests about the model; None before `connect`."""
        self._server_questions: ServerQuestions | None = None
        """Asks servers about their model and arguments; None before `connect`."""
        self._reports_load = False
        """Whether the servers report their load at `/v1/loads`."""
        self._timeout_loop: asyncio.Task[None] | None = None
        """Task that ends requests that exceed `limits.request_timeout`."""
        self._rid_prefix = f"batchrunner-{secrets.token_hex(6)}"
        self._rid_numbers = itertools.count()
        """Numbers of the request ids, each of which is `_rid_prefix` and a number."""
        self._vocabulary: int | None = None
        """Number of tokens in the model's vocabulary; None if the model's files are not on this machine."""
        self._vector_length = VectorLength()
        """Refuses vectors of another length than the model's."""
        self.model_to_send: str | None = None
        """Model name that every request must contain; None if the servers accept requests without a name."""
        self._model_names: frozenset[str] = frozenset()
        """Names of the model that the servers serve."""
        self._names_to_send: dict[str, str] = {}
        """Model name to send for each model name that a row of a batch file has."""
        self._why_unwatched: str | None = None
        """Reason why no answer of any server can be watched for repetition; None if answers can."""
        self._logged_unwatched = False
        """Whether the log already says that answers are not watched for repetition."""
        self._no_thinking_budget: str | None = None
        """Reason why the servers would ignore `max_thinking_tokens`; None if they obey it."""
        self._name_lock = asyncio.Lock()
        """Held while a server is asked what a new model name in the rows stands for."""
        self._large_answers = asyncio.Semaphore(replies.LARGE_AT_ONCE)
        """Permits to read an answer of more than `replies.LARGE_BYTES`."""

    async def connect(self, urls: Sequence[str], *, remedy: str = REMEDY) -> EngineInfo:
        """Connect to the replicas, and return the description of those that answer.

        Raises EngineStartError if no replica answers, with `remedy` as the advice, or if a replica's model
        cannot do the task.
        """
        self._timeout_loop = asyncio.create_task(self._end_late_requests())
        connections, limited_by = open_connections(len(urls))
        self._open_sessions()
        assert self._question_session is not None
        self._server_questions = ServerQuestions(self._question_session, remedy)
        descriptions = await self._describe_servers(self._server_questions, urls)
        self._add_endpoints(descriptions, urls)
        model_infos = [description.model_info for description in descriptions]
        server_infos = [description.server_info for description in descriptions]
        # Replicas may report different details of their model. The run keeps those that are the same on all.
        run_model = common_model([*map(model_in, model_infos, server_infos)])
        loads = await self._first_loads(descriptions)
        info = describe(model_infos=model_infos, server_infos=server_infos, loads=loads)
        self._no_thinking_budget = info.no_thinking_budget
        self.guard.model = run_model
        for endpoint in self.serving:
            self._watch_model(endpoint)
        self._vocabulary = vocabulary_of(str(model_infos[0]["model_path"]))
        # A row of a batch file may name the model by either of its names.
        names = [reply.get(key) for reply in model_infos for key in ("served_model_name", "model_path")]
        self._model_names = frozenset(str(name) for name in names if name)
        notes = [f"connections limited by {limited_by}", *info.notes]
        if not self._reports_load:
            notes.append("the server reports no load (no path /v1/loads)")
        # Servers that the run starts pool the vectors as the model's authors do.
        if self._task == EMBED and not self.starts_servers:
            notes += filter(None, [pooling_note(model_infos[0])])
        return replace(
            info,
            weights=run_model.get("weight_version"),
            routes=tuple(self.endpoints),
            connections=connections,
            connections_by=limited_by,
            notes=tuple(notes),
        )

    def _add_endpoints(self, descriptions: Sequence[ServerDescription], urls: Sequence[str]) -> None:
        """Create an endpoint for each server of `urls`.

        The servers that answer come first in `endpoints`, because `tokens_of` uses the first server.
        """
        for description in descriptions:
            endpoint = self.endpoints[description.url] = self._new_endpoint(description.url)
            endpoint.arguments = description.server_info
            model = model_in(description.model_info, description.server_info)
            endpoint.served_model_name = model.get("served_model_name")
        for url in urls:
            if url not in self.endpoints:
                self.endpoints[url] = self._new_endpoint(url)
        self.serving = [self.endpoints[url] for url in urls]

    async def _first_loads(self, descriptions: Sequence[ServerDescription]) -> Sequence[SchedulerLoad]:
        """Find out whether servers report their load, and return the loads.

        The loads are empty if any server that answers reports none, because the limits of all replicas are
        needed.
        """
        # The reply of the first replica decides for all of them whether `/v1/loads` exists. An empty list
        # means that it does not. None means that the replica did not answer this time, so it may still report
        # its load later.
        first_loads = await self._loads_of(descriptions[0].url)
        self._reports_load = first_loads is None or bool(first_loads)
        loads = await self.loads()
        servers_with_load = {load.server for load in loads}
        described_servers = {description.url for description in descriptions}
        return loads if described_servers <= servers_with_load else []

    @property
    def replicas(self) -> list[str]:
        """URLs of the servers that get rows."""
        return [endpoint.url for endpoint in self.serving]

    def may_speculate(self) -> bool:
        """Tell whether a server uses n-gram speculation; see `Engine.may_speculate`."""
        return any(self.arguments_of(url).get("speculative_algorithm") == "NGRAM" for url in self.endpoints)

    def arguments_of(self, url: str) -> Mapping[str, Any]:
        """Return a server's arguments, with underscores in their names.

        Empty if the server did not answer at the start.
        """
        return self.endpoints[url].arguments or {}

    def start_of(self, url: str) -> int:  # noqa: ARG002 - used by LaunchedFleet
        """Return a number that changes whenever the run starts the server again."""
        return 0

    def status_of(self, url: str) -> ServerStatus:
        """Return a client for a server's status paths, such as `/model_info`."""
        assert self._question_session is not None
        return ServerStatus(self._question_session, url)

    def _new_endpoint(self, url: str) -> Endpoint:
        return Endpoint(url, HangDetector(self._limits.hang))

    def _watch_model(self, endpoint: Endpoint) -> None:
        assert self._server_questions is not None
        ask_model = functools.partial(self._server_questions.model, endpoint.url, self.guard.model)
        self.guard.watch(endpoint, ask_model)

    async def _describe_servers(
        self, questions: ServerQuestions, urls: Sequence[str]
    ) -> list[ServerDescription]:
        """Return the description of each server that answers.

        A server that does not answer now gets rows once it answers. Raises EngineAwayError if no server
        answers, EngineStartError if a server's model cannot do the task.
        """
        questions_at_start = [questions.at_start(url, self._task) for url in urls]
        replies_at_start = await asyncio.gather(*questions_at_start, return_exceptions=True)
        descriptions: list[ServerDescription] = []
        absences: list[EngineAwayError] = []
        for url, reply in zip(urls, replies_at_start, strict=True):
            if isinstance(reply, EngineAwayError):
                absences.append(reply)
            elif isinstance(reply, BaseException):
                raise reply
            else:
                model_info, server_info = reply
                descriptions.append(ServerDescription(url, model_info, server_info))
        if not descriptions:
            raise absences[0]
        for absence in absences:
            log.warning("%s; the run goes on without this server until the server answers", absence)
        return descriptions

    async def close(self) -> None:
        """Close all connections."""
        # From now on, `loads` asks no server.
        self._reports_load = False
        if self._timeout_loop is not None:
            self._timeout_loop.cancel()
        for session in (self._row_session, self._question_session):
            if session is not None:
                await session.close()

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`."""
        self._refuse_unsendable(request)
        endpoint = self.endpoints[route]
        if request.stops_repetition and (interval := self._tokens_between_events(endpoint, request)):
            return await self._send_watched(endpoint, request, interval)
        completion = replies.completion_of(request, await self._reply_to(endpoint, request))
        if request.task is not None:
            # All vectors of a run are in one column, so they must have the same length.
            (result,) = self._vector_length.refuse_other_lengths([request], [completion])
            if isinstance(result, RequestError):
                raise result
        # `check_answer` tests the same conditions, but awaiting it for each row would cost more.
        if completion.weights != self.guard.weights or endpoint.doubts:
            await self.guard.check_answer(endpoint, completion.weights)
        return completion

    async def _reply_to(self, endpoint: Endpoint, request: Request) -> bytes | list[bytes]:
        """Send one request; return its reply, or the list of its replies for embeddings and scores."""
        if request.task is not None:
            return await self._post_task(endpoint, [request])
        if request.kind == "body":
            model_name = await self._name_to_send(endpoint, request.prompt)
            body = with_model(request.prompt, model_name)
        else:
            body = wire.bytes_of(self._with_model_to_send(wire.body_of(request)))
        return await self._post(endpoint, wire.path_of(request), body)

    def _refuse_unsendable(self, request: Request) -> None:
        """Raise RowRefusedError if a request would crash SGLang, or if its thinking budget has no effect."""
        wire.refuse_deadly(request, self._vocabulary)
        if self._no_thinking_budget is not None and THINKING in request.sampling:
            raise RowRefusedError(f"{THINKING}: {self._no_thinking_budget}")

    async def generate_many(self, requests: Sequence[Request], route: str, ended: RowEnded) -> None:
        """Send several requests in one; see `Engine.generate_many`."""
        indexes_to_send = []
        for index, request in enumerate(requests):
            try:
                self._refuse_unsendable(request)
                indexes_to_send.append(index)
            except RowRefusedError as refusal:
                ended(index, refusal)
        if not indexes_to_send:
            return
        send = self._send_bundle if requests[0].task is None else self._send_list
        try:
            await send(
                self.endpoints[route],
                [requests[index] for index in indexes_to_send],
                lambda sent_index, result: ended(indexes_to_send[sent_index], result),
            )
        except EngineBusyError:
            # A busy server would refuse smaller requests too, so the error goes to the caller.
            raise
        except RequestError as failure:
            # An error with a reply is the fault of one row, which fails again when it is sent alone. Other
            # errors, such as a lost connection, apply to all rows.
            is_fault_of_one_row = failure.body is not None or isinstance(failure, RowRefusedError)
            if is_fault_of_one_row:
                raise BundleRefusedError(str(failure)) from None
            raise

    async def tokens_of(self, request: Request, *, special: bool = True) -> list[int] | None:
        """Let the first replica tokenize a prompt; see `Engine.tokens_of`."""
        body = wire.bytes_of(wire.tokenize_body(request, special=special))
        endpoint = next(iter(self.endpoints.values()))
        answer = await self._exchange(endpoint, wire.TOKENIZE_PATH, body=body, read=self._read_whole)
        if answer.status in NO_SUCH_PATH:
            return None
        if answer.status != _OK:
            raise self._refusal(endpoint, answer)
        return replies.tokens_in(answer.content)

    def incidents(self) -> list[Incident]:
        """Return the incidents of the servers since the last call; see `Engine.incidents`."""
        incidents = [*self._incidents]
        self._incidents.clear()
        return incidents

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Poll the load of every replica; leave out replicas that do not answer within 2 s."""
        if not self._reports_load:
            return []
        # Another coroutine may replace `self.serving` during the polls.
        serving = self.serving
        loads: list[SchedulerLoad] = []
        polls = await asyncio.gather(*(self._loads_of(endpoint.url) for endpoint in serving))
        for endpoint, server_loads in zip(serving, polls, strict=True):
            # None means no answer. An empty list means an answer without loads, which adds nothing.
            if server_loads is None:
                endpoint.doubt()
            elif server_loads:
                endpoint.liveness.record(alive=True)
                loads += server_loads
        return loads

    async def answers(self) -> bool:
        """Tell whether a replica answers within 2 s, with any reply."""
        servers = [self.status_of(endpoint.address) for endpoint in self.serving]
        return any(await asyncio.gather(*(server.is_alive() for server in servers)))

    async def _loads_of(self, url: str) -> list[SchedulerLoad] | None:
        """Return the loads of a server's schedulers; empty if it reports none, None if it does not answer."""
        try:
            by_states = running_by_states(self.endpoints[url].arguments or {})
            return await self.status_of(url).load(TIMING.status_timeout, by_states)
        except (*NOT_REACHED, *NOT_SGLANG) as failure:
            log.debug("the load of %s could not be read: %r", url, failure)
            return None if isinstance(failure, NOT_REACHED) else []

    def _pause_hanging_servers(self, loads: Sequence[SchedulerLoad]) -> None:
        """Send no rows to a server that hangs, for `limits.hang` seconds or until it makes progress."""
        for endpoint in self.serving:
            progress = progress_of(load for load in loads if load.server == endpoint.url)
            if endpoint.hang_pause is not None:
                if endpoint.hang_pause.is_over(time.monotonic(), progress):
                    self._reopen(endpoint)
            elif hang := endpoint.check_for_hang(loads):
                self._pause(endpoint, hang, progress)

    def _pause(self, endpoint: Endpoint, hang: Hang, progress: object) -> None:
        """Pause a server that hangs, and report the hang; `progress` is its progress so far."""
        why = f"{endpoint.url} {hang.why}"
        self._incidents.append(Incident("hangs", endpoint.url, why))
        hang_s = self._limits.hang
        message = (
            "%s: its rows are sent again, and the server gets no rows for %g s, or until it makes progress"
        )
        log.warning(message, why, hang_s)
        endpoint.pause(HangPause(why, until=time.monotonic() + hang_s, progress=progress))

    def _reopen(self, endpoint: Endpoint) -> None:
        log.warning("%s gets rows again", endpoint.url)
        self._incidents.append(Incident("back", endpoint.url))
        endpoint.resume()

    def _open_sessions(self) -> None:
        """Open one session for rows, and another for polls and for requests about the model.

        In the session for rows, each new connection first waits until the server has named its model
        (`GuardedConnector`). So the request for the model needs another session.
        """

        def session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
            return aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S),
            )

        self._row_session = session(GuardedConnector(self.guard, limit=0, keepalive_timeout=KEEPALIVE_S))
        # Each of these requests gets a new connection, because an old one may lead to a server that is
        # shutting down.
        self._question_session = session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def _end_late_requests(self) -> None:
        """End requests that exceed `limits.request_timeout`, until cancelled.

        One loop for all requests is cheaper than a timer for each, which would take 8 % of the instructions
        that a row costs.
        """
        while True:
            await asyncio.sleep(min(LONGEST_TICK_S, self._limits.request_timeout / 10))
            latest_send_time = time.monotonic() - self._limits.request_timeout
            for endpoint in self.endpoints.values():
                endpoint.end_requests(sent_before=latest_send_time)

    async def _is_alive(self, endpoint: Endpoint) -> bool:
        """Tell whether a server still answers.

        Rows that lost their connections at the same time share one request to the server.
        """
        liveness = endpoint.liveness
        question = liveness.question
        if question is None:
            server = self.status_of(endpoint.address)
            question = liveness.question = asyncio.ensure_future(server.is_alive())
            question.add_done_callback(liveness.forget_question)
        # The shield keeps the request alive for the other rows if this row is cancelled.
        alive = await asyncio.shield(question)
        liveness.record(alive=alive)
        return alive

    async def excuses(self, url: str, sent_at: float) -> bool:  # noqa: ARG002 - used by LaunchedFleet
        """Tell whether a server that died after `sent_at` died for a reason that is no row's fault."""
        return False

    async def _connection_lost_error(self, endpoint: Endpoint, sent_at: float, message: str) -> RequestError:
        """Return the error, with `message`, of a row that was sent at `sent_at` and lost its connection.

        A server that died after that may have been killed by the row, unless its death has another known
        cause. If the server is alive, the attempt counts against the row. If the server was dead before the
        row was sent, the row is not at fault.
        """
        is_alive = await self._is_alive(endpoint)
        has_died_since = sent_at < endpoint.liveness.died_at
        if has_died_since and await self.excuses(endpoint.url, sent_at):
            return EngineDownError(message)
        if has_died_since:
            return EngineDiedError(message)
        return AttemptFailedError(message) if is_alive else EngineDownError(message)

    async def _name_to_send(self, endpoint: Endpoint, body: RequestBody) -> str | None:
        """Return the model name to send with a row of a batch file; None if the row has no model name.

        SGLang's `/v1/responses` refuses a name that it does not serve, whereas its other endpoints accept any
        name. So the served name is sent to it, if that is known. It accepts the name of a LoRA adapter, but
        ignores the adapter (0.5.23). Raises RowRefusedError for such a name, because the base model would
        answer.
        """
        name = await self._name_with_adapter(endpoint, body.model)
        if body.path != RESPONSES_PATH or name is None:
            return name
        # SGLang reads a name with a colon as `model:adapter`, but a model's own name may have a colon too.
        if ":" in name and name not in self._model_names:
            raise RowRefusedError(
                f"model {body.model!r}: {RESPONSES_PATH} of SGLang ignores LoRA adapters; use {CHAT_PATH}"
            )
        return endpoint.served_model_name or name

    async def _name_with_adapter(self, endpoint: Endpoint, name: str | None) -> str | None:
        """Return the name by which SGLang finds a model, or an adapter, that a batch file names.

        SGLang reads a name as `model:adapter`. For a name without a colon the base model answers, even if it
        is the name of a LoRA adapter. So the bare name of an adapter is sent as `model:adapter`, and any
        other name unchanged. SGLang refuses an adapter that is not loaded.
        """
        if name is None or name in self._model_names or ":" in name:
            return name
        # With the lock, only the first row with a new name asks the server.
        async with self._name_lock:
            if name not in self._names_to_send:
                self._names_to_send[name] = await self._resolve_name(endpoint.url, name)
        return self._names_to_send[name]

    async def _resolve_name(self, url: str, name: str) -> str:
        """Return the name to send for `name`, which has no colon and is not the name of the server's model.

        If the server has loaded an adapter of this name, it is `ANY_MODEL:name`. Otherwise, the name is
        returned unchanged. Then a warning says which model answers, unless the name is ANY_MODEL, which
        stands for the server's model, whatever its name is.
        """
        assert self._server_questions is not None
        if name in await self._server_questions.adapters(url):
            return f"{wire.ANY_MODEL}:{name}"
        if name != wire.ANY_MODEL:
            served = " or ".join(sorted(self._model_names))
            log.warning("requests for the model %r are answered by %s: %s", name, served, url)
        return name

    async def _post(self, endpoint: Endpoint, path: str, body: bytes) -> bytes:
        """Send a body with a request id and return the reply.

        Raises RequestError, with the reply in its `body`, if the reply is not JSON with status 200.
        """
        fields = self._added_fields(endpoint, path)
        rid_field = wire.RID_FIELDS.get(path)
        rids = (str(fields[rid_field]),) if rid_field in fields else ()
        body = wire.with_fields(body, fields) if fields else body
        answer = await self._exchange(endpoint, path, body=body, read=self._read_whole, rids=rids)
        if not answer.is_json:
            raise self._refusal(endpoint, answer)
        return answer.content

    async def _read_whole(self, answer: PostedAnswer) -> replies.WholeAnswer:
        """Read the body of an answer. At most LARGE_AT_ONCE large answers are read at the same time."""
        return await replies.read_whole(answer, self._large_answers)

    def _added_fields(self, endpoint: Endpoint, path: str) -> dict[str, Any]:  # noqa: ARG002 - for subclasses
        """Return fields to add to a body: the request id (`rid`), by which the request can be aborted.

        Empty for a path whose requests cannot be aborted. All ids have the same length. Otherwise an abort
        could hit other requests too, because SGLang may abort every request whose id begins with the one to
        abort.
        """
        rid_field = wire.RID_FIELDS.get(path)
        if rid_field is None:
            return {}
        if path == RESPONSES_PATH:
            # SGLang keeps the response under this id. The id must be impossible to guess: whoever knows it
            # could continue somebody else's response.
            return {rid_field: f"resp_{secrets.token_hex(16)}"}
        return {rid_field: f"{self._rid_prefix}-{next(self._rid_numbers):010}"}

    def _with_model_to_send(self, body: dict[str, Any]) -> dict[str, Any]:
        """Add the model's name to a body, if a gateway needs it to find a worker; return the body."""
        if self.model_to_send is not None:
            body["model"] = self.model_to_send
        return body

    async def _post_task(self, endpoint: Endpoint, requests: Sequence[Request]) -> list[bytes]:
        """Send requests of one task without decoding, and return the replies; raises like `_post`."""
        task = requests[0].task
        assert task is not None
        bodies = [wire.bytes_of(self._with_model_to_send(body)) for body in task.bodies(requests)]
        return [await self._post(endpoint, task.path, body) for body in bodies]

    def _refusal(self, endpoint: Endpoint, answer: replies.WholeAnswer) -> RequestError:
        """Return the error for an answer whose status is not 200 or whose content is not JSON."""
        error = error_of(answer.status, answer.content, answer.retry_after)
        # 429 comes from the server itself. Any other status of a busy server, such as 503, may come from a
        # proxy because the server is away.
        if isinstance(error, EngineBusyError) and answer.status != HTTPStatus.TOO_MANY_REQUESTS:
            endpoint.doubt()
        return error

    async def _send_list(self, endpoint: Endpoint, requests: Sequence[Request], ended: RowEnded) -> None:
        """Send a list of rows of one task without decoding, and end the rows that have a valid answer.

        A row whose answer is missing or invalid does not end: the caller sends it again alone.
        """
        contents = await self._post_task(endpoint, requests)
        task = requests[0].task
        assert task is not None
        try:
            results = task.answers(requests, contents)
        except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
            raise BundleRefusedError(f"the answer cannot be read: {failure}") from None
        await self.guard.check_answer(endpoint, None)
        for index, result in enumerate(self._vector_length.refuse_other_lengths(requests, results)):
            if isinstance(result, (Completion, EngineBusyError)):
                ended(index, result)

    async def _send_bundle(self, endpoint: Endpoint, requests: Sequence[Request], ended: RowEnded) -> None:
        """Send prompts in one body, and call `ended` for each as soon as its answer arrives."""
        fields = self._added_fields(endpoint, wire.GENERATE_PATH)
        rid = fields["rid"]
        if requests[0].stops_repetition and self._why_unwatched is None:
            # A row may be aborted alone. So all ids have the same length, as in `_added_fields`.
            rids = tuple(f"{rid}_{index:04}" for index in range(len(requests)))
            fields["rid"] = rids
        else:
            # The body has only the id of the bundle. SGLang derives the ids of the rows from it in this way.
            rids = tuple(f"{rid}_{index}" for index in range(len(requests)))
        body = wire.bytes_of(self._with_model_to_send(wire.bundle_body(requests) | fields))
        bundle = BundleAnswer(
            requests=requests,
            ended=ended,
            endpoint=endpoint,
            guard=self.guard,
            large_answers=self._large_answers,
            rids=rids,
            abort=self._abort,
        )
        answer = await self._exchange(endpoint, wire.GENERATE_PATH, body=body, read=bundle.read, rids=rids)
        if answer is None:
            # The answer was an event stream, and every row has ended.
            return
        if answer.is_json:
            raise BundleRefusedError("the answer to a request with several rows is not an event stream")
        raise self._refusal(endpoint, answer)

    def _tokens_between_events(self, endpoint: Endpoint, request: Request) -> int | None:
        """Return the number of tokens after which an answer is checked for repetition again; None if never.

        If answers cannot be watched although the job demands it, the first reason is logged.
        """
        reason = self._why_unwatched
        if request.kind not in {"text", "input_ids"}:
            reason = "the server renders the chats"
        elif reason is None and endpoint.arguments is not None:
            reason = why_incremental(endpoint.arguments)
        if reason is None:
            return wire.tokens_between_events(request)
        # `prose` is the default, which the job does not demand.
        if request.stops_repetition != "prose" and not self._logged_unwatched:
            self._logged_unwatched = True
            log.warning(
                "on_repetition has no effect, so answers that repeat themselves go on to max_new_tokens: %s",
                reason,
            )
        return None

    async def _send_watched(self, endpoint: Endpoint, request: Request, interval: int) -> Completion:
        """Send one row, and stop its answer if the answer repeats itself without end; see `generate`.

        The answer is checked every `interval` tokens.
        """
        fields = self._added_fields(endpoint, wire.GENERATE_PATH)
        body = wire.bytes_of(self._with_model_to_send(wire.watched_body(request, interval) | fields))
        results: list[Completion | RequestError] = []
        rids = (str(fields["rid"]),)
        stream = BundleAnswer(
            requests=[request],
            ended=lambda _, result: results.append(result),
            endpoint=endpoint,
            guard=self.guard,
            large_answers=self._large_answers,
            rids=rids,
            abort=self._abort,
        )
        answer = await self._exchange(endpoint, wire.GENERATE_PATH, body=body, read=stream.read, rids=rids)
        # None means that the stream was read into `results`. A proxy or server that does not stream sends one
        # JSON reply.
        if answer is not None and answer.is_json:
            return replies.completion_of(request, answer.content)
        if answer is not None:
            raise self._refusal(endpoint, answer)
        if not results:
            raise AttemptFailedError("the answer ended before its last event")
        (result,) = results
        if isinstance(result, RequestError):
            raise result
        return result

    async def _exchange(
        self,
        endpoint: Endpoint,
        path: str,
        *,
        body: bytes,
        read: Callable[[PostedAnswer], Awaitable[Answer]],
        rids: tuple[str, ...] = (),
    ) -> Answer:
        """Send a body, and return what `read` returns for its answer; raises the error of the body's rows.

        `read` returns None if it has processed the events of an answer. A request without an answer is
        aborted before its error is raised, because its rows may be sent again. `rids` are the ids by which
        the request is aborted.
        """
        if endpoint.why_closed is not None:
            raise EngineDownError(endpoint.why_closed)
        task = asyncio.current_task()
        assert task is not None
        request = endpoint.requests[task] = SentRequest(time.monotonic(), rids)
        try:
            status, answer = await self._post_and_read(endpoint, path, body, read)
        except (RequestError, BatchrunError):
            # These errors already say what happens to the rows, or to the run.
            raise
        except asyncio.CancelledError:
            # `Endpoint.end_requests` removes a request before it cancels the request's task. So if the
            # request is still there, or if another cancellation remains, the caller cancelled the task.
            is_cancelled_by_caller = task in endpoint.requests or task.uncancel() > 0
            if is_cancelled_by_caller:
                raise
            raise await self._ended_error(endpoint, request) from None
        except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
            # `end_requests` must not cancel the task while the next line waits.
            endpoint.requests.pop(task, None)
            raise await self._transport_error(endpoint, failure, request) from None
        finally:
            endpoint.requests.pop(task, None)
        endpoint.answers += 1
        if status in ENDED_BY_PROXY:
            await self._abandon(endpoint, request, f"status {status}")
        elif answer is not None:
            # The age of an answer that came as events does not count, because a proxy does not end a request
            # while events arrive.
            age_s = time.monotonic() - request.sent_at
            if age_s > endpoint.proxy_limit.longest_answer_s:
                endpoint.proxy_limit.answered(age_s)
        if endpoint.liveness.is_dead:
            endpoint.liveness.record(alive=True)
        return answer

    async def _ended_error(self, endpoint: Endpoint, request: SentRequest) -> RequestError:
        """Return the error of a request that `Endpoint.end_requests` has ended.

        The request was ended because its server gets no requests now, or because the request took too long.
        """
        if endpoint.why_closed is not None:
            return EngineDownError(endpoint.why_closed)
        await self._abort(endpoint, request.rids)
        return NoAnswerError(f"no answer within {self._limits.request_timeout:g} s")

    async def _post_and_read(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        read: Callable[[PostedAnswer], Awaitable[Answer]],
    ) -> tuple[int, Answer]:
        """Send a body; return the status of the answer, and what `read` returns for it."""
        sender = endpoint.senders.get(path)
        if sender is None:
            sender = endpoint.senders[path] = self._new_sender(endpoint, path)
        # After a lost connection, another server with another model may be at the address.
        if endpoint.doubts:
            await self.guard.confirm(endpoint)
        posted = await sender.post(body)
        try:
            return posted.status, await read(posted)
        finally:
            posted.release()

    def _new_sender(self, endpoint: Endpoint, path: str) -> PostSender:
        assert self._row_session is not None
        return PostSender(self._row_session, URL(endpoint.address + path))

    async def _abandon(self, endpoint: Endpoint, request: SentRequest, why: str) -> None:
        """Abort a request that ended without an answer. `why` is the status or error with which it ended.

        Raises NoAnswerError if the request ended at the time limit of a proxy.
        """
        limit = endpoint.proxy_limit
        had_limit = limit.limit_s is not None
        now = time.monotonic()
        # Only a request with one id can reach the time limit. The events of a bundle keep its connection
        # open, and requests without ids, such as embeddings, are short.
        is_at_limit = len(request.rids) == 1 and limit.ended(request.sent_at, now)
        await self._abort(endpoint, request.rids)
        if not is_at_limit:
            return
        if not had_limit:
            log.warning(
                "%s: the last %d requests without an answer all ended after %.0f s (%s), and no answer took "
                "longer. So a proxy between this machine and the server ends requests at that age. Raise the "
                "proxy's time limit, give the server's own address, or lower sampling.max_new_tokens",
                endpoint.url, REQUESTS, limit.limit_s, why,
            )  # fmt: skip
        raise NoAnswerError(f"no answer within {now - request.sent_at:.0f} s, the limit of a proxy ({why})")

    async def _abort(self, endpoint: Endpoint, rids: Sequence[str]) -> bool:
        """Ask a server to abort requests by their ids; tell whether the server accepted every call."""
        failures = await asyncio.gather(
            *(self._post_abort(endpoint, rid) for rid in rids), return_exceptions=True
        )
        return not any(failures)

    async def _post_abort(self, endpoint: Endpoint, rid: str) -> None:
        """Ask a server to abort one request; raises if the server does not accept the call."""
        assert self._question_session is not None
        timeout = aiohttp.ClientTimeout(total=TIMING.status_timeout)
        async with self._question_session.post(
            endpoint.url + wire.ABORT_PATH, json={"rid": rid}, timeout=timeout, raise_for_status=True
        ):
            pass

    async def _transport_error(
        self, endpoint: Endpoint, failure: Exception, request: SentRequest
    ) -> Exception:
        """Return the error for the rows of a request that failed.

        `failure` is an error of the connection, or of reading the answer. No row is at fault if there was no
        connection at all.
        """
        url = endpoint.address
        # A lost connection may mean that another server is at the address from now on.
        if isinstance(failure, (aiohttp.ClientError, OSError)):
            endpoint.doubt()
        match failure:
            case aiohttp.ConnectionTimeoutError():
                return EngineDownError(
                    f"no connection to {url}{by_proxy(url)} within {CONNECT_TIMEOUT_S:g} s"
                )
            case aiohttp.ClientConnectorError():
                return EngineDownError(f"no connection to {url}{by_proxy(url)}: {in_words(failure)}")
            case aiohttp.ClientError() | OSError():
                message = f"connection lost: {in_words(failure)}"
                error = await self._connection_lost_error(endpoint, request.sent_at, message)
                # This error means that the server is alive, and may still compute the answer.
                if isinstance(error, AttemptFailedError):
                    await self._abandon(endpoint, request, message)
                return error
        log.debug("an answer of %s cannot be read", url, exc_info=failure)
        return AttemptFailedError(f"the answer cannot be read ({type(failure).__name__})")


@dataclass(slots=True, eq=False)
class BundleAnswer:
    """Reads the event stream that answers a bundle (several prompts in one request), and ends its rows."""

    requests: Sequence[Request]
    ended: RowEnded
    endpoint: Endpoint
    guard: ModelGuard
    large_answers: asyncio.Semaphore
    """Permits to read an answer of more than `replies.LARGE_BYTES` that is not an event stream."""
    rids: Sequence[str]
    """Request ids of the rows, by which SGLang can abort them."""
    abort: Callable[[Endpoint, Sequence[str]], Awaitable[bool]]
    """Aborts requests of a server by their ids."""
    ended_rows: set[int] = field(default_factory=set)
    """Positions in the bundle of the rows that have ended."""
    refusal: replies.WholeAnswer | None = None
    """Error event for the whole bundle, converted to an answer; None if there was none."""

    async def read(self, answer: PostedAnswer) -> replies.WholeAnswer | None:
        """Process the events of an answer until its end, or until shortly after all rows have ended.

        Return an answer that is not an event stream, or a refusal of all rows; otherwise None.
        """
        content_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if content_type != "text/event-stream":
            return await replies.read_whole(answer, self.large_answers)
        lines = replies.EventLines()
        try:
            # The timeout begins when all rows have ended. A server might leave the stream open after that.
            async with asyncio.timeout(None) as end:
                async for chunk in answer.content.iter_any():
                    await self.process(lines.feed(chunk))
                    if self._is_over and end.when() is None:
                        end.reschedule(asyncio.get_running_loop().time() + TIMING.stream_end)
        except TimeoutError:
            # The timeout above begins only when all rows have ended. Before that, the error comes from the
            # connection.
            if not self._is_over:
                raise
        return self.refusal

    @property
    def _is_over(self) -> bool:
        """Whether all rows of the bundle have ended."""
        return len(self.ended_rows) == len(self.requests)

    async def process(self, events: Sequence[bytes]) -> None:
        """Process the data of events; ignore an event that cannot be read or belongs to no pending row.

        Raises AnotherModelError if the server does not serve the run's model.
        """
        for content in events:
            if content == _END:
                continue
            try:
                event = replies.read_event(content)
            except Exception:  # noqa: BLE001 - nothing that a server sends may end a run
                log.debug("an event of %s cannot be read: %.200r", self.endpoint.url, content)
                continue
            if event.index is None and event.error is not None:
                # The server refuses all rows of the bundle.
                code = event.error.get("code") if isinstance(event.error, dict) else None
                self.refusal = replies.WholeAnswer(known_status(code), content)
                continue
            index = self._row_of(event)
            if index is None:
                continue
            if event.meta_info.finish_reason is not None:
                await self._end_row(index, event)
            elif self.requests[index].stops_repetition:
                await self._stop_if_repeating(index, event)

    def _row_of(self, event: replies.Event) -> int | None:
        """Return the position in the bundle of an event's row; None if there is no such row."""
        index = event.index
        # SGLang gives an index to the rows of a list only. Without it, the request had a single row.
        if index is None and len(self.requests) == 1:
            index = 0
        if index is None or not 0 <= index < len(self.requests):
            return None
        return index

    async def _stop_if_repeating(self, index: int, event: replies.Event) -> None:
        """End a row whose answer repeats itself without end, and abort its request."""
        request = self.requests[index]
        if index in self.ended_rows:
            return
        last_event = replies.stopped_at_repetition(event, request)
        # Some rows of a bundle may repeat themselves (`tokens_between_events` is None). This is checked last,
        # because nearly no answer repeats itself.
        if last_event is not None and wire.tokens_between_events(request) is not None:
            # The row must end before the abort, because the server answers the abort with another event,
            # which is not the row's answer.
            await self._end_row(index, last_event)
            await self.abort(self.endpoint, self.rids[index : index + 1])

    async def _end_row(self, index: int, event: replies.Event) -> None:
        """End a row by its last event, unless the row has ended already."""
        if index in self.ended_rows:
            return
        self.ended_rows.add(index)
        self.endpoint.answers += 1
        try:
            completion = replies.completion_of(self.requests[index], event)
            await self.guard.check_answer(self.endpoint, completion.weights)
        except RequestError as failure:
            self.ended(index, failure)
        else:
            self.ended(index, completion)


class AttachedServers(HttpEngine):
    """Replicas of one model that already run. They are named by URLs, or are the workers of a Model Gateway.

    A replica that hangs gets no rows for `limits.hang` seconds, or until it makes progress. Rows go directly
    to a gateway's workers, because the gateway would only pass them on, and would not adapt to the speed of
    each worker. The client sends rows to the workers that the gateway lists at the time.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        gateway: GatewayEngine | None = None,
        api_key: str | None,
        limits: LimitsSpec,
        task: TaskName = GENERATE,
    ) -> None:
        """`urls` are the URLs of replicas. A `gateway`, if there is one, lists the replicas instead."""
        super().__init__(api_key=api_key, limits=limits, task=task)
        self._urls = urls
        self._gateway = gateway
        self._watch_loop: asyncio.Task[None] | None = None
        """Task of `_watch`; None before `open` and after `close`."""

    async def open(self) -> EngineInfo:
        """Connect to the servers and describe them; see `Engine.open`."""
        if self._gateway is None:
            info = await self.connect(self._urls)
        else:
            info = await self._connect_to_workers(self._gateway)
        self._watch_loop = asyncio.create_task(self._watch())
        return info

    async def _connect_to_workers(self, gateway: GatewayEngine) -> EngineInfo:
        """Connect to the workers of a gateway and describe them; raises like `connect`."""
        try:
            urls = await self._worker_urls(gateway)
        except EngineDownError as failure:
            raise EngineAwayError(str(failure)) from None
        if not urls:
            raise EngineAwayError(f"{gateway.url}: the gateway has no workers that speak HTTP")
        remedy = "rows go directly to the gateway's workers, so make the workers reachable from this machine"
        info = await self.connect(urls, remedy=remedy)
        notes = (f"{len(urls)} workers of the gateway {gateway.url}: {', '.join(urls)}", *info.notes)
        return replace(info, kind="gateway", notes=notes)

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load of each scheduler that answers now, and pause servers that hang.

        Raises AnotherModelError if a server does not serve the run's model any more.
        """
        if self._watch_loop is not None and self._watch_loop.done():
            # The loop ends only by an error, which `result` raises. The run may go on after the error, so a
            # new loop is started first.
            failed_loop, self._watch_loop = self._watch_loop, asyncio.create_task(self._watch())
            failed_loop.result()
        loads = await super().loads()
        self._pause_hanging_servers(loads)
        return loads

    async def close(self) -> None:
        """Close all connections."""
        # `_watch_loop` is cleared first, so that a poll that still runs starts no new loop.
        watch_loop, self._watch_loop = self._watch_loop, None
        if watch_loop is not None:
            watch_loop.cancel()
            await asyncio.gather(watch_loop, return_exceptions=True)
        await super().close()

    async def _watch(self) -> None:
        """Update the workers from the gateway's list, and check the servers' models, until cancelled.

        Behind a proxy a server's model may change without any other sign. Raises AnotherModelError.
        """
        while True:
            await asyncio.sleep(TIMING.model_check)
            if self._gateway is not None:
                # Rows do not pass through the gateway. So it is no problem if the gateway does not answer, or
                # if it lists no worker of the run's model for a while.
                with contextlib.suppress(EngineDownError, EngineStartError):
                    self._update_workers(await self._worker_urls(self._gateway))
            for endpoint in self.serving:
                # A server that does not answer is noticed when the next row is sent to it.
                with contextlib.suppress(EngineDownError):
                    await self.guard.confirm(endpoint)

    async def _worker_urls(self, gateway: GatewayEngine) -> list[str]:
        """Return the addresses of a gateway's workers that speak HTTP.

        Raises EngineDownError if the gateway does not answer, EngineStartError if it has no workers of the
        job's `engine.model`.
        """
        from batchrunner.engines.http.gateway_workers import (  # noqa: PLC0415 - for few jobs
            GatewayQuestions,
            workers_of_model,
        )

        async with aiohttp.ClientSession(headers={**self._headers, **gateway.headers}) as session:
            workers = await GatewayQuestions(session, gateway.url).workers()
        # Without `engine.model`, all workers are used. The checks of their models refuse other models.
        if gateway.model is not None:
            workers = workers_of_model(workers, model=gateway.model, gateway_url=gateway.url)
        addresses = [worker.address for worker in workers if not (worker.is_grpc or worker.is_leaving)]
        return list(dict.fromkeys(addresses))

    def _update_workers(self, urls: Sequence[str]) -> None:
        """Send rows to `urls`, the workers that the gateway lists now, and no more rows to other workers."""
        for endpoint in self.serving:
            if endpoint.url not in urls:
                log.info("%s gets no more rows, because the gateway no longer lists it", endpoint.url)
                endpoint.set_listed(is_listed=False)
        for url in set(urls).difference(self.replicas):
            log.info("%s gets rows from now on, because the gateway lists it", url)
            if url in self.endpoints:
                self.endpoints[url].set_listed(is_listed=True)
            else:
                endpoint = self.endpoints[url] = self._new_endpoint(url)
                self._watch_model(endpoint)
        self.serving = [self.endpoints[url] for url in urls]
