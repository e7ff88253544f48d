"""Files that are whole or not there: the run directory's layout, atomic writes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from batchrunner.core.errors import OutputError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TEMPORARY = ".tmp"
"""What ends the name of a file that is not whole yet; a dot before it hides it from readers of the parts."""
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system says that knows no hard links: exFAT, SMB, FUSE."""
LEAST_FREE_BYTES = 16 << 20
"""A run does not start on a disk with less room than this."""


_PART = re.compile(r"part-(.+)-(\d{6,})\.parquet")
"""A part's name: its task and its number."""
MAIN_TASK = "main"
"""A run that is not parted among several tasks is one task."""
OF_A_TASK = (
    "journal-*",
    "events.jsonl",
    "report.json",
    "report.html",
    "engine*.log",
    "owner*",
    "heartbeat",
    "*order-*.parquet*",
)
"""What a task leaves in its directory, and, of a run that is one task, partly in the run's."""


class RunDir:
    """Where everything of one run lies, as one of its tasks sees it."""

    def __init__(self, path: str | Path, task: str = MAIN_TASK) -> None:
        self.path = Path(path).expanduser()
        self.task = task
        self.tasks = self.path / "tasks"
        self.task_directory = self.tasks / task
        self.parts = self.path / "parts"
        self.leases = self.path / "leases"
        self.merged = self.path / "merged"
        self.run_json = self.path / "run.json"
        self.own = self.path if task == MAIN_TASK else self.task_directory
        """Where the task's account lies: its events, its report, its engine's log."""
        self.report_json = self.own / "report.json"
        self.report_html = self.own / "report.html"
        self.events = self.own / "events.jsonl"

    def all_tasks(self) -> list[RunDir]:
        """Return the run as each of its tasks sees it: those with a directory, and those with parts."""
        names = {path.name for path in self.tasks.glob("*") if not _is_empty(path)}
        names |= {task for part in self.all_parts() if (task := _task_of(part))}
        return [RunDir(self.path, name) for name in sorted(names)]

    def all_parts(self) -> list[Path]:
        """Return the parts of all tasks, oldest first; a file that is named in another way is not ours."""
        return sorted(filter(_task_of, self.parts.glob("part-*.parquet")))

    def part(self, number: int) -> Path:
        """Return the path of a part of this task."""
        return self.parts / f"part-{self.task}-{number:06d}.parquet"

    def own_parts(self) -> list[Path]:
        """Return this task's parts, oldest first."""
        found = self.parts.glob(f"part-{self.task}-*.parquet")
        return sorted(part for part in found if _task_of(part) == self.task)

    def journal(self, number: int, token: str) -> Path:
        """Return the path of the journal that becomes the part of this number; `token` is its writer's."""
        return self.task_directory / f"journal-{number:06d}-{token}"

    def journals(self) -> list[Path]:
        """Return this task's journals, oldest first."""
        return sorted(self.task_directory.glob("journal-*"))

    def check_writable(self) -> None:
        """Raise OutputError where results could not be written here; changes nothing."""
        place = self.path
        try:
            while not place.exists():
                place = place.parent
        except OSError as failure:  # a name that is too long, a directory that may not be entered
            raise OutputError(f"output.path {self.path}: {failure.strerror}") from None
        if not place.is_dir():
            raise OutputError(f"output.path {self.path}: {place} is a file: give a directory")
        if not os.access(place, os.W_OK | os.X_OK):
            raise OutputError(f"output.path {self.path}: {place} is not writable")
        self.refuse_links()
        disk = shutil.disk_usage(place)
        if disk.total and disk.free < LEAST_FREE_BYTES:  # /proc and its like have no size at all
            raise OutputError(f"output.path {self.path}: the disk is full ({disk.free >> 20} MiB free)")

    def refuse_links(self) -> None:
        """Raise OutputError where what we write here would land elsewhere, behind a link."""
        own = (self.parts, self.tasks, self.leases, self.merged, self.merged.with_name("merged.tmp"))
        for path in (*own, *self.tasks.glob("*"), *self.own.glob("*.log"), self.events):
            if path.is_symlink():
                raise OutputError(
                    f"{path}: is a symbolic link, and results are written into output.path only: remove it"
                )

    def discard_merged(self) -> None:
        """Delete a merged dataset, which new rows make a thing of the past."""
        for file in self.merged.glob("merged-*.parquet"):
            file.unlink(missing_ok=True)  # another task may be at it too
        with contextlib.suppress(OSError):
            self.merged.rmdir()

    def _of_others(self, pattern: str) -> Iterator[Path]:
        return (path for path in self.tasks.glob(f"*/{pattern}") if path.parent != self.task_directory)

    def discard(self) -> None:
        """Delete what earlier starts left, and nothing that somebody else put beside it."""
        self.discard_merged()
        ours = (
            self.all_parts(),
            self.parts.glob(f".part-*{TEMPORARY}"),
            self.leases.glob("*"),
            self.task_directory.glob("journal-*"),
            *map(self._of_others, OF_A_TASK),
        )
        for work in chain(self.leases.glob("order-*.work"), self._of_others("order-*.work")):
            shutil.rmtree(work, ignore_errors=True)
        for file in chain.from_iterable(ours):
            file.unlink(missing_ok=True)
        for directory in (self.parts, self.leases, *self.tasks.glob("*"), self.tasks):
            with contextlib.suppress(OSError):  # it is not there, or holds what is not ours
                directory.rmdir()
        for file in (self.run_json, self.report_json, self.report_html, self.events):
            file.unlink(missing_ok=True)


