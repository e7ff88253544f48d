"""Journals: files to which finished rows are appended and synced, long before their part is written.

A frame is three little-endian 32-bit numbers (bytes of the payload, its CRC-32, its rows) and the payload, an
Arrow IPC stream with its own schema. A write that a crash or a full disk interrupts leaves a torn last frame;
readers stop there.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from batchrunner.output.files import sync_directory

_HEADER = struct.Struct("<III")


class Journal:
    """A new journal. Every method raises OSError; after that the same call may be repeated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        self._end = 0
        try:
            sync_directory(path.parent)
        except OSError:
            os.close(self._file)
            raise

    @property
    def end(self) -> int:
        """Bytes of the whole frames, which are on disk."""
        return self._end

    def append(self, table: pa.Table) -> None:
        """Append rows; once this returns they survive a power failure."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        payload = sink.getvalue()
        frame = memoryview(_HEADER.pack(payload.size, zlib.crc32(payload), table.num_rows) + payload)
        written = 0
        while written < len(frame):  # after the last whole frame: overwrites what a failed try left
            written += os.pwrite(self._file, frame[written:], self._end + written)
        os.fsync(self._file)
        self._end += len(frame)

    def close(self) -> None:
        """Close the file, which stays on disk."""
        os.close(self._file)


def read_journal(path: Path) -> Iterator[pa.Table]:
    """Yield the tables of a journal up to the first torn or damaged frame; raises FileNotFoundError."""
    with path.open("rb") as file:
        remaining = path.stat().st_size
        while remaining >= _HEADER.size:
            size, checksum, _ = _HEADER.unpack(file.read(_HEADER.size))
            remaining -= _HEADER.size + size
            # zeros: after a power failure a file may be longer than what was written to it
            if size == 0 or remaining < 0 or zlib.crc32(payload := file.read(size)) != checksum:
                return
            with pa.ipc.open_stream(payload) as reader:
                yield reader.read_all()
