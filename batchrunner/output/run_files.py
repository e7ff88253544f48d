"""Refuses a run directory in which something else lies where a file of the run should be."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from batchrunner.core.errors import ResumeError
from batchrunner.core.files import is_special

_FILES = re.compile(
    r"run\.json|report\.(json|html)|events\.jsonl|engine[^/]*\.log|parts/part-.+\.parquet|leases/.+"
    r"|tasks/[^/]+/.+|merged/merged-.+\.parquet|given/rows\.parquet|tune/[^/]+\.(jsonl?|log|yaml|parquet)"
)
"""Names that a run gives to files which it reads later; some of them may be work directories."""
_DIRECTORIES = ("parts", "leases", "merged", "given", "tune")
_NO_DIRECTORIES = re.compile(r"run\.json|parts/part-.+\.parquet|tasks/[^/]+/(journal-.+|owner|heartbeat)")
"""Those of them that no directory may have."""


def refuse_other_than_files(run: Path) -> None:
    """Raise ResumeError where a name of a run's files is a pipe, a socket, a device or a directory.

    Whoever opened a pipe would wait for ever. Looks at names only, and opens nothing.
    """
    for entry in _entries(run):
        name = Path(entry.path).relative_to(run).as_posix()
        if not _FILES.fullmatch(name) or entry.is_file(follow_symlinks=False):
            continue
        if _is_special(Path(entry.path)):
            raise ResumeError(
                f"{entry.path}: is a pipe, a socket or a device, and no file", hint="move it away"
            )
        if entry.is_dir() and _NO_DIRECTORIES.fullmatch(name):
            raise ResumeError(f"{entry.path}: is a directory, and no file", hint="move it away")


def _is_special(path: Path) -> bool:
    with contextlib.suppress(OSError):  # it is not accessible: whoever needs it says so
        return is_special(path)
    return False


def _entries(run: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what lies in a run directory and in the directories that a run makes there."""
    tasks = [Path(entry.path) for entry in _listed(run / "tasks")]
    for directory in (run, *(run / name for name in _DIRECTORIES), *tasks):
        yield from _listed(directory)


def _listed(directory: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            yield from found
    except (OSError, ValueError):  # it is missing, not accessible, or no path: whoever needs it says so
        return
