"""Files and batches in the server's directory, safe against a kill at any moment.

`files/ID.json` and `batches/ID.json` are records; `files/ID` is the content of a file, `batches/ID` the run
of an unfinished batch. The record of a file is written after its content. Content without a record is
incomplete, and the next start deletes it.

A change is written to the disk before it is made in memory. So a client never sees a change that a kill could
undo. A lock lets only one change at a time make its checks and be written.

The server chooses all file names. A name from a client is only looked up among them.
"""

import asyncio
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from batchrunner.output.files import make_directory, sync_directory, using_run, write_json, writing

log = logging.getLogger(__name__)

Record: TypeAlias = dict[str, Any]
"""A file or a batch, with the keys of OpenAI's API."""
FILES, BATCHES = "files", "batches"
"""The two kinds of records. The paths of the API and the directories have these names."""
OWNER = "owner"
"""Key of a record with the name of its owner; empty on a server with one owner."""
_SERVER_NAMES = re.compile(r"\.?(file-|batch_)[0-9a-f]{48}(-output|-error)?(\..*tmp)?")
"""Matches the names that the server gives to its files, runs and temporary files. Nothing else in the
directory is touched."""
FINAL_STATUSES = {"completed", "failed", "expired", "cancelled"}
MOST_DELETED = 10_000
"""Maximum number of deleted files to remember, so that a client can ask for the page after one of them."""


def now() -> int:
    """Return the Unix time in whole seconds, as OpenAI's API writes it."""
    return int(time.time())