def see_anew(directory: Path) -> None:
    """Have this machine look again what a directory holds, which it may remember for a minute (NFS).

    A change of our own makes it forget. Where nothing can be written there is nothing to be seen anew.
    """
    mark = directory / f".look-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        mark.touch()
        mark.unlink()


def _is_empty(directory: Path) -> bool:
    with contextlib.suppress(OSError):  # it is no directory, or has just gone
        return not any(directory.iterdir())
    return True


@contextlib.contextmanager
def whole_file(
    path: Path, writer: str = "", name: Callable[[Path, Path], object] = Path.replace
) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success it is synced and gets its name, else it is removed.

    `writer` tells several that may write the same file at the same time apart. `name` gives the name: the
    default replaces what has it, `name_first` and `name_part` raise FileExistsError.
    """
    temporary = path.with_name(f".{path.name}{writer and '.'}{writer}{TEMPORARY}")
    temporary.unlink(missing_ok=True)  # it may be a link to elsewhere, or a part's other name
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        name(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def name_first(temporary: Path, path: Path) -> None:
    """Name a file, as the first of all that want the name; else raise FileExistsError.

    On NFS too: a hard link is made by the server, once, and where its reply was lost the number of links
    tells.
    """
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        if temporary.stat().st_nlink == 1:
            raise


def name_part(temporary: Path, path: Path) -> None:
    """Do the same; on a file system without hard links by a look: one task alone has a part's name."""
    try:
        name_first(temporary, path)
    except OSError as failure:
        if failure.errno not in NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.replace(path)


def create_file(path: Path, content: bytes, writer: str) -> bool:
    """Create a file, whole when it appears, unless there is one; tell whether it is ours.

    Of several `writer`s one succeeds. Raises OSError.
    """
    try:
        with whole_file(path, writer, name_first) as temporary:
            temporary.write_bytes(content)
    except FileExistsError:
        return False
    return True


def make_directory(path: Path) -> None:
    """Make a directory and those above it, each durable."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write of `path` in mid-run into a StorageError."""
    try:
        yield
    except OSError as failure:
        raise cannot_write(path, failure) from None


def cannot_write(path: Path, failure: OSError) -> StorageError:
    """Say that results could not be written."""
    return StorageError(
        f"{path}: cannot be written: {failure.strerror or failure}; "
        "what is on disk is kept: make room and run the same command again"
    )


def _task_of(part: Path) -> str | None:
    """Return whose part it is; None where it is not named like one."""
    name = _PART.fullmatch(part.name)
    return name[1] if name else None


def number_of(path: Path) -> int:
    """Return the number of a part or a journal."""
    name = _PART.fullmatch(path.name)
    return int(name[2] if name else path.name.split("-")[1])


def write_json(path: Path, value: object, writer: str = "") -> None:
    """Write JSON, whole or not at all; raises StorageError."""
    with writing(path), whole_file(path, writer) as temporary:
        temporary.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
