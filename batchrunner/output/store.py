"""The store in which the files of a run are published: a file system, or an object store.

All paths are in the run's directory on this machine. Every method blocks. A method may raise OSError, and may
be called again after that.

The two classes differ because the stores do. A file system has links and renames, but no conditional writes,
and its files need no working copy. An object store has conditional writes, but no renames and no appending.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import threading
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from batchrunner.core.errors import JobError
from batchrunner.core.files import read_json
from batchrunner.core.processes import thread_pool
from batchrunner.output.files import link_new, link_part, make_directory, using_run, whole_file, write_json
from batchrunner.output.holder import OWNER, parse_holder

if TYPE_CHECKING:
    from batchrunner.output.objects import RunObjects

TRANSFERS = 8
"""Maximum number of objects that are fetched at the same time."""
INDEX = ".store.json"
"""File in a working copy with the ETag of each object that was fetched or published."""
_NOT_COPIED = re.compile(r"merged/.*|tune/.*|(tasks/[^/]+|leases)/owner|\..*|report\.html|probe-.*")
"""Matches objects that no working copy needs.

They are merged results, results of `batchrun tune`, the names of lock holders (`owner`), hidden files, the
HTML report, and probes of `check_sharing`.
"""


class Store:
    """Publishes the files of a run on a local or mounted file system, by links and renames.

    The argument `temporary` of a method is always a complete and synced file. The caller deletes it after the
    call if it still exists.
    """

    objects: RunObjects | None = None
    """The objects of the run; None for a run on a file system."""
    uri = ""
    """URI of the run; "" for a run on a file system."""
    input_place: Path | None = None
    """`bucket/key` of a run in an object store, in the form of input paths; None on a file system."""

    def check_sharing(self) -> None:
        """Raise JobError if several workers cannot share a run in this store. Leave nothing behind."""

    def names(self, directory: Path) -> list[str]:
        """Return the sorted names of the files in a directory that all workers share; [] if it is missing."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(directory))  # noqa: PTH208 - a path object for each name is slow
        return []

    def exists(self, path: Path) -> bool:
        """Tell whether any process has published this file."""
        return path.exists()

    def bring(self, path: Path, *, again: bool = False) -> None:
        """Fetch a published file if this machine lacks it; with `again`, in any case.

        If nobody has published the file, nothing happens.
        """

    def bring_results(self, tasks: Collection[str] | None = None) -> None:
        """Fetch the current run.json, and the part files of these workers (default: all).

        A part file is a Parquet file of results.
        """

    def journals(self, task_directory: Path, last: str | None = None) -> list[Path]:  # noqa: ARG002 - of a store
        """Return the journals of a worker on this machine, oldest first.

        In an object store, only the journals of the worker's last process are returned. `last` is its token
        (default: the token in `owner`). Rows in journals of earlier processes were computed again.
        """
        return sorted(task_directory.glob("journal-*"))

    def add(self, temporary: Path, path: Path) -> None:
        """Publish a file under a new name that only this worker uses.

        Raises FileExistsError if the name is taken.
        """
        link_part(temporary, path)

    def claim(self, temporary: Path, path: Path) -> None:
        """Publish a file under a new name for which several workers may compete.

        One of them succeeds. Raises FileExistsError for all others.
        """
        link_new(temporary, path)

    def replace(self, temporary: Path, path: Path) -> None:
        """Publish a file under a name, and replace any file with this name."""
        temporary.replace(path)

    def mark(self, path: Path) -> None:
        """Create an empty file, such as a beacon, whose name alone has a meaning.

        No other process creates a file of this name.
        """
        path.touch()

    def move(self, old: Path, new: Path) -> None:
        """Rename a file that `mark` has created.

        On a file system, raises FileNotFoundError if the file was deleted.
        """
        old.rename(new)

    def publish(self, path: Path) -> None:
        """Publish the current content of a file; replace its earlier content."""

    def publish_directory(self, directory: Path) -> None:
        """Publish the files of a directory, and replace all files that were published there before.

        The object `_SUCCESS` is written last, to tell readers that the directory is complete.
        """

    def remove(self, path: Path) -> None:
        """Delete a file if it exists."""
        path.unlink(missing_ok=True)

    def clear(self, names: re.Pattern[str]) -> None:
        """Delete the objects whose names, relative to the run's URI, match `names`.

        On a file system nothing happens, because the caller deletes local files itself.
        """

    def discard_copy(self, task: str) -> None:
        """Delete the working copy, with its journals, of a worker that will never run again."""


