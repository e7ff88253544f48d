"""An object as a file: every read gives the object's bytes, blocks are fetched once, memory is bounded."""

from __future__ import annotations

import io
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchrunner.input.read_ahead import AHEAD_BLOCKS, BLOCK_BYTES, KEPT_BLOCKS, SMALL_BYTES, BlockFile


class Blob:
    """An object in memory that notes what is fetched of it."""

    def __init__(self, size: int) -> None:
        self.content = random.Random(size).randbytes(1 << 16) * (1 + (size >> 16))
        self.content = self.content[:size]
        self.size = size
        self.fetched: list[tuple[int, int]] = []
        self.failures = 0
        self._lock = threading.Lock()

    def fetch(self, begin: int, end: int) -> bytes:
        with self._lock:
            self.fetched.append((begin, end))
            if self.failures:
                self.failures -= 1
                raise OSError("the store answered 503")
        return self.content[begin:end]


def test_any_read_gives_the_bytes() -> None:
    """Reads of all sizes at all places, over the bounds of blocks and over the end."""
    blob = Blob(3 * BLOCK_BYTES + 17)
    chance = random.Random(1)
    with ThreadPoolExecutor(4) as pool, BlockFile(blob, pool) as file:
        for _ in range(60):
            at = chance.randrange(blob.size + 10)
            size = chance.choice([0, 1, 100, SMALL_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES + 5])
            file.seek(at)
            assert file.read(size) == blob.content[at : at + size]
            assert file.tell() == max(at, min(at + size, blob.size))
        assert file.seek(-7, io.SEEK_END) == blob.size - 7
        assert file.read() == blob.content[-7:]
        assert file.read() == b""


def test_reading_in_order_fetches_each_byte_once_and_ahead() -> None:
    """A file that is read piece by piece comes in blocks, and few of them stay."""
    blob = Blob(3 * KEPT_BLOCKS * BLOCK_BYTES // 2 + 1)
    with ThreadPoolExecutor(4) as pool, BlockFile(blob, pool) as file:
        pieces = []
        while piece := file.read(1 << 20):
            pieces.append(piece)
            ahead = max(end for _, end in blob.fetched) - file.tell()
            assert ahead <= (AHEAD_BLOCKS + 1) * BLOCK_BYTES
    assert b"".join(pieces) == blob.content
    assert sorted(blob.fetched) == sorted(set(blob.fetched))
    assert sum(end - begin for begin, end in blob.fetched) == blob.size


def test_small_reads_fetch_no_block() -> None:
    """A footer of some kilobytes costs as much."""
    blob = Blob(9 * BLOCK_BYTES)
    with ThreadPoolExecutor(4) as pool, BlockFile(blob, pool) as file:
        file.seek(-SMALL_BYTES, io.SEEK_END)
        assert file.read() == blob.content[-SMALL_BYTES:]
    assert blob.fetched == [(blob.size - SMALL_BYTES, blob.size)]


def test_columns_that_are_read_in_turn() -> None:
    """Several places of a file that are read on in turn do not fetch each other's blocks again."""
    blob = Blob(3 * 3 * BLOCK_BYTES)
    with ThreadPoolExecutor(4) as pool, BlockFile(blob, pool) as file:
        for step in range(0, 3 * BLOCK_BYTES, 1 << 20):
            for column in range(3):
                at = column * 3 * BLOCK_BYTES + step
                file.seek(at)
                assert file.read(1 << 20) == blob.content[at : at + (1 << 20)]
    assert sum(end - begin for begin, end in blob.fetched) <= blob.size * 5 // 4


def test_a_failed_block_is_fetched_again() -> None:
    """A block that could not be fetched fails the read, and not the next one."""
    blob = Blob(BLOCK_BYTES + 5)
    blob.failures = 1
    with ThreadPoolExecutor(1) as pool, BlockFile(blob, pool) as file:
        with pytest.raises(OSError, match="503"):
            file.read(SMALL_BYTES + 1)
        file.seek(0)
        assert file.read() == blob.content
