"""The failure classifier: whether a row was cut off by its own fault, its server's death, or neither."""

import asyncio
import math
import time
from typing import Protocol

import aiohttp

from batchrunner.core.errors import AttemptFailedError, EngineDiedError, EngineDownError, RequestError


def in_words(failure: Exception) -> str:
    """Say in one line why a server gave no answer; some of aiohttp's errors do not say it, or in several."""
    if isinstance(failure, aiohttp.TooManyRedirects):
        return "its redirects lead in a circle"
    return " ".join(str(getattr(failure, "os_error", failure)).split()) or type(failure).__name__


class Probe(Protocol):
    """Asks servers whether they are alive."""

    async def is_alive(self, url: str) -> bool:
        """Tell whether a server answers."""


class DeathVerdicts(Protocol):
    """Knows why servers ended that this run started."""

    async def excuses(self, url: str, sent_at: float) -> bool:
        """Tell whether a server ended after `sent_at` for a reason that is no row's fault."""


class FailureClassifier:
    """Records which servers are alive, and judges rows that were cut off by that."""

    def __init__(self, probe: Probe, verdicts: DeathVerdicts | None) -> None:
        """`verdicts` is None for servers that others started: none of their deaths is excused."""
        self._probe = probe
        self._verdicts = verdicts
        self._questions: dict[str, asyncio.Future[bool]] = {}
        self._dead: set[str] = set()  # servers that did not answer when last asked
        self._died_at: dict[str, float] = {}

    def record(self, url: str, *, alive: bool) -> None:
        """Record whether a server is alive now."""
        if alive:
            self._dead.discard(url)
        elif url not in self._dead:
            self._dead.add(url)
            self._died_at[url] = time.monotonic()

    async def classify(self, url: str, sent_at: float, what: str) -> RequestError:
        """Return the error of a row that was sent to a server at `sent_at` and cut off; `what` is its text.

        If the server is alive, the row may be at fault, and the attempt counts against it. If the server
        died after the row was sent, it may have died of the row, unless the verdict on the death excuses all
        rows. If it was dead before, no row is at fault.
        """
        alive = await self._is_alive(url)
        if sent_at < self._died_at.get(url, -math.inf):
            excused = self._verdicts is not None and await self._verdicts.excuses(url, sent_at)
            return EngineDownError(what) if excused else EngineDiedError(what)
        return AttemptFailedError(what) if alive else EngineDownError(what)

    async def _is_alive(self, url: str) -> bool:
        """Ask a server, once for all rows that were cut off together."""
        question = self._questions.get(url)
        if question is None:
            question = self._questions[url] = asyncio.ensure_future(self._probe.is_alive(url))
            question.add_done_callback(lambda _: self._questions.pop(url, None))
        alive = await asyncio.shield(question)
        self.record(url, alive=alive)
        return alive
