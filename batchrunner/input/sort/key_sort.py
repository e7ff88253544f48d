"""Sorts the keys of any number of rows with duckdb, in bounded memory and on disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from batchrunner.output.columns import arrow_array

MEMORY = "128MB"
"""Memory limit of duckdb. It takes more than that, but with Arrow's memory the process stays below 512 MB."""
CHUNK_ROWS = 16_384
"""Keys that are passed to or from duckdb at once."""


class SortKey(NamedTuple):
    """The sort key of a row: keys are compared field by field, except `size`."""

    first: int
    """Compared before everything else."""
    key: bytes
    """Checksums of the blocks of the prompt, see `prefixes.sort_key`."""
    tail: int
    """Checksum of the rest of the prompt."""
    row: int
    """Ordinal of the row."""
    size: int
    """Approximate bytes of the row."""


_TYPES = {"first": pa.int64(), "key": pa.binary(), "tail": pa.int64(), "row": pa.int64(), "size": pa.int64()}


class KeySort:
    """Collects keys and returns them sorted. All methods raise OSError where duckdb fails."""

    def __init__(self, directory: Path) -> None:
        """Start duckdb, which writes to `directory` what exceeds its memory."""
        import duckdb  # noqa: PLC0415 - 25 MB, for jobs that sort

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
        """Add a key."""
        self._chunk.append(key)
        if len(self._chunk) >= CHUNK_ROWS:
            self._flush()

    def sort(self) -> None:
        """Sort the keys that were added."""
        self._flush()
        with self._errors():
            self._duckdb.execute(
                "CREATE TABLE sorted AS SELECT key, row, size FROM keys ORDER BY first, key, tail, row"
            )
            self._duckdb.execute("DROP TABLE keys")

    def in_order(self) -> Iterator[tuple[bytes, int]]:
        """Yield `key` and `size` of each row in sorted order."""
        for batch in self._batches("SELECT key, size FROM sorted"):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def positions(self) -> Iterator[pa.Array]:
        """Yield the sorted positions of the rows, counted from 0, in input order; deletes the keys."""
        with self._errors():
            self._duckdb.execute("CREATE TABLE positions AS SELECT row, rowid AS position FROM sorted")
            self._duckdb.execute("DROP TABLE sorted")
        for batch in self._batches("SELECT position FROM positions ORDER BY row"):
            yield batch.column(0)

    def close(self) -> None:
        """Close duckdb, which frees its memory and files."""
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
