"""Where the files of a run become visible: the local file system, or an object store.

All paths are those of files in the run's directory on this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from batchrunner.output.files import link_new, link_part


class ConditionalObjects(Protocol):
    """Objects that are written on a condition. Methods raise OSError."""

    def create(self, name: str, content: bytes) -> str | None:
        """Create an object and return its e_tag; None where another one has the name."""

    def swap(self, name: str, content: bytes, e_tag: str) -> str | None:
        """Replace an object that still has this e_tag; return the new one, None where it has another."""

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return an object's content and e_tag; None where there is none."""


class Store(Protocol):
    """Where files are published whole. Every method blocks and may raise OSError, and may then be repeated.

    `temporary` is a whole file on this machine, which is synced, and is gone afterwards or may be deleted.
    """

    @property
    def objects(self) -> ConditionalObjects | None:
        """The objects of the run; None where its files are on the file systems of this machine."""

    @property
    def uri(self) -> str:
        """URI of the run; "" where it is local."""

    @property
    def input_place(self) -> Path | None:
        """Directory of the run as the paths of input files have it, `bucket/key`; None where it is local."""

    def check(self) -> None:
        """Raise OutputError where results cannot be written; changes nothing."""

    def check_sharing(self) -> None:
        """Raise JobError where several tasks cannot write at once; leaves nothing behind."""

    def names(self, directory: Path) -> list[str]:
        """Return the sorted names in a directory, whoever published the files; none where there is none."""

    def size(self, path: Path) -> int:
        """Return the bytes of a file that was published; raises FileNotFoundError."""

    def bring(self, path: Path, *, again: bool = False) -> None:
        """Bring a file here that was published, unless it is here; with `again` as it is now.

        Where there is none, nothing is done.
        """

    def bring_results(self, tasks: Collection[str] | None = None) -> None:
        """Bring run.json, and the parts and journals of these tasks or of all, here as they are now."""

    def add(self, temporary: Path, path: Path) -> None:
        """Give a file a name that no file has; raises FileExistsError. No other task uses this name."""

    def claim(self, temporary: Path, path: Path) -> None:
        """Do as `add`, where several tasks may use the name at once: one of them succeeds."""

    def replace(self, temporary: Path, path: Path) -> None:
        """Give a file a name, also in place of a file that has it."""

    def add_segment(self, path: Path, number: int, content: bytes) -> None:
        """Publish the next piece of a file that grows, counted from 0; `path` is that of the file."""

    def publish(self, path: Path) -> None:
        """Publish a file as it is now, also in place of an earlier state of it."""

    def publish_directory(self, directory: Path) -> None:
        """Publish the files of a directory in place of all that were there; `_SUCCESS` comes last."""

    def remove(self, path: Path) -> None:
        """Delete a file, and what was published of it piece by piece, where it is there."""

    def clear(self, names: re.Pattern[str]) -> None:
        """Delete what was published under names like these, relative to the run's directory.

        What is on this machine is deleted by the caller.
        """

    def discard_copy(self, task: str) -> None:
        """Delete the working copy of a task that will not come back, with its journals."""


class LocalStore:
    """The local file system, or one that is mounted: names are given by links and renames."""

    objects = None
    uri = ""
    input_place = None

    def check(self) -> None:
        """Do nothing: the run directory is looked at by its owner."""

    def check_sharing(self) -> None:
        """Do nothing: links and renames are enough."""

    def names(self, directory: Path) -> list[str]:
        """List the directory."""
        try:
            return sorted(entry.name for entry in os.scandir(directory))
        except FileNotFoundError:
            return []

    def size(self, path: Path) -> int:
        """Return the size of the file."""
        return path.stat().st_size

    def bring(self, path: Path, *, again: bool = False) -> None:
        """Do nothing: each file is visible, as in the next method."""

    def bring_results(self, tasks: Collection[str] | None = None) -> None:
        """Do nothing."""

    def add(self, temporary: Path, path: Path) -> None:
        """Link the file, or rename it where the file system has no hard links."""
        link_part(temporary, path)

    def claim(self, temporary: Path, path: Path) -> None:
        """Link the file."""
        link_new(temporary, path)

    def replace(self, temporary: Path, path: Path) -> None:
        """Rename the file."""
        temporary.replace(path)

    def add_segment(self, path: Path, number: int, content: bytes) -> None:
        """Do nothing: the file itself is visible, as in the next two methods."""

    def publish(self, path: Path) -> None:
        """Do nothing."""

    def publish_directory(self, directory: Path) -> None:
        """Do nothing."""

    def remove(self, path: Path) -> None:
        """Unlink the file."""
        path.unlink(missing_ok=True)

    def clear(self, names: re.Pattern[str]) -> None:
        """Do nothing: all of it is on this machine."""

    def discard_copy(self, task: str) -> None:
        """Do nothing: there is no copy."""


LOCAL = LocalStore()
