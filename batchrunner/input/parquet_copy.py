"""Writes the tables and rows of a program, or an input file of another format, as one Parquet file.

Batches of rows may differ in columns and types. They are first spooled to disk as Arrow streams, and written
as Parquet once the type of each column is known. Values without a common type become JSON text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from batchrunner.core.errors import first_line
from batchrunner.input.common_types import common_type
from batchrunner.job.arrow_types import type_name
from batchrunner.output.arrow_arrays import arrow_array
from batchrunner.output.files import writing

Item = TypeVar("Item")
UNFIT = (ValueError, TypeError, OverflowError, pa.ArrowException)
"""Errors that Arrow raises for a value that does not fit a type."""
VALUE_CHARACTERS = 40
"""Maximum length in characters of a bad value, or of a type, in a message."""
PROBLEM = "\0problem"
"""Column with the reason why a record of a CSV or JSON Lines file cannot be read; null if it can."""
LINE = "\0line"
"""Column with the line number of each record in a CSV or JSON Lines file. It is not copied to Parquet."""
AS_JSON = "\0json "
"""Prefix of the name of a column that a batch stores as JSON text.

A batch stores a column in this way if its values have no common type.
"""
MOST_ODD = 0.1
"""Maximum share of odd values in a column of lists or structs.

A value is odd if it does not fit the type of most values. Up to this share, the records with odd values fail.
Above it, the whole column becomes JSON text.
"""
NOTES = b"batchrunner.notes"
"""Metadata key in a Parquet copy for notes to the user, a JSON list of sentences."""
MOST_FIELDS = 1000
"""Maximum number of fields of an object in a column of structs.

A larger object is likely a lookup table, so its column becomes JSON text.
"""
BATCH_BYTES = 4 << 20
"""Size in bytes at which a batch of records ends."""
_TEXT = pa.string()
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
"""Arrow's view types, which Parquet cannot store, and the types that replace them."""
_JSON_NAMES = {
    str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object",
}  # fmt: skip
"""Names of JSON types in messages, by Python type."""
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")


def write_parquet(
    batches: Iterable[pa.RecordBatch],
    path: Path,
    metadata: Mapping[bytes, bytes] | None = None,
    source: str = "",
) -> None:
    """Write one or more batches as a Parquet file.

    Batches of a CSV or JSON Lines file have the columns PROBLEM and LINE, and may have AS_JSON columns.
    `source` is the name of this file in messages. Notes on its records are added to the metadata as NOTES.
    Raises StorageError or ArrowException, and any error of the iterator of batches.
    """
    # The types of columns are known only after the last batch, so all batches are first written to a spool.
    # Batches may differ in columns, so each is an Arrow stream of its own.
    spool = path.with_name(f"{path.name}.arrows")
    record_columns: dict[str, _RecordColumn] = {}
    # For records of text files, the values of each column are counted by type. For other batches, the common
    # schema follows from their schemas.
    schema: pa.Schema | None = None
    try:
        with spool.open("wb") as file:
            for batch in batches:
                if LINE in batch.schema.names:
                    _count_types(batch, record_columns)
                elif schema is None or not batch.schema.equals(schema):
                    schema = common_schema([schema, batch.schema] if schema else [batch.schema])
                with writing(path):
                    with pa.ipc.new_stream(file, batch.schema, options=_LZ4) as stream:
                        stream.write_batch(batch)
                    file.flush()
        if schema is None:
            schema = pa.schema([(name, column.type()) for name, column in record_columns.items()])
        schema = stored_schema(schema)
        records = _Records(schema, record_columns, source)
        with (
            writing(path),
            pa.OSFile(str(spool)) as spooled,
            pq.ParquetWriter(path, schema.with_metadata(metadata), compression="zstd") as writer,
        ):
            while spooled.tell() < spooled.size():
                with pa.ipc.open_stream(spooled) as stream:
                    for batch in stream:
                        fitting = records.fitted(batch) if record_columns else fitted(batch, schema)
                        writer.write_batch(fitting.replace_schema_metadata())
            writer.add_key_value_metadata({NOTES: msgspec.json.encode(records.notes())})
    finally:
        spool.unlink(missing_ok=True)


def _count_types(records: pa.RecordBatch, columns: dict[str, _RecordColumn]) -> None:
    for field, values in zip(records.schema, records.columns, strict=True):
        name = field.name.removeprefix(AS_JSON)
        if name != LINE:
            columns.setdefault(name, _RecordColumn()).count(values, is_json=name != field.name)


