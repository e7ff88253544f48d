"""How a run is stopped from outside: by a signal, a deadline, a caller."""

from __future__ import annotations

import asyncio

from batchrunner.report import EXIT_STOPPED, EXIT_TERMINATED


class Control:
    """First gently, then at once; may be used before the run begins."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.exit_code = EXIT_STOPPED
        self.at_once = False
        self._changed: list[asyncio.Event] = []

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

    def changed(self) -> asyncio.Event:
        """Return an event that is set at every call."""
        event = asyncio.Event()
        if self.reason is not None:
            event.set()
        self._changed.append(event)
        return event

    def _notify(self) -> None:
        for event in self._changed:
            event.set()
