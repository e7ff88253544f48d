"""The supervisor: restarts a program that dies or hangs, until it is plain that no start helps."""

import asyncio
import contextlib
import logging
import math
import time
from typing import Protocol

from batchrunner.core.engine_info import Incident
from batchrunner.core.errors import EngineLostError, EngineStartError
from batchrunner.core.timing import TIMING
from batchrunner.engines.base import IncidentQueue
from batchrunner.engines.hang_detector import Hang
from batchrunner.engines.launched.process import LaunchedProcess

log = logging.getLogger(__name__)

MOST_QUICK_DEATHS = 8
"""More quick deaths in succession are a crash loop. A row that kills the engine is given up after four
deaths, so the limit tolerates two such rows in succession."""
VERDICT_S = 30.0
"""Longest wait, in seconds, for the cause of a death: a launcher takes up to 20 s to end what is left."""


class Supervised(Protocol):
    """A program that a supervisor restarts."""

    process: LaunchedProcess

    async def start(self) -> None:
        """Start the program and wait until it is ready; raises EngineStartError where it does not."""

    def heal(self) -> bool:
        """Change the next start so that it avoids the cause of death; return whether that is possible."""
        return False

    async def went_down(self) -> None:
        """Take the program out of use."""

    async def came_up(self) -> None:
        """Put the program into use again."""


class ServerSupervisor:
    """Watches one program; `lost` says why the program is not restarted any more, once that is so."""

    def __init__(self, program: Supervised, incidents: IncidentQueue) -> None:
        self.lost: EngineLostError | None = None
        self._program = program
        self._incidents = incidents
        self._hung: asyncio.Future[Hang] | None = None
        self._healed, self._judged_at = False, -math.inf
        self._verdict = asyncio.Event()  # set at the next death
        self._settled = asyncio.Event()  # set while the program is up, or lost
        self._settled.set()

    async def ready(self) -> None:
        """Return when the program is up; raises EngineLostError when it will not be again."""
        await self._settled.wait()
        if self.lost is not None:
            raise self.lost

    def hangs(self, hang: Hang) -> None:
        """Have the program ended and restarted: it is up, but does nothing."""
        if self._hung is not None and not self._hung.done():
            self._hung.set_result(hang)

    async def excuses(self, sent_at: float) -> bool:
        """Tell whether a death after `sent_at` was healed: then no row is at fault."""
        if self._judged_at < sent_at:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(VERDICT_S):
                    await self._verdict.wait()
        return self._judged_at >= sent_at and self._healed

    async def watch(self) -> None:
        """Restart the program whenever it ends; returns when it is lost."""
        try:
            await self._watch()
        except Exception as failure:  # or those who wait in `ready` would wait for ever
            self.lost = EngineLostError(f"{self._program.process.name}: {type(failure).__name__}: {failure}")
            raise
        finally:
            self._settled.set()

    async def _watch(self) -> None:
        name = self._program.process.name
        quick_deaths, began = 0, time.monotonic()
        while True:
            hang = await self._end()
            self._settled.clear()
            lived_s = time.monotonic() - began - (hang.silent_s if hang else 0)
            cause = await self._take_down(hang)
            log.warning("%s", cause)
            self._judge(healed=hang is None and self._program.heal())
            if not self._healed:
                quick_deaths = quick_deaths + 1 if lived_s < TIMING.quick_death else 1
            if quick_deaths > MOST_QUICK_DEATHS:
                self.lost = EngineLostError(f"{cause} (for the {quick_deaths}th time in a row)")
                self._incidents.report(Incident("lost", name, str(self.lost)))
                log.warning("%s: not started again", name)
                return
            count = f" ({quick_deaths} of at most {MOST_QUICK_DEATHS} times in a row)"
            log.warning("%s: started again%s", name, "" if self._healed else count)
            if quick_deaths > 1:
                await asyncio.sleep(
                    min(TIMING.first_restart * 2.0 ** (quick_deaths - 2), TIMING.longest_restart)
                )
            try:
                await self._program.start()
            except EngineStartError:  # the next pass of the loop finds the program ended and says why
                await self._program.process.stop()
                began = time.monotonic()
                continue
            began = time.monotonic()
            self._settled.set()
            await self._program.came_up()
            self._incidents.report(Incident("back", name))
            log.warning("%s is back", name)

    def _judge(self, *, healed: bool) -> None:
        """Publish the verdict on a death to those who wait for it."""
        self._healed, self._judged_at = healed, time.monotonic()
        self._verdict.set()
        self._verdict = asyncio.Event()

    async def _end(self) -> Hang | None:
        """Return when the program has ended, or with the hang when it hangs."""
        self._hung = hung = asyncio.get_running_loop().create_future()
        ended = asyncio.ensure_future(self._program.process.ended())
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        return hung.result() if hung.done() else None

    async def _take_down(self, hang: Hang | None) -> str:
        """Report why the program is of no use any more, take it out of use, and end it if it hangs."""
        process = self._program.process
        cause = f"{process.name} {hang.why}" if hang else process.failure_message(f"{process.name} died")
        self._incidents.report(Incident("hangs" if hang else "died", process.name, cause))
        await self._program.went_down()
        if hang:
            await process.stop()
        return cause
