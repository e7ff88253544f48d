"""A program of ours that dies or hangs is started again, until it is plain that this leads nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from typing import TYPE_CHECKING

from batchrunner.core.errors import EngineLostError, EngineStartError
from batchrunner.core.types import Incident

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchrunner.engines.hang_detector import Hang
    from batchrunner.engines.launched.process import LaunchedProcess

log = logging.getLogger(__name__)

QUICK_S = 120.0
"""A program that was up for less than this died quickly; the silence of a hang does not count as life."""
MOST_QUICK_DEATHS = 8
"""More quick deaths in a row are a crash loop. A row that kills the engine is given up after four: of such
rows two in a row are borne."""
VERDICT_S = 30.0
"""Until a death is known for what it is: a launcher takes 20 s at most to end what is left of its server."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before another start, doubling with every quick death in a row."""


class ServerSupervisor:
    """Watches one program; `lost` says why it is not started any more, once that is so."""

    def __init__(
        self,
        process: LaunchedProcess,
        start: Callable[[], Awaitable[None]],
        tell: Callable[[Incident], None],
        *,
        down: Callable[[], Awaitable[None]] | None = None,
        up: Callable[[], Awaitable[None]] | None = None,
        heal: Callable[[], bool] = lambda: False,
        then: str = "started again",
    ) -> None:
        """`start` starts it and waits until it is ready; `down` and `up` are told; `then` is for the log.

        `tell` takes note of what befalls it; `heal` tells whether the next start is to be another one, so
        that the death does not count.
        """
        self.lost: EngineLostError | None = None
        self._process = process
        self._start = start
        self._tell = tell
        self._hung: asyncio.Future[Hang] | None = None
        self._down, self._up = down, up
        self._heal = heal
        self._healed, self._judged_at = False, -math.inf
        self._verdict = asyncio.Event()  # on the next death
        self._then = then
        self._settled = asyncio.Event()  # up, or lost
        self._settled.set()

    async def ready(self) -> None:
        """Return when the program is up; raises EngineLostError when it will not be again."""
        await self._settled.wait()
        if self.lost is not None:
            raise self.lost

    def hangs(self, hang: Hang) -> None:
        """Have it ended and started again; it is up, but does nothing."""
        if self._hung is not None and not self._hung.done():
            self._hung.set_result(hang)

    async def excuses(self, sent_at: float) -> bool:
        """Tell whether what ended the program since then is no row's fault: its next start is another one."""
        if self._judged_at < sent_at:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(VERDICT_S):
                    await self._verdict.wait()
        return self._judged_at >= sent_at and self._healed

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
            hang = await self._end()
            self._settled.clear()
            lived_s = time.monotonic() - began - (hang.silent_s if hang else 0)
            cause = await self._bury(hang)
            log.warning("%s", cause)
            self._judge(healed=hang is None and self._heal())
            if not self._healed:
                quick_deaths = quick_deaths + 1 if lived_s < QUICK_S else 1
            if quick_deaths > MOST_QUICK_DEATHS:
                self.lost = EngineLostError(f"{cause} (for the {quick_deaths}th time in a row)")
                self._tell(Incident("lost", self._process.name, str(self.lost)))
                log.warning("%s: not started again", self._process.name)
                return
            count = f"{quick_deaths} of at most {MOST_QUICK_DEATHS} times in a row"
            log.warning("%s: %s%s", self._process.name, self._then, "" if self._healed else f" ({count})")
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
            self._tell(Incident("back", self._process.name))
            log.warning("%s is back", self._process.name)

    def _judge(self, *, healed: bool) -> None:
        """Let those know who ask what the program died of."""
        self._healed, self._judged_at = healed, time.monotonic()
        self._verdict.set()
        self._verdict = asyncio.Event()

    async def _end(self) -> Hang | None:
        """Return when the program has ended, or hangs: then how."""
        self._hung = hung = asyncio.get_running_loop().create_future()
        ended = asyncio.ensure_future(self._process.ended())
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        return hung.result() if hung.done() else None

    async def _bury(self, hang: Hang | None) -> str:
        """Say why the program is no use any more, take it out of use, and end it where it only hangs."""
        name = self._process.name
        cause = f"{name} {hang.why}" if hang else self._process.obituary(f"{name} died")
        self._tell(Incident("hangs" if hang else "died", name, cause))
        if self._down is not None:
            await self._down()
        if hang:
            await self._process.stop()
        return cause
