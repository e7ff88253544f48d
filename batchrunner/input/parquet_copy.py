"""Data as people have it in Python → one Parquet file."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.errors import InputError
from batchrunner.input.files import first_line
from batchrunner.input.tables import CHUNK_ROWS, batches_of
from batchrunner.output.files import writing


def write_parquet(data: object, path: Path) -> None:
    """Write data as one Parquet file; an iterator is read in bounded memory.

    Chunks of an iterator may differ in their columns and types, which are unified. Raises InputError, and
    what an iterator raises.
    """
    segments = _Segments(path)
    with contextlib.closing(segments):
        # a list is converted as one: it is in memory anyway
        for batch in batches_of(data, chunk_rows=len(data) if isinstance(data, (list, tuple)) else None):
            with _writing_parquet(path):
                segments.add(batch)
        with _writing_parquet(path):
            segments.join()


@contextlib.contextmanager
def about_rows(path: Path) -> Iterator[None]:
    """Let an InputError about the file with a program's rows say "rows": the program knows no such file."""
    try:
        yield
    except InputError as failure:
        if str(path) not in failure.message:
            raise
        hint = None if failure.hint == failure.advice else failure.hint
        renamed = type(failure)(failure.message.replace(str(path), "rows"), hint=hint)
        renamed.report = failure.report
        raise renamed from None


@contextlib.contextmanager
def _writing_parquet(path: Path) -> Iterator[None]:
    try:
        with writing(path):
            yield
    except pa.ArrowException as failure:  # a type that Parquet has not
        raise InputError(f"rows: cannot be written as Parquet: {first_line(failure)}") from None


class _Segments:
    """Writes batches to Parquet files of one schema each, and then joins these into one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: list[Path] = []
        self._schemas: list[pa.Schema] = []
        self._writer: pq.ParquetWriter | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Write a batch; raises OSError or ArrowException."""
        if self._writer is None or not batch.schema.equals(self._schemas[-1]):
            self.close()
            file = self._path.with_name(f"{self._path.name}.{len(self._files)}")
            self._writer = pq.ParquetWriter(file, batch.schema)
            self._files.append(file)
            self._schemas.append(batch.schema)
        self._writer.write_batch(batch)

    def join(self) -> None:
        """Put the segments together under the path; raises OSError, ArrowException or InputError."""
        self.close()
        if len(self._files) == 1:
            self._files[0].rename(self._path)
            return
        try:
            schema = pa.unify_schemas(self._schemas, promote_options="permissive")
        except (TypeError, ValueError, pa.ArrowException) as failure:
            raise InputError(f"rows: their types do not fit together: {first_line(failure)}") from None
        with pq.ParquetWriter(self._path, schema) as writer:
            for file in self._files:
                with pq.ParquetFile(file) as segment:
                    for batch in segment.iter_batches(CHUNK_ROWS):
                        writer.write_batch(_cast(batch, schema))
                file.unlink()

    def close(self) -> None:
        """Close the file that is open."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with these columns; one that it has not is null."""
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
