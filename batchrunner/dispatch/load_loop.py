"""Polls the engine's load a few times a second and passes each sample on."""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.feedback import Feedback
from batchrunner.dispatch.held_back import HoldingBack
from batchrunner.dispatch.queue import Backlog
from batchrunner.engines.base import Engine


class LoadObserver(Protocol):
    """What looks at every load sample."""

    def polled(self, loads: Sequence[SchedulerLoad], now: float) -> None:
        """Take a sample, empty if there is none to believe; `now` is seconds of the monotonic clock."""


class LoadLoop:
    """Resizes the slots by the engine's load while rows are sent."""

    def __init__(
        self,
        engine: Engine,
        feedback: Feedback,
        backlog: Backlog,
        holding_back: HoldingBack,
        observers: Sequence[LoadObserver],
    ) -> None:
        """Build the loop; the `observers` are called after the slots were resized."""
        self._engine = engine
        self._feedback = feedback
        self._backlog = backlog
        self._holding_back = holding_back
        self._observers = observers

    async def run(self) -> None:
        """Poll until cancelled; raises what an observer raises."""
        while True:
            polled = await self._engine.loads()
            now = time.monotonic()
            loads = self._feedback.observe(polled, now, unsent=self._backlog.unsent)
            self._backlog.wake_dispatcher()
            for observer in self._observers:
                observer.polled(loads, now)
            self._holding_back.follow()
            await asyncio.sleep(TIMING.load_poll)
