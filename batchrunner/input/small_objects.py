"""Small objects of a store: each is fetched once, kept on this machine, and asked for before each reading."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from batchrunner.input.spool import Spool

CHECKED_AHEAD = 16
"""Objects that are asked for ahead of the one that is read."""


class WholeObject(Protocol):
    """An object as it was when it was opened. Methods raise OSError, also where it has changed."""

    @property
    def e_tag(self) -> str:
        """Changes whenever the object is replaced."""

    def fetch_all(self) -> memoryview:
        """Return its content."""

    def check(self) -> None:
        """Do nothing where it has not changed."""


class SmallObjects:
    """The small objects of an input, by path. Methods may be called from several threads."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        """`pool` asks for objects ahead."""
        self._pool = pool
        self._spool = Spool()
        self._kept: dict[str, WholeObject] = {}
        self._sorted: Sequence[str] = ()
        self._checks: dict[str, Future[None]] = {}  # of objects that will soon be read
        self._lock = threading.Lock()

    def find(self, path: str, e_tag: str) -> bytes | None:
        """Return an object that is kept; None for another one."""
        return self._spool.find(path, e_tag)

    def read(self, path: str, found: WholeObject) -> bytes | memoryview:
        """Return the content of an object; raises OSError, also where it has changed since it was kept."""
        kept = self._spool.find(path, found.e_tag)
        if kept is not None:
            self._check(path)
            return kept
        content = found.fetch_all()
        self._spool.keep(path, found.e_tag, content)
        with self._lock:
            self._kept[path] = found
        return content

    def _check(self, path: str) -> None:
        with self._lock:
            if len(self._sorted) != len(self._kept):
                self._sorted = sorted(self._kept)
            at = bisect_right(self._sorted, path)
            for later in (path, *self._sorted[at : at + CHECKED_AHEAD]):
                if later not in self._checks:
                    self._checks[later] = self._pool.submit(self._kept[later].check)
            asked = self._checks.pop(path)
        asked.result()
