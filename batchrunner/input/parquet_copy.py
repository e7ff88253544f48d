"""Rows of any origin → one Parquet file: a program's tables and rows, and copies of files of other formats.

Batches may differ in their columns and types. They are written to a file of Arrow streams first, and to
Parquet once the type of each column is known. Values without a common type become JSON text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from batchrunner.input.common_types import common_type
from batchrunner.job.arrow_types import type_name
from batchrunner.output.arrow_arrays import arrow_array
from batchrunner.output.files import writing

Record = TypeVar("Record")
UNFIT = (ValueError, TypeError, OverflowError, pa.ArrowException)
"""What Arrow raises for a value that a type cannot hold."""
MOST_SHOWN = 40
"""Most characters of a bad value in a message."""

_TEXT = pa.string()
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def first_line(failure: BaseException) -> str:
    """Return the first line of an error's text; Arrow may add a stack trace below it."""
    return str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__


def normalized(schema: pa.Schema, nulls: pa.DataType = _TEXT) -> pa.Schema:
    """Return the schema with nullable fields and without views; `nulls` is the type of what is always null.

    Columns may be dictionaries, with numbers of 32 bits: those of two files may be more than 8 bits hold.
    """
    fields = []
    for field in schema:
        plain = _normalized_field(field, nulls)
        if pt.is_dictionary(field.type):
            plain = plain.with_type(pa.dictionary(pa.int32(), plain.type, field.type.ordered))
        fields.append(plain)
    return pa.schema(fields)


def not_for_parquet(kind: pa.DataType) -> str | None:
    """Return why Parquet, as which results are written, cannot hold values of a type; None where it can."""
    try:
        with pa.BufferOutputStream() as sink, pq.ParquetWriter(sink, pa.schema([("a", kind)])) as writer:
            writer.write_table(pa.table([pa.nulls(0, kind)], names=["a"]))
        pq.ParquetFile(sink.getvalue())  # which does not read what is nested too deeply
    except (OSError, pa.ArrowException, NotImplementedError) as failure:
        return str(failure).partition("\n")[0]
    return None


def _normalized_field(field: pa.Field[Any], nulls: pa.DataType) -> pa.Field[Any]:
    return field.with_type(_normalized_type(field.type, nulls)).with_nullable(True)


def _normalized_type(kind: pa.DataType, nulls: pa.DataType = _TEXT) -> pa.DataType:
    if pt.is_dictionary(kind):
        kind = kind.value_type
    if pt.is_list(kind) or pt.is_list_view(kind):
        return pa.list_(_normalized_field(kind.value_field, nulls))
    if pt.is_large_list(kind) or pt.is_large_list_view(kind):
        return pa.large_list(_normalized_field(kind.value_field, nulls))
    if pt.is_fixed_size_list(kind):
        return pa.list_(_normalized_field(kind.value_field, nulls), kind.list_size)
    if pt.is_map(kind):
        key = _normalized_field(kind.key_field, nulls).with_nullable(False)  # as Arrow requires of a map
        return pa.map_(key, _normalized_field(kind.item_field, nulls), kind.keys_sorted)
    if pt.is_struct(kind):
        return pa.struct([_normalized_field(field, nulls) for field in kind])
    return nulls if pt.is_null(kind) else _VIEWS.get(kind, kind)


PROBLEM = "\0problem"
"""Column that says why a record of a text file cannot be read; null where it can."""
LINE = "\0line"
"""Column with the line of each record, which is not stored."""
ODD = "\0odd "
"""Beginning of the name of a column with values, as JSON, that have no type in common with most of theirs."""
MOST_ODD = 0.1
"""Share of the values of a column up to which the records of odd ones fail; with more, all are text."""
NOTES = b"batchrunner.notes"
"""Key of what a person should know of the records, a JSON list of sentences, in the metadata."""
_JSON_WORDS = {
    str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object",
}  # fmt: skip
MOST_FIELDS = 1000
"""Most fields of an object; one with more is a dictionary, and its column JSON text."""
BATCH_BYTES = 4 << 20
"""Bytes of records, one more than which ends the batch that is made of them."""
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")


