"""The objects of a run, by their names below its URI; a condition makes a write exclusive."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from batchrunner.job.output import StorageSpec
from batchrunner.output.stores.addresses import StoreAddress
from batchrunner.output.stores.opening import STORE_ERRORS, as_os_error, e_tag_of, open_bucket, read_whole

PIECE_BYTES = 4 << 20
"""Least bytes of an object that are in memory while it is downloaded."""
_REQUESTS = (BaseError, FileNotFoundError, ValueError)
"""Errors of requests, and not of files on this machine."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a run."""

    name: str
    """Its key below the run's URI."""
    e_tag: str
    size: int = 0


class RunObjects:
    """The objects below a URI. Methods may be called from several threads, and raise OSError."""

    def __init__(self, address: StoreAddress, storage: StorageSpec) -> None:
        """Send nothing; raises JobError."""
        self.address = address
        self._bucket = open_bucket(address, storage)

    def create(self, name: str, content: bytes) -> str | None:
        """Create an object and return its e_tag; None where another one has the name.

        Where the reply to a first try was lost, the object is there, with this content: then it is ours.
        """
        try:
            return _tag(obstore.put(self._bucket, self._key(name), content, mode="create"))
        except AlreadyExistsError:
            found = self.read(name)
        except STORE_ERRORS as failure:
            raise as_os_error(failure, self.uri(name)) from None
        return found[1] if found is not None and found[0] == content else None

    def swap(self, name: str, content: bytes, e_tag: str) -> str | None:
        """Replace an object that still has this e_tag; return the new one, None where it has another.

        A lost reply is recognised as in `create`.
        """
        try:
            mode = self._unless_changed(name, e_tag)
            return _tag(obstore.put(self._bucket, self._key(name), content, mode=mode))
        except (PreconditionError, AlreadyExistsError, FileNotFoundError):
            found = self.read(name)
        except STORE_ERRORS as failure:
            raise as_os_error(failure, self.uri(name)) from None
        return found[1] if found is not None and found[0] == content else None

    def put(self, name: str, content: bytes | Path) -> str:
        """Write an object, also in place of another; return its e_tag."""
        try:
            return _tag(obstore.put(self._bucket, self._key(name), content))
        except STORE_ERRORS as failure:
            raise as_os_error(failure, self.uri(name)) from None

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return an object's content and e_tag; None where there is none."""
        return self._read(self._key(name))

    def download(self, name: str, file: Path) -> str | None:
        """Write an object's content to a file, piece by piece; return its e_tag, None where there is none."""

        def fetch() -> str:
            found = obstore.get(self._bucket, self._key(name))
            with file.open("wb") as sink:
                for piece in found.stream(min_chunk_size=PIECE_BYTES):
                    sink.write(piece)
            return _tag(found.meta)

        try:
            return read_whole(fetch)
        except STORE_ERRORS as failure:
            error = as_os_error(failure, self.uri(name)) if isinstance(failure, _REQUESTS) else failure
            if isinstance(error, FileNotFoundError):
                return None
            raise error from None

    def read_above(self, key: str) -> bytes | None:
        """Return the content of an object of the bucket by its whole key; None where there is none."""
        found = self._read(key)
        return None if found is None else found[0]

    def below(self, prefix: str = "") -> list[StoredObject]:
        """Return the objects whose names begin so."""
        directory = prefix.rpartition("/")[0]  # a client of a store lists whole directories
        key = self._key(directory) if directory else self.address.key
        begin = len(self.address.key) + 1 if self.address.key else 0
        try:
            pages = read_whole(lambda: list(obstore.list(self._bucket, key or None)))
        except STORE_ERRORS as failure:
            raise as_os_error(failure, str(self.address)) from None
        every = [
            StoredObject(found["path"][begin:], _tag(found), found["size"])
            for page in pages
            for found in page
        ]
        return [each for each in every if each.name and each.name.startswith(prefix)]

    def delete(self, names: Collection[str]) -> None:
        """Delete objects, where they are there."""
        keys = [self._key(name) for name in names]
        try:
            if keys:
                obstore.delete(self._bucket, keys)
        except FileNotFoundError:  # Google and Azure stop at one that is not there
            self._delete_one_by_one(keys)
        except STORE_ERRORS as failure:
            raise as_os_error(failure, str(self.address)) from None

    def uri(self, name: str) -> str:
        """Return the URI of an object."""
        return f"{self.address}/{name}"

    def _read(self, key: str) -> tuple[bytes, str] | None:
        tags: list[str] = []

        def read() -> bytes:
            found = obstore.get(self._bucket, key)
            tags.append(_tag(found.meta))
            return bytes(found.bytes())

        try:
            return read_whole(read), tags[-1]
        except STORE_ERRORS as failure:
            error = as_os_error(failure, f"{self.address.scheme}://{self.address.bucket}/{key}")
            if isinstance(error, FileNotFoundError):
                return None
            raise error from None

    def _delete_one_by_one(self, keys: Collection[str]) -> None:
        for key in keys:
            try:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._bucket, key)
            except STORE_ERRORS as failure:
                raise as_os_error(failure, str(self.address)) from None

    def _unless_changed(self, name: str, e_tag: str) -> Any:
        """Return the mode of a write that fails where the object has not this e_tag any more.

        Google's conditions name the generation of an object, which its listings do not tell. So the object is
        asked for it; raises PreconditionError where it has changed already.
        """
        if self.address.scheme != "gs":
            return {"e_tag": e_tag}
        found = obstore.head(self._bucket, self._key(name))
        if _tag(found) != e_tag:
            raise PreconditionError(f"{name}: it has changed")
        return {"version": found["version"]}

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self.address.key, name)))


def _tag(result: Any) -> str:
    return e_tag_of(result) or ""
