"""Where the files of a run become visible: the local file system, or an object store.

All paths are those of files in the run's directory on this machine.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from batchrunner.output.files import link_new, link_part


class Store(Protocol):
    """Where files are published whole. Every method blocks and may raise OSError, and may then be repeated.

    `temporary` is a whole file on this machine, which is synced, and is gone afterwards or may be deleted.
    """

    @property
    def is_local(self) -> bool:
        """Whether what is published is on this machine's file systems."""

    def add(self, temporary: Path, path: Path) -> None:
        """Give a file a name that no file has; raises FileExistsError. No other task uses this name."""

    def claim(self, temporary: Path, path: Path) -> None:
        """Do as `add`, where several tasks may use the name at once: one of them succeeds."""

    def replace(self, temporary: Path, path: Path) -> None:
        """Give a file a name, also in place of a file that has it."""

    def remove(self, path: Path) -> None:
        """Delete a file, and what was published of it piece by piece, where it is there."""

    def clear(self, names: re.Pattern[str]) -> None:
        """Delete what was published under names like these, relative to the run's directory.

        What is on this machine is deleted by the caller.
        """


class LocalStore:
    """The local file system, or one that is mounted: names are given by links and renames."""

    is_local = True

    def add(self, temporary: Path, path: Path) -> None:
        """Link the file, or rename it where the file system has no hard links."""
        link_part(temporary, path)

    def claim(self, temporary: Path, path: Path) -> None:
        """Link the file."""
        link_new(temporary, path)

    def replace(self, temporary: Path, path: Path) -> None:
        """Rename the file."""
        temporary.replace(path)

    def remove(self, path: Path) -> None:
        """Unlink the file."""
        path.unlink(missing_ok=True)

    def clear(self, names: re.Pattern[str]) -> None:
        """Do nothing: all of it is on this machine."""


LOCAL = LocalStore()
