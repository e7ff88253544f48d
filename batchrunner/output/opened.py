"""Run directories by path or URI: a run in an object store has a working copy on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from batchrunner.core.errors import OutputError
from batchrunner.core.files import cache_directory, read_json
from batchrunner.job.output import StorageSpec
from batchrunner.output.files import make_directory
from batchrunner.output.owner_object import parse_owner
from batchrunner.output.run_dir import MAIN_TASK, OWNER, RunDir
from batchrunner.output.run_files import refuse_other_than_files
from batchrunner.output.run_json import RUN_ID
from batchrunner.output.stores.addresses import (
    NEEDS_EXTRA,
    StoreAddress,
    endpoint_of,
    has_client,
    store_address,
)
from batchrunner.output.stores.copy_places import CopyPlaces
from batchrunner.output.stores.store import ConditionalObjects
from batchrunner.output.task_holder import this_process

PLACE = ".place.json"
"""Name of the file in a working copy that says where its run lies, without secrets."""
_OWNER = re.compile(rf"tasks/[^/]+/{OWNER}")


def open_run(given: str | Path, task: str = MAIN_TASK, storage: StorageSpec | None = None) -> RunDir:
    """Return the run directory of a job, which results are written to.

    Of a run in an object store the working copy is brought up to date, unless a process of this machine is
    at work in it. Raises OutputError where the store cannot be used, JobError where `storage` is wrong,
    ResumeError where a pipe or a directory has the name of one of its files.
    """
    address = store_address(str(given))
    if address is None:
        return _of_files(RunDir(given, task))
    storage = storage or StorageSpec()
    return _with_copy(address, storage, _places(address, storage), task, _needed_by(task))


def look_at_run(given: str | Path | RunDir) -> RunDir:
    """Return the run directory of a run that is looked at, whoever writes it; raises as `open_run`.

    Of a run in an object store this is a working copy of its own.
    """
    if isinstance(given, RunDir):
        return given
    address = store_address(str(given))
    if address is None:
        return _of_files(RunDir(given))
    storage = _known_storage(address)
    copy = cache_directory() / "looked-at" / _name(address, storage)
    return _with_copy(address, storage, _places(address, storage), MAIN_TASK, looked_at=copy)


def _of_files(run_dir: RunDir) -> RunDir:
    refuse_other_than_files(run_dir.path)
    return run_dir


def _places(address: StoreAddress, storage: StorageSpec) -> CopyPlaces:
    base = Path(storage.copies) if storage.copies else cache_directory()
    return CopyPlaces(base / "runs", _name(address, storage), MAIN_TASK)


def _needed_by(task: str) -> re.Pattern[str]:
    """Return the names of what a task needs from the beginning.

    One that joins a run may come often, and asks for the results of others where it must know them.
    """
    if task.startswith("join-"):
        return re.compile(r"run\.json|events\.jsonl|tasks/main/.*|tasks/[^/]+/events\.jsonl")
    return re.compile(rf"(?!leases/)(?!tasks/(?!{re.escape(task)}/)[^/]+/[^/]+\.log).*", re.DOTALL)


def _known_storage(address: StoreAddress) -> StorageSpec:
    """Return how this machine reached a run last."""
    places = sorted(cache_directory().glob(f"*/*/{PLACE}"), key=lambda path: path.stat().st_mtime)
    for place in reversed(places):
        found = read_json(place)
        if found.get("uri") == str(address):
            return StorageSpec.model_validate(found["storage"])
    return StorageSpec()


def _name(address: StoreAddress, storage: StorageSpec) -> str:
    """Return the name of the working copy of a run."""
    where = f"{address} {endpoint_of(address, storage) or ''}"
    digest = hashlib.sha256(where.encode()).hexdigest()[:16]
    return f"{address.name}-{digest}"


def _with_copy(
    address: StoreAddress,
    storage: StorageSpec,
    places: CopyPlaces,
    task: str,
    wanted: re.Pattern[str] | None = None,
    *,
    looked_at: Path | None = None,
) -> RunDir:
    if not has_client():
        raise OutputError(f"{address}: object stores need a package", hint=NEEDS_EXTRA)
    from batchrunner.output.stores.objects import ObjectStore  # noqa: PLC0415 - an extra
    from batchrunner.output.stores.run_objects import RunObjects  # noqa: PLC0415 - an extra
    from batchrunner.output.stores.working_copy import EVERYTHING, WorkingCopy  # noqa: PLC0415 - an extra

    objects = RunObjects(address, storage)
    root = looked_at or places.of(task)
    copy = WorkingCopy(objects, root, places)
    try:
        owner = objects.read(f"tasks/{task}/{OWNER}")
        holder = parse_owner(owner[0]) if owner is not None else None
        if looked_at or holder is None or holder.is_dead(this_process()) is not False:
            _drop_copy_of_another_run(root, objects)
            make_directory(root)
            content = {"uri": str(address), "storage": storage.model_dump(mode="json", exclude_unset=True)}
            (root / PLACE).write_bytes(orjson.dumps(content))
            names = copy.fetch_all(wanted or EVERYTHING)
            if looked_at:
                _copy_owners(objects, root, [name for name in names if _OWNER.fullmatch(name)])
    except OSError as failure:
        what = f"{address}" if looked_at else f"output.path {address}"
        raise OutputError(f"{what}: cannot be used: {failure.strerror or failure}") from None
    return RunDir(root, task, ObjectStore(objects, copy))


def _drop_copy_of_another_run(root: Path, objects: ConditionalObjects) -> None:
    """Delete a working copy whose run is gone from the store, or was replaced by a fresh one."""
    mine = read_json(root / "run.json")  # before the store's: a run that has just begun writes that first
    stored = objects.read("run.json") if mine else None
    theirs = _json_in(stored[0]) if stored is not None else None
    if mine and (theirs is None or theirs.get(RUN_ID) != mine.get(RUN_ID)):
        shutil.rmtree(root)


def _copy_owners(objects: ConditionalObjects, root: Path, names: list[str]) -> None:
    """Write down which processes hold the tasks, as a run on a disk has it."""
    for name in names:
        owner = objects.read(name)
        holder = parse_owner(owner[0]) if owner is not None else None
        path = root / name
        if holder is None:
            path.unlink(missing_ok=True)
        else:
            make_directory(path.parent)
            path.write_bytes(orjson.dumps(asdict(holder)))


def _json_in(content: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(orjson.JSONDecodeError):
        found = orjson.loads(content)
        return found if isinstance(found, dict) else None
    return None
