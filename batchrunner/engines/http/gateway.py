"""Sends rows through SGLang's Model Gateway (`smg`), and decides whether they have to go through it.

A gateway sends all requests with the same routing key to one worker if its policy is
`consistent_hashing` or `manual`, or if it has `--routing-key-override`. There each worker is a route,
as if it were reached directly: its rows carry a key that leads to it, and windows, prefix groups and retries
work as for a replica. Any other gateway is one route that leads to several schedulers, and the gateway
chooses the worker of each request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
import orjson
from yarl import URL

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import (
    AttemptFailedError,
    EngineAwayError,
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    EngineStartError,
    RequestError,
)
from batchrunner.core.server_replies import error_of
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Request
from batchrunner.engines.hang_detector import HangDetector
from batchrunner.engines.http import replies, wire
from batchrunner.engines.http.client import HttpEngine
from batchrunner.engines.http.connections import open_connections
from batchrunner.engines.http.gateway_workers import GatewayQuestions, GatewayWorker, load_now, sum_of
from batchrunner.engines.http.guard import common_model, refuse_another
from batchrunner.engines.http.server import Endpoint
from batchrunner.engines.http.server_info import (
    NOT_REACHED,
    ServerStatus,
    check_does,
    describe,
)
from batchrunner.engines.http.wire import PostedAnswer, PostSender
from batchrunner.job.output import OF_TOKENS
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import EMBED, GENERATE, TaskName
from batchrunner.sglang.model_files import vocabulary_of

log = logging.getLogger(__name__)

ROUTING_KEY, ROUTED_TO = "x-smg-routing-key", "x-smg-routed-worker-id"
"""Request header with the routing key, and answer header with the worker that answered."""
TRIES_PER_WORKER = 16
"""Maximum number of routing keys that are tried per worker. Among N workers, 16·N keys all miss a given
worker with a probability of about e⁻¹⁶."""
UNANSWERED_PER_WORKER = 4
"""The search ends after this many unanswered keys per worker, because each key for a host that is gone takes
2 s."""
CONFIRMATIONS = 4
"""Number of times that a key must lead to the same worker again before it is used."""
MODEL_INFO, SERVER_INFO = "/get_model_info", "/get_server_info"
"""Paths under which the gateway returns the description that one of its HTTP workers gives of itself."""
TASKS_PASSED = frozenset({GENERATE, EMBED})
"""Tasks whose requests a gateway passes on. It has no `/encode`, and takes no lists of logprob options."""
NO_WORKER = frozenset({"no_available_workers", "no_healthy_workers", "no_workers", "model_not_found"})
"""Error codes of a gateway that has no worker for a request now."""
NOT_CONNECTED = "call_upstream_connection_failed"
"""Error code of a request that reached no worker."""
LOST_AT_WORKER = ("call_upstream_", "read_response", "upstream_error", "worker_stream_failed")
"""Beginnings of the error codes of a request whose worker failed while it had the request."""
LIMITS = (
    *("admission_queue_", "scheduler_queue_", "prefill_queue_", "tenant_rate_limit", "rate_limit"),
    *("worker_overload_protection_shed", "selection_queue_timeout"),
)
"""Beginnings of the error codes of a request that the gateway refuses because of its own limits."""
_NO_TEXTS = "the gateway's workers speak gRPC, and it returns them without the texts of the tokens"
GRPC_UNSUPPORTED: Mapping[str, str] = {
    "sampling.lora_path": "the gateway's workers speak gRPC, and it drops the name of the adapter",
    **dict.fromkeys(OF_TOKENS, _NO_TEXTS),
}
"""Parts of a job that gRPC workers cannot do, and why."""


class _GatewayError(msgspec.Struct):
    code: str | None = None


class _GatewayRefusal(msgspec.Struct):
    error: _GatewayError


_read_refusal = msgspec.json.Decoder(_GatewayRefusal)


def code_of(content: bytes) -> str | None:
    """Return the error code if the gateway itself refused; None if a worker did: its codes are numbers."""
    try:
        return _read_refusal.decode(content).error.code
    except (msgspec.MsgspecError, ValueError):
        return None


def refusal_of(answer: replies.WholeAnswer) -> RequestError | None:
    """Return the error of a row that the gateway itself refused; None for any other refusal."""
    code = code_of(answer.content)
    if code is None:
        return None
    error = error_of(answer.status, answer.content, answer.retry_after)
    message = f"the gateway: {error}"
    if code in NO_WORKER or code == NOT_CONNECTED:
        return EngineDownError(message)
    if code.startswith(LIMITS):
        return EngineBusyError(message, getattr(error, "retry_after_s", None))
    if "timeout" in code or answer.status in {408, 504}:
        return AttemptFailedError(message)
    return EngineDiedError(message) if code.startswith(LOST_AT_WORKER) else None


async def reason_to_go_through(url: str, headers: Mapping[str, str]) -> str | None:
    """Return why rows must go through a gateway; None if all its workers can be reached directly.

    Raises EngineAwayError if there is no gateway, or if it has no workers.
    """
    async with aiohttp.ClientSession(headers=headers) as session:
        workers = await _workers_at_start(GatewayQuestions(session, url), url)
        for worker in workers:
            if worker.is_grpc:
                return f"{worker.url} speaks gRPC"
            if worker.worker_type != "regular":
                return f"{worker.url} is a {worker.worker_type} worker, and only the gateway joins the halves"
        reasons = await asyncio.gather(*(_unreachable(session, worker) for worker in workers))
        return next(filter(None, reasons), None)


async def _workers_at_start(gateway: GatewayQuestions, url: str) -> list[GatewayWorker]:
    """Return the gateway's workers that stay; raises EngineAwayError if there are none, or no gateway."""
    try:
        workers = await gateway.workers()
    except EngineDownError as failure:
        raise EngineAwayError(str(failure)) from None
    staying = [worker for worker in workers if not worker.is_leaving]
    if not staying:
        raise EngineAwayError(f"{url}: the gateway has no workers")
    return staying


