"""The model guard: compares the model that servers serve with the run's, whenever another server may answer.

A connection leads to one process for as long as it lives. So a new connection takes a request only once its
server has said, after the connection was made, that it serves the run's model (`GuardedConnector`). Behind a
proxy or a gateway that says nothing: there the question is put again after each sign of an absence (`doubt`),
or before an answer counts (`confirm`).
"""

import asyncio
import itertools
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.connector import Connection
from yarl import URL

from batchrunner.core.errors import AnotherModelError, EngineDownError, EngineStartError

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
class _Place:
    """An address that takes requests. Its times are numbers of a counter."""

    question: ModelQuestion
    pause_s: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked: int = 0
    """When the question was put last."""
    confirmed: int = 0
    """When the question was put whose answer was the run's model."""
    doubted: int = 0
    failure: str | None = None
    """Why the last question was not answered."""
    asked_at: float = 0.0
    """Time of the last question, in seconds of the loop's clock."""


class ModelGuard:
    """Knows the run's model, and asks servers for theirs: one question answers all who wait for it."""

    def __init__(self) -> None:
        self._model: Model = {}
        self._places: dict[str, _Place] = {}
        self._origins: dict[URL, list[str]] = {}
        self._clock = itertools.count(1)
        self._version_of_answers: str | None = None

    def begin(self, model: Model) -> None:
        """Take the run's model."""
        self._model = model

    def watch(self, url: str, question: ModelQuestion, *, pause_s: float = 0.0) -> None:
        """Guard the address `url`; there are `pause_s` seconds at least from one question to the next."""
        self._places[url] = _Place(question, pause_s)
        self._origins.setdefault(URL(url).origin(), []).append(url)

    def addresses_at(self, url: URL) -> Sequence[str]:
        """Return the guarded addresses that a connection to a URL may be for."""
        return self._origins.get(url.origin(), ())

    def doubt(self, url: str) -> None:
        """Record that another server may be at the address by now: it was away."""
        if place := self._places.get(url):
            place.doubted = next(self._clock)

    def is_settled(self, url: str) -> bool:
        """Tell whether nothing is in doubt."""
        place = self._places.get(url)
        return place is None or place.doubted <= place.confirmed

    async def settle(self, url: str) -> None:
        """Return at once, or if there is doubt, after a question; raises as `confirm` does."""
        if not self.is_settled(url):
            await self.confirm(url)

    async def confirm(self, url: str) -> None:
        """Return once a question that was put after this call was answered with the run's model.

        Raises AnotherModelError for another model, EngineDownError where there is no answer.
        """
        if (place := self._places.get(url)) is None:
            return
        since = next(self._clock)
        async with place.lock:
            if place.asked < since:
                await self._ask(place)
            if place.failure is not None:
                raise EngineDownError(place.failure)

    async def check_answer(self, url: str, version: str | None) -> None:
        """Return once an answer counts; raises as `confirm`, or for another version of the weights.

        An answer may have another version than the server's description, but all have the same.
        """
        await self.settle(url)
        if version is None or version == self._version_of_answers:
            return
        if self._version_of_answers or version != self._model.get("weight_version"):
            await self.confirm(url)  # its error has the server's own words
        was = self._version_of_answers = self._version_of_answers or version
        if was != version:
            raise another_model(url, f"{MODEL_FIELDS['weight_version']} was {was!r} and is {version!r}")

    async def _ask(self, place: _Place) -> None:
        loop = asyncio.get_running_loop()
        if (wait_s := place.asked_at + place.pause_s - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        asked, asked_at = next(self._clock), loop.time()
        try:
            found = await place.question()
        except EngineDownError as failure:
            place.failure = str(failure)
        else:
            self._compare(found)
            place.failure, place.confirmed = None, asked
        place.asked, place.asked_at = asked, asked_at

    def _compare(self, found: Mapping[str, Model]) -> None:
        for url, model in found.items():
            for name, words in MODEL_FIELDS.items():
                was, now = self._model.get(name), model.get(name)
                if was is not None and now is not None and was != now:
                    raise another_model(url, f"{words} was {was!r} and is {now!r}")


def another_model(url: str, what: str) -> AnotherModelError:
    """Return the error for a server that serves another model than at the beginning."""
    return AnotherModelError(
        f"{url} serves another model now ({what})",
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
