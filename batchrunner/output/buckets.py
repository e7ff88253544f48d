"""External bucket sort: rows are partitioned by an integer column into files, which are sorted one by one."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

BUFFER_BYTES = 32 << 20
"""Default size in bytes of the rows that are buffered before they are written to the buckets.

Few long writes per bucket are faster than many short ones.
"""
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(slots=True)
class Buckets:
    """Sorts rows by a column of integers, with one bucket in memory at a time."""

    directory: Path
    """Directory of the bucket files."""
    column: str
    ends: Sequence[int]
    """Exclusive upper bounds of the buckets, ascending. The last bound exceeds all numbers.

    Bucket i holds the numbers from `ends[i - 1]` up to, but not including, `ends[i]`.
    """
    buffer_bytes: int = BUFFER_BYTES
    """Size in bytes of the buffered rows at which they are written to the bucket files."""
    _buffer: list[pa.Table] = field(default_factory=list, init=False)
    _bytes: int = field(default=0, init=False)

    def put(self, table: pa.Table) -> None:
        """Add rows in any order. Raises OSError if a bucket file cannot be written."""
        self._buffer.append(table)
        self._bytes += table.nbytes
        if self._bytes >= self.buffer_bytes:
            self._partition()

    def take(self) -> Iterator[pa.Table]:
        """Yield the sorted rows of one bucket after another; delete the file of each yielded bucket.

        Raises OSError if a file cannot be written or read.
        """
        self._partition()
        for path in sorted(self.directory.glob("bucket-*.arrows")):
            yield _sorted_rows(path, self.column)
            path.unlink()
            release_unused()

    def _partition(self) -> None:
        """Append the buffered rows to the files of their buckets, and empty the buffer.

        Bucket i gets the rows with numbers below `ends[i]` that are not below `ends[i - 1]`.
        """
        if not self._buffer:
            return
        # After sorting, the rows of a bucket are one slice.
        table = pa.concat_tables(self._buffer).sort_by(self.column)
        self._buffer, self._bytes = [], 0
        numbers = table.column(self.column)
        start = 0
        while start < table.num_rows:
            bucket = bisect_right(self.ends, numbers[start].as_py())
            # Index of the first row that belongs to a later bucket.
            end = bisect_left(numbers, self.ends[bucket], start, key=lambda number: number.as_py())
            self._append(bucket, table.slice(start, end - start))
            start = end
        release_unused()

    def _append(self, bucket: int, rows: pa.Table) -> None:
        """Append rows to a bucket's file as a separate Arrow stream, so that no file stays open."""
        path = self.directory / f"bucket-{bucket:06d}.arrows"
        with path.open("ab") as file, pa.ipc.new_stream(file, rows.schema, options=_LZ4) as stream:
            stream.write_table(rows)


def release_unused() -> None:
    """Return memory to the operating system that Arrow's pool keeps for later use.

    The pool often keeps more memory than all tables occupy.
    """
    pa.default_memory_pool().release_unused()


def _sorted_rows(path: Path, column: str) -> pa.Table:
    return pa.concat_tables(_streams(path)).sort_by(column)


def _streams(path: Path) -> Iterator[pa.Table]:
    """Yield the table of each Arrow stream in the file of a bucket."""
    with pa.OSFile(str(path)) as file:
        while file.tell() < file.size():
            with pa.ipc.open_stream(file) as stream:
                yield stream.read_all()
