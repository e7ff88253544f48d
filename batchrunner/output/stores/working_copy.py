"""The working copy on this machine of a run in an object store."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchrunner.core.jsonfile import read_json
from batchrunner.output.files import make_directory, whole_file, write_json
from batchrunner.output.stores.run_objects import RunObjects, StoredObject

TRANSFERS = 8
"""Objects that are fetched at once."""
INDEX = ".store.json"
"""Name of the file in a working copy with the e_tags of what was fetched or published."""
_SEGMENT = re.compile(r"(tasks/[^/]+/journal-\d+-[0-9a-f]+)\.(\d{6})")
_NOT_COPIED = re.compile(r"merged/.*|given/.*|tune/.*|tasks/[^/]+/owner|\..*|report\.html")
"""Names that a working copy does not have from the store."""


class _GoneError(Exception):
    """An object was deleted since it was listed."""


class WorkingCopy:
    """Files that were fetched from a run's objects, or published as such."""

    def __init__(self, objects: RunObjects, root: Path) -> None:
        """`root` is the directory, which may not exist yet."""
        self.root = root
        self._objects = objects
        self._e_tags: dict[str, str] = read_json(root / INDEX)

    def note(self, name: str, e_tag: str) -> None:
        """Note that the file is the object with this e_tag."""
        self._e_tags[name] = e_tag

    def forget(self, name: str) -> None:
        """Note that there is no such object any more."""
        self._e_tags.pop(name, None)

    def fetch_all(self) -> list[str]:
        """Make the copy what the store has; return the names of all objects. Raises OSError.

        A file that this machine has published or fetched, and that the store has unchanged, stays. A journal
        that is here has at least the rows of its segments, and stays too.
        """
        found = self._objects.below()
        copied = {each.name: each for each in found if not _NOT_COPIED.fullmatch(each.name)}
        for name in self._e_tags.keys() - copied.keys():
            if not _NOT_COPIED.fullmatch(name):
                (self.root / name).unlink(missing_ok=True)
        segments = sorted(name for name in copied if _SEGMENT.fullmatch(name))
        wanted = [name for name, each in copied.items() if name not in segments and not self._has(each)]
        with ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(self.fetch, wanted))
        self._join_segments(segments)
        self._e_tags = {name: tag for name, tag in self._e_tags.items() if name in copied}
        self.save()
        return [each.name for each in found]

    def fetch(self, name: str) -> None:
        """Bring an object here; one that is gone meanwhile is left out. Raises OSError."""
        path = self.root / name
        make_directory(path.parent)
        with contextlib.suppress(_GoneError), whole_file(path) as temporary:
            e_tag = self._objects.download(name, temporary)
            if e_tag is None:
                raise _GoneError
            self.note(name, e_tag)

    def save(self) -> None:
        """Write down which objects are here; without that they are fetched again."""
        with contextlib.suppress(Exception):
            write_json(self.root / INDEX, self._e_tags)

    def _has(self, found: StoredObject) -> bool:
        return self._e_tags.get(found.name) == found.e_tag and (self.root / found.name).exists()

    def _join_segments(self, names: list[str]) -> None:
        journals: dict[str, list[str]] = {}
        for match in filter(None, map(_SEGMENT.fullmatch, names)):
            journals.setdefault(match[1], []).append(match[0])
        for journal, segments in journals.items():
            path = self.root / journal
            if not path.exists():
                make_directory(path.parent)
                with whole_file(path) as temporary, temporary.open("wb") as file:
                    for content in filter(None, map(self._objects.read, segments)):
                        file.write(content[0])
