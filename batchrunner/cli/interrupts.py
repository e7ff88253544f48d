"""Ctrl-C ends a command that does not handle it itself, even a blocked one; a second ends it at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from batchrunner.core.console import tell_failure, wants_json
from batchrunner.core.errors import interrupted
from batchrunner.core.timing import TIMING


class Interrupts:
    """Counts Ctrl-C, as SIGINT's handler and as a listener: the one that is late does not count again."""

    def __init__(self) -> None:
        self._seen = 0
        """Signals that came."""
        self._handled = 0
        """Signals that the main thread has taken: the command ends by itself."""
        self._is_timed = False

    def came(self, number: signal.Signals) -> None:
        """Take a signal; see `SignalListener`."""
        if number == signal.SIGINT and signal.getsignal(number) == self.handle:
            self._seen += 1
            self._act()

    def handle(self, _number: int, _frame: FrameType | None) -> NoReturn:
        """Interrupt the main thread."""
        self._handled += 1
        self._act()
        raise KeyboardInterrupt

    def _act(self) -> None:
        if max(self._seen, self._handled) > 1:
            _end_process()
        if not self._is_timed:
            self._is_timed = True
            _after(TIMING.stop_start, self._end_blocked)
            _after(TIMING.stop_at_once, _end_process)

    def _end_blocked(self) -> None:
        if not self._handled:
            _end_process()


def _after(seconds: float, act: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def _end_process() -> None:
    """End the process, whatever its threads do; every file becomes visible whole."""
    os._exit(tell_failure(interrupted(), as_json=wants_json(sys.argv[1:])))
