"""The HTTP client of SGLang servers: sends the rows of a run to replicas of one model and reads the answers.

A row is one POST with one complete reply, and so is a list of rows of a task without decoding. A bundle is a
list of prompts with `stream: true`. SGLang answers a bundle with events, each with the `index` of its row:
one when a row ends, and one after its first token if more follow.

`HttpEngine` is the client. `AttachedServers` is the engine of servers that already run, or of a gateway's
workers; the run does not restart them. The engine of servers that we start is in `launched/fleet.py`.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
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
    NoAnswerError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.server_replies import error_of, known_status
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import Engine, RowEnded
from batchrunner.engines.hang_detector import Hang, HangDetector, progress_of
from batchrunner.engines.http import replies, wire
from batchrunner.engines.http.connections import open_connections
from batchrunner.engines.http.guard import GuardedConnector, ModelGuard, common_model, model_in
from batchrunner.engines.http.proxies import ENDED_BY_PROXY, REQUESTS, by_proxy
from batchrunner.engines.http.replies import JSON_BEGINS
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
    sends_pieces,
)
from batchrunner.engines.http.wire import PostedAnswer, PostSender
from batchrunner.input.request_bodies import with_model
from batchrunner.job.sampling import THINKING
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import EMBED, GENERATE, TaskName, VectorLength
from batchrunner.sglang.model_files import vocabulary_of

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
KEEPALIVE_S = 3.0
"""Seconds; SGLang (uvicorn) closes an idle connection after 5 s, so the client drops it before that."""
LONGEST_TICK_S = 1.0
"""Longest pause between two checks for late requests."""
START = "start the server, or correct engine.urls"
"""What to do where no server answers."""
_END = b"[DONE]"
_OK = HTTPStatus.OK.value  # a lookup in an enumeration takes as long as ten other lines

Answer = TypeVar("Answer")


class ServerDescription(NamedTuple):
    """What a server reports of itself at the start of a run."""

    url: str
    model: dict[str, Any]
    """Its `/model_info`."""
    arguments: dict[str, Any]
    """Its `/server_info`: arguments and limits."""


class HttpEngine(Engine):
    """Sends requests to replicas of one model, each of whose URLs is a route, and polls their loads.

    A subclass calls `connect()` once the servers are up.
    """

    starts_servers = False
    """Whether this run starts the servers, and restarts them."""

    def __init__(
        self,
        *,
        api_key: str | None,
        limits: LimitsSpec,
        task: TaskName = GENERATE,
    ) -> None:
        """Take the `task` that the servers' model must be able to do."""
        self.endpoints: dict[str, Endpoint] = {}
        """Where requests are sent, by route."""
        self.serving: list[Endpoint] = []
        """The servers that get rows; those of a gateway may change."""
        self.guard = ModelGuard()
        self._incidents: list[Incident] = []
        self._task = task
        self.api_key = api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if api_key:
            SECRETS.add(api_key)
        self._limits = limits
        self._row_session: aiohttp.ClientSession | None = None
        self._question_session: aiohttp.ClientSession | None = None
        self._server_questions: ServerQuestions | None = None
        self._reports_load = False
        """Whether servers report their load."""
        self._timeout_loop: asyncio.Task[None] | None = None
        self._rid_prefix = f"batchrunner-{secrets.token_hex(6)}"
        self._rid_numbers = itertools.count()
        self._vocabulary: int | None = None
        self._vector_length = VectorLength()
        self.model_to_send: str | None = None
        """Model name that every request must have; None where servers take any."""
        self._model_names: frozenset[str] = frozenset()
        self._names_to_send: dict[str, str] = {}
        """Model name to send in a whole request, by the name that its row gives."""
        self._logged_unwatched = False
        self._no_thinking_budget: str | None = None
        self._name_lock = asyncio.Lock()
        self._large_answers = asyncio.Semaphore(replies.LARGE_AT_ONCE)
        """Permits to read large answers."""

    async def connect(self, urls: Sequence[str], remedy: str = START) -> EngineInfo:
        """Connect to the replicas, and read the description of each that answers.

        Raises EngineStartError if no replica can be reached (with the `remedy`) or one cannot do the task.
        """
        self._timeout_loop = asyncio.create_task(self._end_late_requests())
        connections, limited_by = open_connections(len(urls))
        self._open_sessions()
        assert self._question_session is not None
        self._server_questions = ServerQuestions(self._question_session, remedy)
        descriptions = await self._describe_servers(self._server_questions, urls)
        self._add_endpoints(descriptions, urls)
        models = [description.model for description in descriptions]
        arguments = [description.arguments for description in descriptions]
        model = common_model([*map(model_in, models, arguments)])
        info = describe(models, arguments, await self._first_loads(descriptions))
        self._no_thinking_budget = info.no_thinking_budget
        self.guard.model = model
        for endpoint in self.serving:
            self._watch_model(endpoint)
        self._vocabulary = vocabulary_of(str(models[0]["model_path"]))
        names = [reply.get(key) for reply in models for key in ("served_model_name", "model_path")]
        self._model_names = frozenset(str(name) for name in names if name)
        notes = [f"connections limited by {limited_by}", *info.notes]
        if not self._reports_load:
            notes.append("the server reports no load (no /v1/loads)")
        if self._task == EMBED and not self.starts_servers and (note := pooling_note(models[0])):
            notes.append(note)
        return replace(
            info,
            weights=model.get("weight_version"),
            routes=tuple(self.endpoints),
            connections=connections,
            connections_by=limited_by,
            notes=tuple(notes),
        )

    def _add_endpoints(self, descriptions: Sequence[ServerDescription], urls: Sequence[str]) -> None:
        """Create the endpoints; those that answer come first, as `tokens_of` asks the first one."""
        arguments = {description.url: description.arguments for description in descriptions}
        for url in dict.fromkeys([*arguments, *urls]):
            endpoint = self.endpoints[url] = self._new_endpoint(url)
            endpoint.arguments = arguments.get(url)
        self.serving = [self.endpoints[url] for url in urls]

    async def _first_loads(self, descriptions: Sequence[ServerDescription]) -> Sequence[SchedulerLoad]:
        """Find out whether servers report their load; return the loads if all servers that answer do."""
        self._reports_load = await self._loads_of(descriptions[0].url) != []
        loads = await self.loads()
        servers = {load.server for load in loads}
        return loads if all(description.url in servers for description in descriptions) else []

    @property
    def replicas(self) -> list[str]:
        """URLs of the servers that get rows."""
        return [endpoint.url for endpoint in self.serving]

    def _new_endpoint(self, url: str) -> Endpoint:
        return Endpoint(url, HangDetector(self._limits.hang))

    def _watch_model(self, endpoint: Endpoint) -> None:
        """Let the guard ask a server for its model."""
        assert self._server_questions is not None
        self.guard.watch(
            endpoint, functools.partial(self._server_questions.model, endpoint.url, self.guard.model)
        )

    async def _describe_servers(
        self, questions: ServerQuestions, urls: Sequence[str]
    ) -> list[ServerDescription]:
        """Return the description of each server that answers.

        A server that does not answer gets rows once it answers. Raises EngineAwayError if none answers,
        EngineStartError if one cannot do the task.
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
                model, arguments = reply
                descriptions.append(ServerDescription(url, model, arguments))
        if not descriptions:
            raise absences[0]
        for absence in absences:
            log.warning("%s; the run goes on without it until it answers", absence)
        return descriptions

    async def close(self) -> None:
        """Close all connections."""
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
        reply: bytes | list[bytes]
        if request.task is not None:
            reply = await self._post_task(endpoint, [request])
        elif request.stops_repetition and self._can_watch(endpoint, request):
            return await self._send_watched(endpoint, request)
        else:
            if request.kind == "body":
                body = with_model(request.prompt, await self._name_to_send(endpoint, request.prompt.model))
            else:
                body = wire.bytes_of(self._addressed(wire.body_of(request)))
            reply = await self._post(endpoint, wire.path_of(request), body)
        completion = replies.completion_of(request, reply)
        if request.task is not None:
            (result,) = self._vector_length.refuse_other_lengths([request], [completion])
            if isinstance(result, RequestError):
                raise result
        if completion.weights != self.guard.weights or endpoint.doubts:
            await self.guard.check_answer(endpoint, completion.weights)
        return completion

    def _refuse_unsendable(self, request: Request) -> None:
        """Raise RowRefusedError for a row that would kill the servers, or whose limit they would ignore."""
        wire.refuse_deadly(request, self._vocabulary)
        if self._no_thinking_budget is not None and THINKING in request.sampling:
            raise RowRefusedError(f"{THINKING}: {self._no_thinking_budget}")

    async def generate_many(self, requests: Sequence[Request], route: str, ended: RowEnded) -> None:
        """Send several requests in one; see `Engine.generate_many`."""
        places = []
        for place, request in enumerate(requests):
            try:
                self._refuse_unsendable(request)
                places.append(place)
            except RowRefusedError as refusal:
                ended(place, refusal)
        if not places:
            return
        send = self._send_bundle if requests[0].task is None else self._send_list
        try:
            await send(
                self.endpoints[route],
                [requests[place] for place in places],
                lambda index, result: ended(places[index], result),
            )
        except EngineBusyError:
            raise
        except RequestError as failure:  # the fault of one row, which fails again when it is sent alone
            if failure.body is None and not isinstance(failure, RowRefusedError):
                raise
            raise BundleRefusedError(str(failure)) from None

    async def tokens_of(self, request: Request, *, special: bool = True) -> list[int] | None:
        """Ask the first replica; see `Engine.tokens_of`."""
        body = wire.bytes_of(wire.tokenize_body(request, special=special))
        endpoint = next(iter(self.endpoints.values()))
        answer = await self._exchange(endpoint, wire.TOKENIZE_PATH, body, self._whole)
        if answer.status in NO_SUCH_PATH:
            return None
        if answer.status != _OK:
            raise self._refusal(endpoint, answer)
        return replies.tokens_in(answer.content)

    def incidents(self) -> list[Incident]:
        """Return the servers' incidents; see `Engine.incidents`."""
        incidents = [*self._incidents]
        self._incidents.clear()
        return incidents

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Poll every replica's load; one that does not answer in 2 s is left out."""
        if not self._reports_load:
            return []
        serving = self.serving
        loads: list[SchedulerLoad] = []
        polls = await asyncio.gather(*(self._loads_of(endpoint.url) for endpoint in serving))
        for endpoint, polled in zip(serving, polls, strict=True):
            if polled is None:
                endpoint.doubt()
            elif polled:
                endpoint.liveness.record(alive=True)
                loads += polled
        return loads

    async def _loads_of(self, url: str) -> list[SchedulerLoad] | None:
        """Return the loads that a server reports: empty where it reports none, None without an answer."""
        assert self._question_session is not None
        try:
            status = ServerStatus(self._question_session, url)
            by_states = running_by_states(self.endpoints[url].arguments or {})
            return await status.load(TIMING.status_timeout, by_states)
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
            elif hang := endpoint.hang_among(loads):
                self._pause(endpoint, hang, progress)

    def _pause(self, endpoint: Endpoint, hang: Hang, progress: object) -> None:
        why = f"{endpoint.url} {hang.why}"
        self._incidents.append(Incident("hangs", endpoint.url, why))
        hang_s = self._limits.hang
        message = "%s: its rows are sent again, and it gets no rows for %g s or until it makes progress"
        log.warning(message, why, hang_s)
        endpoint.pause(HangPause(why, until=time.monotonic() + hang_s, progress=progress))

    def _reopen(self, endpoint: Endpoint) -> None:
        log.warning("%s gets rows again", endpoint.url)
        self._incidents.append(Incident("back", endpoint.url))
        endpoint.resume()

    def _open_sessions(self) -> None:
        """Keep the connections of rows apart from those of polls and of questions about the model."""

        def session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
            return aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S),
            )

        self._row_session = session(GuardedConnector(self.guard, limit=0, keepalive_timeout=KEEPALIVE_S))
        # each question has a new connection: an old one may lead to a server that is shutting down
        self._question_session = session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def _end_late_requests(self) -> None:
        """End requests that take too long. A timer for each would be 8 % of a row's instructions."""
        while True:
            await asyncio.sleep(min(LONGEST_TICK_S, self._limits.request_timeout / 10))
            late = time.monotonic() - self._limits.request_timeout
            for endpoint in self.endpoints.values():
                endpoint.end_requests(sent_before=late)

    async def _is_alive(self, endpoint: Endpoint) -> bool:
        """Ask a server whether it answers, once for all rows that were cut off together."""
        liveness = endpoint.liveness
        question = liveness.question
        if question is None:
            assert self._question_session is not None
            status = ServerStatus(self._question_session, endpoint.address)
            question = liveness.question = asyncio.ensure_future(status.is_alive())
            question.add_done_callback(liveness.forget_question)
        alive = await asyncio.shield(question)
        liveness.record(alive=alive)
        return alive

    async def excuses(self, url: str, sent_at: float) -> bool:  # noqa: ARG002 - of servers that we start
        """Tell whether a server that ended after `sent_at` ended for a reason that is no row's fault."""
        return False

    async def _connection_lost_error(self, endpoint: Endpoint, sent_at: float, message: str) -> RequestError:
        """Return the error, with `message`, of a row that was sent at `sent_at` and lost its connection.

        If the server is alive, the row may be at fault, and the attempt counts against it. If the server
        died after the row was sent, it may have died of the row, unless its death excuses all rows. If it
        was dead before, no row is at fault.
        """
        is_alive = await self._is_alive(endpoint)
        if sent_at < endpoint.liveness.died_at:
            is_excused = await self.excuses(endpoint.url, sent_at)
            return EngineDownError(message) if is_excused else EngineDiedError(message)
        return AttemptFailedError(message) if is_alive else EngineDownError(message)

    async def _name_to_send(self, endpoint: Endpoint, name: str | None) -> str | None:
        """Return the model name to send in a whole request; None if the request has none.

        A name is sent unchanged, unless it is the plain name of a LoRA adapter. SGLang takes the part after a
        colon for an adapter, and refuses an adapter that is not loaded. It answers any name without a colon
        with its own model. So the plain name of an adapter is sent in the form with the colon.
        """
        if name is None or name in self._model_names or ":" in name:
            return name
        async with self._name_lock:  # only the first row with a name asks the server
            if name not in self._names_to_send:
                self._names_to_send[name] = await self._resolve_name(endpoint.url, name)
        return self._names_to_send[name]

    async def _resolve_name(self, url: str, name: str) -> str:
        """Return the name to send for `name`, which has no colon: `model:adapter` for a loaded adapter.

        Any other name is returned as it is, and a warning says which model answers for it.
        """
        assert self._server_questions is not None
        if name in await self._server_questions.adapters(url):
            return f"{wire.ANY_MODEL}:{name}"
        if name != wire.ANY_MODEL:
            served = " or ".join(sorted(self._model_names))
            log.warning("requests for the model %r are answered by %s: %s", name, served, url)
        return name

    async def _post(self, endpoint: Endpoint, path: str, body: bytes) -> bytes:
        """Send a body and return the reply; raises RequestError, with the reply, if that is no answer."""
        fields = self._added_fields(endpoint, path)
        rids = (str(fields["rid"]),) if "rid" in fields else ()
        body = wire.with_fields(body, fields) if fields else body
        answer = await self._exchange(endpoint, path, body, self._whole, rids=rids)
        if answer.status != _OK or not answer.content.lstrip().startswith(JSON_BEGINS):
            raise self._refusal(endpoint, answer)
        return answer.content

    async def _whole(self, answer: PostedAnswer) -> replies.WholeAnswer:
        """Read the body of an answer; only LARGE_AT_ONCE large ones are read at a time."""
        return await replies.whole(answer, self._large_answers)

    def _added_fields(self, endpoint: Endpoint, path: str) -> dict[str, Any]:  # noqa: ARG002 - for subclasses
        """Return fields to add to a body: the request id by which its request can be aborted.

        All ids have the same length, because SGLang may abort every request whose id begins with a given one.
        """
        if path not in wire.ABORTABLE_PATHS:
            return {}
        return {"rid": f"{self._rid_prefix}-{next(self._rid_numbers):010}"}

    def _addressed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Add the model's name to a body, if a gateway needs it to find a worker; return the body."""
        if self.model_to_send is not None:
            body["model"] = self.model_to_send
        return body

    async def _post_task(self, endpoint: Endpoint, requests: Sequence[Request]) -> list[bytes]:
        """Send requests of one task without decoding, and return the replies; raises as `_post`."""
        task = requests[0].task
        assert task is not None
        bodies = [wire.bytes_of(self._addressed(body)) for body in task.bodies(requests)]
        return [await self._post(endpoint, task.path, body) for body in bodies]

    def _refusal(self, endpoint: Endpoint, answer: replies.WholeAnswer) -> RequestError:
        """Return the error for an answer whose status is not 200 or whose content is not JSON."""
        error = error_of(answer.status, answer.content, answer.retry_after)
        if isinstance(error, EngineBusyError) and answer.status != HTTPStatus.TOO_MANY_REQUESTS:
            endpoint.doubt()
        return error

    async def _send_list(self, endpoint: Endpoint, requests: Sequence[Request], ended: RowEnded) -> None:
        """Send a list of rows of one task. Rows without a good answer in the reply do not end yet."""
        contents = await self._post_task(endpoint, requests)
        try:
            results = replies.answers_of(requests, contents)
        except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
            raise BundleRefusedError(f"the answer cannot be read: {failure}") from None
        await self.guard.check_answer(endpoint, None)
        for index, result in enumerate(self._vector_length.refuse_other_lengths(requests, results)):
            if isinstance(result, (Completion, EngineBusyError)):  # any other row is sent again alone
                ended(index, result)

    async def _send_bundle(self, endpoint: Endpoint, requests: Sequence[Request], ended: RowEnded) -> None:
        """Send prompts in one body, and pass on the answer of each when it comes."""
        fields = self._added_fields(endpoint, wire.GENERATE_PATH)
        body = wire.bytes_of(self._addressed(wire.bundle_body(requests) | fields))
        # SGLang names the rows of a bundle in this way.
        rids = tuple(f"{fields['rid']}_{index}" for index in range(len(requests)))
        bundle = BundleAnswer(
            requests=requests,
            ended=ended,
            endpoint=endpoint,
            guard=self.guard,
            large_answers=self._large_answers,
            rids=rids,
            abort=self._abort,
        )
        answer = await self._exchange(endpoint, wire.GENERATE_PATH, body, bundle.read, rids=rids)
        if answer is None:
            return
        if answer.status == _OK and answer.content.lstrip().startswith(JSON_BEGINS):
            raise BundleRefusedError("the answer to a request with several rows is not an event stream")
        raise self._refusal(endpoint, answer)

    def _can_watch(self, endpoint: Endpoint, request: Request) -> bool:
        """Tell whether an answer can be watched for repetition while it is written; log the first failure."""
        why = None
        if request.kind not in {"text", "input_ids"}:
            why = "the server renders the chats"
        elif endpoint.arguments is not None:
            why = sends_pieces(endpoint.arguments)
        if why is not None and not self._logged_unwatched:
            self._logged_unwatched = True
            log.warning("on_repetition: answers go on to max_new_tokens, however they repeat: %s", why)
        return why is None and wire.tokens_between_events(request) is not None

    async def _send_watched(self, endpoint: Endpoint, request: Request) -> Completion:
        """Send one row, and stop its answer if the answer repeats itself; raises like `generate`."""
        fields = self._added_fields(endpoint, wire.GENERATE_PATH)
        body = wire.bytes_of(self._addressed(wire.watched_body(request) | fields))
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
        answer = await self._exchange(endpoint, wire.GENERATE_PATH, body, stream.read, rids=rids)
        if answer is not None:
            if answer.status == _OK and answer.content.lstrip().startswith(JSON_BEGINS):
                return replies.completion_of(request, answer.content)  # the server does not stream
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
        body: bytes,
        read: Callable[[PostedAnswer], Awaitable[Answer]],
        *,
        rids: tuple[str, ...] = (),
    ) -> Answer:
        """Send a body and read the answer; raises the error of its rows where that fails.

        A request without an answer is aborted before its error is raised: its rows may be sent again.
        """
        if endpoint.closed is not None:
            raise EngineDownError(endpoint.closed)
        task = asyncio.current_task()
        assert task is not None
        request = endpoint.requests[task] = SentRequest(time.monotonic(), rids)
        try:
            status, answer = await self._post_and_read(endpoint, path, body, read)
        except (RequestError, BatchrunError):
            raise
        except asyncio.CancelledError:
            if task in endpoint.requests or task.uncancel():  # somebody else cancelled the task
                raise
            if endpoint.closed is not None:
                raise EngineDownError(endpoint.closed) from None
            await self._abort(endpoint, rids)
            raise NoAnswerError(f"no answer within {self._limits.request_timeout:g} s") from None
        except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
            endpoint.requests.pop(task, None)  # nobody cancels the task any more
            raise await self._transport_error(endpoint, failure, request) from None
        finally:
            endpoint.requests.pop(task, None)
        endpoint.answers += 1
        limit = endpoint.proxy_limit
        if status in ENDED_BY_PROXY:
            await self._abandon(endpoint, request, f"status {status}")
        # A proxy does not end a request while events arrive, so an answer that came as events does not count.
        elif answer is not None and (age_s := time.monotonic() - request.sent_at) > limit.longest_answer_s:
            limit.answered(age_s)
        if endpoint.liveness.is_dead:
            endpoint.liveness.record(alive=True)
        return answer

    async def _post_and_read(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        read: Callable[[PostedAnswer], Awaitable[Answer]],
    ) -> tuple[int, Answer]:
        """Send a body; return the status of the answer, and what was read of it."""
        sender = endpoint.senders.get(path)
        if sender is None:
            sender = endpoint.senders[path] = self._new_sender(endpoint, path)
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
        """Abort a request that was ended without an answer; raises NoAnswerError at the limit of a proxy."""
        limit = endpoint.proxy_limit
        was_known, now = limit.limit_s is not None, time.monotonic()
        is_limit = len(request.rids) == 1 and limit.ended(request.sent_at, now)
        await self._abort(endpoint, request.rids)
        if not is_limit:
            return
        if not was_known:
            log.warning(
                "%s: the last %d requests without an answer all ended after %.0f s (%s), and no answer took "
                "longer: a proxy on the way ends requests then. Raise its time limit, give the server's own "
                "address, or lower sampling.max_new_tokens",
                endpoint.url, REQUESTS, limit.limit_s, why,
            )  # fmt: skip
        raise NoAnswerError(f"no answer within {now - request.sent_at:.0f} s, the limit of a proxy ({why})")

    async def _abort(self, endpoint: Endpoint, rids: Sequence[str]) -> bool:
        """Ask a server to abort the requests that it still has; tell whether it accepted every call."""
        outcomes = await asyncio.gather(
            *(self._post_abort(endpoint, rid) for rid in rids), return_exceptions=True
        )
        return not any(outcomes)

    async def _post_abort(self, endpoint: Endpoint, rid: str) -> None:
        assert self._question_session is not None
        timeout = aiohttp.ClientTimeout(total=TIMING.status_timeout)
        async with self._question_session.post(
            endpoint.url + wire.ABORT_PATH, json={"rid": rid}, timeout=timeout, raise_for_status=True
        ):
            pass

    async def _transport_error(
        self, endpoint: Endpoint, failure: Exception, request: SentRequest
    ) -> Exception:
        """Return the error of the rows of a request that failed on its way."""
        url = endpoint.address
        if isinstance(failure, (aiohttp.ClientError, OSError)):
            endpoint.doubt()
        match failure:
            case aiohttp.ConnectionTimeoutError():  # a host that is gone: no row is why
                return EngineDownError(
                    f"no connection to {url}{by_proxy(url)} within {CONNECT_TIMEOUT_S:g} s"
                )
            case aiohttp.ClientConnectorError():
                return EngineDownError(f"no connection to {url}{by_proxy(url)}: {in_words(failure)}")
            case aiohttp.ClientError() | OSError():
                message = f"connection lost: {in_words(failure)}"
                error = await self._connection_lost_error(endpoint, request.sent_at, message)
                if isinstance(error, AttemptFailedError):  # the server is alive, and may compute on
                    await self._abandon(endpoint, request, message)
                return error
        log.debug("an answer of %s", url, exc_info=failure)
        return AttemptFailedError(f"the answer cannot be read ({type(failure).__name__})")


