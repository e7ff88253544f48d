"""Sort keys of any number of rows, sorted by duckdb: in bounded memory, the rest on disk."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from batchrunner.output.columns import arrow_array

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MEMORY = "128MB"
"""What duckdb may use: with what it takes beyond that, and what Arrow holds meanwhile, a start that sorts
stays below 512 MB."""
CHUNK_ROWS = 16_384


class SortKey(NamedTuple):
    """What decides on a row's place: the fields in their order."""

    first: int
    """Comes before everything else, the smaller numbers first."""
    key: bytes
    tail: int
    row: int
    size: int
    """Bytes that the row takes, roughly; does not count for its place."""


_TYPES = {"first": pa.int64(), "key": pa.binary(), "tail": pa.int64(), "row": pa.int64(), "size": pa.int64()}


class KeySort:
    """Takes keys and gives them back in order. All methods raise OSError where duckdb can not go on."""

    def __init__(self, directory: Path) -> None:
        """`directory` takes what does not fit into memory."""
        import duckdb  # noqa: PLC0415 - 25 MB, and only for those who sort

        self._error = duckdb.Error
        self._chunk: list[SortKey] = []
        with self._errors():
            self._duckdb = duckdb.connect(
                config={"memory_limit": MEMORY, "threads": 1, "temp_directory": str(directory / "spilled")}
            )
            self._duckdb.execute(
                "CREATE TABLE keys (first BIGINT, key BLOB, tail BIGINT, row BIGINT, size BIGINT)"
            )

    def add(self, key: SortKey) -> None:
        """Take one."""
        self._chunk.append(key)
        if len(self._chunk) >= CHUNK_ROWS:
            self._flush()

    def sort(self) -> None:
        """Put those that were added into order."""
        self._flush()
        with self._errors():
            self._duckdb.execute(
                "CREATE TABLE sorted AS SELECT key, row, size FROM keys ORDER BY first, key, tail, row"
            )
            self._duckdb.execute("DROP TABLE keys")

    def in_order(self) -> Iterator[tuple[bytes, int]]:
        """Yield key and size of the rows, place by place."""
        for batch in self._batches("SELECT key, size FROM sorted"):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def places(self) -> Iterator[pa.Array]:
        """Yield the places of the rows, counted from 0, row by row; the keys are forgotten."""
        with self._errors():
            self._duckdb.execute("CREATE TABLE places AS SELECT row, rowid AS place FROM sorted")
            self._duckdb.execute("DROP TABLE sorted")
        for batch in self._batches("SELECT place FROM places ORDER BY row"):
            yield batch.column(0)

    def close(self) -> None:
        """Let go of memory and files."""
        self._duckdb.close()

    def _flush(self) -> None:
        if not self._chunk:
            return
        columns = zip(zip(*self._chunk, strict=True), _TYPES.values(), strict=True)
        chunk = pa.table([arrow_array(values, kind) for values, kind in columns], names=list(_TYPES))
        self._chunk = []
        with self._errors():
            self._duckdb.register("chunk", chunk)
            self._duckdb.execute("INSERT INTO keys SELECT * FROM chunk")

    def _batches(self, query: str) -> Iterator[pa.RecordBatch]:
        with self._errors():
            yield from self._duckdb.sql(query).to_arrow_reader(CHUNK_ROWS)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._error as failure:
            raise OSError(str(failure).splitlines()[0]) from None