def write_parquet(
    batches: Iterable[pa.RecordBatch],
    path: Path,
    about: Mapping[bytes, bytes] | None = None,
    source: str = "",
) -> None:
    """Write batches, of which there is one at least, as a Parquet file with `about` in its metadata.

    Batches of records, which have PROBLEM and LINE, may have ODD columns. `source` names their file. What a
    person should know of them is in the metadata as NOTES. Raises StorageError or ArrowException, and what
    the batches raise.
    """
    spool = path.with_name(f"{path.name}.arrows")
    columns: dict[str, _Column] = {}  # of records
    schema: pa.Schema | None = None  # of other batches
    try:
        with spool.open("wb") as file:
            for batch in batches:
                if LINE in batch.schema.names:
                    _count(batch, columns)
                elif schema is None or not batch.schema.equals(schema):
                    schema = common_schema([schema, batch.schema] if schema else [batch.schema])
                with writing(path):
                    with pa.ipc.new_stream(file, batch.schema, options=_LZ4) as stream:
                        stream.write_batch(batch)
                    file.flush()
        if schema is None:
            schema = pa.schema([(name, column.kind()) for name, column in columns.items()])
        schema = stored_schema(schema)
        records = _Records(schema, source)
        with (
            writing(path),
            pa.OSFile(str(spool)) as spooled,
            pq.ParquetWriter(path, schema.with_metadata(about), compression="zstd") as writer,
        ):
            while spooled.tell() < spooled.size():
                with pa.ipc.open_stream(spooled) as stream:
                    for batch in stream:
                        done = records.finished(batch) if columns else fitted(batch, schema)
                        writer.write_batch(done.replace_schema_metadata())
            writer.add_key_value_metadata({NOTES: msgspec.json.encode(records.notes())})
    finally:
        spool.unlink(missing_ok=True)


def _count(records: pa.RecordBatch, columns: dict[str, _Column]) -> None:
    """Count the values of records by their types in the columns of all."""
    for field, values in zip(records.schema, records.columns, strict=True):
        name = field.name.removeprefix(ODD)
        if name != LINE:
            columns.setdefault(name, _Column()).add(values, is_odd=name != field.name)


class _Column:
    """Types of a column's values, with the number of values of each."""

    def __init__(self) -> None:
        self._kinds: dict[pa.DataType, int] = {}
        self._odd = 0

    def add(self, values: pa.Array, *, is_odd: bool) -> None:
        """Count values; odd ones have no type in common with others of their batch."""
        count = len(values) - values.null_count
        if is_odd:
            self._odd += count
        else:
            self._kinds[values.type] = self._kinds.get(values.type, 0) + count

    def kind(self) -> pa.DataType:
        """Return the common type of all values, also where a few beside lists or structs are odd; or text."""
        common: list[tuple[pa.DataType, int]] = []
        for kind, count in self._kinds.items():
            for at, (known, known_count) in enumerate(common):
                both = common_type(known, kind)
                if both is not None:
                    common[at] = both, known_count + count
                    break
            else:
                common.append((kind, count))
        main, main_count = max(common, key=itemgetter(1))
        total = self._odd + sum(count for _, count in common)
        others = total - main_count
        if not others:
            return main
        return main if pt.is_nested(main) and others <= MOST_ODD * total else _TEXT


