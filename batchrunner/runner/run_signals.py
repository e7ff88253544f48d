"""What a signal does to a run in the foreground: it drains, it stops, or its process ends."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping

from batchrunner.core.console import tell_failure, wants_json
from batchrunner.core.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_TIME_UP, BatchrunError
from batchrunner.core.timing import TIMING
from batchrunner.runner.control import Control

log = logging.getLogger(__name__)

SIGNALS = {
    signal.SIGINT: ("interrupted", EXIT_INTERRUPTED),
    signal.SIGTERM: ("interrupted", EXIT_TERMINATED),
    signal.SIGHUP: ("interrupted", EXIT_TERMINATED),  # no terminal; what nohup ignores stays so
    signal.SIGUSR1: ("time is nearly up", EXIT_TIME_UP),
}
"""The signals that end a run, with the reason and the exit code."""


class RunSignals:
    """Stops a run by signals: the first one gently; a second SIGINT ends it, whatever its threads do.

    A run that sends no rows has nothing to wait for: its process ends within seconds of the first signal. It
    may be killed at any moment, so nothing is lost by that. Slurm may send other signals than SIGINT twice.
    """

    def __init__(
        self, control: Control, loop: asyncio.AbstractEventLoop, bounds_s: Mapping[signal.Signals, float]
    ) -> None:
        """`bounds_s` are the seconds that requests in flight get after a signal, where they are limited."""
        self._control = control
        self._loop = loop
        self._bounds_s = bounds_s
        self._first: tuple[str, int] | None = None
        """Reason and exit code of the first signal, which a blocked loop does not get to know."""
        self._stops_at_once = False
        self._timers: list[threading.Timer] = []

    def came(self, number: signal.Signals) -> None:
        """Take a signal; see `SignalListener`."""
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
            limit = "; once more stops now" if bound_s is None else f", for {bound_s:g} s at most"
            log.warning("%s: waiting for the rows in flight%s", reason, limit)
        else:
            self._after(TIMING.stop_start, self._end_start)
            self._after(TIMING.stop_at_once, self._end_if_idle)

    def close(self) -> None:
        """End the run's process no more: the run has ended."""
        for timer in self._timers:
            timer.cancel()

    def _stop_at_once(self, reason: str) -> None:
        """Stop without the rows in flight; end the process if that was asked for, or is of no use."""
        if self._stops_at_once or self._control.stage != "sending":
            self._end_process()
        self._stops_at_once = True
        self._on_loop(self._control.stop, reason)
        self._after(TIMING.stop_at_once, self._end_process)

    def _end_start(self) -> None:
        if self._control.stage == "starting":
            self._end_process()

    def _end_if_idle(self) -> None:
        if self._control.stage != "sending":
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
