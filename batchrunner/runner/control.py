"""Stops a run: gently, so that requests in flight end, or at once."""

import asyncio
import threading
from collections.abc import Callable
from typing import Literal, TypeVar

from batchrunner.core.errors import EXIT_STOPPED, EXIT_TERMINATED, EXIT_TIME_UP, BatchrunError
from batchrunner.core.timing import TIMING

T = TypeVar("T")


class Control:
    """Takes requests to stop, from signals, limits or a caller; also before the run begins."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why the run is to stop; None while it is not."""
        self.exit_code = EXIT_STOPPED
        self.at_once = False
        """Whether requests in flight are to be cancelled."""
        self.stage: Literal["starting", "sending", "ending"] = "starting"
        """What the run does: it sends rows until its results are on disk. Before and after that a stop has
        nothing to wait for."""
        self._listeners: list[Callable[[], object]] = []

    def drain(self, reason: str, exit_code: int = EXIT_STOPPED) -> None:
        """Send no more rows and let requests in flight end; a second call changes nothing."""
        if self.reason is None:
            self.reason, self.exit_code = reason, exit_code
        self._notify()

    def stop(self, reason: str, exit_code: int = EXIT_TERMINATED) -> None:
        """End at once; the next attempt sends the rows in flight again."""
        self.drain(reason, exit_code)
        self.at_once = True
        self._notify()

    def listen(self, listener: Callable[[], object]) -> None:
        """Call `listener` at every change, and at once if the run is already to stop."""
        self._listeners.append(listener)
        if self.reason is not None:
            listener()

    def interrupted(self, when: str) -> BatchrunError:
        """Return the error of an attempt that was stopped before its first row, which ends it."""
        self.stage = "ending"
        error = BatchrunError(f"{self.reason or 'cancelled'} {when}")
        # not EXIT_TIME_UP: Slurm would requeue for ever a task whose engine takes all of its time to start
        error.exit_code = EXIT_STOPPED if self.exit_code == EXIT_TIME_UP else self.exit_code
        return error

    async def reading(self, work: Callable[[], T], when: str) -> T:
        """Run `work`, which may block and changes nothing, in a thread; a stop soon leaves it there.

        Raises BatchrunError then, with the exit code of the stop; `when` says what was done.
        """
        working = asyncio.ensure_future(asyncio.to_thread(work))
        asked = asyncio.Event()
        self.listen(asked.set)
        stopped = asyncio.ensure_future(asked.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if (await asyncio.wait({working}, timeout=TIMING.stop_start))[0]:
                return working.result()
            error = BatchrunError(f"{self.reason} {when}")
            error.exit_code = self.exit_code
            raise error
        finally:
            working.cancel()
            stopped.cancel()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


class Sleeper:
    """Sleeps in threads until the run is stopped."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._stopped = threading.Event()
        control.listen(self._stopped.set)

    def sleep(self, seconds: float) -> None:
        """Sleep; raises BatchrunError once the run is stopped."""
        if self._stopped.wait(seconds):
            raise self._control.interrupted("before the first row was sent")

    def check(self) -> None:
        """Raise BatchrunError if the run is stopped."""
        if self._stopped.is_set():  # it is called for each row
            self.sleep(0)

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking `work` in a thread; if cancelled, wait for its end."""
        working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            self._stopped.set()
            await asyncio.wait([working])  # a thread left behind could still take the task lock
            raise