class _Records:
    """Gives batches of records their columns in the end, and fails a record whose value does not fit."""

    def __init__(self, schema: pa.Schema, source: str) -> None:
        self._schema, self._source = schema, source
        self._rows = self._failed = 0
        self._problem = ""  # the first one
        self._texts: dict[str, str] = {}  # why a column of lists or structs is text

    def finished(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch in the schema."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        lines = columns[LINE].to_pylist()
        problems = columns[PROBLEM].to_pylist()
        for field in self._schema:
            name, kind = field.name, field.type
            if name == PROBLEM:
                continue
            values = columns.get(name, pa.nulls(len(lines)))
            odd = _odd_values(values, columns.get(f"{ODD}{name}"), kind)
            if not _fits(values.type, kind):
                values = pa.nulls(len(lines))
            columns[name] = _as_type(values, kind)
            if odd and pt.is_string(kind):
                columns[name] = _with_texts(columns[name], odd)
                if pt.is_nested(values.type) and name not in self._texts:
                    line = min(odd)
                    self._texts[name] = self._cause(lines[line], name, odd[line], values.type)
            elif odd:
                for at, value in odd.items():
                    problems[at] = problems[at] or self._cause(lines[at], name, value, kind)
        self._count_failed(problems)
        columns[PROBLEM] = arrow_array(problems, _TEXT)
        return pa.RecordBatch.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)

    def notes(self) -> list[str]:
        """Return what a person should know: the records that fail, and columns that are text."""
        notes = [f"{cause}: the column is JSON text" for cause in self._texts.values()]
        if self._failed:
            notes.append(f"{self._failed:,} of {self._rows:,} records cannot be sent: {self._problem}")
        return notes

    def _cause(self, line: int, name: str, value: Any, kind: pa.DataType) -> str:
        return f"{self._source}: line {line}: {_difference(name, value, kind)}"

    def _count_failed(self, problems: Sequence[str | None]) -> None:
        failed = [problem for problem in problems if problem]
        self._rows += len(problems)
        self._failed += len(failed)
        self._problem = self._problem or next(iter(failed), "")


def _odd_values(values: pa.Array, odd: pa.Array | None, kind: pa.DataType) -> dict[int, Any]:
    """Return by place the values of a column that do not fit into its type, and those that were odd."""
    found: dict[int, Any] = {}
    if odd is not None:
        found = {at: msgspec.json.decode(text) for at, text in enumerate(odd.to_pylist()) if text is not None}
    if not _fits(values.type, kind):
        found |= {at: value for at, value in enumerate(values.to_pylist()) if value is not None}
    return found


def _with_texts(column: pa.Array, values: Mapping[int, Any]) -> pa.Array:
    """Return a column of texts with the texts of these values."""
    texts = column.to_pylist()
    for at, value in values.items():
        texts[at] = text_of(value)
    return arrow_array(texts, column.type)


def _fits(kind: pa.DataType, into: pa.DataType) -> bool:
    """Tell whether all values of a type fit into another one; any value can be text."""
    return bool(pt.is_string(into) or common_type(into, kind) == into)


def _difference(name: str, value: Any, kind: pa.DataType) -> str:
    """Say how a value of JSON differs from a type: the part that has another type."""
    parts: list[tuple[str, Any, pa.DataType]] = []
    if isinstance(value, dict) and pt.is_struct(kind):
        fields = [field for field in kind if field.name in value]
        parts = [(f"{name}.{field.name}", value[field.name], field.type) for field in fields]
    elif isinstance(value, list) and pt.is_list(kind):
        parts = [(f"{name}[{at}]", part, kind.value_type) for at, part in enumerate(value)]
    for place, part, kind_of_part in parts:
        if part is not None and not _is_of(part, kind_of_part):
            return _difference(place, part, kind_of_part)
    return f"{name} is {_JSON_WORDS[type(value)]}, but {type_name(kind):.{MOST_SHOWN}} in other records"


def _is_of(value: Any, kind: pa.DataType) -> bool:
    both = None
    with contextlib.suppress(*UNFIT):
        both = common_type(kind, pa.array([value]).type)
    return both is not None


