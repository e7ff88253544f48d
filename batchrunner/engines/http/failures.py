"""Why a row was cut off: its own fault, its server's death, or neither."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from batchrunner.core.errors import AttemptFailedError, EngineDiedError, EngineDownError, RequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class FailureClassifier:
    """What is known of the life of some servers; `answers` asks one whether it is alive."""

    def __init__(self, answers: Callable[[str], Awaitable[bool]]) -> None:
        self._answers = answers
        self._questions: dict[str, asyncio.Future[bool]] = {}
        self._dead: set[str] = set()  # that did not answer when last asked
        self._died_at: dict[str, float] = {}
        self.excuses: Callable[[str, float], Awaitable[bool]] | None = None
        """Whether what ended a server since then is no row's fault; of one that is not ours nobody knows."""

    def saw(self, url: str, *, alive: bool) -> None:
        """Take note of whether a server is alive."""
        if alive:
            self._dead.discard(url)
        elif url not in self._dead:
            self._dead.add(url)
            self._died_at[url] = time.monotonic()

    async def of(self, url: str, sent_at: float, what: str) -> RequestError:
        """Return the error of a row that was sent to a server then and cut off; a gateway never tells why.

        A server that is alive cut it off, which may be the row's fault: it must run out of tries at last.
        One that died after the row was sent may have died of it, unless that is excused. One that was dead
        before is nobody's fault.
        """
        alive = await self._is_alive(url)
        if sent_at < self._died_at.get(url, -math.inf):
            excused = self.excuses is not None and await self.excuses(url, sent_at)
            return EngineDownError(what) if excused else EngineDiedError(what)
        return AttemptFailedError(what) if alive else EngineDownError(what)

    async def _is_alive(self, url: str) -> bool:
        """Ask a server, once for all rows that were cut off together."""
        question = self._questions.get(url)
        if question is None:
            question = self._questions[url] = asyncio.ensure_future(self._answers(url))
            question.add_done_callback(lambda _: self._questions.pop(url, None))
        alive = await asyncio.shield(question)
        self.saw(url, alive=alive)
        return alive
