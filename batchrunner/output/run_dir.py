"""The paths of a run. A run in an object store also has a working copy on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from batchrunner.core.errors import OutputError
from batchrunner.core.files import cache_directory, is_uri, read_json
from batchrunner.job.output import StorageSpec
from batchrunner.output.addresses import StoreAddress, check_client, endpoint_of, store_address
from batchrunner.output.files import make_directory, using_run
from batchrunner.output.holder import OWNER, parse_holder, this_process
from batchrunner.output.store import LOCAL, ObjectStore, Store

if TYPE_CHECKING:
    from batchrunner.output.objects import RunObjects

LEAST_FREE_BYTES = 16 << 20
"""Minimum number of free bytes on the disk at the start of a run."""
ENGINE_STARTING = "engine-starting"
"""File in a worker's directory that exists while the worker's engine starts."""
ESTIMATE = "estimate.json"
"""File that `batchrun estimate` writes in an output path."""
TUNE = "tune"
"""Directory that `batchrun tune` writes in an output path."""
MAIN_TASK = "main"
"""Name of the only worker of a run that is not shared."""
_PART = re.compile(r"part-(.+)-(\d{6,})\.parquet")
"""Matches a part file (a Parquet file of results); its groups are the worker's name and the number."""
_MERGED = re.compile(r"merged/(merged-\d+\.parquet|_SUCCESS)")
_OURS = re.compile(
    r"parts/(part-.+-\d{6,}\.parquet|\.part-.+\.tmp)|(leases|tasks/[^/]+)/.+"
    r"|run\.json|report\.(json|html)|estimate\.json|events\.jsonl|engine[^/]*\.log"
)
"""Matches the files that a run writes, by their paths relative to the run directory."""
_DIRECTORIES = re.compile(r"parts|(leases|tasks)(/.+)?")
_RESERVED = re.compile(rf"(parts|leases|tasks|merged|\.input)(/.*)?|{_OURS.pattern}|discarding")
"""Matches the paths that only the run may write: its own files, and everything in its directories."""
SEGMENT = "turns-"
"""Prefix of files in a worker's directory with the answers of unfinished rollouts (turns.py)."""
PLACE = ".place.json"
"""File in a working copy with the URI of its run and the storage options, without secrets."""
RUN_ID = "run_id"
"""Key in run.json of a run in an object store: a random name, by which a working copy recognizes its run."""


