"""Uploaded files, results and batches, as files in the server's directory: a kill at any moment loses none.

files/ID is a file's content, files/ID.json its record, which comes last: a file without it is none.
batches/ID/ has a batch's record, and the run's directory until the batch has ended.

Names on the disk are made here. What clients call a file or a batch is only looked up among those names.
"""

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from pathlib import Path
from typing import Any, TypeAlias

from batchrunner.core.files import read_json
from batchrunner.output.files import make_directory, write_json

log = logging.getLogger(__name__)

Record: TypeAlias = dict[str, Any]
"""A file or a batch, with the keys of OpenAI's API."""
BATCH = "batch.json"
ENDED = {"completed", "failed", "expired", "cancelled"}
"""States of a batch in which it stays."""


def new_id(kind: str) -> str:
    """Return a name that nobody can guess; later ones come later in the alphabet."""
    return f"{kind}{time.time_ns():016x}{secrets.token_hex(16)}"


class State:
    """All files and batches: their records in memory, and on the disk."""

    def __init__(self, directory: Path) -> None:
        """Read what is in a directory, and delete what a kill left half done. Raises OSError."""
        self._files, self._batches = directory / "files", directory / "batches"
        make_directory(self._files)
        make_directory(self._batches)
        records = {path.stem: read_json(path) for path in sorted(self._files.glob("*.json"))}
        self.files: dict[str, Record] = {name: record for name, record in records.items() if record}
        """Records of files by their IDs."""
        for path in self._files.iterdir():
            if path.name.removesuffix(".json") not in self.files:
                path.unlink()
        self.batches: dict[str, Record] = {}
        """Records of batches by their IDs, the oldest first."""
        for path in sorted(self._batches.iterdir()):
            if record := read_json(path / BATCH):
                self.batches[path.name] = record
            if not record or record["status"] in ENDED - {"failed"}:
                self.drop_run(path.name)
        self._saving = asyncio.Lock()

    def content_of(self, file: str) -> Path:
        """Return the path of a file's content."""
        return self._files / file

    def run_of(self, batch: str) -> Path:
        """Return the directory of a batch's run."""
        return self._batches / batch / "run"

    def under_way(self) -> list[Record]:
        """Return the batches that have not ended, the oldest first."""
        return [batch for batch in self.batches.values() if batch["status"] not in ENDED]

    async def add_file(self, file: str, name: str, purpose: str) -> Record:
        """Make a file of content that is on the disk; return its record. Raises StorageError."""
        path = self.content_of(file)
        record = {
            "id": file, "object": "file", "bytes": path.stat().st_size, "created_at": int(time.time()),
            "filename": name, "purpose": purpose, "status": "processed", "status_details": None,
        }  # fmt: skip
        await asyncio.to_thread(write_json, self._files / f"{file}.json", record)
        self.files[file] = record
        return record

    def delete_file(self, file: str) -> None:
        """Delete a file."""
        del self.files[file]
        (self._files / f"{file}.json").unlink()
        self.content_of(file).unlink()

    async def save(self, batch: Record, **changes: Any) -> None:
        """Change a batch's record, here and on the disk. Raises StorageError."""
        batch.update(changes)
        async with self._saving:
            path = self._batches / batch["id"] / BATCH
            await asyncio.to_thread(make_directory, path.parent)
            await asyncio.to_thread(write_json, path, {**batch})
        self.batches[batch["id"]] = batch
        log.info("%s: %s %s", batch["id"], batch["status"], batch["request_counts"])

    def drop_run(self, batch: str) -> None:
        """Delete the run of a batch, whose results are files."""
        shutil.rmtree(self.run_of(batch), ignore_errors=True)
        with contextlib.suppress(OSError):  # its record is there
            (self._batches / batch).rmdir()
