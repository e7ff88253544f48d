"""What is known of an object of a store beside what pyarrow tells of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, runtime_checkable

import pyarrow.fs as pafs


@dataclass(frozen=True, slots=True)
class ObjectState:
    """What a store says of an object."""

    size: int
    changed: datetime | None
    e_tag: str | None
    """Changes whenever the object is replaced."""


@runtime_checkable
class StoredObjects(Protocol):
    """The objects of a store, which returns bytes of no other object than the one that was opened."""

    def state(self, path: str) -> ObjectState:
        """Return what the store says of an object now; raises OSError, FileNotFoundError where it is gone."""

    def read_samples(self, path: str, starts: Sequence[int], size: int) -> list[bytes]:
        """Return `size` bytes from each of these places, fetched at once; raises OSError."""


def objects_of(fs: pafs.FileSystem) -> StoredObjects | None:
    """Return the objects behind a file system; None for one of pyarrow's own, or of another package."""
    handler = getattr(fs, "handler", None)
    return handler if isinstance(handler, StoredObjects) else None
