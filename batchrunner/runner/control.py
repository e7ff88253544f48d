"""Stops a run gently (drain) or at once (stop): on a signal, at a limit of the job, or for its caller."""

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
from batchrunner.report.verdict import GO_ON

log = logging.getLogger(__name__)

T = TypeVar("T")


class Control:
    """Receives requests to stop a run from signals, limits and callers, even before the run has begun."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why the run must stop; None as long as it may go on."""
        self.exit_code = EXIT_STOPPED
        """Exit code of the command if the run must stop."""
        self.next_step = GO_ON
        """What the user should do if rows remain; empty if `reason` says it."""
        self.at_once = False
        """Whether requests in flight must be cancelled too."""
        self.stage: Literal["starting", "sending", "ending"] = "starting"
        """Stage of the run. "sending" lasts until the results are on disk. In the other stages no rows are in
        flight, so a stop need not wait for rows."""
        self._listeners: list[Callable[[], object]] = []
        self._stopped = threading.Event()
        """Set at a request to stop. It wakes threads in `sleep`."""

    def drain(self, reason: str, exit_code: int = EXIT_STOPPED, *, next_step: str = GO_ON) -> None:
        """Ask the run to send no more rows and to let requests in flight end.

        `next_step` says what to do about rows that remain; it is empty if `reason` says it. Only the first
        call counts.
        """
        if self.reason is None:
            self.reason, self.exit_code, self.next_step = reason, exit_code, next_step
        self._notify()

    def stop(self, reason: str) -> None:
        """Ask the run to end at once. The next attempt sends the rows in flight again."""
        self.drain(reason, EXIT_TERMINATED)
        self.at_once = True
        self._notify()

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call `listener` at each request to stop while the block runs.

        If there was such a request before, call it at once.
        """
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
            # EXIT_TIME_UP makes a Slurm task requeue itself. If the engine never starts in time, that would
            # go on for ever.
            error.exit_code = EXIT_STOPPED
        self.stage = "ending"
        return error

    async def wait_for(self, work: Coroutine[Any, Any, T], when: str, *, grace_s: float = 0.0) -> T:
        """Wait for `work` and return its result. After a stop, wait `grace_s` more seconds, then cancel it.

        Raises BatchrunError, whose message ends with `when`, if the work is cancelled.
        """
        working = asyncio.ensure_future(work)
        stopped = asyncio.get_running_loop().create_future()  # a request to stop cancels this future
        ends: set[asyncio.Future[Any]] = {working, stopped}
        try:
            with self.listening(stopped.cancel):
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait({working}, timeout=grace_s)
            if working in done:
                return working.result()
            raise self.interrupted(when)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def sleep(self, seconds: float) -> None:
        """Sleep, in a thread, before rows are sent. Raises BatchrunError once the run must stop."""
        if self._stopped.wait(seconds):
            raise self.interrupted("before the first row was sent")

    def check(self) -> None:
        """Raise BatchrunError if the run must stop before the first row is sent."""
        # `sleep` would be slow if called for each row.
        if self._stopped.is_set():
            self.sleep(0)

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking `work`, which may call `sleep`, in a thread. If cancelled, wait for the thread."""
        working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            self._stopped.set()
            # Without this wait the thread could still acquire the lock of a task later.
            await asyncio.wait([working])
            raise

    def _notify(self) -> None:
        self._stopped.set()
        for listener in self._listeners:
            listener()


SIGNALS = {
    signal.SIGINT: ("interrupted", EXIT_INTERRUPTED),
    signal.SIGTERM: ("interrupted", EXIT_TERMINATED),
    # The terminal was closed. With nohup, Python ignores this signal.
    signal.SIGHUP: ("interrupted", EXIT_TERMINATED),
    signal.SIGUSR1: ("the time limit is near", EXIT_TIME_UP),
}
"""The signals that end a run, each with the reason and the exit code."""


