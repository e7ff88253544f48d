"""The layout of a run directory: where each file of a run lies."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from batchrunner.core.errors import OutputError
from batchrunner.core.files import is_uri
from batchrunner.output.files import TEMPORARY
from batchrunner.output.stores.store import LOCAL, Store

LEAST_FREE_BYTES = 16 << 20
"""A run does not begin on a disk with less free space than this."""
OWNER = "owner"
"""Name of the file in a task directory that names the process which holds it."""
ENGINE_STARTING = "engine-starting"
"""Name of the file in a task directory that is there while the task's engine starts."""
TUNE = "tune"
"""Name of the directory in an output path that `batchrun tune` writes to."""
MAIN_TASK = "main"
"""Name of the only task of a run that is not divided among several tasks."""
_TASK_FILES = (
    "journal-*",
    "events.jsonl",
    "report.json",
    "report.html",
    "engine*.log",
    "owner*",
    "heartbeat",
    ENGINE_STARTING,
    "*order-*.parquet*",
)
"""Names of the files that a task writes into its directory."""
_PART = re.compile(r"part-(.+)-(\d{6,})\.parquet")
"""Name of a part: its task and its number."""
_MERGED = re.compile(r"merged/(merged-\d+\.parquet|_SUCCESS)")
_PUBLISHED = re.compile(
    r"parts/part-.+\.parquet|leases/.+|run\.json|tasks/[^/]+/(?!owner$).+"
    r"|report\.(json|html)|events\.jsonl|engine[^/]*\.log"
)
"""Names of what a run publishes, without its locks."""