class _RecordColumn:
    """Counts of the values of one column by type, over all batches of records."""

    def __init__(self) -> None:
        self._counts: Counter[pa.DataType] = Counter()
        self._without_type = 0

    def count(self, values: pa.Array, *, is_json: bool) -> None:
        """Count values by type; `is_json` means that the values are JSON texts, each with its own type."""
        if not is_json:
            self._counts[values.type] += len(values) - values.null_count
            return
        # The batch had no common type for the column, so its values are counted one by one.
        for value in _decoded(values):
            if value is not None:
                kind = _type_of(value)
                if kind is None:
                    self._without_type += 1
                else:
                    self._counts[kind] += 1

    def main_type(self) -> tuple[pa.DataType, float]:
        """Return the type that holds most values, and the share of values that it cannot hold."""
        # Types that have a common type form a group. The largest group gives the main type.
        groups: list[tuple[pa.DataType, int]] = []
        for kind, count in self._counts.items():
            for index, (group_type, group_count) in enumerate(groups):
                common = common_type(group_type, kind)
                if common is not None:
                    groups[index] = common, group_count + count
                    break
            else:
                groups.append((kind, count))
        main_type, main_count = max(groups, key=itemgetter(1), default=(pa.null(), 0))
        total = self._without_type + sum(count for _, count in groups)
        return main_type, (total - main_count) / max(1, total)

    def type(self) -> pa.DataType:
        """Return the type of most values, or text if too many values do not fit it.

        In a column of lists or structs, a share of up to MOST_ODD may not fit. In any other column, all
        values must fit.
        """
        main_type, odd_share = self.main_type()
        most_odd = MOST_ODD if pt.is_nested(main_type) else 0.0
        return main_type if odd_share <= most_odd else _TEXT


class _Records:
    """Converts batches of records to their final schema. A record with a value that does not fit fails."""

    def __init__(self, schema: pa.Schema, columns: Mapping[str, _RecordColumn], source: str) -> None:
        self._schema, self._columns, self._source = schema, columns, source
        self._count = self._failed_count = 0
        self._first_problem = ""
        self._text_causes: dict[str, str] = {}
        """For each column of lists or structs that became text, its first value of another type."""

    def fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Convert a batch of records to the schema; a record fails if a value does not fit its column."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        lines: list[int] = columns[LINE].to_pylist()
        problems: list[str | None] = columns[PROBLEM].to_pylist()
        for name, kind in zip(self._schema.names, self._schema.types, strict=True):
            if name == PROBLEM:
                continue
            column = columns.get(name, pa.nulls(len(lines)))
            # A batch whose values had no common type has the column as JSON texts.
            json_column = columns.get(f"{AS_JSON}{name}")
            if json_column is None and _fits(column.type, kind):
                columns[name] = _as_type(column, kind)
                continue
            values = column.to_pylist() if json_column is None else _decoded(json_column)
            # A text column holds any value as JSON. If the column would have had another type but for a few
            # values, the first of them is noted for the user.
            if pt.is_string(kind):
                columns[name] = arrow_array([text_of(value) for value in values], kind)
                self._note_cause(name, lines, values)
                continue
            # In any other column, a value that does not fit becomes null and its record fails.
            for index, value in enumerate(values):
                is_odd = value is not None and not _is_of(value, kind)
                if is_odd:
                    values[index] = None
                    if not problems[index]:
                        # If a record has several problems, the first one is kept.
                        problems[index] = self._odd_value(lines[index], name, value, kind)
            columns[name] = pa.array(values, kind)
        self._count_failed(problems)
        columns[PROBLEM] = arrow_array(problems, _TEXT)
        columns_in_order = [columns[name] for name in self._schema.names]
        return pa.RecordBatch.from_arrays(columns_in_order, schema=self._schema)

    def notes(self) -> list[str]:
        """Return sentences for users: how many records fail, and why some columns became JSON text."""
        notes = [f"{cause}: so the column is read as JSON text" for cause in self._text_causes.values()]
        if self._failed_count:
            failed = f"{self._failed_count:,} of {self._count:,} records cannot be sent"
            notes.append(f"{failed}: {self._first_problem}")
        return notes

    def _note_cause(self, name: str, lines: Sequence[int], values: Sequence[Any]) -> None:
        """Record the first value that makes a column of lists or structs a text column."""
        main_type, _ = self._columns[name].main_type()
        # A column of mixed plain values is expected to be text, which needs no note.
        if name in self._text_causes or not pt.is_nested(main_type):
            return
        for line, value in zip(lines, values, strict=True):
            if value is not None and not _is_of(value, main_type):
                self._text_causes[name] = self._odd_value(line, name, value, main_type)
                return

    def _odd_value(self, line: int, name: str, value: Any, kind: pa.DataType) -> str:
        """Describe a value that does not fit its column's type `kind`, with its file and line."""
        return f"{self._source}: line {line}: {_difference(name, value, kind)}"

    def _count_failed(self, problems: Sequence[str | None]) -> None:
        """Count a batch's records; for each record, `problems` has the reason why it failed, or None."""
        for problem in problems:
            self._count += 1
            if problem:
                self._failed_count += 1
                self._first_problem = self._first_problem or problem