def common_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the columns of all schemas; values of types that have none in common will be JSON text."""
    if all(schema.equals(schemas[0]) for schema in schemas):
        return schemas[0]
    kinds: dict[str, pa.DataType] = {}
    for field in chain.from_iterable(schemas):
        kind = common_type(kinds.get(field.name, pa.null()), field.type)
        kinds[field.name] = _TEXT if kind is None else kind
    return pa.schema(list(kinds.items()))


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema for Parquet: JSON text for what it cannot hold, and PROBLEM only if there is any.

    Columns of nulls stay such: with another file they may get a type.
    """
    fields = [
        field.with_type(pa.string())
        if _most_fields(field.type) > MOST_FIELDS or not_for_parquet(field.type)
        else field
        for field in schema
        if field.name != PROBLEM or not pt.is_null(field.type)
    ]
    return normalized(pa.schema(fields), pa.null())


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns of a schema, see `common_schema`; one that it has not is null."""
    if batch.schema.equals(schema):
        return batch
    found = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns = [
        _as_type(found[field.name], field.type)
        if field.name in found
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def fitted_values(column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Return a column as one of a type, and by place what is wrong with a value that the type cannot hold.

    Such a value is null.
    """
    try:
        return _as_type(column, kind), {}
    except UNFIT:
        pass
    values: list[pa.Array] = []
    misfits: dict[int, str] = {}
    for at in range(len(column)):
        try:
            values.append(_as_type(column.slice(at, 1), kind))
        except UNFIT:
            values.append(pa.nulls(1, kind))
            misfits[at] = f"{column[at]!s:.{MOST_SHOWN}} is not {type_name(kind)}"
    return pa.concat_arrays(values), misfits


def in_chunks(
    records: Iterable[Record], most: int, bytes_of: Callable[[Record], int]
) -> Iterator[list[Record]]:
    """Yield records in lists of so many at most, or of as many as have more than BATCH_BYTES."""
    chunk: list[Record] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += bytes_of(record)
        if len(chunk) == most or size > BATCH_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def array_of(values: Sequence[Any]) -> pa.Array:
    """Return values as Arrow has them, or as JSON text where they have no type in common."""
    try:
        return pa.array(values)
    except (TypeError, ValueError, OverflowError, pa.ArrowException):
        return arrow_array([text_of(value) for value in values], pa.string())


def main_and_odd(values: Sequence[Any]) -> tuple[pa.Array, pa.Array | None]:
    """Return values as Arrow has them, and as JSON those that have no type in common with most others.

    Those are null in the first. Where most values are no lists or objects, all are text.
    """
    try:
        return pa.array(values), None
    except UNFIT:
        pass
    places: dict[pa.DataType, list[int]] = {}
    for at, value in enumerate(values):
        with contextlib.suppress(*UNFIT):
            places.setdefault(pa.array([value]).type, []).append(at)
    most: list[int] = []
    common = pa.null()
    for kind in sorted(places, key=lambda kind: len(places[kind]), reverse=True):
        both = common_type(common, kind)
        if both is not None:
            common, most = both, most + places[kind]
    kept = {*most}
    if pt.is_nested(common) or pt.is_null(common):
        with contextlib.suppress(*UNFIT):
            main = pa.array([value if at in kept else None for at, value in enumerate(values)])
            odd = {at: value for at, value in enumerate(values) if at not in kept and value is not None}
            texts = [
                msgspec.json.encode(odd[at]).decode() if at in odd else None for at in range(len(values))
            ]
            return main, arrow_array(texts, _TEXT)
    return array_of(values), None


def text_of(value: Any, default: Callable[[Any], Any] | None = None) -> str | None:
    """Return a value as text: a text as it is, null as None, anything else as JSON.

    `default` is what JSON has for a value that it cannot have; without it, that is a TypeError.
    """
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value, enc_hook=default).decode()


def _most_fields(kind: pa.DataType) -> int:
    """Return the number of fields of the object in a type that has most."""
    own = kind.num_fields if pt.is_struct(kind) else 0
    return max([own, *(_most_fields(kind.field(at).type) for at in range(kind.num_fields))])


def _as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column as one of a type; raises ArrowException, also for a number that it cannot hold."""
    if column.type == kind:
        return column
    if pt.is_dictionary(kind) and not pt.is_dictionary(column.type):
        column = _as_type(column, kind.value_type).dictionary_encode()
    if pt.is_string(kind) and _normalized_type(column.type) not in {kind, pa.large_string()}:
        return pa.array([text_of(value, str) for value in column.to_pylist()], kind)
    try:
        found = column.cast(kind)
        found.validate()
    except pa.ArrowException:
        if not pt.is_nested(kind):
            raise
        found = pa.array(column.to_pylist(), kind)  # Arrow casts no lists in views, for example
    return found
