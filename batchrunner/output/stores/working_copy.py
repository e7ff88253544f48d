"""The working copy on this machine of a run in an object store."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

from batchrunner.core.files import read_json
from batchrunner.core.processes import thread_pool
from batchrunner.output.files import make_directory, whole_file, write_json
from batchrunner.output.stores.copy_places import CopyPlaces
from batchrunner.output.stores.run_objects import RunObjects, StoredObject
from batchrunner.output.stores.tokens import recovered_tokens

TRANSFERS = 8
"""Objects that are fetched at once."""
INDEX = ".store.json"
"""Name of the file in a working copy with the e_tags of what was fetched or published."""
EVERYTHING = re.compile(r".*", re.DOTALL)
_JOURNAL = re.compile(r"tasks/(?P<task>[^/]+)/journal-\d+-(?P<token>[0-9a-f]+)")
_SEGMENT = re.compile(rf"(?P<journal>{_JOURNAL.pattern})\.\d{{6}}")
_NOT_COPIED = re.compile(r"merged/.*|given/.*|tune/.*|(tasks/[^/]+|leases)/owner|\..*|report\.html|probe-.*")
"""Names that a working copy does not have from the store."""


class _GoneError(Exception):
    """An object was deleted since it was listed."""


class WorkingCopy:
    """Files that were fetched from a run's objects, or published as such."""

    def __init__(self, objects: RunObjects, root: Path, places: CopyPlaces) -> None:
        """`root` is the directory, which may not exist yet; `places` those of this machine's tasks."""
        self.root = root
        self.places = places
        self._objects = objects
        self._e_tags: dict[str, str] = read_json(root / INDEX)
        self._turn = threading.Lock()

    def note(self, name: str, e_tag: str) -> None:
        """Note that the file is the object with this e_tag."""
        self._e_tags[name] = e_tag

    def published(self, name: str, e_tag: str) -> None:
        """Note that the file is the object with this e_tag, for the next start on this machine too."""
        self.note(name, e_tag)
        self._save()

    def forget(self, name: str) -> None:
        """Note that there is no such object any more."""
        self._e_tags.pop(name, None)

    def fetch_all(self, wanted: re.Pattern[str] = EVERYTHING) -> list[str]:
        """Make the files with wanted names what the store has; return the names of all objects.

        A file that this machine has published or fetched, and that the store has unchanged, stays. A journal
        that a task of this machine has left has at least the rows of its segments, and is taken instead.
        Raises OSError.
        """
        found = self._objects.below()
        names = {each.name for each in found}
        copied = [each for each in found if _is_wanted(each.name, wanted)]
        for name in [name for name in self._e_tags if name not in names and _is_wanted(name, wanted)]:
            (self.root / name).unlink(missing_ok=True)
            self.forget(name)
        segments = sorted(each.name for each in copied if _SEGMENT.fullmatch(each.name))
        changed = [each.name for each in copied if each.name not in segments and not self._has(each)]
        with thread_pool(TRANSFERS) as pool:
            list(pool.map(self.fetch, changed))
        self._bring_journals(segments, names, wanted)
        self._save()
        return sorted(names)

    def fetch(self, name: str) -> None:
        """Bring an object here; one that is gone meanwhile is left out. Raises OSError."""
        path = self.root / name
        make_directory(path.parent)
        with contextlib.suppress(_GoneError), whole_file(path) as temporary:
            e_tag = self._objects.download(name, temporary)
            if e_tag is None:
                raise _GoneError
            self.note(name, e_tag)

    def _save(self) -> None:
        """Write down which objects are here; without that they are fetched again."""
        with self._turn, contextlib.suppress(Exception):
            write_json(self.root / INDEX, dict(self._e_tags))

    def _has(self, found: StoredObject) -> bool:
        return self._e_tags.get(found.name) == found.e_tag and (self.root / found.name).exists()

    def _bring_journals(self, segments: list[str], names: Collection[str], wanted: re.Pattern[str]) -> None:
        """Bring the journals that hold rows which may be in no part yet."""
        published: dict[str, list[str]] = {}
        for found in filter(None, map(_SEGMENT.fullmatch, segments)):
            published.setdefault(found["journal"], []).append(found[0])
        tasks = {name.split("/")[1] for name in names if name.startswith("tasks/")}
        tasks |= {path.name for path in self.root.glob("tasks/*")}
        left = {f"tasks/{task}/{path.name}": path for task in tasks for path in self.places.journals(task)}
        here = {path.relative_to(self.root).as_posix() for path in self.root.glob("tasks/*/journal-*")}
        every = {*published, *left, *here}
        journals = [each for name in sorted(every) if (each := _JOURNAL.fullmatch(name))]
        journals = [each for each in journals if _is_wanted(each[0], wanted)]
        over = {task: self._over(task) for task in {each["task"] for each in journals}}
        for each in journals:
            name, is_over = each[0], each["token"] in over[each["task"]]
            if name in left and not is_over:
                self._copy_journal(left[name], self.root / name)
            elif name in published and not is_over:
                self._join_segments(self.root / name, published[name])
            else:
                (self.root / name).unlink(missing_ok=True)

    def _over(self, task: str) -> frozenset[str]:
        """Return the tokens of a task's holders whose rows are all in parts."""
        found = self._objects.read(f"tasks/{task}/owner")
        return frozenset() if found is None else recovered_tokens(found[0])

    def _copy_journal(self, journal: Path, path: Path) -> None:
        if journal != path:
            make_directory(path.parent)
            with contextlib.suppress(FileNotFoundError), whole_file(path) as temporary:
                shutil.copyfile(journal, temporary)

    def _join_segments(self, path: Path, segments: list[str]) -> None:
        make_directory(path.parent)
        with whole_file(path) as temporary, temporary.open("wb") as file:
            for content in filter(None, map(self._objects.read, segments)):
                file.write(content[0])


def _is_wanted(name: str, wanted: re.Pattern[str]) -> bool:
    return not _NOT_COPIED.fullmatch(name) and wanted.fullmatch(name) is not None
