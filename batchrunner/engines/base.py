"""The protocol of all engines, and the base of wrappers that observe an engine's answers."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import BundleRefusedError, RequestError
from batchrunner.core.types import Completion, Request

RowEnded: TypeAlias = Callable[[int, Completion | RequestError], None]
"""Called with the index of a request in a bundle, and the request's answer or error."""


class Engine(Protocol):
    """One or more replicas of a model, wherever they run. All methods are called from one event loop."""

    async def open(self) -> EngineInfo:
        """Make the engine ready for requests, and describe it; raises EngineStartError with a hint."""

    async def generate(self, request: Request, route: str) -> Completion:
        """Send a request once, to the replica or gateway behind `route`, and return the complete answer.

        The routes are in `EngineInfo`. Raises RowRefusedError, AttemptFailedError or EngineBusyError, and
        EngineLostError if no server remains.
        """

    async def generate_many(
        self,
        requests: Sequence[Request],  # noqa: ARG002 - for engines that can
        route: str,  # noqa: ARG002
        ended: RowEnded,  # noqa: ARG002
    ) -> None:
        """Send several requests as a bundle, each once, and return when all answers have arrived.

        Each request has token ids and asks for one completion. `ended` is called with the answer or error of
        each request as soon as it is known. The caller sends a request again, in a smaller bundle, if `ended`
        was not called for it. If the method raises, no request has an answer: BundleRefusedError means that
        the engine refused the whole bundle; all other errors are those of `generate`.
        """
        raise BundleRefusedError("the engine accepts only one row in a request")

    async def tokens_of(
        self,
        request: Request,  # noqa: ARG002 - for engines that can
        *,
        special: bool = True,  # noqa: ARG002
    ) -> list[int] | None:
        """Return the token ids of a prompt; None if the engine does not support this.

        With `special`, the tokens that begin and end a prompt (BOS, EOS) are included. Raises the errors of
        `generate`.
        """
        return None

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return a load sample of each scheduler; empty if the engine reports no load.

        Schedulers of servers that do not answer are left out. Raises AnotherModelError if a server does not
        serve the run's model any more.
        """

    async def answers(self) -> bool:
        """Tell whether a server of the engine answers now, with any reply."""
        return True

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
    """An open engine, wrapped so that a subclass observes the answers."""

    _engine: Engine
    first_sent_at: float | None = field(default=None, init=False)
    """Time of the first request, in seconds of `time.monotonic`; None if no request was sent yet."""

    @abstractmethod
    def observe(self, request: Request, completion: Completion, route: str, sent_at: float) -> None:
        """Process the answer to a request that was sent at `sent_at`, in seconds of `time.monotonic`."""

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute or method of the engine."""
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
        """Return the time; the first call also stores it as `first_sent_at`."""
        now = time.monotonic()
        self.first_sent_at = self.first_sent_at or now
        return now
