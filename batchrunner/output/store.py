"""Where the files of a run become visible: the local file system, or an object store with a copy here.

All paths are those of files in the run's directory on this machine. Every method blocks and may raise
OSError, and may then be repeated.
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
"""Objects that are fetched at once."""
INDEX = ".store.json"
"""Name of the file in a working copy with the e_tags of what was fetched or published."""
_NOT_COPIED = re.compile(r"merged/.*|tune/.*|(tasks/[^/]+|leases)/owner|\..*|report\.html|probe-.*")
"""Names that a working copy does not have from the store."""


class Store:
    """The local file system, or one that is mounted: names are given by links and renames.

    `temporary` is a whole file on this machine, which is synced, and is gone afterwards or may be deleted.
    """

    objects: RunObjects | None = None
    """The objects of the run; None where its files are on the file systems of this machine."""
    uri = ""
    """URI of the run; "" where it is local."""
    input_place: Path | None = None
    """Directory of the run as the paths of input files have it, `bucket/key`; None where it is local."""

    def check_sharing(self) -> None:
        """Raise JobError where several tasks cannot write at once; leaves nothing behind."""

    def names(self, directory: Path) -> list[str]:
        """Return the sorted names in a directory, whoever published the files; none where there is none."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in directory.iterdir())
        return []

    def exists(self, path: Path) -> bool:
        """Tell whether a file was published, whoever did it."""
        return path.exists()

    def size(self, path: Path) -> int:
        """Return the bytes of a file that was published; raises FileNotFoundError."""
        return path.stat().st_size

    def bring(self, path: Path, *, again: bool = False) -> None:
        """Bring a file here that was published, unless it is here; with `again` as it is now.

        Where there is none, nothing is done.
        """

    def bring_results(self, tasks: Collection[str] | None = None) -> None:
        """Bring run.json, and the parts of these tasks or of all, here as they are now."""

    def journals(self, task_directory: Path, last: str | None = None) -> list[Path]:  # noqa: ARG002 - of a store
        """Return the journals of a task that this machine has, oldest first.

        In a store only its last holder's, whose token is `last`, by default that in `owner`: what others left
        is done again by those who came after them.
        """
        return sorted(task_directory.glob("journal-*"))

    def add(self, temporary: Path, path: Path) -> None:
        """Give a file a name that no file has; raises FileExistsError. No other task uses this name."""
        link_part(temporary, path)

    def claim(self, temporary: Path, path: Path) -> None:
        """Do as `add`, where several tasks may use the name at once: one of them succeeds."""
        link_new(temporary, path)

    def replace(self, temporary: Path, path: Path) -> None:
        """Give a file a name, also in place of a file that has it."""
        temporary.replace(path)

    def publish(self, path: Path) -> None:
        """Publish a file as it is now, also in place of an earlier state of it."""

    def publish_directory(self, directory: Path) -> None:
        """Publish the files of a directory in place of all that were there; `_SUCCESS` comes last."""

    def remove(self, path: Path) -> None:
        """Delete a file, where it is there."""
        path.unlink(missing_ok=True)

    def clear(self, names: re.Pattern[str]) -> None:
        """Delete what was published under names like these, relative to the run's directory.

        What is on this machine is deleted by the caller.
        """

    def discard_copy(self, task: str) -> None:
        """Delete the working copy of a task that will not come back, with its journals."""


LOCAL = Store()


