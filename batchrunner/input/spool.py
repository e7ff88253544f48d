"""Keeps small objects of a store that were fetched once, in a file on this machine that has no name."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading

from batchrunner.core.files import cache_directory

SPOOL_BYTES = 2 << 30
"""Most bytes of all objects that are kept, and at most a quarter of the free space."""


class Spool:
    """Contents of objects by path and e_tag. Methods may be called from several threads."""

    def __init__(self) -> None:
        """Open nothing yet."""
        self._places: dict[tuple[str, str], tuple[int, int]] = {}
        self._file: int | None = None
        self._end = self._most = 0
        self._lock = threading.Lock()

    def keep(self, path: str, e_tag: str, content: memoryview) -> None:
        """Keep an object, if there is room; a disk that is full is no error."""
        with contextlib.suppress(OSError):
            begin = self._take(len(content))
            if begin is not None and self._file is not None:
                written = 0
                while written < len(content):
                    written += os.pwrite(self._file, content[written:], begin + written)
                with self._lock:
                    self._places[path, e_tag] = begin, len(content)

    def find(self, path: str, e_tag: str) -> bytes | None:
        """Return an object that is kept; None for another one."""
        place = self._places.get((path, e_tag))
        if place is None or self._file is None:
            return None
        begin, size = place
        content = os.pread(self._file, size, begin)
        return content if len(content) == size else None

    def _take(self, size: int) -> int | None:
        """Return the place for so many bytes; None where there is no room. Raises OSError."""
        with self._lock:
            if self._file is None:
                directory = cache_directory()
                directory.mkdir(parents=True, exist_ok=True)
                self._most = min(SPOOL_BYTES, shutil.disk_usage(directory).free // 4)
                with tempfile.TemporaryFile(dir=directory, prefix="spool-") as file:
                    self._file = os.dup(file.fileno())
            if self._end + size > self._most:
                return None
            begin, self._end = self._end, self._end + size
            return begin

    def __del__(self) -> None:
        """Give the space back."""
        if self._file is not None:
            os.close(self._file)
