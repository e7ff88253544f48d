"""Publishes the logs of a run in an object store, which cannot be appended to: whole, again and again."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from batchrunner.core.timing import TIMING
from batchrunner.output.run_dir import RunDir

log = logging.getLogger(__name__)

BYTES_PER_S = 256 << 10
"""Most bytes of a log a second: a log that has grown to 100 MB is published every seven minutes."""


@contextlib.contextmanager
def uploading_logs(run_dir: RunDir) -> Iterator[None]:
    """Publish the event log and the engines' logs of a task during the block, and at its end.

    A failure is logged: the rows are what matters. On a local file system nothing is done.
    """
    if run_dir.store.objects is None:
        yield
        return
    upload, ended = _LogUpload(run_dir), threading.Event()
    thread = threading.Thread(target=upload.run, args=(ended,), name="logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        upload.publish_changed(at_end=True)


class _LogUpload:
    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._published: dict[Path, tuple[int, float]] = {}  # size, and when
        self._has_failed = False

    def run(self, ended: threading.Event) -> None:
        while not ended.wait(TIMING.log_upload):
            self.publish_changed()

    def publish_changed(self, *, at_end: bool = False) -> None:
        logs = self._run_dir.log_directory
        for path in (self._run_dir.events, *sorted(logs.glob("*.log"))):
            with contextlib.suppress(FileNotFoundError):
                size, now = path.stat().st_size, time.monotonic()
                before, at = self._published.get(path, (0, 0.0))
                is_due = at_end or not at or now - at >= size / BYTES_PER_S
                if size != before and is_due and self._publish(path):
                    self._published[path] = size, now

    def _publish(self, path: Path) -> bool:
        try:
            self._run_dir.store.publish(path)
        except OSError as failure:
            if not self._has_failed:
                log.warning("%s: was not uploaded: %s", path.name, failure)
            self._has_failed = True
            return False
        return True
