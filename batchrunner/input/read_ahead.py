"""An object of a store as a file: read in blocks, of which the next ones are fetched ahead."""

from __future__ import annotations

import io
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

BLOCK_BYTES = 4 << 20
"""Bytes of a block: at 100 MB/s it takes as long as the store takes to begin an answer, about 40 ms."""
AHEAD_BLOCKS = 4
"""Blocks that are fetched ahead where a file is read in order."""
KEPT_BLOCKS = 12
"""Blocks of a file that stay in memory; the columns of a row group are read in turn."""
SMALL_BYTES = 64 << 10
"""A read of at most this many bytes, such as that of a footer, fetches no block."""


class ByteRanges(Protocol):
    """An object whose bytes can be fetched, from several threads at once."""

    @property
    def size(self) -> int:
        """Bytes of the object."""

    def fetch(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` up to `end`; raises OSError, also where the object has changed."""


class BlockFile(io.RawIOBase):
    """An open object. Not safe for several threads, as any file."""

    def __init__(self, ranges: ByteRanges, pool: ThreadPoolExecutor) -> None:
        """`pool` fetches the blocks."""
        super().__init__()
        self._ranges = ranges
        self._pool = pool
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._ranges.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes, fewer only at the end; raises OSError."""
        end = self._ranges.size if size < 0 else min(self._at + size, self._ranges.size)
        begin, self._at = self._at, max(self._at, end)
        if begin >= end:
            return b""
        first, last = begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        if end - begin <= SMALL_BYTES and first not in self._blocks and first - 1 not in self._blocks:
            return self._ranges.fetch(begin, end)
        is_in_order = first in self._blocks or first - 1 in self._blocks
        wanted = [self._block(number) for number in range(first, last + 1)]
        if is_in_order:
            for number in range(last + 1, last + 1 + AHEAD_BLOCKS):
                self._block(number)
        data = [block.result() for block in wanted]
        self._forget(first)
        if first == last:
            return data[0][begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]
        whole = b"".join(data)
        return whole[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def close(self) -> None:
        """Forget the blocks; those that are being fetched are not waited for."""
        for block in self._blocks.values():
            block.cancel()
        self._blocks.clear()
        super().close()

    def _block(self, number: int) -> Future[bytes]:
        """Return a block, which is fetched unless it is there; past the end it is empty."""
        block = self._blocks.get(number)
        if block is None or (block.done() and (block.cancelled() or block.exception() is not None)):
            begin = number * BLOCK_BYTES
            if begin >= self._ranges.size:
                return _nothing()
            end = min(begin + BLOCK_BYTES, self._ranges.size)
            block = self._blocks[number] = self._pool.submit(self._ranges.fetch, begin, end)
        self._blocks.move_to_end(number)
        return block

    def _forget(self, current: int) -> None:
        """Drop the blocks that were used longest ago, but not the current one."""
        for number in list(self._blocks):
            if len(self._blocks) <= KEPT_BLOCKS:
                return
            if number != current:
                self._blocks.pop(number).cancel()


def _nothing() -> Future[bytes]:
    empty: Future[bytes] = Future()
    empty.set_result(b"")
    return empty