LOCAL = Store()


class ObjectStore(Store):
    """The files of a run as objects below its URI. Thread-safe.

    Each file is published by one request. Journals are not published; instead, part files are published
    often. The working copy on this machine has the files that were fetched or published.
    """

    def __init__(self, objects: RunObjects, root: Path, copies: Path) -> None:
        """Use `root` as the working copy of one worker; it need not exist yet.

        `copies` is the directory with the working copies of all workers on this machine.
        """
        self.objects: RunObjects = objects
        self.uri = str(objects.address)
        # This is the form of input paths in a store, so that both can be compared.
        self.input_place = Path(objects.address.bucket, objects.address.key)
        self._root = root
        self._copies = copies
        self._e_tags: dict[str, str] = read_json(root / INDEX)
        """ETags of the objects whose content equals the file in the working copy, by object name."""
        self._lock = threading.Lock()

    def check_sharing(self) -> None:
        """Raise JobError if the store ignores conditions of writes, which keep two workers apart.

        The writes are tried on a probe object, which is deleted.
        """
        name = f"probe-{secrets.token_hex(8)}"
        with using_run(f"output.path {self.uri}"):
            has_conditions = (
                self.objects.create(name, b"1") is not None
                and self.objects.create(name, b"2") is None
                and self.objects.swap(name, b"3", '"0"') is None  # The object has another ETag.
            )
            self.objects.delete([name])
        if not has_conditions:
            raise JobError(
                f"output.path {self.uri}: the store has no conditional writes, which --join needs",
                hint="run a single worker without --join, or use another store",
            )

    def names(self, directory: Path) -> list[str]:
        """Return the names of files in a directory, and of directories with files at any depth."""
        prefix = f"{self._name(directory)}/"
        objects = self.objects.below(prefix)
        return sorted({obj.name.removeprefix(prefix).partition("/")[0] for obj in objects})

    def exists(self, path: Path) -> bool:
        """Tell whether the object exists, by reading it."""
        return self.objects.read(self._name(path)) is not None

    def bring(self, path: Path, *, again: bool = False) -> None:
        """Fetch the object if the file is missing here; with `again`, in any case."""
        if again or not path.exists():
            self._fetch(self._name(path))

    def bring_results(self, tasks: Collection[str] | None = None) -> None:
        """Fetch run.json and the part files that have changed since this machine fetched them."""
        task = "[^/]+" if tasks is None else f"(?:{'|'.join(map(re.escape, tasks))})"
        self.bring_all(re.compile(rf"run\.json|parts/part-{task}-\d+\.parquet"))

    def journals(self, task_directory: Path, last: str | None = None) -> list[Path]:
        """Return the journals on this machine that a worker's last process has written, oldest first.

        A journal is never in the store, only in a working copy. `last` is the token of the last process; by
        default it is read from the store.
        """
        task = task_directory.name
        journals = sorted((self._copies / task / "tasks" / task).glob("journal-*"))
        if journals and last is None:
            holder = parse_holder(self.objects.look(f"tasks/{task}/{OWNER}")[0])
            last = holder.token if holder else None
        # The name of a journal ends with the token of its process.
        return [path for path in journals if path.name.endswith(f"-{last}")]

    def bring_all(self, pattern: re.Pattern[str]) -> None:
        """Make the local files whose names match `pattern` equal to their objects in the store.

        Objects that have changed are fetched, and files whose objects were deleted are deleted.
        """
        objects = [obj for obj in self.objects.below() if _is_copied(obj.name, pattern)]
        names_in_store = {obj.name for obj in objects}
        for name in [*self._e_tags]:
            if name not in names_in_store and _is_copied(name, pattern):
                (self._root / name).unlink(missing_ok=True)
                del self._e_tags[name]
        outdated = []
        for obj in objects:
            # The local file is up to date if its recorded ETag is that of the object.
            is_current = self._e_tags.get(obj.name) == obj.e_tag and (self._root / obj.name).exists()
            if not is_current:
                outdated.append(obj.name)
        with thread_pool(TRANSFERS) as pool:
            list(pool.map(self._fetch, outdated))  # Reading the results raises the first error.
        self._save()

    def _fetch(self, name: str) -> None:
        """Download an object into the working copy. Ignore an object that was deleted."""
        path = self._root / name
        make_directory(path.parent)
        with contextlib.suppress(FileNotFoundError), whole_file(path) as temporary:
            self._e_tags[name] = self.objects.download(name, temporary)

    def add(self, temporary: Path, path: Path) -> None:
        """Create the object, then the local file.

        If the object exists already, it is fetched into the working copy, where the caller can read it. Then
        FileExistsError is raised.
        """
        name = self._name(path)
        e_tag = self.objects.create(name, temporary.read_bytes())
        if e_tag is None:
            self._fetch(name)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        temporary.replace(path)
        self._note(name, e_tag)

    # Creating an object succeeds for only one of several competing workers, as `claim` requires.
    claim = add

    def replace(self, temporary: Path, path: Path) -> None:
        """Write the object, then the local file."""
        e_tag = self.objects.put(self._name(path), temporary)
        temporary.replace(path)
        self._note(self._name(path), e_tag)

    def mark(self, path: Path) -> None:
        """Create an empty object, without a file in the working copy."""
        self.objects.create(self._name(path), b"")

    def move(self, old: Path, new: Path) -> None:
        """Create an object with the new name, then delete the old object if it still exists."""
        self.mark(new)
        self.objects.delete([self._name(old)])

    def publish(self, path: Path) -> None:
        """Write the content of a local file to its object."""
        self._note(self._name(path), self.objects.put(self._name(path), path))

    def publish_directory(self, directory: Path) -> None:
        """Delete `_SUCCESS`, write the new objects, delete outdated objects, and write `_SUCCESS` again.

        For readers, the directory is complete while the object `_SUCCESS` exists.
        """
        prefix = f"{self._name(directory)}/"
        mark = f"{prefix}_SUCCESS"
        self.objects.delete([mark])
        names = {obj.name for obj in self.objects.below(prefix)}
        files = {self._name(path): path for path in sorted(directory.iterdir())}
        for name, path in files.items():
            self.objects.put(name, path)
        self.objects.delete(names - files.keys())
        self.objects.put(mark, b"")

    def remove(self, path: Path) -> None:
        """Delete the object, then the local file."""
        self._delete([self._name(path)])
        path.unlink(missing_ok=True)

    def clear(self, names: re.Pattern[str]) -> None:
        """Delete the objects whose names match, except the locks of workers."""
        matching = (obj.name for obj in self.objects.below() if names.fullmatch(obj.name))
        self._delete([name for name in matching if not name.endswith(f"/{OWNER}")])

    def discard_copy(self, task: str) -> None:
        """Delete the working copy of the run that a worker keeps on this machine; ignore errors."""
        shutil.rmtree(self._copies / task, ignore_errors=True)
        with contextlib.suppress(OSError):  # The directory may still have working copies of other workers.
            self._copies.rmdir()

    def _delete(self, names: list[str]) -> None:
        self.objects.delete(names)
        for name in names:
            self._e_tags.pop(name, None)

    def _note(self, name: str, e_tag: str) -> None:
        """Record in memory and on disk that an object with this ETag equals its local file."""
        self._e_tags[name] = e_tag
        self._save()

    def _save(self) -> None:
        """Write the ETags to INDEX. Ignore errors: the next start then only fetches more objects."""
        with self._lock, contextlib.suppress(Exception):
            write_json(self._root / INDEX, dict(self._e_tags))

    def _name(self, path: Path) -> str:
        """Return the name of the object of a local file, relative to the run's URI."""
        return path.relative_to(self._root).as_posix()


def _is_copied(name: str, pattern: re.Pattern[str]) -> bool:
    return not _NOT_COPIED.fullmatch(name) and pattern.fullmatch(name) is not None
