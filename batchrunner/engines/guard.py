"""A program of ours that dies is started again, until it is plain that this leads nowhere."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from batchrunner.errors import EngineLostError, EngineStartError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchrunner.engines.process import LaunchedProcess

log = logging.getLogger(__name__)

QUICK_S = 120.0
"""A program that was up for less than this died quickly."""
MOST_QUICK_DEATHS = 8
"""More quick deaths in a row are a crash loop. A row that kills the engine is given up after four: of such
rows two in a row are borne."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before another start, doubling with every quick death in a row."""


class Guard:
    """Watches one program; `lost` says why it is not started any more, once that is so."""

    def __init__(
        self,
        process: LaunchedProcess,
        start: Callable[[], Awaitable[None]],
        *,
        down: Callable[[], Awaitable[None]] | None = None,
        up: Callable[[], Awaitable[None]] | None = None,
        then: str = "started again",
    ) -> None:
        """`start` starts it and waits until it is ready; `down` and `up` are told; `then` is for the log."""
        self.lost: EngineLostError | None = None
        self._process = process
        self._start = start
        self._down, self._up = down, up
        self._then = then
        self._settled = asyncio.Event()  # up, or lost
        self._settled.set()

    async def ready(self) -> None:
        """Return when the program is up; raises EngineLostError when it will not be again."""
        await self._settled.wait()
        if self.lost is not None:
            raise self.lost

    async def watch(self) -> None:
        """Start the program again whenever it has ended; returns when it is lost."""
        try:
            await self._watch()
        except Exception as failure:  # nobody may wait for ever
            self.lost = EngineLostError(f"{self._process.name}: {type(failure).__name__}: {failure}")
            raise
        finally:
            self._settled.set()

    async def _watch(self) -> None:
        quick_deaths, began = 0, time.monotonic()
        while True:
            await self._process.ended()
            self._settled.clear()
            if self._down is not None:
                await self._down()
            quick_deaths = quick_deaths + 1 if time.monotonic() - began < QUICK_S else 1
            cause = self._process.obituary(f"{self._process.name} died")
            if quick_deaths > MOST_QUICK_DEATHS:
                self.lost = EngineLostError(f"{cause} (for the {quick_deaths}th time in a row)")
                return
            log.warning(
                "%s: %s (%d of at most %d times in a row)", cause, self._then, quick_deaths, MOST_QUICK_DEATHS
            )
            if quick_deaths > 1:
                await asyncio.sleep(min(FIRST_PAUSE_S * 2.0 ** (quick_deaths - 2), LONGEST_PAUSE_S))
            try:
                await self._start()
            except EngineStartError:  # the next turn finds it ended and says why
                await self._process.stop()
                began = time.monotonic()
                continue
            began = time.monotonic()
            self._settled.set()
            if self._up is not None:
                await self._up()
            log.warning("%s is back", self._process.name)
