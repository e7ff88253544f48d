"""The calls of OpenAI's Files API: upload, download and deletion."""

import asyncio
import contextlib
import shutil
from collections import Counter
from pathlib import Path
from typing import IO, Annotated, Literal

from aiohttp import BodyPartReader, web
from pydantic import BaseModel, ConfigDict, Field

from batchrunner.output.files import whole_file
from batchrunner.serve.api_errors import ApiError
from batchrunner.serve.owners import Owner, Owners
from batchrunner.serve.records import OWNER_OF_CALL, Records
from batchrunner.serve.state import FILES, Record, State, new_id

BLOCK_BYTES = 1 << 20
"""Size in bytes of the blocks in which an upload is read and written."""
MOST_FIELDS = 5
"""Maximum number of fields in the form of an upload. Each field may have 1 MiB."""
FORM_ERRORS = (ValueError, LookupError, RuntimeError, AssertionError, ConnectionError, TypeError)
"""Errors that aiohttp raises for an upload that is not a form or ends too early."""
RESERVED_SHARE, RESERVED_BYTES = 0.05, 10_000_000_000
"""Disk space that uploads must leave free for results: a fraction of the disk, or a number of bytes if that
is less."""


class Parameters(BaseModel):
    """Base class for the parameters of a call. Unknown parameters are refused."""

    model_config = ConfigDict(extra="forbid")


class ExpiresAfter(Parameters):
    """Lifetime of a file."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86400)]


class NewFile(Parameters):
    """Form fields of a file upload; `file` is the file name that the client sent."""

    file: str
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FilesApi:
    """Handlers of the calls for files."""

    def __init__(
        self, *, state: State, owners: Owners, records: Records, most_bytes: int, most_files: int
    ) -> None:
        """Accept at most `most_files` files of at most `most_bytes` bytes each.

        Several owners divide these files according to their shares.
        """
        self._state, self._owners, self._records = state, owners, records
        self._most_bytes, self._most_files = most_bytes, most_files
        self._uploading = Counter[str]()
        """Bytes of the uploads in progress, by name of the owner."""

    def check_count(self, owner: Owner) -> None:
        """Raise ApiError if an owner has too many files."""
        count = self._state.file_count(owner.name)
        if count >= self._most_files * self._owners.part_of(owner):
            raise ApiError(400, f"There are {count} files: delete some.", code="too_many_files")

    async def upload(self, request: web.Request) -> Record:
        """Store an uploaded file. It is on the disk before the client gets the reply."""
        owner = request[OWNER_OF_CALL]
        self.check_count(owner)
        name = new_id("file-")
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(whole_file(self._state.path_of(FILES, name)))
            try:
                fields = await self._read_form(request, temporary, owner)
            except FORM_ERRORS:
                raise ApiError(400, "The upload is not a complete multipart/form-data form.") from None
            new_file = NewFile.model_validate(fields).model_dump()
            # Check again: other uploads of the owner may have ended meanwhile.
            self.check_count(owner)
            # Closing the stack gives the temporary file its final name, durably.
            await asyncio.to_thread(stack.pop_all().close)
        record = await self._state.add_file(name, owner=owner.name, filename=new_file.pop("file"), **new_file)
        return owner.view(record)

    async def _read_form(self, request: web.Request, target: Path, owner: Owner) -> Record:
        """Write the uploaded file to `target`; return the form's fields, with the file's name as `file`."""
        fields: Record = {}
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader) or len(fields) == MOST_FIELDS:
                # `upload` turns this error into an ApiError.
                raise ValueError
            if part.name == "file":
                await self._write_part(part, target, owner)
                # File names may have lone surrogates, which no JSON can hold.
                fields["file"] = (part.filename or "upload").encode(errors="replace").decode()
            else:
                fields[str(part.name)] = await part.text()
        # Fields such as `expires_after[seconds]` become mappings; some clients write
        # `expires_after.seconds`.
        for name in [*fields]:
            outer, dot, inner = name.replace("[", ".").partition(".")
            if dot:
                fields.setdefault(outer, {})[inner.removesuffix("]")] = fields.pop(name)
        return fields

    async def _write_part(self, part: BodyPartReader, target: Path, owner: Owner) -> None:
        """Write the part of a form that is the file; raises ApiError if there is no room for it."""
        size = 0
        try:
            with target.open("wb") as content:
                while block := await part.read_chunk(BLOCK_BYTES):
                    size += len(block)
                    # Count the block before it is written, so that parallel uploads together do not exceed
                    # the limit.
                    self._uploading[owner.name] += len(block)
                    stored = self._state.stored_bytes
                    await asyncio.to_thread(
                        self._write,
                        content,
                        block,
                        part=self._owners.part_of(owner),
                        used=stored[owner.name] + self._uploading[owner.name],
                        used_by_all=stored.total() + self._uploading.total(),
                    )
        finally:
            # The upload is over. If it succeeded, its file will count as stored.
            self._uploading[owner.name] -= size

    def _write(self, content: IO[bytes], block: bytes, *, part: float, used: int, used_by_all: int) -> None:
        """Write a block of an upload.

        Raises ApiError if the file is too large, if the disk is nearly full, or if the owner has filled its
        `part` (a fraction) of the disk. `used` is the number of bytes of the owner's files and uploads, and
        `used_by_all` that of all owners.
        """
        if content.tell() + len(block) > self._most_bytes:
            raise ApiError(413, f"'file' is larger than {self._most_bytes} bytes.", "file", "too_large")
        disk = shutil.disk_usage(content.name)
        # The owner may fill its part of the space for uploads: what they use now, and what is free.
        free = disk.free - min(RESERVED_SHARE * disk.total, RESERVED_BYTES)
        if free < 0 or used > (used_by_all + free) * part:
            raise ApiError(413, "The disk is nearly full: delete files.", "file", "disk_full")
        content.write(block)

    async def content(self, request: web.Request) -> web.FileResponse:
        """Return the content of a file."""
        path = self._state.path_of(FILES, self._records.one(request)["id"])
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    async def delete(self, request: web.Request) -> Record:
        """Delete a file that no unfinished batch reads."""
        name = self._records.one(request)["id"]
        if not await self._state.delete_file(name):
            raise ApiError(409, "A batch reads this file: cancel the batch first.", "id", "file_in_use")
        return {"id": name, "object": "file", "deleted": True}