class RunDir:
    """The paths of a run, as one of its workers sees them.

    All workers share `parts`, `leases`, `merged` and run.json. `task_directory` has this worker's lock and
    journals; a task is one worker's share of the run.
    """

    def __init__(self, path: str | Path, task: str = MAIN_TASK, store: Store = LOCAL) -> None:
        """Set the paths of a run. `path` is its directory on this machine; `store` publishes its files."""
        self._path_in_job = str(path)
        self.path = Path(path).expanduser()
        self.task = task
        self.store = store
        self.tasks = self.path / "tasks"
        self.task_directory = self.tasks / task
        self.owner = f"tasks/{task}/{OWNER}"
        """Object that names the process which holds this worker's lock, if the run is in an object store."""
        self.parts = self.path / "parts"
        self.leases = self.path / "leases"
        self.merged = self.path / "merged"
        self.copies = self.path / ".input"
        """Directory of Parquet copies of input files in other formats, until the run is done."""
        self.run_json = self.path / "run.json"
        self.discarding = self.path / "discarding"
        """File that marks a run as being discarded; see `discard.py`."""
        self.log_directory = self.path if task == MAIN_TASK else self.task_directory
        """Directory of this worker's event log, report and engine logs."""
        self.report_json = self.log_directory / "report.json"
        self.report_html = self.log_directory / "report.html"
        self.events = self.log_directory / "events.jsonl"

    @property
    def name(self) -> str:
        """The path or URI by which users know the run."""
        return self.store.uri or (self._path_in_job if is_uri(self._path_in_job) else str(self.path))

    def all_tasks(self) -> list[RunDir]:
        """Return a RunDir for each worker that has part files, or files in its directory."""
        with_files = [path.name for path in self.tasks.glob("*") if not _is_empty(path)]
        in_store = self._published(self.tasks)
        with_parts = [task for task in map(_task_of, self.all_parts()) if task is not None]
        names = {*with_files, *in_store, *with_parts}
        return [self.of_task(name) for name in sorted(names)]

    def of_task(self, task: str = MAIN_TASK) -> RunDir:
        """Return the same run as the worker with this name sees it."""
        return RunDir(self.path, task, self.store)

    def other_tasks(self) -> list[RunDir]:
        """Return a RunDir for each other worker in `all_tasks`."""
        return [run_dir for run_dir in self.all_tasks() if run_dir.task != self.task]

    def all_parts(self) -> list[Path]:
        """Return the part files of all workers, sorted by worker, then by number."""
        return sorted(filter(_task_of, self.parts.glob("part-*.parquet")))

    def bring_results(self) -> None:
        """Fetch the current results of all workers from the run's store.

        Raises OutputError or StoreAwayError if that fails.
        """
        with using_run(self.name):
            self.store.bring_results()

    def _published(self, directory: Path) -> list[str]:
        """Return the names below a directory in the object store; [] for a run on a file system."""
        if not self.store.uri:
            return []
        with using_run(self.name):
            return self.store.names(directory)

    def part(self, number: int) -> Path:
        """Return the path of this worker's part file with this number."""
        return self.parts / f"part-{self.task}-{number:06d}.parquet"

    def owns(self, path: Path) -> bool:
        """Tell whether a path belongs to the run: a file that it writes, or anything in its directories.

        Users may keep other files in the directory of a run.
        """
        path, directory = path.resolve(), self.path.resolve()
        if not path.is_relative_to(directory):
            return False
        return _RESERVED.fullmatch(path.relative_to(directory).as_posix()) is not None

    def own_parts(self) -> list[Path]:
        """Return the part files of this worker, oldest first."""
        parts = self.parts.glob(f"part-{self.task}-*.parquet")
        return sorted(part for part in parts if _task_of(part) == self.task)

    def next_number(self) -> int:
        """Return the number of this worker's next part file."""
        return 1 + max(map(number_of, self.own_parts()), default=-1)

    def journal(self, number: int, token: str) -> Path:
        """Return the path of the journal for part file `number`; `token` is the process's random name."""
        return self.task_directory / f"journal-{number:06d}-{token}"

    def journals(self, last: str | None = None) -> list[Path]:
        """Return the journals of this worker, oldest first; `last` is explained in `Store.journals`."""
        with using_run(self.name):
            return self.store.journals(self.task_directory, last)

    def check_writable(self) -> None:
        """Raise OutputError if results cannot be written to this directory. Change nothing."""
        if self.store.objects is None and is_uri(self._path_in_job):
            raise OutputError(
                f"output.path {self._path_in_job}: "
                "results go to a directory or an object store, not to a URI of this kind",
                hint="give a directory, or s3://, gs:// or az:// with bucket and path, without options",
            )
        try:
            existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        except OSError as failure:  # The name is too long, or a parent directory is not accessible.
            raise OutputError(f"output.path {self.path}: {failure.strerror}") from None
        if not existing.is_dir():
            raise OutputError(f"output.path {self.path}: {existing} is a file", hint="give a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise OutputError(f"output.path {self.path}: {existing} is not writable")
        disk = shutil.disk_usage(existing)
        # A file system without a size, such as /proc, has a total of 0.
        if disk.total and disk.free < LEAST_FREE_BYTES:
            raise OutputError(f"output.path {self.path}: the disk is full ({disk.free >> 20} MiB free)")

    def discard_merged(self) -> None:
        """Delete the merged dataset, because it would lack the rows that are about to be added."""
        for file in self.merged.glob("merged-*.parquet"):
            file.unlink(missing_ok=True)  # Another process may be deleting the same files.
        with contextlib.suppress(OSError):
            self.merged.rmdir()
        self.store.clear(_MERGED)

    def is_being_discarded(self) -> bool:
        """Tell whether a `--fresh` start is deleting this run, or died before it had deleted all files.

        Raises OutputError or StoreAwayError if the run's store does not answer.
        """
        with using_run(self.name):
            return self.store.exists(self.discarding)

    def discard(self, *, before_each: Callable[[], object]) -> None:
        """Delete the files that earlier attempts wrote, and no others.

        This attempt's lock, sorted input and engine log stay. `before_each` is called before each deletion,
        and may raise an exception to stop.
        """
        before_each()
        # Without run.json, readers do not take the remaining files for a run.
        self.run_json.unlink(missing_ok=True)
        self.discard_merged()
        # In reverse order, files come before their directory.
        for path in sorted(self.path.rglob("*"), reverse=True):
            before_each()
            name = path.relative_to(self.path).as_posix()
            if self.task_directory in path.parents:
                # These files are from earlier attempts. All others here belong to this attempt.
                if path.name.startswith(("journal-", SEGMENT)):
                    path.unlink(missing_ok=True)
            elif path.is_dir():
                if _DIRECTORIES.fullmatch(name):
                    with contextlib.suppress(OSError):  # A directory with a user's files is kept.
                        path.rmdir()
            elif path.parent == self.log_directory and path.suffix == ".log":
                continue  # The engine of this attempt may be writing this log.
            elif _OURS.fullmatch(name):
                path.unlink(missing_ok=True)
        before_each()
        self.store.clear(_OURS)


def number_of(path: Path) -> int:
    """Return the number in the name of a part file or a journal."""
    name = _PART.fullmatch(path.name)
    return int(name[2] if name else path.name.split("-")[1])


def _task_of(part: Path) -> str | None:
    """Return the worker's name in the name of a part file; None for another file."""
    name = _PART.fullmatch(part.name)
    return name[1] if name else None


def _is_empty(directory: Path) -> bool:
    with contextlib.suppress(OSError):  # `directory` is a file, or was just deleted.
        return not any(directory.iterdir())
    return True


def open_run(path: str | Path, task: str = MAIN_TASK, storage: StorageSpec | None = None) -> RunDir:
    """Return the run directory for writing.

    For a run in an object store, the working copy is updated, unless another process on this machine is using
    it. Raises OutputError or StoreAwayError for a store that cannot be used, and JobError for a wrong
    `storage`.
    """
    if task.startswith("join-"):
        # Workers with --join may start often, so they fetch little now. Results are fetched when they are
        # needed.
        pattern = r"run\.json|events\.jsonl|tasks/main/.*|tasks/[^/]+/events\.jsonl"
    else:
        # Fetch everything except leases and the engine logs of other workers.
        pattern = rf"(?!leases/)(?!tasks/(?!{re.escape(task)}/)[^/]+/[^/]+\.log).*"
    return _with_copy(str(path), storage or StorageSpec(), task=task, pattern=pattern)


def look_at_run(run: str | Path | RunDir, storage: StorageSpec | None = None) -> RunDir:
    """Return the run directory for reading.

    For a run in an object store, the files are copied to a directory that no worker writes to. Without
    `storage`, the options with which this machine last reached the run are used. Raises OutputError or
    StoreAwayError for a store that cannot be used, and JobError for a wrong `storage`.
    """
    if isinstance(run, RunDir):
        return run
    return _with_copy(str(run), storage, task=MAIN_TASK, pattern=".*", is_read_only=True)


def _last_storage(address: StoreAddress) -> StorageSpec:
    """Return the storage options with which this machine last reached a run."""
    places = sorted(cache_directory().glob(f"*/*/*/{PLACE}"), key=lambda path: path.stat().st_mtime)
    for path in reversed(places):
        place = read_json(path)
        if place.get("uri") == str(address):
            return StorageSpec.model_validate(place["storage"])
    return StorageSpec()


def _with_copy(
    path: str, storage: StorageSpec | None, *, task: str, pattern: str, is_read_only: bool = False
) -> RunDir:
    """Return the RunDir of a run. If it is in an object store, fetch the files whose names match `pattern`.

    The working copy is kept for later attempts. With `is_read_only`, the run gets a separate copy.
    """
    address = store_address(path)
    if address is None:  # A run on a file system needs no copy.
        return RunDir(path, task)
    storage = storage or _last_storage(address)
    check_client(address, OutputError)
    from batchrunner.output.objects import RunObjects  # noqa: PLC0415 - an extra

    # Stores with different endpoints may have buckets of the same name.
    identity = f"{address} {endpoint_of(address, storage) or ''}"
    name = f"{address.name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    copies = cache_directory() / "runs" / name
    root = cache_directory() / "looked-at" / name / task if is_read_only else copies / task
    objects = RunObjects(address, storage)
    store = ObjectStore(objects, root, copies)
    run_dir = RunDir(root, task, store)
    with using_run(run_dir.name if is_read_only else f"output.path {run_dir.name}"):
        holder = parse_holder(objects.look(run_dir.owner)[0])
        is_in_use = holder is not None and holder.is_dead(this_process()) is False
        if is_in_use and not is_read_only:
            # A process on this machine, perhaps this one, is writing to the working copy. The copy is newer
            # than the store, and must not be changed.
            return run_dir
        if _is_outdated(run_dir, objects):
            # The copy is of an older run, which was deleted from the store.
            shutil.rmtree(root)
        make_directory(root)
        place = {"uri": str(address), "storage": storage.model_dump(mode="json", exclude_unset=True)}
        (root / PLACE).write_bytes(orjson.dumps(place))
        store.bring_all(re.compile(pattern, re.DOTALL))
    return run_dir


def _is_outdated(run_dir: RunDir, objects: RunObjects) -> bool:
    """Tell whether the run of a local copy was deleted from the store, or replaced by a new run."""
    # The local file is read before the object. A new run writes the object first, so in this order the local
    # file is never the newer one.
    copied = read_json(run_dir.run_json)
    if not copied:
        return False
    # The run ID is a long random text, so searching the unparsed JSON is enough.
    return str(copied.get(RUN_ID)).encode() not in objects.look("run.json")[0]
