"""Rows put into the order of a column of theirs, on disk: dealt out to buckets, then bucket by bucket."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

GATHERED_BYTES = 32 << 20
"""Rows wait in memory until they are so many bytes: each bucket then gets a piece that is worth a write."""
_LIGHTLY = pa.ipc.IpcWriteOptions(compression="lz4")


class Buckets:
    """Rows by a column of numbers; one bucket has to fit into memory."""

    def __init__(self, directory: Path, by: str, ends: Sequence[int]) -> None:
        """Part them at each of the sorted `ends`, which begins the next bucket; the last is above all."""
        self._directory = directory
        self._by = by
        self._ends = ends
        self._gathered: list[pa.Table] = []
        self._bytes = 0

    def put(self, table: pa.Table) -> None:
        """Take some rows. Raises OSError."""
        self._gathered.append(table)
        self._bytes += table.nbytes
        if self._bytes >= GATHERED_BYTES:
            self._deal_out()

    def take(self) -> Iterator[pa.Table]:
        """Yield the rows of each bucket in order, and delete it. Raises OSError."""
        self._deal_out()
        for path in sorted(self._directory.glob("bucket-*.arrows")):
            table = pa.concat_tables(_streams(path)).sort_by(self._by)
            path.unlink()
            yield table

    def _deal_out(self) -> None:
        if not self._gathered:
            return
        table = pa.concat_tables(self._gathered).sort_by(self._by)
        self._gathered, self._bytes = [], 0
        numbers = table.column(self._by)
        start = 0
        while start < table.num_rows:
            bucket = bisect_right(self._ends, numbers[start].as_py())
            end = bisect_left(numbers, self._ends[bucket], start, key=lambda number: number.as_py())
            self._append(bucket, table.slice(start, end - start))
            start = end

    def _append(self, bucket: int, rows: pa.Table) -> None:
        """Write a stream of their own, so that no file stays open however many buckets there are."""
        path = self._directory / f"bucket-{bucket:06d}.arrows"
        with path.open("ab") as file, pa.ipc.new_stream(file, rows.schema, options=_LIGHTLY) as stream:
            stream.write_table(rows)


def _streams(path: Path) -> Iterator[pa.Table]:
    with pa.OSFile(str(path)) as file:
        while file.tell() < file.size():
            with pa.ipc.open_stream(file) as stream:
                yield stream.read_all()
