"""External bucket sort: rows are partitioned by a numeric column into files, which are sorted one by one."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

BUFFER_BYTES = 32 << 20
"""Bytes of rows that are collected before they are partitioned, so that each bucket gets a long write."""
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")


class Buckets:
    """Sorts rows by a column of whole numbers; one bucket has to fit into memory."""

    def __init__(
        self, directory: Path, column: str, ends: Sequence[int], buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        """Set the bounds: bucket i holds numbers below ends[i] and from ends[i-1] on.

        `ends` is sorted, and its last number is greater than any in the column. `directory` takes the files.
        """
        self._directory = directory
        self._column = column
        self._ends = ends
        self._buffer_bytes = buffer_bytes
        self._buffer: list[pa.Table] = []
        self._bytes = 0

    def put(self, table: pa.Table) -> None:
        """Add rows. Raises OSError."""
        self._buffer.append(table)
        self._bytes += table.nbytes
        if self._bytes >= self._buffer_bytes:
            self._partition()

    def take(self) -> Iterator[pa.Table]:
        """Yield the sorted rows of each bucket in turn, and delete its file. Raises OSError."""
        self._partition()
        for path in sorted(self._directory.glob("bucket-*.arrows")):
            yield _sorted_rows(path, self._column)
            path.unlink()
            release_unused()

    def _partition(self) -> None:
        if not self._buffer:
            return
        table = pa.concat_tables(self._buffer).sort_by(self._column)
        self._buffer, self._bytes = [], 0
        numbers = table.column(self._column)
        start = 0
        while start < table.num_rows:
            bucket = bisect_right(self._ends, numbers[start].as_py())
            end = bisect_left(numbers, self._ends[bucket], start, key=lambda number: number.as_py())
            self._append(bucket, table.slice(start, end - start))
            start = end
        release_unused()

    def _append(self, bucket: int, rows: pa.Table) -> None:
        """Append an Arrow stream of its own to the file, so that no file stays open between calls."""
        path = self._directory / f"bucket-{bucket:06d}.arrows"
        with path.open("ab") as file, pa.ipc.new_stream(file, rows.schema, options=_LZ4) as stream:
            stream.write_table(rows)


def release_unused() -> None:
    """Give the memory that Arrow keeps for later, often more than it uses, back to the operating system."""
    pa.default_memory_pool().release_unused()


def _sorted_rows(path: Path, column: str) -> pa.Table:
    return pa.concat_tables(_streams(path)).sort_by(column)


def _streams(path: Path) -> Iterator[pa.Table]:
    with pa.OSFile(str(path)) as file:
        while file.tell() < file.size():
            with pa.ipc.open_stream(file) as stream:
                yield stream.read_all()
