"""How a run is stopped from outside: by a signal, a deadline, a caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchrunner.report import EXIT_STOPPED, EXIT_TERMINATED

if TYPE_CHECKING:
    from collections.abc import Callable


class Control:
    """First gently, then at once; may be used before the run begins."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.exit_code = EXIT_STOPPED
        self.at_once = False
        self._listeners: list[Callable[[], object]] = []

    def drain(self, reason: str, exit_code: int = EXIT_STOPPED) -> None:
        """Send no row any more, let those in flight end; a second call changes nothing."""
        if self.reason is None:
            self.reason, self.exit_code = reason, exit_code
        self._notify()

    def stop(self, reason: str, exit_code: int = EXIT_TERMINATED) -> None:
        """End at once; rows in flight are done again at the next start."""
        self.drain(reason, exit_code)
        self.at_once = True
        self._notify()

    def listen(self, listener: Callable[[], object]) -> None:
        """Call this at every change, and now if there was one: what is stopped is stopped when it returns."""
        self._listeners.append(listener)
        if self.reason is not None:
            listener()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
