"""Waiting while a disk or a store is away: `limits.disk_wait` in one place."""

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
"""Seconds between two tries of a write."""


class AwayWait:
    """A wait for a disk or a store, from its first failure until it answers, or until patience ends."""

    def __init__(self, longest_s: float) -> None:
        """Wait at most `longest_s` seconds after the first failure: `limits.disk_wait`."""
        self._longest_s = longest_s
        self._failed_at: float | None = None

    def may_go_on(self, message: str) -> bool:
        """Note a failure, and tell whether to try again. The first one is logged with this message."""
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
            log.warning("%s", message)
        return now - self._failed_at <= self._longest_s

    def end(self) -> float | None:
        """Note a success; return how many seconds the wait took, None where nothing had failed."""
        failed_at, self._failed_at = self._failed_at, None
        return None if failed_at is None else time.monotonic() - failed_at


@dataclass(frozen=True, slots=True)
class DiskWait:
    """How long a failing write is repeated."""

    wait_s: float
    """Seconds after the first failure, from `limits.disk_wait`."""
    is_over: Callable[[], bool]
    """Tells whether the user wants the run to end without waiting for anything."""

    async def write(self, path: Path, write: Callable[[], None]) -> None:
        """Call `write`, which writes `path`, in a thread until it succeeds; raises StorageError at the end.

        Only an OSError is followed by another try.
        """
        wait = AwayWait(self.wait_s)
        while True:
            try:
                await asyncio.to_thread(write)
                break
            except OSError as failure:
                why = failure.strerror or failure
                message = f"{path}: {why}: the run pauses until it can be written"
                if self.is_over() or not wait.may_go_on(message):
                    raise cannot_write(path, failure) from None
            await asyncio.sleep(PAUSE_S)
        waited_s = wait.end()
        if waited_s is not None:
            log.warning("%s: written after %.0f s", path, waited_s)
