"""Which server answers: whether it serves the run's model, and whether it died of a row.

A connection leads to one process for as long as it lives. So a new connection takes a request only once its
server has said, after the connection was made, that it serves the run's model (`GuardedConnector`). Behind a
proxy that says nothing: there the question is put again after each sign of an absence (`doubt`), before an
answer counts (`confirm`).
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from batchrunner.core.errors import (
    AnotherModelError,
    AttemptFailedError,
    BatchrunError,
    EngineDiedError,
    EngineDownError,
    EngineStartError,
    RequestError,
)

Model = Mapping[str, str]
"""What a server says of its model: those of MODEL_FIELDS that it tells."""
MODEL_FIELDS = {
    "model_path": "the model",
    "served_model_name": "the served name",
    "weight_version": "the weights' version",
    "revision": "the revision",
}
"""Fields of `/model_info` and `/server_info` that say which model a server serves, in words."""


def model_in(*replies: Mapping[str, Any]) -> dict[str, str]:
    """Return what replies to `/model_info` and `/server_info` say of the model; the first one wins."""
    merged = {name: value for reply in reversed(replies) for name, value in reply.items()}
    return {name: str(merged[name]) for name in MODEL_FIELDS if merged.get(name) is not None}


def common_model(models: Sequence[Model]) -> dict[str, str]:
    """Return what replicas say alike; raises EngineStartError where they serve different models.

    Names under which they serve it may differ.
    """
    alike = {name: value for name, value in models[0].items() if all(m.get(name) == value for m in models)}
    for name, words in MODEL_FIELDS.items():
        told = {model[name] for model in models if name in model}
        if len(told) > 1 and name != "served_model_name":
            raise EngineStartError(
                f"the replicas serve different models: {words} is {' and '.join(sorted(told))}"
            )
    return alike


ModelQuestion = Callable[[], Awaitable[Model]]
"""Asks what the server at an address serves; raises EngineDownError without an answer."""


@dataclass(slots=True, eq=False)
class _Address:
    """An address that takes requests, and the questions about the model there."""

    question: ModelQuestion
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    next_question: asyncio.Task[BatchrunError | EngineDownError | None] | None = None
    """A question that is not put yet; it ends with what is wrong."""


class ModelGuard:
    """Compares the model of servers with the run's: one question to a server answers all who wait for it."""

    def __init__(self) -> None:
        self.model: Model = {}
        """The run's model."""
        self.weights: str | None = None
        """Version of the weights that all answers have had."""
        self.in_doubt: dict[str, int] = {}
        """Addresses where another server may be by now, with the number of signs of it."""
        self._addresses: dict[str, _Address] = {}

    def watch(self, url: str, question: ModelQuestion) -> None:
        """Guard the address `url`."""
        self._addresses[url] = _Address(question)

    def addresses_at(self, url: URL) -> Sequence[str]:
        """Return the guarded addresses that a connection to a URL may be for."""
        return [address for address in self._addresses if URL(address).origin() == url.origin()]

    def doubt(self, url: str) -> None:
        """Record that another server may be at the address by now: it was away."""
        if url in self._addresses:
            self.in_doubt[url] = self.in_doubt.get(url, 0) + 1

    async def confirm(self, url: str) -> None:
        """Return once a question that was put after this call was answered with the run's model.

        Raises AnotherModelError for another model, EngineDownError where there is no answer.
        """
        if (address := self._addresses.get(url)) is None:
            return
        if address.next_question is None:
            address.next_question = asyncio.create_task(self._ask(url, address))
        wrong = await asyncio.shield(address.next_question)
        if wrong is not None:
            raise wrong

    async def check_answer(self, url: str, version: str | None) -> None:
        """Return once an answer counts; raises as `confirm`, or for another version of the weights."""
        if url in self.in_doubt:
            await self.confirm(url)
        if version is None:
            return
        self.weights = self.weights or version
        if version != self.weights:
            raise _another_model(url, "weight_version", self.weights, version)

    async def _ask(self, url: str, address: _Address) -> BatchrunError | EngineDownError | None:
        async with address.lock:
            await asyncio.sleep(0)  # for all who ask now
            address.next_question = None
            doubts = self.in_doubt.get(url)
            try:
                model = await address.question()
                for name, was in self.model.items():
                    if model.get(name, was) != was:
                        raise _another_model(url, name, was, model[name])
            except (BatchrunError, EngineDownError) as wrong:
                return wrong
            if self.in_doubt.get(url) == doubts:
                self.in_doubt.pop(url, None)
            return None


def _another_model(url: str, name: str, was: str, now: str) -> AnotherModelError:
    """Return the error for a server that serves another model than at the beginning."""
    return AnotherModelError(
        f"{url} serves another model now ({MODEL_FIELDS[name]} was {was!r} and is {now!r})",
        hint="start the run's model there and run the job again to "
        "resume, or take another output.path for the new model",
    )


class GuardedConnector(aiohttp.TCPConnector):
    """Hands out a new connection only once its server is known to serve the run's model."""

    def __init__(self, guard: ModelGuard, **options: Any) -> None:
        """Take the guard, and the options of TCPConnector."""
        super().__init__(**options)
        self._guard = guard

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        protocol = await super()._create_connection(req, traces, timeout)
        try:
            for address in self._guard.addresses_at(req.url):
                await self._guard.confirm(address)
        except BaseException:
            protocol.close()
            raise
        if not protocol.is_connected():
            protocol.close()
            raise EngineDownError(f"the connection to {req.url.origin()} was lost before it was used")
        return protocol


@dataclass(slots=True, eq=False)
class FailureClassifier:
    """Judges whether a row was cut off by its own fault, its server's death, or neither."""

    is_alive: Callable[[str], Awaitable[bool]]
    """Asks a server whether it answers."""
    excuses: Callable[[str, float], Awaitable[bool]] | None
    """Tells whether a server that this run started ended after a time for a reason that is no row's fault."""
    dead: set[str] = field(default_factory=set)
    """Servers that did not answer when last asked."""
    _questions: dict[str, asyncio.Future[bool]] = field(default_factory=dict)
    _died_at: dict[str, float] = field(default_factory=dict)

    def record(self, url: str, *, alive: bool) -> None:
        """Record whether a server is alive now."""
        if alive:
            self.dead.discard(url)
        elif url not in self.dead:
            self.dead.add(url)
            self._died_at[url] = time.monotonic()

    async def classify(self, url: str, sent_at: float, what: str) -> RequestError:
        """Return the error of a row that was sent to a server at `sent_at` and cut off; `what` is its text.

        If the server is alive, the row may be at fault, and the attempt counts against it. If the server
        died after the row was sent, it may have died of the row, unless its death excuses all rows. If it
        was dead before, no row is at fault.
        """
        alive = await self._ask(url)
        if sent_at < self._died_at.get(url, -math.inf):
            excused = self.excuses is not None and await self.excuses(url, sent_at)
            return EngineDownError(what) if excused else EngineDiedError(what)
        return AttemptFailedError(what) if alive else EngineDownError(what)

    async def _ask(self, url: str) -> bool:
        """Ask a server, once for all rows that were cut off together."""
        question = self._questions.get(url)
        if question is None:
            question = self._questions[url] = asyncio.ensure_future(self.is_alive(url))
            question.add_done_callback(lambda _: self._questions.pop(url, None))
        alive = await asyncio.shield(question)
        self.record(url, alive=alive)
        return alive
