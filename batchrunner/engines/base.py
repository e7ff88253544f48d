"""The protocol of an engine."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import BundleRefusedError, RequestError
from batchrunner.core.types import Completion, Request

RowEnded: TypeAlias = Callable[[int, Completion | RequestError], None]
"""Called with the index of a request in a bundle, and its answer or error."""


class Engine(Protocol):
    """One SGLang engine, wherever it runs. All methods are called from one event loop."""

    async def open(self) -> EngineInfo:
        """Make the engine ready for requests; raises EngineStartError with a hint where that fails."""

    async def generate(self, request: Request, route: str) -> Completion:
        """Send a request once, on one of the routes of `EngineInfo`, and return the complete answer.

        Raises RowRefusedError, AttemptFailedError or EngineBusyError, and EngineLostError where no server
        remains.
        """

    async def generate_many(
        self,
        requests: Sequence[Request],  # noqa: ARG002 - for engines that can
        route: str,  # noqa: ARG002
        ended: RowEnded,  # noqa: ARG002
    ) -> None:
        """Send several requests as a bundle, each once, and return when all answers have arrived.

        Each request has token ids and asks for one completion. `ended` is called with the answer or error of
        each request as soon as it has one. Requests for which it was not called should be sent again in
        smaller bundles. Raises BundleRefusedError where the engine refuses the whole bundle, or an error of
        `generate`, which applies to all requests without an answer.
        """
        raise BundleRefusedError("the engine accepts only one row in a request")

    async def tokens_of(
        self,
        request: Request,  # noqa: ARG002 - for engines that can
        *,
        special: bool = True,  # noqa: ARG002
    ) -> list[int] | None:
        """Return the token ids of a prompt; None if the engine does not support this.

        With `special`, the tokens that begin and end a prompt are included.

        Raises the errors of `generate`.
        """
        return None

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return a load sample of each scheduler; empty if the engine reports no load.

        Schedulers whose poll fails are left out; nothing is raised.
        """

    def preempt(self, route: str, kept: int) -> None:  # noqa: ARG002 - for engines with users
        """Preempt the youngest rows of a route until only `kept` remain.

        Each preempted row ends with a PreemptedError, or with its answer if that came first.
        """
        return

    def may_speculate(self) -> bool:
        """Tell whether servers use n-gram speculation now, or may do so after flag tuning during the run."""
        return False

    def incidents(self) -> list[Incident]:
        """Return the incidents of the engine's servers since the last call, oldest first."""
        return []

    async def close(self) -> None:
        """Release all resources. May be called twice, and after a failed `open`."""


@dataclass(eq=False)
class ObservedEngine(ABC):
    """An open engine whose answers a subclass observes."""

    _engine: Engine
    first_sent_at: float | None = field(default=None, init=False)
    """Time of the first request by `time.monotonic`; None before it."""

    @abstractmethod
    def observe(self, request: Request, completion: Completion, route: str, sent_at: float) -> None:
        """Process the answer to a request that was sent at `sent_at`."""

    def __getattr__(self, name: str) -> Any:
        """Delegate all other methods to the engine."""
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

        def observe_and_pass_on(index: int, result: Completion | RequestError) -> None:
            if isinstance(result, Completion):
                self.observe(requests[index], result, route, sent_at)
            ended(index, result)

        await self._engine.generate_many(requests, route, observe_and_pass_on)

    def _now(self) -> float:
        now = time.monotonic()
        self.first_sent_at = self.first_sent_at or now
        return now
