"""Waits while a disk or an object store is unavailable, for at most `limits.disk_wait`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchrunner.output.files import cannot_write

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Seconds between two tries of a failing operation."""


class AwayWait:
    """Measures how long a disk or an object store has been failing, and whether to try again."""

    def __init__(self, longest_s: float) -> None:
        """Set the time limit: seconds from the first failure, as in `limits.disk_wait`."""
        self._longest_s = longest_s
        self._failed_at: float | None = None

    def may_go_on(self, message: str) -> bool:
        """Record a failure; return whether there is time for another try.

        The first failure is logged as `message`.
        """
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
            log.warning("%s", message)
        return now - self._failed_at <= self._longest_s

    def end(self) -> float | None:
        """Record a success; return the seconds since the first failure, or None if nothing had failed."""
        failed_at, self._failed_at = self._failed_at, None
        return None if failed_at is None else time.monotonic() - failed_at


@dataclass(frozen=True, slots=True)
class DiskWait:
    """Repeats a failing write for a limited time."""

    wait_s: float
    """Time limit in seconds from the first failure (`limits.disk_wait`)."""
    is_over: Callable[[], bool]
    """Returns True once the run must end immediately. A failing write is then not repeated."""

    async def write(self, path: Path, write: Callable[[], None]) -> None:
        """Call `write` in a thread until it succeeds; it writes the file at `path`.

        Only an OSError is followed by another try. Raises StorageError if a call fails more than `wait_s`
        after the first failure, or when `is_over()` is true.
        """
        wait = AwayWait(self.wait_s)
        while True:
            try:
                await asyncio.to_thread(write)
                break
            except OSError as failure:
                reason = failure.strerror or failure
                message = f"{path}: {reason}: the run pauses until the file can be written"
                if self.is_over() or not wait.may_go_on(message):
                    raise cannot_write(path, failure) from None
            await asyncio.sleep(PAUSE_S)
        waited_s = wait.end()
        if waited_s is not None:
            log.warning("%s: written after %.0f s", path, waited_s)
