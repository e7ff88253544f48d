"""A disk that takes nothing is waited for: a full one gets room, a mount comes back."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchrunner.output.run_dir import cannot_write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class DiskWait:
    """How long a disk is waited for."""

    wait_s: float
    in_a_hurry: Callable[[], bool] = lambda: False
    """Whether the run is to stop at once: then nothing is waited for."""

    async def do(self, path: Path, write: Callable[[], None]) -> None:
        """Write `path`, in a thread, again and again until it goes well; raises StorageError in the end."""
        failed_at: float | None = None
        while True:
            try:
                await asyncio.to_thread(write)
            except OSError as failure:
                if failed_at is None:
                    failed_at = time.monotonic()
                    log.warning("%s: %s: the run pauses until it can be written", path, failure.strerror)
                if self.in_a_hurry() or time.monotonic() - failed_at > self.wait_s:
                    raise cannot_write(path, failure) from None
                await asyncio.sleep(AGAIN_S)
            else:
                if failed_at is not None:
                    log.warning("%s: written after %.0f s", path, time.monotonic() - failed_at)
                return
