"""The model guard: compares the model that servers serve with the run's, whenever another server may answer.

A connection leads to one process for as long as it lives. So a new connection takes a request only once its
server has said, after the connection was made, that it serves the run's model (`GuardedConnector`). Behind a
proxy or a gateway that says nothing: there the question is put again after each sign of an absence (`doubt`),
or before an answer counts (`confirm`).
"""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.connector import Connection
from yarl import URL

from batchrunner.core.errors import AnotherModelError, BatchrunError, EngineDownError, EngineStartError

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


ModelQuestion = Callable[[], Awaitable[Mapping[str, Model]]]
"""Asks what the servers behind one address serve, by URL; raises EngineDownError without an answer."""


@dataclass(slots=True, eq=False)
class _Address:
    """An address that takes requests, and what is known of the model there."""

    question: ModelQuestion
    pause_s: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    next_question: asyncio.Task[BatchrunError | EngineDownError | None] | None = None
    """A question that is not put yet; it ends with what is wrong."""
    asked_at: float = 0.0
    """Time of the last question, in seconds of the loop's clock."""
    doubts: int = 0
    """Signs that another server may be there by now."""
    cleared: int = 0
    """Those before the last question that was answered with the run's model."""


class ModelGuard:
    """Knows the run's model, and asks servers for theirs: one question answers all who wait for it."""

    def __init__(self) -> None:
        self._model: Model = {}
        self._addresses: dict[str, _Address] = {}
        self._origins: dict[URL, list[str]] = {}
        self._version: str | None = None
        """Version of the weights that all answers have had."""

    def begin(self, model: Model) -> None:
        """Take the run's model."""
        self._model = model

    def watch(self, url: str, question: ModelQuestion, *, pause_s: float = 0.0) -> None:
        """Guard the address `url`; there are `pause_s` seconds at least from one question to the next."""
        self._addresses[url] = _Address(question, pause_s)
        self._origins.setdefault(URL(url).origin(), []).append(url)

    def addresses_at(self, url: URL) -> Sequence[str]:
        """Return the guarded addresses that a connection to a URL may be for."""
        return self._origins.get(url.origin(), ())

    def doubt(self, url: str) -> None:
        """Record that another server may be at the address by now: it was away."""
        if address := self._addresses.get(url):
            address.doubts += 1

    def is_settled(self, url: str) -> bool:
        """Tell whether nothing is in doubt."""
        address = self._addresses.get(url)
        return address is None or address.cleared == address.doubts

    async def settle(self, url: str) -> None:
        """Return at once, or if there is doubt, after a question; raises as `confirm` does."""
        if not self.is_settled(url):
            await self.confirm(url)

    async def confirm(self, url: str) -> None:
        """Return once a question that was put after this call was answered with the run's model.

        Raises AnotherModelError for another model, EngineDownError where there is no answer.
        """
        if (address := self._addresses.get(url)) is None:
            return
        if address.next_question is None:
            address.next_question = asyncio.create_task(self._ask(address))
        wrong = await asyncio.shield(address.next_question)
        if wrong is not None:
            raise wrong

    async def check_answer(self, url: str, version: str | None) -> None:
        """Return once an answer counts; raises as `confirm`, or for another version of the weights."""
        await self.settle(url)
        if version is None:
            return
        self._version = self._version or version
        if version != self._version:
            raise _another_model(url, "weight_version", self._version, version)

    async def _ask(self, address: _Address) -> BatchrunError | EngineDownError | None:
        async with address.lock:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, address.asked_at + address.pause_s - loop.time()))
            address.next_question, address.asked_at = None, loop.time()
            doubts = address.doubts
            try:
                for url, model in (await address.question()).items():
                    for name, was in self._model.items():
                        if model.get(name, was) != was:
                            raise _another_model(url, name, was, model[name])
            except (BatchrunError, EngineDownError) as wrong:
                return wrong
            address.cleared = doubts
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
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    async def connect(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> Connection:
        """Return a connection from the pool, or a new one after its server's answer."""
        connection = await super().connect(req, traces=traces, timeout=timeout)
        protocol = connection.protocol
        if protocol not in self._known:
            try:
                for address in self._guard.addresses_at(req.url):
                    await self._guard.confirm(address)
            except BaseException:
                connection.close()
                raise
            if connection.closed:
                connection.close()
                raise EngineDownError(f"the connection to {req.url.origin()} was lost before it was used")
            self._known.add(protocol)
        return connection
