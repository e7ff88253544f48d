"""The protocol that every engine follows."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import BundleRefusedError, RequestError
from batchrunner.core.types import Completion, Request

RowEnded: TypeAlias = Callable[[int, Completion | RequestError], None]
"""Takes the answer to the row of a bundle with an index, or why it has none."""


class Engine(Protocol):
    """One SGLang engine, wherever it runs. All methods are called from one event loop."""

    async def open(self) -> EngineInfo:
        """Make the engine ready for requests; raises EngineStartError, with what to do, where it cannot."""

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once, on one of the routes of `EngineInfo`, and wait for the whole answer.

        Raises RowRefusedError, AttemptFailedError or EngineBusyError; EngineLostError where there is
        no engine left to ask.
        """

    async def generate_many(
        self,
        requests: Sequence[Request],  # noqa: ARG002 - for engines that can
        route: str,  # noqa: ARG002
        ended: RowEnded,  # noqa: ARG002
    ) -> None:
        """Send several requests at once, each one time, and return when none will be answered any more.

        Each must be one of token ids, for one sample. `ended` gets what `generate` returns or raises for
        each, when it ends. Those left out should be sent in smaller requests. Raises BundleRefusedError where
        the engine refused them all, or what `generate` raises, which holds for all that are left.
        """
        raise BundleRefusedError("the engine takes one row in a request")

    async def tokens_of(
        self,
        request: Request,  # noqa: ARG002 - for engines that can
        *,
        special: bool = True,  # noqa: ARG002
    ) -> list[int] | None:
        """Return the tokens that the engine makes of a prompt, or None where it cannot.

        With `special` the tokens that begin and end a prompt are there too.

        Raises as `generate` does where the prompt is refused, or asking failed.
        """
        return None

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load of each scheduler now; empty where the engine does not report it.

        A poll that fails raises nothing: the schedulers that it was for are left out.
        """

    def give_back(self, route: str, kept: int) -> None:  # noqa: ARG002 - for engines with users
        """Take the youngest rows of a route from the engine until so many are left.

        Each ends with a GivenBackError, or with its answer if that was faster.
        """
        return

    def incidents(self) -> list[Incident]:
        """Return what happened to the engine's servers since the last call, oldest first."""
        return []

    async def close(self) -> None:
        """Release everything. May be called twice, and after a failed open."""


@dataclass(eq=False)
class ObservedEngine(ABC):
    """An open engine that hears of each answer on its way."""

    _engine: Engine
    first_sent_at: float | None = field(default=None, init=False)
    """When the first request was sent; None before."""

    @abstractmethod
    def observe(self, request: Request, completion: Completion, route: str, sent_at: float) -> None:
        """Hear of the answer to a request."""

    def __getattr__(self, name: str) -> Any:
        """Leave all else to the engine."""
        return getattr(self._engine, name)

    async def generate(self, request: Request, route: str) -> Completion:
        """Send a request; see `Engine.generate`."""
        sent_at = self._now()
        completion = await self._engine.generate(request, route)
        self.observe(request, completion, route, sent_at)
        return completion

    async def generate_many(self, requests: Sequence[Request], route: str, ended: RowEnded) -> None:
        """Send several requests; see `Engine.generate_many`."""
        sent_at = self._now()

        def hear(index: int, result: Completion | RequestError) -> None:
            if isinstance(result, Completion):
                self.observe(requests[index], result, route, sent_at)
            ended(index, result)

        await self._engine.generate_many(requests, route, hear)

    def _now(self) -> float:
        now = time.monotonic()
        self.first_sent_at = self.first_sent_at or now
        return now