@dataclass(slots=True, eq=False)
class BundleAnswer:
    """The answer to a bundle: reads its events, and passes on those that end a row, each once."""

    requests: Sequence[Request]
    ended: RowEnded
    endpoint: Endpoint
    guard: ModelGuard
    large_answers: asyncio.Semaphore
    """Permits to read large answers."""
    rids: Sequence[str]
    """Request ids of the rows."""
    abort: Callable[[Endpoint, Sequence[str]], Awaitable[bool]]
    ended_rows: set[int] = field(default_factory=set)
    """Places in the bundle of the rows that have ended."""
    refusal: replies.WholeAnswer | None = None
    """Error event for the whole bundle, in the form of an answer."""

    async def read(self, answer: PostedAnswer) -> replies.WholeAnswer | None:
        """Process the events of an answer until it ends, or briefly after all rows have ended.

        Return an answer that is not an event stream, or a refusal of all rows; otherwise None.
        """
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "text/event-stream":
            return await replies.whole(answer, self.large_answers)
        lines = replies.EventLines()
        try:
            async with asyncio.timeout(None) as end:
                async for part in answer.content.iter_any():
                    await self.process(lines.feed(part))
                    if self._is_over and end.when() is None:
                        end.reschedule(asyncio.get_running_loop().time() + TIMING.stream_end)
        except TimeoutError:
            if not self._is_over:
                raise
        return self.refusal

    @property
    def _is_over(self) -> bool:
        return len(self.ended_rows) == len(self.requests)

    async def process(self, events: Sequence[bytes]) -> None:
        """Process the data of events; ignore an event that cannot be read or belongs to no pending row.

        Raises AnotherModelError where the server serves another model.
        """
        for content in events:
            if content == _END:
                continue
            try:
                event = replies.read_event(content)
            except Exception:  # noqa: BLE001 - nothing that a server sends may end a run
                log.debug("an event of %s cannot be read: %.200r", self.endpoint.url, content)
                continue
            index = event.index
            if index is None and event.error is not None:
                code = event.error.get("code") if isinstance(event.error, dict) else None
                self.refusal = replies.WholeAnswer(known_status(code), content)
                continue
            if index is None and len(self.requests) == 1:  # SGLang numbers the rows of lists only
                index = 0
            if index is None or not 0 <= index < len(self.requests):
                continue
            if event.meta_info.finish_reason is not None:
                await self._end(index, event)
            elif self.requests[index].stops_repetition:
                await self._stop_if_repeating(index, event)

    async def _stop_if_repeating(self, index: int, event: replies.Event) -> None:
        """End a row whose answer repeats itself without end, and abort its request."""
        request = self.requests[index]
        if index in self.ended_rows or wire.tokens_between_events(request) is None:
            return
        end = replies.stopped_at_repetition(event, request)
        if end is not None:
            # The row must end before the abort, since the server's reply to the abort is not the row's
            # answer.
            await self._end(index, end)
            await self.abort(self.endpoint, self.rids[index : index + 1])

    async def _end(self, index: int, event: replies.Event) -> None:
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
    """Replicas of one model that already run: given by their URLs, or the workers of a Model Gateway.

    A replica that hangs gets no rows for a while, or until it makes progress. Rows go directly to a gateway's
    workers, because the gateway would only pass them on, and would not adapt to the speed of each worker. The
    client follows the gateway's list of workers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        gateway: str | None = None,
        api_key: str | None,
        limits: LimitsSpec,
        task: TaskName = GENERATE,
    ) -> None:
        """Take the URLs of the replicas, or that of a `gateway`, which knows them."""
        super().__init__(api_key=api_key, limits=limits, task=task)
        self._urls = urls
        self._gateway = gateway
        self._watch_loop: asyncio.Task[None] | None = None

    async def open(self) -> EngineInfo:
        """Connect and read the description of every server; see `Engine.open`."""
        gateway, urls = self._gateway, self._urls
        remedy = START
        if gateway is not None:
            try:
                urls = await self._workers(gateway)
            except EngineDownError as failure:
                raise EngineAwayError(str(failure)) from None
            if not urls:
                raise EngineAwayError(f"{gateway}: the gateway has no workers that speak HTTP")
            remedy = "rows go directly to the gateway's workers: make them reachable from this machine"
        info = await self.connect(urls, remedy)
        self._watch_loop = asyncio.create_task(self._watch())
        if gateway is None:
            return info
        notes = (f"{len(urls)} workers of the gateway {gateway}: {', '.join(urls)}", *info.notes)
        return replace(info, kind="gateway", notes=notes)

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load of each scheduler that answers now; raises AnotherModelError for a new model."""
        if self._watch_loop is not None and self._watch_loop.done():
            failed_loop, self._watch_loop = self._watch_loop, asyncio.create_task(self._watch())
            failed_loop.result()
        loads = await super().loads()
        self._pause_hanging_servers(loads)
        return loads

    async def close(self) -> None:
        """Close all connections."""
        watching, self._watch_loop = self._watch_loop, None  # so a poll that still runs starts no new watch
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await super().close()

    async def _watch(self) -> None:
        """Follow the gateway's list; ask servers for their model, which may change unseen behind a proxy."""
        while True:
            await asyncio.sleep(TIMING.model_check)
            if self._gateway is not None:
                with contextlib.suppress(EngineDownError):  # the gateway is away, but rows do not need it
                    self._update_workers(await self._workers(self._gateway))
            for endpoint in self.serving:
                with contextlib.suppress(EngineDownError):  # the server is away: its rows will notice
                    await self.guard.confirm(endpoint)

    async def _workers(self, gateway: str) -> list[str]:
        """Return the addresses of a gateway's workers that speak HTTP; raises EngineDownError."""
        from batchrunner.engines.http.gateway_workers import GatewayQuestions  # noqa: PLC0415 - for few jobs

        async with aiohttp.ClientSession(headers=self._headers) as session:
            workers = await GatewayQuestions(session, gateway).workers()
        return [worker.url for worker in workers if not (worker.is_grpc or worker.is_leaving)]

    def _update_workers(self, urls: Sequence[str]) -> None:
        """Send rows to the workers that the gateway lists now, and no more rows to other workers."""
        for endpoint in self.serving:
            if endpoint.url not in urls:
                log.info("%s gets no more rows: the gateway no longer lists it", endpoint.url)
                endpoint.set_listed(is_listed=False)
        for url in set(urls).difference(self.replicas):
            log.info("%s gets rows: the gateway lists it", url)
            if url in self.endpoints:
                self.endpoints[url].set_listed(is_listed=True)
            else:
                endpoint = self.endpoints[url] = self._new_endpoint(url)
                self._watch_model(endpoint)
        self.serving = [self.endpoints[url] for url in urls]