def _decoded(texts: pa.Array) -> list[Any]:
    return [None if text is None else msgspec.json.decode(text) for text in texts.to_pylist()]


def _type_of(value: Any) -> pa.DataType | None:
    """Return the type that Arrow infers for a value; None if Arrow cannot hold it."""
    try:
        return pa.array([value]).type
    except UNFIT:
        return None


def _fits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Tell whether all values of type `kind` also fit the type `wanted`."""
    return bool(common_type(wanted, kind) == wanted)


def _is_of(value: Any, kind: pa.DataType) -> bool:
    """Tell whether a value's type, as Arrow infers it, has a common type with `kind`."""
    value_type = _type_of(value)
    return value_type is not None and common_type(kind, value_type) is not None


def _difference(name: str, value: Any, kind: pa.DataType) -> str:
    """Describe the innermost part of a JSON value that does not fit the column's type `kind`."""
    inner_values: list[tuple[str, Any, pa.DataType]] = []
    if isinstance(value, dict) and pt.is_struct(kind):
        fields = [field for field in kind if field.name in value]
        inner_values = [(f"{name}.{field.name}", value[field.name], field.type) for field in fields]
    elif isinstance(value, list) and pt.is_list(kind):
        inner_values = [(f"{name}[{index}]", item, kind.value_type) for index, item in enumerate(value)]
    # Descend into the first part that does not fit. If all parts fit, the value itself has the wrong type.
    for inner_name, inner_value, inner_type in inner_values:
        if inner_value is not None and not _is_of(inner_value, inner_type):
            return _difference(inner_name, inner_value, inner_type)
    return f"{name} is {_JSON_NAMES[type(value)]}, but {type_name(kind):.{VALUE_CHARACTERS}} in other records"


def normalized(schema: pa.Schema, nulls: pa.DataType = _TEXT) -> pa.Schema:
    """Return the schema with nullable fields and without view types; null columns get the type `nulls`.

    Dictionary columns get 32-bit indices: together, the files of an input may have too many distinct values
    for 8-bit indices.
    """
    fields = []
    for field in schema:
        normalized_field = _normalized_field(field, nulls)
        if pt.is_dictionary(field.type):
            encoded_type = pa.dictionary(pa.int32(), normalized_field.type, field.type.ordered)
            normalized_field = normalized_field.with_type(encoded_type)
        fields.append(normalized_field)
    return pa.schema(fields)


def _normalized_field(field: pa.Field[Any], nulls: pa.DataType) -> pa.Field[Any]:
    return field.with_type(_normalized_type(field.type, nulls)).with_nullable(True)


def _normalized_type(kind: pa.DataType, nulls: pa.DataType = _TEXT) -> pa.DataType:
    """Convert a type as `normalized` does; a dictionary type becomes the type of its values."""
    if pt.is_dictionary(kind):
        kind = kind.value_type
    if pt.is_list(kind) or pt.is_list_view(kind):
        return pa.list_(_normalized_field(kind.value_field, nulls))
    if pt.is_large_list(kind) or pt.is_large_list_view(kind):
        return pa.large_list(_normalized_field(kind.value_field, nulls))
    if pt.is_fixed_size_list(kind):
        return pa.list_(_normalized_field(kind.value_field, nulls), kind.list_size)
    if pt.is_map(kind):
        # Arrow does not allow null keys in a map.
        key = _normalized_field(kind.key_field, nulls).with_nullable(False)
        return pa.map_(key, _normalized_field(kind.item_field, nulls), kind.keys_sorted)
    if pt.is_struct(kind):
        return pa.struct([_normalized_field(field, nulls) for field in kind])
    return nulls if pt.is_null(kind) else _VIEWS.get(kind, kind)


