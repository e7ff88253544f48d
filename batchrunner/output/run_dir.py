"""The layout of a run directory: where each file of a run lies. A run in a store has a working copy here."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import orjson

from batchrunner.core.errors import OutputError
from batchrunner.core.files import cache_directory, is_uri, read_json
from batchrunner.job.output import StorageSpec
from batchrunner.output.addresses import StoreAddress, check_client, endpoint_of, store_address
from batchrunner.output.files import make_directory, using_run
from batchrunner.output.holder import OWNER, parse_holder, this_process
from batchrunner.output.store import LOCAL, ObjectStore, Store

LEAST_FREE_BYTES = 16 << 20
"""A run does not begin on a disk with less free space than this."""
ENGINE_STARTING = "engine-starting"
"""Name of the file in a task directory that is there while the task's engine starts."""
ESTIMATE = "estimate.json"
"""Name of the file in an output path that `batchrun estimate` writes."""
TUNE = "tune"
"""Name of the directory in an output path that `batchrun tune` writes to."""
MAIN_TASK = "main"
"""Name of the only task of a run that is not divided among several tasks."""
_PART = re.compile(r"part-(.+)-(\d{6,})\.parquet")
"""Name of a part: its task and its number."""
_MERGED = re.compile(r"merged/(merged-\d+\.parquet|_SUCCESS)")
_OURS = re.compile(
    r"parts/(part-.+-\d{6,}\.parquet|\.part-.+\.tmp)|(leases|tasks/[^/]+)/.+"
    r"|run\.json|report\.(json|html)|estimate\.json|events\.jsonl|engine[^/]*\.log"
)
"""Names of what the tasks of a run write."""
_DIRECTORIES = re.compile(r"parts|(leases|tasks)(/.+)?")
SEGMENT = "turns-"
"""Beginning of the names of the files with turns of rollouts in a task's directory."""
PLACE = ".place.json"
"""Name of the file in a working copy that says where its run lies, without secrets."""
RUN_ID = "run_id"
"""Key in run.json of a run in an object store: a random name, by which a working copy is recognised."""


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
        self.owner = f"tasks/{task}/{OWNER}"
        """Name of what the task's holder has in the run's store."""
        self.parts = self.path / "parts"
        self.leases = self.path / "leases"
        self.merged = self.path / "merged"
        self.copies = self.path / ".input"
        """Parquet copies of input files of other formats, until the run is done."""
        self.run_json = self.path / "run.json"
        self.discarding = self.path / "discarding"
        """Mark of a run that is being discarded, see `discard.py`."""
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

    def bring_results(self) -> None:
        """Bring what any task has published here, as it is now; raises OutputError."""
        with using_run(self.name):
            self.store.bring_results()

    def _published(self, directory: Path) -> list[str]:
        """Return the names in a directory of the run's store; none where there is no store."""
        if not self.store.uri:
            return []
        with using_run(self.name):
            return self.store.names(directory)

    def part(self, number: int) -> Path:
        """Return the path of this task's part with this number."""
        return self.parts / f"part-{self.task}-{number:06d}.parquet"

    def own_parts(self) -> list[Path]:
        """Return the parts of this task, oldest first."""
        found = self.parts.glob(f"part-{self.task}-*.parquet")
        return sorted(part for part in found if _task_of(part) == self.task)

    def next_number(self) -> int:
        """Return the number of this task's next part."""
        return 1 + max(map(number_of, self.own_parts()), default=-1)

    def journal(self, number: int, token: str) -> Path:
        """Return the path of the journal of part `number`; `token` is that of the writer's task lock."""
        return self.task_directory / f"journal-{number:06d}-{token}"

    def journals(self, last: str | None = None) -> list[Path]:
        """Return the journals of this task, oldest first; `last` is as for `Store.journals`."""
        with using_run(self.name):
            return self.store.journals(self.task_directory, last)

    def check_writable(self) -> None:
        """Raise OutputError where results cannot be written here; changes nothing."""
        if self.store.objects is None and is_uri(self._given):
            raise OutputError(
                f"output.path {self._given}: "
                "results go to a directory or an object store, not to a URI of this kind",
                hint="give a directory, or s3://, gs:// or az:// with bucket and path, without options",
            )
        try:
            existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        except OSError as failure:  # the name is too long, or a parent directory is not accessible
            raise OutputError(f"output.path {self.path}: {failure.strerror}") from None
        if not existing.is_dir():
            raise OutputError(f"output.path {self.path}: {existing} is a file", hint="give a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise OutputError(f"output.path {self.path}: {existing} is not writable")
        disk = shutil.disk_usage(existing)
        if disk.total and disk.free < LEAST_FREE_BYTES:  # /proc and similar file systems have no size
            raise OutputError(f"output.path {self.path}: the disk is full ({disk.free >> 20} MiB free)")

    def discard_merged(self) -> None:
        """Delete the merged dataset, which is outdated once new rows are written."""
        for file in self.merged.glob("merged-*.parquet"):
            file.unlink(missing_ok=True)  # another task may delete it at the same time
        with contextlib.suppress(OSError):
            self.merged.rmdir()
        self.store.clear(_MERGED)

    def is_being_discarded(self) -> bool:
        """Tell whether a start discards this run, or died while it did. Raises OutputError."""
        with using_run(self.name):
            return self.store.exists(self.discarding)

    def discard(self, *, before_each: Callable[[], object]) -> None:
        """Delete what earlier attempts wrote, and no file of another origin.

        What this attempt has by then stays: its lock, its order and the log of its engine. `before_each` is
        called before each deletion, and may raise to end them.
        """
        before_each()
        self.run_json.unlink(missing_ok=True)  # first: without it no reader takes the rest for a run
        self.discard_merged()
        for path in sorted(self.path.rglob("*"), reverse=True):  # a directory comes after what is in it
            before_each()
            name = path.relative_to(self.path).as_posix()
            if self.task_directory in path.parents:
                if path.name.startswith(("journal-", SEGMENT)):
                    path.unlink(missing_ok=True)
            elif path.is_dir():
                if _DIRECTORIES.fullmatch(name):
                    with contextlib.suppress(OSError):  # it holds files of another origin
                        path.rmdir()
            elif path.parent == self.log_directory and path.suffix == ".log":
                continue
            elif _OURS.fullmatch(name):
                path.unlink(missing_ok=True)
        before_each()
        self.store.clear(_OURS)


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


def open_run(given: str | Path, task: str = MAIN_TASK, storage: StorageSpec | None = None) -> RunDir:
    """Return the run directory of a job, which results are written to.

    Of a run in an object store the working copy is brought up to date, unless a process of this machine is
    at work in it. Raises OutputError or StoreAwayError where the store cannot be used, JobError where
    `storage` is wrong.
    """
    if task.startswith("join-"):  # such tasks may come often, and ask for results where they must know them
        needed = r"run\.json|events\.jsonl|tasks/main/.*|tasks/[^/]+/events\.jsonl"
    else:
        needed = rf"(?!leases/)(?!tasks/(?!{re.escape(task)}/)[^/]+/[^/]+\.log).*"
    return _with_copy(str(given), storage or StorageSpec(), task, needed)


def look_at_run(given: str | Path | RunDir, storage: StorageSpec | None = None) -> RunDir:
    """Return the run directory of a run that is looked at, whoever writes it; raises as `open_run`.

    Of a run in an object store this is a working copy of its own; without `storage` it is reached as this
    machine reached it last.
    """
    if isinstance(given, RunDir):
        return given
    return _with_copy(str(given), storage, MAIN_TASK, ".*", is_looked_at=True)


def _known_storage(address: StoreAddress) -> StorageSpec:
    """Return how this machine reached a run last."""
    places = sorted(cache_directory().glob(f"*/*/*/{PLACE}"), key=lambda path: path.stat().st_mtime)
    for place in reversed(places):
        found = read_json(place)
        if found.get("uri") == str(address):
            return StorageSpec.model_validate(found["storage"])
    return StorageSpec()


def _with_copy(
    given: str, storage: StorageSpec | None, task: str, needed: str, *, is_looked_at: bool = False
) -> RunDir:
    """Return a run; one in an object store has a working copy of the files whose names are `needed`."""
    address = store_address(given)
    if address is None:
        return RunDir(given, task)
    storage = storage or _known_storage(address)
    check_client(address, OutputError)
    from batchrunner.output.objects import RunObjects  # noqa: PLC0415 - an extra

    where = f"{address} {endpoint_of(address, storage) or ''}"
    name = f"{address.name}-{hashlib.sha256(where.encode()).hexdigest()[:16]}"
    copies = cache_directory() / "runs" / name
    root = cache_directory() / "looked-at" / name / task if is_looked_at else copies / task
    objects = RunObjects(address, storage)
    store = ObjectStore(objects, root, copies)
    run_dir = RunDir(root, task, store)
    with using_run(run_dir.name if is_looked_at else f"output.path {run_dir.name}"):
        holder = parse_holder(objects.look(run_dir.owner)[0])
        if is_looked_at or holder is None or holder.is_dead(this_process()) is not False:
            mine = read_json(run_dir.run_json)  # before the store's: a run that just begins writes that first
            if mine and str(mine.get(RUN_ID)).encode() not in objects.look("run.json")[0]:
                shutil.rmtree(root)  # of a run that is gone from the store, or was replaced by a fresh one
            make_directory(root)
            content = {"uri": str(address), "storage": storage.model_dump(mode="json", exclude_unset=True)}
            (root / PLACE).write_bytes(orjson.dumps(content))
            store.bring_all(re.compile(needed, re.DOTALL))
    return run_dir
