"""The protocol that every engine speaks, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.core.types import Completion, EngineInfo, Incident, Request, SchedulerLoad


class Engine(Protocol):
    """One SGLang engine, wherever it runs. All methods are called from one event loop."""

    async def open(self) -> EngineInfo:
        """Make the engine ready for requests.

        Raises EngineStartError, with what to do, where it cannot.
        """

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once, on one of the routes of `EngineInfo`, and wait for the whole answer.

        Raises RowRefusedError, AttemptFailedError or EngineBusyError; EngineLostError where there is
        no engine left to ask.
        """

    async def tokens_of(self, request: Request) -> list[int] | None:
        """Return the tokens that the engine makes of a prompt, or None where it has no way to tell.

        Raises as `generate` does where the prompt is refused, or asking failed.
        """

    async def signals(self) -> Sequence[SchedulerLoad]:
        """Return the load of each scheduler now; empty where the engine does not tell.

        Never raises for a poll that failed: an empty answer is the sign.
        """

    def incidents(self) -> list[Incident]:
        """Return what befell the engine's servers since this was last asked, oldest first."""

    async def close(self) -> None:
        """Let go of everything. May be called twice, and after a failed open."""
