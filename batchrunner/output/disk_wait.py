"""Repeats writes that fail until the disk accepts them: a full disk gets space, a mount comes back."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_fixed

from batchrunner.output.files import cannot_write, is_for_good

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Seconds between two tries of a write."""


class StopRequest(Protocol):
    """The user's wish to end the run."""

    @property
    def at_once(self) -> bool:
        """Whether the run is to end without waiting for anything."""


@dataclass(frozen=True, slots=True)
class DiskWait:
    """How long a failing write is repeated."""

    wait_s: float
    """Seconds after the first failure, from `limits.disk_wait`."""
    stop_request: StopRequest | None = None
    """Ends the wait early."""

    async def write(self, path: Path, write: Callable[[], None]) -> None:
        """Call `write`, which writes `path`, in a thread until it succeeds; raises StorageError at the end.

        Only an OSError that may pass is followed by another try.
        """
        failed_at: float | None = None

        def gives_up(_: RetryCallState) -> bool:
            if self.stop_request is not None and self.stop_request.at_once:
                return True
            return failed_at is not None and time.monotonic() - failed_at > self.wait_s

        def note_failure(state: RetryCallState) -> None:
            nonlocal failed_at
            if failed_at is None:
                failed_at = time.monotonic()
                why = getattr(state.outcome and state.outcome.exception(), "strerror", None)
                log.warning("%s: %s: the run pauses until it can be written", path, why)

        retrying = AsyncRetrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_fixed(PAUSE_S),
            stop=gives_up,
            before_sleep=note_failure,
            reraise=True,
        )
        try:
            await retrying(asyncio.to_thread, write)
        except OSError as failure:
            raise cannot_write(path, failure) from None
        if failed_at is not None:
            log.warning("%s: written after %.0f s", path, time.monotonic() - failed_at)


def _may_pass(failure: BaseException) -> bool:
    return isinstance(failure, OSError) and not is_for_good(failure)