async def _unreachable(session: aiohttp.ClientSession, worker: GatewayWorker) -> str | None:
    """Return why a worker cannot get rows directly; None if it answers here as the gateway knows it."""
    try:
        status, reply = await ServerStatus(session, worker.url).mapping("/model_info", TIMING.status_timeout)
    except NOT_REACHED:
        return f"{worker.url} cannot be reached from here"
    if not reply.get("model_path"):
        return f"{worker.url} does not describe its model here (status {status})"
    known = worker.model.get("model_path")
    if known is not None and known != str(reply["model_path"]):
        return f"{worker.url} serves {reply['model_path']} here, and {known} to the gateway"
    return None


class KeyedSender(PostSender):
    """Posts to a gateway with a routing key, and remembers which worker answered last."""

    routed_to: str | None = None

    async def post(self, body: bytes) -> PostedAnswer:
        """Send a body; see `PostSender.post`."""
        answer = await super().post(body)
        self.routed_to = answer.headers.get(ROUTED_TO, self.routed_to)
        return answer


class ThroughGateway(HttpEngine):
    """The workers of a Model Gateway, which gets all rows and passes them on."""

    def __init__(
        self,
        url: str,
        *,
        why: str,
        api_key: str | None,
        limits: LimitsSpec,
        task: TaskName = GENERATE,
    ) -> None:
        """Take the gateway's address, and `why` rows go through it."""
        super().__init__(api_key=api_key, limits=limits, task=task)
        self.url = url
        self._why = why
        self._gateway: GatewayQuestions | None = None
        self._model_id = ""
        self._keys: dict[str, str] = {}
        """Routing key of each worker; empty if the gateway does not route by keys."""
        self._key_numbers = itertools.count()
        self._usable: frozenset[str] = frozenset()
        """Workers that get rows now."""
        self._key_search: asyncio.Task[None] | None = None
        """Search for new keys, after a change of the workers."""
        self._is_away = False

    async def open(self) -> EngineInfo:
        """Read the list of workers, and find out whether the gateway keeps to routing keys.

        Raises EngineAwayError if no worker answers, EngineStartError if the workers cannot do the task.
        """
        self._timeout_loop = asyncio.create_task(self._end_late_requests())
        connections, limited_by = open_connections(1)
        self._open_sessions()
        assert self._question_session is not None
        self._gateway = GatewayQuestions(self._question_session, self.url)
        if self._task not in TASKS_PASSED:
            raise EngineStartError(
                f"task: {self._task} needs requests that the gateway {self.url} does not pass on",
                hint="set engine.route: workers, or list the workers as engine.urls",
            )
        workers = await _workers_at_start(self._gateway, self.url)
        model, server = await self._describe(workers)
        self._model_id = next((w.model_id for w in workers if w.model_id), str(model["served_model_name"]))
        self.model_to_send = self._model_id
        self._model_names = frozenset({self._model_id, str(model["model_path"])})
        self.guard.model = common_model([worker.model for worker in workers if worker.labels] or [{}])
        self._vocabulary = vocabulary_of(str(model["model_path"]))
        check_does(self._task, model, f"{self.url}: serves {model['model_path']}")
        self._keys = await self._find_keys(workers)
        self._usable = frozenset(worker.url for worker in workers if worker.is_usable)
        for url in self._keys or (self.url,):
            endpoint = self.endpoints[url] = self._new_endpoint(url)
            endpoint.arguments = server
        self.serving = [*self.endpoints.values()]
        self._reports_load = True
        info = describe([model], [server], self._loads_now(workers, time.monotonic()))
        return replace(
            info,
            kind="gateway",
            weights=self.guard.model.get("weight_version"),
            routes=tuple(self.endpoints),
            connections=connections,
            connections_by=limited_by,
            one_by_one=self._why_one_by_one(workers) or info.one_by_one,
            only_short_share="the gateway drops stream_interval, and a bundle has an event for each token",
            unsupported=GRPC_UNSUPPORTED if any(worker.is_grpc for worker in workers) else {},
            notes=(*self._notes(workers), f"connections limited by {limited_by}", *info.notes),
        )

    def _notes(self, workers: Sequence[GatewayWorker]) -> list[str]:
        """Return notes for the user: why rows go through the gateway, and who chooses the worker."""
        if self._keys:
            choice = "each worker gets its rows by a routing key"
        else:
            choice = (
                "the gateway chooses the worker of each row (with --policy consistent_hashing, rows with a "
                "common prefix would stay on one worker)"
            )
        names = ", ".join(worker.url for worker in workers)
        return [f"rows go through the gateway {self.url} ({self._why}) to {names}: {choice}"]

    @staticmethod
    def _why_one_by_one(workers: Sequence[GatewayWorker]) -> str | None:
        if any(worker.is_grpc for worker in workers):
            return "a worker that speaks gRPC takes one row in a request"
        if any(worker.worker_type != "regular" for worker in workers):
            return "prefill and decode workers take one row in a request"
        return None

    async def _describe(self, workers: Sequence[GatewayWorker]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a worker's description of its model and of its arguments.

        The gateway asks an HTTP worker for both. For gRPC workers only the labels are known, which have some
        of the fields.
        """
        assert self._question_session is not None
        status = ServerStatus(self._question_session, self.url)
        model, server = dict[str, Any](), dict[str, Any]()
        if not any(worker.is_grpc for worker in workers):
            try:
                code, model = await status.mapping(MODEL_INFO, TIMING.server_open)
                _, server = await status.mapping(SERVER_INFO, TIMING.server_open)
            except NOT_REACHED as failure:
                raise EngineAwayError(f"{self.url}: no answer to {MODEL_INFO} ({failure!r})") from None
            if code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                names = ", ".join(worker.url for worker in workers)
                raise EngineAwayError(
                    f"{self.url}: no worker of the gateway answers ({code}): {names}",
                    hint="start them, or remove them from the gateway's list",
                )
        labels = next((worker.labels for worker in workers if worker.labels), {})
        labelled = {name: _value_of(value) for name, value in labels.items()}
        model = {"served_model_name": workers[0].model_id, **labelled, **model}
        if not model.get("model_path"):
            raise EngineAwayError(f"{self.url}: the gateway does not say which model its workers serve")
        return model, {**labelled, **server}

    # Sending

    def _new_endpoint(self, url: str) -> Endpoint:
        return Endpoint(url, HangDetector(self._limits.hang), address=self.url)

    def _new_sender(self, endpoint: Endpoint, path: str) -> PostSender:
        assert self._row_session is not None
        key = self._keys.get(endpoint.url)
        if key is None:
            return PostSender(self._row_session, URL(endpoint.address + path))
        return KeyedSender(self._row_session, URL(endpoint.address + path), headers={ROUTING_KEY: key})

    async def tokens_of(self, request: Request, *, special: bool = True) -> list[int] | None:  # noqa: ARG002
        """Return None: a gateway has no tokenizer for workers that have one themselves."""
        return None

    async def _name_to_send(self, endpoint: Endpoint, name: str | None) -> str | None:  # noqa: ARG002
        """Return the name by which the gateway finds a worker, whatever name a row gives."""
        if name not in self._names_to_send and name is not None and name not in self._model_names:
            log.warning("requests for the model %r are answered by %s", name, self._model_id)
            self._names_to_send[name] = self._model_id
        return self._model_id

    def _refusal(self, endpoint: Endpoint, answer: replies.WholeAnswer) -> RequestError:
        """Return the error of a refused row; a refusal by the gateway itself tells little about the row."""
        return refusal_of(answer) or super()._refusal(endpoint, answer)

    async def _abort(self, endpoint: Endpoint, rids: Sequence[str]) -> bool:  # noqa: ARG002 - it needs none
        """Do nothing: our closed connection makes the gateway close its own, and SGLang aborts the rows."""
        return True

    async def excuses(self, url: str, sent_at: float) -> bool:  # noqa: ARG002 - of any row
        """Tell that no row is to blame for the end of a connection: it is the gateway that was lost."""
        return True

    # Workers and their load

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load of each worker; empty while the gateway is away.

        Raises AnotherModelError for a worker that serves another model under the same name.
        """
        if self._gateway is None or not self._reports_load:
            return []
        try:
            workers = await self._gateway.workers(TIMING.status_timeout)
        except (EngineDownError, *NOT_REACHED) as failure:
            self._note_absence(str(failure))
            return []
        self._note_absence(None)
        workers = [worker for worker in workers if worker.model_id in {None, self._model_id}]
        for worker in workers:
            if worker.labels:
                refuse_another(worker.url, self.guard.model, worker.model)
        self._follow(workers)
        return self._loads_now(workers, time.monotonic())

    def _note_absence(self, why: str | None) -> None:
        """Log when the gateway goes away, and when it is back."""
        if (why is not None) == self._is_away:
            return
        self._is_away = why is not None
        if why is not None:
            log.warning("the gateway %s is away (%s): rows wait for it", self.url, why)
        else:
            log.warning("the gateway %s is back", self.url)
            self._incidents.append(Incident("back", self.url))
            self._usable = frozenset()  # the gateway may have forgotten the keys, so they are found anew

    def _loads_now(self, workers: Sequence[GatewayWorker], now: float) -> list[SchedulerLoad]:
        """Return the load of each worker that gets rows."""
        usable = [worker for worker in workers if worker.is_usable]
        if any(worker.worker_type == "decode" for worker in usable):
            return [self._load_of_halves(usable, now)]
        # In a gateway with keys, a worker gets rows once a key leads to it.
        with_rows = [worker for worker in usable if not self._keys or worker.url in self.endpoints]
        return [self._load_of(worker, now) for worker in with_rows]

    def _load_of(self, worker: GatewayWorker, now: float) -> SchedulerLoad:
        is_route = worker.url in self.endpoints
        return load_now(
            worker.reported,
            self._in_flight_at(worker),
            scheduler=worker.url if is_route else f"{self.url}#{worker.url}",
            route=worker.url if is_route else self.url,
            now=now,
        )

    def _in_flight_at(self, worker: GatewayWorker) -> int:
        """Estimate the rows in flight at a worker, from our own rows and the gateway's count of requests."""
        endpoint = self.endpoints.get(worker.url)
        if endpoint is not None:
            others = 0 if worker.load is None else max(0, worker.load - len(endpoint.requests))
            return _rows_of(endpoint) + others
        if worker.load is None:
            return worker.reported.num_running_reqs + worker.reported.num_waiting_reqs
        return round(worker.load * self._rows_per_request())

    def _load_of_halves(self, workers: Sequence[GatewayWorker], now: float) -> SchedulerLoad:
        """Return one load for all prefill and decode workers: rows wait for the former, run on the latter.

        Running requests and token usage are those of the decode workers. All other requests in flight count
        as waiting for a prefill.
        """
        decoding = [worker.reported for worker in workers if worker.worker_type == "decode"]
        counts = [worker.load for worker in workers if worker.worker_type == "decode"]
        in_flight = sum(count or 0 for count in counts) if all(c is not None for c in counts) else 0
        return load_now(
            sum_of(decoding),
            max(in_flight, sum(map(_rows_of, self.serving))),
            scheduler=self.url,
            route=self.url,
            now=now,
        )

    def _rows_per_request(self) -> float:
        requests = sum(len(endpoint.requests) for endpoint in self.serving)
        return sum(map(_rows_of, self.serving)) / requests if requests else 1.0

    def _follow(self, workers: Sequence[GatewayWorker]) -> None:
        """Send rows to the workers that the gateway uses now; renew the keys if workers or keys changed."""
        usable = frozenset(worker.url for worker in workers if worker.is_usable)
        has_keys = not self._keys or usable <= self._keys.keys()
        if usable == self._usable and has_keys and not self._leads_astray():
            return
        for url in sorted(usable - self._usable if self._usable else ()):
            log.info("%s gets rows: the gateway uses it", url)
        for url in sorted(self._usable - usable):
            log.info("%s gets no more rows: the gateway does not use it now", url)
        self._usable = usable
        if not self._keys:
            return
        for endpoint in self.serving:
            endpoint.set_listed(is_listed=endpoint.url in usable)
        if self._key_search is None or self._key_search.done():
            self._key_search = asyncio.create_task(self._renew_keys())

    # Routing keys

    def _leads_astray(self) -> bool:
        """Tell whether a key has led to a worker other than its own: the gateway may have reassigned it."""
        senders = (
            (endpoint.url, sender) for endpoint in self.serving for sender in endpoint.senders.values()
        )
        return any(
            isinstance(sender, KeyedSender) and sender.routed_to not in {None, url} for url, sender in senders
        )

    async def _renew_keys(self) -> None:
        """Find the workers' routing keys anew; repeat this if the list of workers changed meanwhile."""
        is_current = False
        while not is_current:
            usable = self._usable
            keys = await self._keys_of(usable)
            if not keys.keys() >= usable:  # a worker or the gateway is down: old keys stay until it answers
                await asyncio.sleep(TIMING.model_check)
            is_current = usable == self._usable
            self._keys.update(keys)
            for url in keys:
                endpoint = self.endpoints.get(url)
                if endpoint is None:
                    endpoint = self.endpoints[url] = self._new_endpoint(url)
                    self.serving.append(endpoint)
                endpoint.set_listed(is_listed=True)
                endpoint.senders.clear()

    async def _find_keys(self, workers: Sequence[GatewayWorker]) -> dict[str, str]:
        """Return a key for each worker; empty if the gateway does not route by keys."""
        if any(worker.is_grpc or worker.worker_type != "regular" for worker in workers):
            return {}
        return await self._keys_of(frozenset(worker.url for worker in workers if worker.is_usable))

    async def _keys_of(self, urls: frozenset[str]) -> dict[str, str]:
        """Try routing keys until one leads to each worker; return them.

        The result is empty if a key leads to another worker when it is tried again, or if some worker got no
        key though all requests were answered.

        Workers that are down get no key. Requests are sent one after the other, because a gateway may pin a
        key at its first request, and must have answered this request before the next one comes.
        """
        keys = dict[str, str]()
        unanswered = 0
        for _ in range(TRIES_PER_WORKER * len(urls)):
            if keys.keys() >= urls or unanswered >= UNANSWERED_PER_WORKER * len(urls):
                break
            key = f"{self._rid_prefix}-{next(self._key_numbers)}"
            url = await self._worker_of(key)
            if url is None:
                unanswered += 1
            elif url in urls and url not in keys:
                keys[url] = key
                if await self._worker_of(key) != url:
                    return {}
        if not (keys.keys() >= urls or unanswered):
            return {}
        for _ in range(CONFIRMATIONS - 1):
            for url, key in keys.items():
                if await self._worker_of(key) != url:
                    return {}
        return keys

    async def _worker_of(self, key: str) -> str | None:
        """Return the worker to which a key leads; the request is one that the worker refuses at once."""
        assert self._question_session is not None
        body = {"model": self._model_id, "input_ids": [1], "sampling_params": {"temperature": -1}}
        timeout = aiohttp.ClientTimeout(total=TIMING.status_timeout)
        try:
            async with self._question_session.post(
                self.url + wire.GENERATE_PATH, json=body, headers={ROUTING_KEY: key}, timeout=timeout
            ) as answer:
                return answer.headers.get(ROUTED_TO)
        except NOT_REACHED:
            return None

    async def close(self) -> None:
        """Close all connections."""
        if self._key_search is not None:
            self._key_search.cancel()
            await asyncio.gather(self._key_search, return_exceptions=True)
        await super().close()


def _rows_of(endpoint: Endpoint) -> int:
    """Return how many rows of ours are in flight at an endpoint; a bundle has several rows in a request."""
    return sum(max(1, len(request.rids)) for request in endpoint.requests.values())


def _value_of(label: Any) -> Any:
    """Return the value of a label: parsed if the text is JSON, such as true or 4096, else the text."""
    try:
        return orjson.loads(label)
    except (orjson.JSONDecodeError, TypeError):
        return label