class ObjectStore(Store):
    """The files of a run as objects below its URI. Methods may be called from several threads.

    Each file is published by one request. Journals are not: there parts come often. The working copy has the
    files that were fetched, or published as such.
    """

    def __init__(self, objects: RunObjects, root: Path, copies: Path) -> None:
        """`root` is the working copy, which may not exist; those of this machine's tasks are in `copies`."""
        self.objects: RunObjects = objects
        self.uri = str(objects.address)
        self.input_place = Path(objects.address.bucket, objects.address.key)
        self._root = root
        self._copies = copies
        self._e_tags: dict[str, str] = read_json(root / INDEX)
        self._sizes: dict[str, int] = {}  # of objects that were listed
        self._turn = threading.Lock()

    def check_sharing(self) -> None:
        """Try what keeps tasks apart on an object of no other use."""
        name = f"probe-{secrets.token_hex(8)}"
        with using_run(f"output.path {self.uri}"):
            created = self.objects.create(name, b"1")
            is_kept = self.objects.create(name, b"2") is None and self.objects.swap(name, b"3", '"0"') is None
            self.objects.delete([name])
        if not (created and is_kept):
            raise JobError(
                f"output.path {self.uri}: the store has no conditional writes, which --join needs",
                hint="run one task, or take another store",
            )

    def names(self, directory: Path) -> list[str]:
        """List the objects: files, and directories at any depth above files."""
        top = f"{self._name(directory)}/"
        found = self.objects.below(top)
        with self._turn:
            self._sizes.update((each.name, each.size) for each in found)
        return sorted({each.name.removeprefix(top).partition("/")[0] for each in found})

    def exists(self, path: Path) -> bool:
        """Ask for the object."""
        return self.objects.read(self._name(path)) is not None

    def size(self, path: Path) -> int:
        """Return the size in the last listing, or of the file that is brought here."""
        with self._turn:
            known = self._sizes.get(self._name(path))
        if known is None:
            self.bring(path)
            known = path.stat().st_size
        return known

    def bring(self, path: Path, *, again: bool = False) -> None:
        """Fetch the object."""
        if again or not path.exists():
            self._fetch(self._name(path))

    def bring_results(self, tasks: Collection[str] | None = None) -> None:
        """Fetch what changed."""
        of = "[^/]+" if tasks is None else f"(?:{'|'.join(map(re.escape, tasks))})"
        self.bring_all(re.compile(rf"run\.json|parts/part-{of}-\d+\.parquet"))

    def journals(self, task_directory: Path, last: str | None = None) -> list[Path]:
        """Return those in the working copy of the task itself."""
        task = task_directory.name
        found = sorted((self._copies / task / "tasks" / task).glob("journal-*"))
        if found and last is None:
            holder = parse_holder(self.objects.look(f"tasks/{task}/{OWNER}")[0])
            last = holder.token if holder else None
        return [path for path in found if path.name.endswith(f"-{last}")]

    def bring_all(self, wanted: re.Pattern[str]) -> None:
        """Make the files with wanted names what the store has.

        A file that this machine has published or fetched, and that the store has unchanged, stays.
        """
        found = [each for each in self.objects.below() if _is_wanted(each.name, wanted)]
        names = {each.name for each in found}
        for name in [name for name in self._e_tags if name not in names and _is_wanted(name, wanted)]:
            (self._root / name).unlink(missing_ok=True)
            del self._e_tags[name]
        changed = [
            each.name
            for each in found
            if self._e_tags.get(each.name) != each.e_tag or not (self._root / each.name).exists()
        ]
        with thread_pool(TRANSFERS) as pool:
            list(pool.map(self._fetch, changed))
        self._save()

    def _fetch(self, name: str) -> None:
        """Bring an object here; one that is gone is left out."""
        path = self._root / name
        make_directory(path.parent)
        with contextlib.suppress(FileNotFoundError), whole_file(path) as temporary:
            self._e_tags[name] = self.objects.download(name, temporary)

    def add(self, temporary: Path, path: Path) -> None:
        """Create the object; where another one has the name, that one comes into the working copy."""
        name = self._name(path)
        e_tag = self.objects.create(name, temporary.read_bytes())
        if e_tag is None:
            self._fetch(name)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        temporary.replace(path)
        self._note(name, e_tag)

    claim = add

    def replace(self, temporary: Path, path: Path) -> None:
        """Write the object, then the file."""
        e_tag = self.objects.put(self._name(path), temporary)
        temporary.replace(path)
        self._note(self._name(path), e_tag)

    def publish(self, path: Path) -> None:
        """Write the object."""
        self._note(self._name(path), self.objects.put(self._name(path), path))

    def publish_directory(self, directory: Path) -> None:
        """Delete the mark, write the new files, delete the other old ones, and set the mark again."""
        top = self._name(directory)
        mark = f"{top}/_SUCCESS"
        self.objects.delete([mark])
        old = {found.name for found in self.objects.below(f"{top}/")}
        files = {self._name(path): path for path in sorted(directory.iterdir())}
        for name, path in files.items():
            self.objects.put(name, path)
        self.objects.delete(old - files.keys())
        self.objects.put(mark, b"")

    def remove(self, path: Path) -> None:
        """Delete the object, then the file."""
        self._delete([self._name(path)])
        path.unlink(missing_ok=True)

    def clear(self, names: re.Pattern[str]) -> None:
        """Delete the objects with names like these, but no locks."""
        found = (each.name for each in self.objects.below() if names.fullmatch(each.name))
        self._delete([name for name in found if not name.endswith(f"/{OWNER}")])

    def discard_copy(self, task: str) -> None:
        """Delete the directory; errors are ignored."""
        shutil.rmtree(self._copies / task, ignore_errors=True)
        with contextlib.suppress(OSError):  # other tasks have copies there
            self._copies.rmdir()

    def _delete(self, names: list[str]) -> None:
        self.objects.delete(names)
        for name in names:
            self._e_tags.pop(name, None)

    def _note(self, name: str, e_tag: str) -> None:
        """Note that the file is the object with this e_tag, for the next start on this machine too."""
        self._e_tags[name] = e_tag
        self._save()

    def _save(self) -> None:
        """Write down which objects are here; without that they are fetched again."""
        with self._turn, contextlib.suppress(Exception):
            write_json(self._root / INDEX, dict(self._e_tags))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def _is_wanted(name: str, wanted: re.Pattern[str]) -> bool:
    return not _NOT_COPIED.fullmatch(name) and wanted.fullmatch(name) is not None