def new_id(prefix: str) -> str:
    """Return an ID that nobody can guess. IDs sort by age."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(16)}"


class State:
    """All files and batches: their records in memory and on the disk."""

    def __init__(self, directory: Path) -> None:
        """Read the records in `directory`, and delete what a kill left incomplete.

        Raises OSError, and OutputError if a record cannot be read.
        """
        self._directory = directory
        self.records: dict[str, dict[str, Record]] = {}
        """Records by kind and ID, the oldest first."""
        for kind in (FILES, BATCHES):
            make_directory(directory / kind)
            self.records[kind] = {}
            for path in sorted((directory / kind).glob("*.json")):
                if _SERVER_NAMES.fullmatch(path.stem):
                    with using_run(str(path)):
                        self.records[kind][path.stem] = json.loads(path.read_bytes())
        # IDs sort by age, but a file of results has the ID of its batch, which is older than the file.
        by_age = sorted(self.records[FILES].values(), key=self._age_of_file)
        self.records[FILES] = {file["id"]: file for file in by_age}
        self._new_place = count()
        self.places = {name: next(self._new_place) for kind in self.records.values() for name in kind}
        """Place of each file and batch in the order of creation, by ID, also of those in `deleted_files`."""
        self.deleted_files: dict[str, Record] = {}
        """The last files that were deleted, by ID. A client that deletes the files of a page asks for the
        next page by the ID of a deleted file."""
        # The run of a finished batch is not needed. Content without a record is incomplete.
        used_names = {*self.records[FILES], *(batch["id"] for batch in self.unfinished_batches())}
        for path in [*(directory / FILES).iterdir(), *(directory / BATCHES).iterdir()]:
            if not _SERVER_NAMES.fullmatch(path.name) or path.name in used_names:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.stored_bytes = Counter[str]()
        """Total size of the files of each owner, by the owner's name."""
        for file in self.records[FILES].values():
            self.stored_bytes[file.get(OWNER, "")] += file["bytes"]
        self.changes = Counter[str]()
        """Number of changes of each owner's batches since the start of the server, by the owner's name."""
        self._changing = asyncio.Lock()
        """Allows one change at a time, from its checks until it is written."""

    def _age_of_file(self, file: Record) -> tuple[int, int]:
        """Return when a file was created, in seconds, and when its record was written, in nanoseconds."""
        return file["created_at"], self.path_of(FILES, f"{file['id']}.json").stat().st_mtime_ns

    def path_of(self, kind: str, name: str) -> Path:
        """Return the path of a file's content, or of a batch's run."""
        return self._directory / kind / name

    def look(self) -> int:
        """Test that the server's directories can be read. Return the free bytes of the disk.

        Raises OSError.
        """
        for kind in (FILES, BATCHES):
            with os.scandir(self._directory / kind) as names:
                next(names, None)
        return shutil.disk_usage(self._directory).free

    def unfinished_batches(self, owner: str | None = None) -> list[Record]:
        """Return the unfinished batches of an owner, or of all owners, the oldest first."""
        batches = self.records[BATCHES].values()
        unfinished = [batch for batch in batches if batch["status"] not in FINAL_STATUSES]
        return [batch for batch in unfinished if owner in {None, batch.get(OWNER, "")}]

    def file_count(self, owner: str) -> int:
        """Return the number of an owner's files. An unfinished batch counts as its two future files."""
        files = [file for file in self.records[FILES].values() if file.get(OWNER, "") == owner]
        return len(files) + 2 * len(self.unfinished_batches(owner))

    async def save(self, kind: str, record: Record, **changes: Any) -> Record:
        """Add or change a record; return it. Raises StorageError.

        A batch with a final status stays as it is: a client may cancel it just when it ends. A batch that is
        being cancelled keeps the status `cancelling` until it gets a final one.
        """
        async with self._changing:
            if record["status"] == "cancelling" and changes.get("status") not in FINAL_STATUSES:
                changes.pop("status", None)
            if record["status"] not in FINAL_STATUSES:
                await self._write(kind, record, changes)
        return record

    async def add_batch(self, batch: Record, check: Callable[[], None]) -> bool:
        """Add a batch, or return False if its input file was deleted. Raises StorageError.

        `check` raises an error if the batch may not be added. No other batch is added between the check and
        the end of this call.
        """
        async with self._changing:
            check()
            has_input = batch["input_file_id"] in self.records[FILES]
            if has_input:
                await self._write(BATCHES, batch, {})
        return has_input

    async def _write(self, kind: str, record: Record, changes: Record) -> None:
        """Write a changed record to the disk, then change it in memory."""
        name = record["id"]
        path = self.path_of(kind, f"{name}.json")
        await asyncio.to_thread(write_json, path, {**record, **changes})
        record.update(changes)
        self.records[kind][name] = record
        if name not in self.places:
            self.places[name] = next(self._new_place)
        # The page notices by this counter that a batch has changed.
        self.changes[record.get(OWNER, "")] += kind == BATCHES
        log.info("%s: %s", name, record["status"])

    async def add_file(
        self, name: str, *, owner: str, filename: str, purpose: str, expires_after: Record | None
    ) -> Record:
        """Store and return the record of a file whose content is already on the disk; raises StorageError.

        `filename` is the name that clients see.
        """
        created = now()
        # The file exists if the server was killed just after it had written these results.
        replaced = self.records[FILES].get(name)
        record = await self.save(FILES, {
            "id": name,
            "object": "file",
            "bytes": self.path_of(FILES, name).stat().st_size,
            "created_at": created,
            "expires_at": expires_after and created + expires_after["seconds"],
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
            OWNER: owner,
        })  # fmt: skip
        self.stored_bytes[owner] += record["bytes"] - (replaced["bytes"] if replaced else 0)
        return record

    async def delete_file(self, name: str) -> bool:
        """Delete a file, or return False if an unfinished batch reads it. Raises StorageError."""
        # The lock keeps new batches from taking the file between the check and the deletion.
        async with self._changing:
            is_used = any(batch["input_file_id"] == name for batch in self.unfinished_batches())
            if not is_used:
                await asyncio.to_thread(self._unlink, name)
                file = self.records[FILES].pop(name, None)
                if file is not None:
                    self.stored_bytes[file.get(OWNER, "")] -= file["bytes"]
                    self._remember_deleted(file)
        return not is_used

    def _remember_deleted(self, file: Record) -> None:
        """Keep the record of a file that was deleted, and forget the one that was deleted long ago."""
        self.deleted_files[file["id"]] = file
        if len(self.deleted_files) > MOST_DELETED:
            oldest = next(iter(self.deleted_files))
            del self.deleted_files[oldest], self.places[oldest]

    def _unlink(self, name: str) -> None:
        """Delete a file's record durably, then its content."""
        content = self.path_of(FILES, name)
        with writing(content):
            # After a kill between the two steps, the next start deletes the content without a record.
            content.with_name(f"{name}.json").unlink(missing_ok=True)
            sync_directory(content.parent)
            content.unlink(missing_ok=True)

    async def delete_expired(self) -> None:
        """Delete expired files, except those that an unfinished batch reads. Raises StorageError."""
        for name, file in [*self.records[FILES].items()]:
            if file["expires_at"] and file["expires_at"] < now():
                await self.delete_file(name)
