"""The `input` part of a job: where the rows come from."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from batchrunner.job.fields import Spec, UserPath

ColumnType: TypeAlias = Literal["string", "bool", "int32", "int64", "float32", "float64", "date", "timestamp"]


class InputSpec(Spec):
    """Where the rows come from."""

    path: UserPath | Annotated[list[UserPath], Field(min_length=1)]
    """A file, a directory, a glob, or a list of these. Files are Parquet, or by their ending CSV (`.csv`,
    `.tsv`), JSON Lines (`.jsonl`, `.ndjson`, `.json`) or Arrow (`.arrow`, `.feather`, `.ipc`), which may be
    compressed (`.gz`, `.zst`). Directory names such as `year=2024` become
    columns, unless the files have a column of that name. Paths are local, or URIs of object stores (s3://,
    gs://, az://) or of what else pyarrow can open (hdfs://), whose globs may contain `*` and `**/`."""
    columns: list[str] = []
    """Input columns that are copied to the results."""
    types: dict[str, ColumnType] = {}
    """Types of columns of CSV and JSON Lines files. In CSV any other column is a text, as it stands in the
    file; in JSON Lines it has the type of its values. A value that does not fit fails its row."""
    rename: dict[str, str] = {}
    """New names for copied columns: `{input_name: output_name}`."""
    filter: str | None = None
    """Jinja2 expression over the columns of a row; only rows for which it is true are sent."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Number of rows to send, counted after `filter`; by default all."""

    @property
    def carried_names(self) -> list[str]:
        """Names of the copied columns in the results, in the order of `columns`."""
        return [self.rename.get(name, name) for name in self.columns]
