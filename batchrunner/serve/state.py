"""Files and batches on the disk, in the server's directory: a kill at any moment loses none.

files/ID.json and batches/ID.json are records; files/ID is the content of a file, batches/ID the run of a
batch that has not ended. A file's record comes last: content without one is none.

Names on the disk are made here. What clients call a file or a batch is only looked up among those names.
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
_OURS = re.compile(r"\.?(file-|batch_)[0-9a-f]{48}(-output|-error)?(\..*tmp)?")
"""Names of contents, of runs, and of files that are not whole: nothing else in the directory is touched."""
ENDED = {"completed", "failed", "expired", "cancelled"}
"""States of a batch in which it stays."""


def now() -> int:
    """Return the time as OpenAI's API has it."""
    return int(time.time())


def new_id(kind: str) -> str:
    """Return a name that nobody can guess; later ones come later in the alphabet."""
    return f"{kind}{time.time_ns():016x}{secrets.token_hex(16)}"


class State:
    """All files and batches: their records in memory, and on the disk."""

    def __init__(self, directory: Path) -> None:
        """Read what is in a directory, and delete what a kill left half done.

        Raises OSError, and OutputError where a record cannot be read.
        """
        self._directory = directory
        self.records: dict[str, dict[str, Record]] = {}
        """Records by kind and ID, the oldest first."""
        for kind in (FILES, BATCHES):
            make_directory(directory / kind)
            self.records[kind] = {}
            for path in sorted((directory / kind).glob("*.json")):
                if _OURS.fullmatch(path.stem):
                    with using_run(str(path)):
                        self.records[kind][path.stem] = json.loads(path.read_bytes())
        kept = {*self.records[FILES], *(batch["id"] for batch in self.under_way())}
        for path in [*(directory / FILES).iterdir(), *(directory / BATCHES).iterdir()]:
            if not _OURS.fullmatch(path.name) or path.name in kept:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self._saving = asyncio.Lock()

    def place_of(self, kind: str, name: str) -> Path:
        """Return the path of a file's content, or of a batch's run."""
        return self._directory / kind / name

    def under_way(self) -> list[Record]:
        """Return the batches that have not ended, the oldest first."""
        return [batch for batch in self.records[BATCHES].values() if batch["status"] not in ENDED]

    async def save(self, kind: str, record: Record, **changes: Any) -> Record:
        """Change a record, or add one, here and on the disk; return it. Raises StorageError."""
        record.update(changes)
        name = record["id"]
        async with self._saving:
            await asyncio.to_thread(write_json, self.place_of(kind, f"{name}.json"), {**record})
        self.records[kind][name] = record
        log.info("%s: %s", name, record["status"])
        return record

    async def add_file(self, name: str, file: str, purpose: str, expires_after: Record | None) -> Record:
        """Make a file, which clients call `file`, of content that is on the disk; return its record.

        Raises StorageError.
        """
        size, created = self.place_of(FILES, name).stat().st_size, now()
        return await self.save(FILES, {
            "id": name, "object": "file", "bytes": size, "created_at": created, "filename": file,
            "expires_at": expires_after and created + expires_after["seconds"], "purpose": purpose,
            "status": "processed", "status_details": None,
        })  # fmt: skip

    def delete_file(self, name: str) -> None:
        """Delete a file."""
        del self.records[FILES][name]
        for each in (f"{name}.json", name):
            self.place_of(FILES, each).unlink(missing_ok=True)

    def delete_expired(self) -> None:
        """Delete the files whose time is over and that no batch reads."""
        read = {batch["input_file_id"] for batch in self.under_way()}
        for name, file in [*self.records[FILES].items()]:
            if name not in read and file["expires_at"] and file["expires_at"] < now():
                self.delete_file(name)
