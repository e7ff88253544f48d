"""Files and batches in the server's directory, safe against a kill at any moment.

`files/ID.json` and `batches/ID.json` are records; `files/ID` is the content of a file, `batches/ID` the run
of an unfinished batch. The record of a file is written last: content without a record is deleted.

The server makes all names on the disk. A name from a client is only looked up among them.
"""

import asyncio
import json
import logging
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any, TypeAlias

from batchrunner.output.files import make_directory, using_run, write_json

log = logging.getLogger(__name__)

Record: TypeAlias = dict[str, Any]
"""A file or a batch, with the keys of OpenAI's API."""
FILES, BATCHES = "files", "batches"
"""The two kinds of records, as in the paths of the API and on the disk."""
_SERVER_NAMES = re.compile(r"\.?(file-|batch_)[0-9a-f]{48}(-output|-error)?(\..*tmp)?")
"""Names of contents, runs and temporary files. Nothing else in the directory is touched."""
FINAL_STATUSES = {"completed", "failed", "expired", "cancelled"}


def now() -> int:
    """Return the Unix time in whole seconds, as OpenAI's API writes it."""
    return int(time.time())


def new_id(prefix: str) -> str:
    """Return an ID that nobody can guess; IDs sort by age."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(16)}"


class State:
    """All files and batches: their records in memory and on the disk."""

    def __init__(self, directory: Path) -> None:
        """Read the records in `directory`, and delete what a kill left incomplete.

        Raises OSError, and OutputError where a record cannot be read.
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
        used_names = {*self.records[FILES], *(batch["id"] for batch in self.unfinished_batches())}
        for path in [*(directory / FILES).iterdir(), *(directory / BATCHES).iterdir()]:
            if not _SERVER_NAMES.fullmatch(path.name) or path.name in used_names:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self._saving = asyncio.Lock()

    def path_of(self, kind: str, name: str) -> Path:
        """Return the path of a file's content, or of a batch's run."""
        return self._directory / kind / name

    def unfinished_batches(self) -> list[Record]:
        """Return the batches without a final status, the oldest first."""
        return [batch for batch in self.records[BATCHES].values() if batch["status"] not in FINAL_STATUSES]

    async def save(self, kind: str, record: Record, **changes: Any) -> Record:
        """Add or change a record, in memory and on the disk; return it. Raises StorageError."""
        record.update(changes)
        name = record["id"]
        async with self._saving:
            await asyncio.to_thread(write_json, self.path_of(kind, f"{name}.json"), {**record})
        self.records[kind][name] = record
        log.info("%s: %s", name, record["status"])
        return record

    async def add_file(
        self, name: str, *, filename: str, purpose: str, expires_after: Record | None
    ) -> Record:
        """Return a new record for content that is on the disk already; raises StorageError.

        `filename` is the name that clients see.
        """
        created = now()
        return await self.save(FILES, {
            "id": name,
            "object": "file",
            "bytes": self.path_of(FILES, name).stat().st_size,
            "created_at": created,
            "expires_at": expires_after and created + expires_after["seconds"],
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        })  # fmt: skip

    def delete_file(self, name: str) -> None:
        """Delete a file and its record."""
        del self.records[FILES][name]
        self.path_of(FILES, f"{name}.json").unlink(missing_ok=True)
        self.path_of(FILES, name).unlink(missing_ok=True)

    def delete_expired(self) -> None:
        """Delete expired files, except those that a batch reads."""
        files_in_use = {batch["input_file_id"] for batch in self.unfinished_batches()}
        for name, file in [*self.records[FILES].items()]:
            is_expired = file["expires_at"] and file["expires_at"] < now()
            if is_expired and name not in files_in_use:
                self.delete_file(name)