@dataclass(slots=True)
class RunSignals:
    """Stops a run on signals: gently on the first signal, and at once on a second SIGINT.

    A gentle stop waits for the rows in flight. Without such rows, the process ends within seconds. If a
    thread or the event loop is blocked, the process is ended by force. That loses nothing, because a run can
    be killed at any moment and resumed. Only SIGINT counts twice, because Slurm may send other signals twice.
    """

    _control: Control
    _loop: asyncio.AbstractEventLoop
    _grace_s: Mapping[signal.Signals, float]
    """Maximum seconds that requests in flight get after a signal; without an entry there is no maximum."""
    _first: tuple[str, int] | None = None
    """Reason and exit code of the first signal. A blocked event loop would not pass them to `_control`."""
    _stops_at_once: bool = False
    """Whether `_stop_at_once` was called."""
    _timers: list[threading.Timer] = field(default_factory=list)
    """Timers that stop the run or end the process."""

    def came(self, number: signal.Signals) -> None:
        """Handle a signal, in the thread of `SignalWatch`.

        The run sends no more rows. If the signal has a grace period (`_grace_s`), the run stops at once after
        it.
        """
        if number not in SIGNALS:
            return
        reason, exit_code = SIGNALS[number]
        was_stopping = self._first is not None or self._control.reason is not None
        self._on_loop(self._control.drain, reason, exit_code)
        if number == signal.SIGINT and was_stopping:  # a second Ctrl-C does not wait for rows
            self._stop_at_once(reason)
        elif number in self._grace_s:
            self._after(self._grace_s[number], self._stop_at_once, reason)
        if not was_stopping:
            self._first = reason, exit_code
            self._begin_to_stop(reason, self._grace_s.get(number))

    def _begin_to_stop(self, reason: str, grace_s: float | None) -> None:
        """Log that the run waits for the rows in flight; without such rows, limit the time until its end."""
        if self._control.stage == "sending":
            limit = "; a second Ctrl-C stops now, and the next start sends these rows again"
            if grace_s is not None:
                limit = f", for {grace_s:g} s at most"
            log.warning("%s: waiting for the rows in flight%s", reason, limit)
            return
        # While an engine starts, there is nothing to save. At the end of a run, the report and the engine
        # need more time.
        self._after(TIMING.stop_start, self._end_in, "starting")
        self._after(TIMING.stop_at_once, self._end_in, "starting", "ending")

    def close(self) -> None:
        """Cancel the timers that would end the process, because the run has ended."""
        for timer in self._timers:
            timer.cancel()

    def _stop_at_once(self, reason: str) -> None:
        """Cancel the rows in flight. At a second call, or if no rows are in flight, end the process."""
        if self._stops_at_once or self._control.stage != "sending":
            self._end_process()
        self._stops_at_once = True
        self._on_loop(self._control.stop, reason)
        # The timer ends a run with a blocked thread.
        self._after(TIMING.stop_at_once, self._end_process)

    def _end_in(self, *stages: str) -> None:
        """End the process if the run is still in one of the `stages`."""
        if self._control.stage in stages:
            self._end_process()

    def _end_process(self) -> None:
        """Print the error and end the process even if threads still run. Journals need not be closed."""
        # A blocked event loop may not have passed the signal on to `_control`. So a new Control gets the
        # reason and the exit code of that signal from `_first`.
        stopped = Control()
        if self._first is not None:
            stopped.drain(*self._first)
        else:
            stopped.drain(self._control.reason or "", self._control.exit_code)
        if self._control.stage == "starting":
            ended = stopped.interrupted("before the first row was sent")
        else:
            ended = BatchrunError("interrupted: the process ended without waiting for its threads")
            ended.exit_code = stopped.exit_code
        os._exit(tell_failure(ended, as_json=wants_json(sys.argv[1:])))

    def _after(self, seconds: float, act: Callable[..., None], *arguments: str) -> None:
        """Call `act` in a thread after some seconds, unless the run has ended by then."""
        timer = threading.Timer(seconds, act, arguments)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _on_loop(self, act: Callable[..., None], *arguments: object) -> None:
        """Call `act` in the event loop of the run, as soon as the loop is free."""
        with contextlib.suppress(RuntimeError):  # the loop is closed if the run has ended
            self._loop.call_soon_threadsafe(act, *arguments)
