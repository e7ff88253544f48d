"""Arrow schemas as this package uses them: every field nullable, and types that Arrow can select and sort.

Files of one input may differ in which fields are nullable. `string_view` cannot be sorted yet. Where nothing
but null is known, the type is that of texts.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def normalized(schema: pa.Schema) -> pa.Schema:
    """Return the schema with all fields nullable, without views, and with texts for nulls."""
    return pa.schema([_normalized_field(field) for field in schema])


def normalize(data: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with the normalized schema."""
    schema = normalized(data.schema)
    return data if data.schema.equals(schema) else data.cast(schema)


def not_for_parquet(kind: pa.DataType) -> str | None:
    """Return why Parquet, as which results are written, cannot hold values of a type; None where it can."""
    try:
        with pa.BufferOutputStream() as sink, pq.ParquetWriter(sink, pa.schema([("a", kind)])) as writer:
            writer.write_table(pa.table([pa.nulls(0, kind)], names=["a"]))
        pq.ParquetFile(sink.getvalue())  # which does not read what is nested too deeply
    except (OSError, pa.ArrowException, NotImplementedError) as failure:
        return str(failure).partition("\n")[0]
    return None


def _normalized_field(field: pa.Field[Any]) -> pa.Field[Any]:
    return field.with_type(_normalized_type(field.type)).with_nullable(True)


def _normalized_type(kind: pa.DataType) -> pa.DataType:
    if pt.is_list(kind):
        return pa.list_(_normalized_field(kind.value_field))
    if pt.is_large_list(kind):
        return pa.large_list(_normalized_field(kind.value_field))
    if pt.is_fixed_size_list(kind):
        return pa.list_(_normalized_field(kind.value_field), kind.list_size)
    if pt.is_map(kind):
        key = _normalized_field(kind.key_field).with_nullable(False)  # as Arrow requires of a map
        return pa.map_(key, _normalized_field(kind.item_field), kind.keys_sorted)
    if pt.is_struct(kind):
        return pa.struct([_normalized_field(field) for field in kind])
    return pa.string() if pt.is_null(kind) else _VIEWS.get(kind, kind)
