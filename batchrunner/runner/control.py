"""Stop of a run, gently or at once: by signals, by a limit of the job, or by its caller."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from batchrunner.core.console import tell_failure, wants_json
from batchrunner.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    EXIT_TIME_UP,
    BatchrunError,
)
from batchrunner.core.timing import TIMING

log = logging.getLogger(__name__)

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
        """Stage of the run: "sending" lasts until its results are on disk. A stop in another stage waits for
        nothing."""
        self._listeners: list[Callable[[], object]] = []
        self._stopped = threading.Event()

    def drain(self, reason: str, exit_code: int = EXIT_STOPPED) -> None:
        """Send no more rows and let requests in flight end; a second call changes nothing."""
        if self.reason is None:
            self.reason, self.exit_code = reason, exit_code
        self._notify()

    def stop(self, reason: str) -> None:
        """End at once; the next attempt sends the rows in flight again."""
        self.drain(reason, EXIT_TERMINATED)
        self.at_once = True
        self._notify()

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call `listener` at every change in the block, and at once if the run is already to stop."""
        self._listeners.append(listener)
        if self.reason is not None:
            listener()
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def interrupted(self, when: str) -> BatchrunError:
        """Return the error of an attempt that is stopped in the phase `when`, such as "while it sorted"."""
        error = BatchrunError(f"{self.reason or 'cancelled'} {when}")
        error.exit_code = self.exit_code
        if self.stage == "starting" and self.exit_code == EXIT_TIME_UP:
            # else Slurm would requeue for ever an array task whose engine takes all of its time to start
            error.exit_code = EXIT_STOPPED
        self.stage = "ending"
        return error

    async def wait_for(self, work: Coroutine[Any, Any, T], when: str, *, grace_s: float = 0.0) -> T:
        """Wait for the end of work, and after a stop for `grace_s` more seconds; then it is cancelled.

        Raises BatchrunError then, whose message ends with `when`.
        """
        working = asyncio.ensure_future(work)
        stopped = asyncio.get_running_loop().create_future()
        ends: set[asyncio.Future[Any]] = {working, stopped}
        try:
            with self.listening(stopped.cancel):
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if working in (await asyncio.wait({working}, timeout=grace_s))[0]:
                return working.result()
            raise self.interrupted(when)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def sleep(self, seconds: float) -> None:
        """Sleep, in a thread, before the first row is sent; raises BatchrunError once the run is stopped."""
        if self._stopped.wait(seconds):
            raise self.interrupted("before the first row was sent")

    def check(self) -> None:
        """Raise BatchrunError if the run is stopped before the first row is sent."""
        if self._stopped.is_set():  # it is called for each row
            self.sleep(0)

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking `work`, which may sleep here, in a thread; if cancelled, wait for its end."""
        working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            self._stopped.set()
            await asyncio.wait([working])  # a thread left behind could still take the task lock
            raise

    def _notify(self) -> None:
        self._stopped.set()
        for listener in self._listeners:
            listener()


SIGNALS = {
    signal.SIGINT: ("interrupted", EXIT_INTERRUPTED),
    signal.SIGTERM: ("interrupted", EXIT_TERMINATED),
    signal.SIGHUP: ("interrupted", EXIT_TERMINATED),  # no terminal; what nohup ignores stays so
    signal.SIGUSR1: ("time is nearly up", EXIT_TIME_UP),
}
"""The signals that end a run, with the reason and the exit code."""


@dataclass(slots=True)
class RunSignals:
    """Stops a run by signals: the first one gently; a second SIGINT ends it, whatever its threads do.

    A run that sends no rows has nothing to wait for: its process ends within seconds of the first signal. It
    may be killed at any moment, so nothing is lost by that. Slurm may send other signals than SIGINT twice.
    """

    _control: Control
    _loop: asyncio.AbstractEventLoop
    _bounds_s: Mapping[signal.Signals, float]
    """Seconds that requests in flight get after a signal, where they are limited."""
    _first: tuple[str, int] | None = None
    """Reason and exit code of the first signal, of which a blocked loop does not hear."""
    _stops_at_once: bool = False
    _timers: list[threading.Timer] = field(default_factory=list)

    def came(self, number: signal.Signals) -> None:
        """Handle a signal; see `SignalWatch`."""
        if number not in SIGNALS:
            return
        reason, exit_code = SIGNALS[number]
        again = self._first is not None or self._control.reason is not None
        self._on_loop(self._control.drain, reason, exit_code)
        if number == signal.SIGINT and again:
            self._stop_at_once(reason)
        elif number in self._bounds_s:
            self._after(self._bounds_s[number], self._stop_at_once, reason)
        if again:
            return
        self._first = reason, exit_code
        if self._control.stage == "sending":
            bound_s = self._bounds_s.get(number)
            limit = "; a second Ctrl-C stops now, and the next start sends them again"
            if bound_s is not None:
                limit = f", for {bound_s:g} s at most"
            log.warning("%s: waiting for the rows in flight%s", reason, limit)
        else:
            self._after(TIMING.stop_start, self._end_in, "starting")
            self._after(TIMING.stop_at_once, self._end_in, "starting", "ending")

    def close(self) -> None:
        """End the run's process no more: the run has ended."""
        for timer in self._timers:
            timer.cancel()

    def _stop_at_once(self, reason: str) -> None:
        """Cancel the rows in flight. End the process if this was asked for before, or if no rows are sent."""
        if self._stops_at_once or self._control.stage != "sending":
            self._end_process()
        self._stops_at_once = True
        self._on_loop(self._control.stop, reason)
        self._after(TIMING.stop_at_once, self._end_process)

    def _end_in(self, *stages: str) -> None:
        if self._control.stage in stages:
            self._end_process()

    def _end_process(self) -> None:
        """End the process, whatever its threads do; journals need no end."""
        stopped = Control()
        stopped.drain(*self._first or (self._control.reason or "", self._control.exit_code))
        if self._control.stage == "starting":
            ended = stopped.interrupted("before the first row was sent")
        else:
            ended = BatchrunError("interrupted: ended without waiting for its threads")
            ended.exit_code = stopped.exit_code
        os._exit(tell_failure(ended, as_json=wants_json(sys.argv[1:])))

    def _after(self, seconds: float, act: Callable[..., None], *arguments: str) -> None:
        timer = threading.Timer(seconds, act, arguments)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _on_loop(self, act: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(act, *arguments)