def not_for_parquet(kind: pa.DataType) -> str | None:
    """Return why Parquet, the format of results, cannot store a type; None if it can."""
    try:
        with pa.BufferOutputStream() as sink, pq.ParquetWriter(sink, pa.schema([("a", kind)])) as writer:
            writer.write_table(pa.table([pa.nulls(0, kind)], names=["a"]))
        # Parquet can write some deeply nested types that it cannot read back.
        pq.ParquetFile(sink.getvalue())
    except (OSError, pa.ArrowException, NotImplementedError) as failure:
        return first_line(failure)
    return None


def common_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the columns of all schemas. A column without a common type becomes text, which holds JSON."""
    if all(schema.equals(schemas[0]) for schema in schemas):
        return schemas[0]
    types: dict[str, pa.DataType] = {}
    for field in chain.from_iterable(schemas):
        # A new column starts with the null type, which has a common type with every type.
        common = common_type(types.get(field.name, pa.null()), field.type)
        types[field.name] = _TEXT if common is None else common
    return pa.schema(list(types.items()))


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema for writing rows to Parquet; types that it should not store become JSON text.

    These are the types that Parquet cannot store, and structs of more than MOST_FIELDS fields. A column of
    nulls keeps the null type, because another file may give it a type.
    """
    fields = []
    for field in schema:
        is_too_wide = _most_fields(field.type) > MOST_FIELDS
        fields.append(field.with_type(_TEXT) if is_too_wide or not_for_parquet(field.type) else field)
    return normalized(pa.schema(fields), pa.null())


def _most_fields(kind: pa.DataType) -> int:
    """Return the number of fields of the largest struct in a type."""
    fields = kind.num_fields if pt.is_struct(kind) else 0
    return max([fields, *(_most_fields(kind.field(index).type) for index in range(kind.num_fields))])


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows that has this schema."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a batch to a schema; a missing column becomes null.

    Raises one of UNFIT if a value does not fit.
    """
    if batch.schema.equals(schema):
        return batch
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    arrays = []
    for field in schema:
        if field.name in columns:
            arrays.append(_as_type(columns[field.name], field.type))
        else:
            arrays.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def fitted_values(column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Convert a column to a type; return it with a complaint about each value that does not fit.

    The complaints are keyed by the index of the value, which becomes null.
    """
    try:
        return _as_type(column, kind), {}
    except UNFIT:
        # Convert each value alone to find those that do not fit.
        pass
    values: list[pa.Array] = []
    misfits: dict[int, str] = {}
    for index in range(len(column)):
        try:
            values.append(_as_type(column.slice(index, 1), kind))
        except UNFIT:
            values.append(pa.nulls(1, kind))
            value = column[index]
            shown = repr(value.as_py()) if pt.is_string(column.type) else str(value)
            misfits[index] = f"{shown:.{VALUE_CHARACTERS}} is not {type_name(kind)}"
    return pa.concat_arrays(values), misfits


def _as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert a column to a type; raise one of UNFIT if a value does not fit."""
    if column.type == kind:
        return column
    if pt.is_dictionary(kind) and not pt.is_dictionary(column.type):
        column = _as_type(column, kind.value_type).dictionary_encode()
    # Other values in a text column become JSON. Arrow's cast would print them in its own notation.
    if pt.is_string(kind) and _normalized_type(column.type) not in {kind, pa.large_string()}:
        return pa.array([text_of(value, str) for value in column.to_pylist()], kind)
    try:
        converted = column.cast(kind)
        converted.validate()
    except pa.ArrowException:
        if not pt.is_nested(kind):
            raise
        # Arrow cannot cast all nested types, such as list views, so convert by way of Python values.
        converted = pa.array(column.to_pylist(), kind)
    return converted


def in_chunks(
    items: Iterable[Item], most_items: int, bytes_of: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Yield items in lists of at most `most_items`; a list ends early once its items exceed BATCH_BYTES."""
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += bytes_of(item)
        if len(chunk) == most_items or size > BATCH_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def array_of(values: Sequence[Any]) -> pa.Array:
    """Return an array with the type that Arrow infers; JSON texts if the values have no common type."""
    try:
        return pa.array(values)
    except UNFIT:
        return arrow_array([text_of(value) for value in values], _TEXT)


def json_array(values: Sequence[Any]) -> pa.Array:
    """Return an array of JSON texts for values of mixed types; a null stays null."""
    texts = [None if value is None else msgspec.json.encode(value).decode() for value in values]
    return arrow_array(texts, _TEXT)


def text_of(value: Any, default: Callable[[Any], Any] | None = None) -> str | None:
    """Return a value as JSON text; a text and None are returned unchanged.

    `default` converts a value that JSON cannot represent. Without it, such a value raises TypeError.
    """
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value, enc_hook=default).decode()
