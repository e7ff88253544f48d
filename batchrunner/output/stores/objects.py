"""An object store as the `Store` of a run: its files lie under a URI, with a working copy on this machine.

Each file is published by one request. A journal is published in segments, `journal-000003-TOKEN.000000`,
`.000001` and so on, which together are the journal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
from collections.abc import Collection
from pathlib import Path

from batchrunner.core.errors import JobError, OutputError
from batchrunner.output.stores.run_objects import RunObjects
from batchrunner.output.stores.working_copy import WorkingCopy

_OTHER_RUN = re.compile(r"(?!tune/)(?:[^/]+/)+run\.json")
"""Name of another run's file below the URI of a run."""


class ObjectStore:
    """The files of a run as objects. Methods may be called from several threads."""

    def __init__(self, objects: RunObjects, copy: WorkingCopy) -> None:
        """Send nothing."""
        self.objects = objects
        self.copy = copy
        self.uri = str(objects.address)
        self._sizes: dict[str, int] = {}  # of objects that were listed
        self._turn = threading.Lock()

    @property
    def input_place(self) -> Path:
        """Directory of the run as the paths of input files have it."""
        return Path(self.objects.address.bucket, self.objects.address.key)

    def check(self) -> None:
        """Raise OutputError where the store cannot be listed, or another run's URI is above or below."""
        try:
            names = (found.name for found in self.objects.below())
            inner = next((name.rpartition("/")[0] for name in names if _OTHER_RUN.fullmatch(name)), None)
            outer = next(filter(self._is_run, self._above()), None)
        except OSError as failure:
            raise OutputError(f"output.path {self.uri}: cannot be used: {failure.strerror}") from None
        if inner is not None:
            raise OutputError(
                f"output.path {self.uri}: holds the output path of another run, {inner}",
                hint="give another URI",
            )
        if outer is not None:
            raise OutputError(
                f"output.path {self.uri}: lies in the output path of another run, {outer or 'the bucket'}",
                hint="give a URI outside of it",
            )

    def check_sharing(self) -> None:
        """Try what keeps tasks apart on an object of no other use."""
        name = f"probe-{secrets.token_hex(8)}"
        try:
            created = self.objects.create(name, b"1")
            is_kept = self.objects.create(name, b"2") is None
            is_same = self.objects.swap(name, b"3", '"0"') is None
            swapped = self.objects.swap(name, b"4", created or "")
        except OSError as failure:
            raise OutputError(f"output.path {self.uri}: cannot be written: {failure.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                self.objects.delete([name])
        if not (created and is_kept and is_same and swapped):
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
            self.copy.fetch(self._name(path))

    def bring_results(self, tasks: Collection[str] | None = None) -> None:
        """Fetch what changed."""
        of = "[^/]+" if tasks is None else f"(?:{'|'.join(map(re.escape, tasks))})"
        self.copy.fetch_all(re.compile(rf"run\.json|parts/part-{of}-\d+\.parquet|tasks/{of}/journal-[^/]+"))

    def add(self, temporary: Path, path: Path) -> None:
        """Create the object; where another one has the name, that one comes into the working copy."""
        name = self._name(path)
        e_tag = self.objects.create(name, temporary.read_bytes())
        if e_tag is None:
            self.copy.fetch(name)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        temporary.replace(path)
        self.copy.published(name, e_tag)

    def claim(self, temporary: Path, path: Path) -> None:
        """Create the object, as `add` does."""
        self.add(temporary, path)

    def replace(self, temporary: Path, path: Path) -> None:
        """Write the object, then the file."""
        e_tag = self.objects.put(self._name(path), temporary)
        temporary.replace(path)
        self.copy.published(self._name(path), e_tag)

    def add_segment(self, path: Path, number: int, content: bytes) -> None:
        """Create the object of a segment."""
        name = f"{self._name(path)}.{number:06d}"
        if self.objects.create(name, content) is None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.objects.uri(name))

    def publish(self, path: Path) -> None:
        """Write the object."""
        self.copy.published(self._name(path), self.objects.put(self._name(path), path))

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
        """Delete the object, its segments, and then the file."""
        name = self._name(path)
        segments = [found.name for found in self.objects.below(f"{name}.")]
        self.objects.delete([name, *segments])
        self.copy.forget(name)
        path.unlink(missing_ok=True)

    def clear(self, names: re.Pattern[str]) -> None:
        """Delete the objects with names like these."""
        found = [each.name for each in self.objects.below() if names.fullmatch(each.name)]
        self.objects.delete(found)
        for name in found:
            self.copy.forget(name)

    def discard_copy(self, task: str) -> None:
        """Delete the directory."""
        self.copy.places.discard(task)

    def _above(self) -> list[str]:
        """Return the keys of which this one may be a part; "" is the bucket."""
        parts = self.objects.address.key.split("/")
        return ["/".join(parts[:count]) for count in range(len(parts))]

    def _is_run(self, key: str) -> bool:
        content = self.objects.read_above("/".join(filter(None, (key, "run.json"))))
        return content is not None and b'"fingerprint"' in content

    def _name(self, path: Path) -> str:
        return path.relative_to(self.copy.root).as_posix()