class RunDir:
    """The paths of one run, as one of its tasks sees them.

    All tasks share `parts`, `leases`, `merged` and run.json. Locks and journals lie in `task_directory`.
    """

    def __init__(self, path: str | Path, task: str = MAIN_TASK, store: Store = LOCAL) -> None:
        """`path` is the directory on this machine, `store` where its files are published."""
        self._given = str(path)
        self.path = Path(path).expanduser()
        self.task = task
        self.store = store
        self.tasks = self.path / "tasks"
        self.task_directory = self.tasks / task
        self.parts = self.path / "parts"
        self.leases = self.path / "leases"
        self.merged = self.path / "merged"
        self.given = self.path / "given" / "rows.parquet"
        """Rows that a program gave to `stream`, from where every start reads them."""
        self.copies = self.path / ".input"
        """Parquet copies of input files of other formats, until the run is done."""
        self.run_json = self.path / "run.json"
        self.log_directory = self.path if task == MAIN_TASK else self.task_directory
        """Directory of the task's events, report and engine log."""
        self.report_json = self.log_directory / "report.json"
        self.report_html = self.log_directory / "report.html"
        self.events = self.log_directory / "events.jsonl"

    @property
    def name(self) -> str:
        """The run as users know it: its path, or its URI."""
        return self.store.uri or (self._given if is_uri(self._given) else str(self.path))

    def all_tasks(self) -> list[RunDir]:
        """Return this run as each of its tasks sees it: tasks with files in their directory or with parts."""
        names = {path.name for path in self.tasks.glob("*") if not _is_empty(path)}
        names |= {*self._published(self.tasks)}
        names |= {task for part in self.all_parts() if (task := _task_of(part))}
        return [self.of_task(name) for name in sorted(names)]

    def of_task(self, task: str = MAIN_TASK) -> RunDir:
        """Return this run as another one of its tasks sees it."""
        return RunDir(self.path, task, self.store)

    def other_tasks(self) -> list[RunDir]:
        """Return `all_tasks` without this one."""
        return [run_dir for run_dir in self.all_tasks() if run_dir.task != self.task]

    def all_parts(self) -> list[Path]:
        """Return the parts of all tasks, by task and number; files with other names are left out."""
        return sorted(filter(_task_of, self.parts.glob("part-*.parquet")))

    def parts_elsewhere(self) -> Iterator[Path]:
        """Yield the parts in the run's store, each brought here before; none where there is no store."""
        for name in self._published(self.parts):
            if _task_of(self.parts / name):
                self.store.bring(self.parts / name)
                yield self.parts / name

    def bring_results(self) -> None:
        """Bring what any task has published here, as it is now; raises OutputError."""
        with self._asking_store():
            self.store.bring_results()

    def _published(self, directory: Path) -> list[str]:
        """Return the names in a directory of the run's store; none where there is no store."""
        if not self.store.uri:
            return []
        with self._asking_store():
            return self.store.names(directory)

    @contextlib.contextmanager
    def _asking_store(self) -> Iterator[None]:
        try:
            yield
        except OSError as failure:
            raise OutputError(f"{self.name}: cannot be used: {failure.strerror or failure}") from None

    def part(self, number: int) -> Path:
        """Return the path of this task's part with this number."""
        return self.parts / f"part-{self.task}-{number:06d}.parquet"

    def own_parts(self) -> list[Path]:
        """Return the parts of this task, oldest first."""
        found = self.parts.glob(f"part-{self.task}-*.parquet")
        return sorted(part for part in found if _task_of(part) == self.task)

    def journal(self, number: int, token: str) -> Path:
        """Return the path of the journal of part `number`; `token` is that of the writer's task lock."""
        return self.task_directory / f"journal-{number:06d}-{token}"

    def journals(self) -> list[Path]:
        """Return the journals of this task, oldest first."""
        return sorted(self.task_directory.glob("journal-*"))

    def check_writable(self) -> None:
        """Raise OutputError where results cannot be written here; changes nothing."""
        self.refuse_uri()
        self.store.check()
        existing = self.path
        try:
            while not existing.exists():
                existing = existing.parent
        except OSError as failure:  # the name is too long, or a parent directory is not accessible
            raise OutputError(f"output.path {self.path}: {failure.strerror}") from None
        if not existing.is_dir():
            raise OutputError(f"output.path {self.path}: {existing} is a file", hint="give a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise OutputError(f"output.path {self.path}: {existing} is not writable")
        self.refuse_links()
        disk = shutil.disk_usage(existing)
        if disk.total and disk.free < LEAST_FREE_BYTES:  # /proc and similar file systems have no size
            raise OutputError(f"output.path {self.path}: the disk is full ({disk.free >> 20} MiB free)")

    def refuse_uri(self) -> None:
        """Raise OutputError where the path is a URI, of an object store for example."""
        if self.store.objects is None and is_uri(self._given):
            raise OutputError(
                f"output.path {self._given}: "
                "results go to a directory or an object store, not to a URI of this kind",
                hint="give a directory, or s3://, gs:// or az:// with bucket and path, without options",
            )

    def refuse_links(self) -> None:
        """Raise OutputError where a symbolic link would lead writes to a place outside the run directory."""
        directories = (
            self.parts, self.tasks, self.leases, self.copies, self.merged,
            self.merged.with_name("merged.tmp"),
        )  # fmt: skip
        logs = self.log_directory.glob("*.log")
        for path in (*directories, *self.tasks.glob("*"), *logs, self.events):
            if path.is_symlink():
                raise OutputError(
                    f"{path}: is a symbolic link, and results are written into output.path only",
                    hint="remove it",
                )

    def discard_merged(self) -> None:
        """Delete the merged dataset, which is outdated once new rows are written."""
        for file in self.merged.glob("merged-*.parquet"):
            file.unlink(missing_ok=True)  # another task may delete it at the same time
        with contextlib.suppress(OSError):
            self.merged.rmdir()
        self.store.clear(_MERGED)

    def discard(self) -> None:
        """Delete what earlier attempts wrote, and no file of another origin; the lock of this task stays."""
        self.discard_merged()
        ours = (
            self.all_parts(),
            self.parts.glob(f".part-*{TEMPORARY}"),
            self.leases.glob("*"),
            self.task_directory.glob("journal-*"),
            *map(self._in_other_tasks, _TASK_FILES),
        )
        for work in chain(self.leases.glob("order-*.work"), self._in_other_tasks("order-*.work")):
            shutil.rmtree(work, ignore_errors=True)
        for file in chain.from_iterable(ours):
            file.unlink(missing_ok=True)
        for directory in (self.parts, self.leases, *self.tasks.glob("*"), self.tasks):
            with contextlib.suppress(OSError):  # it does not exist, or holds files of another origin
                directory.rmdir()
        for file in (self.run_json, self.report_json, self.report_html, self.events):
            file.unlink(missing_ok=True)
        self.store.clear(_PUBLISHED)

    def _in_other_tasks(self, pattern: str) -> Iterator[Path]:
        return (path for path in self.tasks.glob(f"*/{pattern}") if path.parent != self.task_directory)


def number_of(path: Path) -> int:
    """Return the number in the name of a part or a journal."""
    name = _PART.fullmatch(path.name)
    return int(name[2] if name else path.name.split("-")[1])


def _task_of(part: Path) -> str | None:
    """Return the task in the name of a part; None for a file with another name."""
    name = _PART.fullmatch(part.name)
    return name[1] if name else None


def _is_empty(directory: Path) -> bool:
    with contextlib.suppress(OSError):  # it is not a directory, or was just deleted
        return not any(directory.iterdir())
    return True
