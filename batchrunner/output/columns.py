"""Converts outcomes into Arrow tables with the columns of a part, without `pa.array` (`arrow_array`)."""

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa

from batchrunner.core.types import Outcome, RowRef
from batchrunner.job.spec import RESULT_COLUMNS

_NUMBER_CODES = {pa.int32(): "i", pa.int64(): "q", pa.float64(): "d"}


def result_schema(carried: pa.Schema, *, samples: int, metadata: dict[str, str]) -> pa.Schema:
    """Return the schema of a part: `row`, the carried columns, then the columns of the result.

    With `samples` above 1 some of these are lists, with one value for each sample.
    """

    def each(kind: pa.DataType) -> pa.DataType:
        return kind if samples == 1 else pa.list_(kind)

    types: dict[str, pa.DataType] = {
        "row": pa.int64(),
        "output": each(pa.string()),
        "finish_reason": each(pa.string()),
        "prompt_tokens": pa.int32(),
        "cached_tokens": pa.int32(),
        "completion_tokens": each(pa.int32()),
        "latency_s": pa.float64(),
        "attempts": pa.int32(),
        "error": pa.string(),
    }
    first, *rest = RESULT_COLUMNS
    fields = [pa.field(first, types[first], nullable=False), *carried, *(pa.field(n, types[n]) for n in rest)]
    return pa.schema(fields, metadata=metadata)


def table_of(outcomes: Sequence[Outcome], schema: pa.Schema, *, samples: int) -> pa.Table:
    """Return outcomes as a table of the schema of a part, in the given order."""

    def per_sample(name: str) -> list[Any]:
        if samples == 1:
            return [getattr(o.completion, name)[0] if o.completion else None for o in outcomes]
        return [getattr(o.completion, name) if o.completion else None for o in outcomes]

    values: dict[str, Any] = {
        "row": [o.ref.row for o in outcomes],
        "output": per_sample("texts"),
        "finish_reason": per_sample("finish_reasons"),
        "prompt_tokens": [o.completion.prompt_tokens if o.completion else None for o in outcomes],
        "cached_tokens": [o.completion.cached_tokens if o.completion else None for o in outcomes],
        "completion_tokens": per_sample("completion_tokens"),
        "latency_s": [o.latency_s for o in outcomes],
        "attempts": [o.attempts for o in outcomes],
        "error": [o.error for o in outcomes],
    }
    carried = _carried([outcome.ref for outcome in outcomes])
    columns = [
        arrow_array(values[field.name], field.type) if field.name in values else carried.column(field.name)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def arrow_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return an array of texts, bytes, numbers, booleans, or lists and structs of these; None becomes null.

    A struct is a mapping; a key that it lacks is null.

    `pa.array` does the same, but imports pandas where that is installed: 47 MB, and 0.2 s while rows wait.
    Lone surrogates, which JSON can carry and Parquet's UTF-8 cannot, become question marks.
    """
    nulls = _validity(values) if None in values else None
    if pa.types.is_list(kind):
        lists = [value or () for value in values]
        inner = arrow_array(list(chain.from_iterable(lists)), kind.value_type)
        return pa.Array.from_buffers(kind, len(values), [nulls, _offsets(lists)], children=[inner])
    if pa.types.is_struct(kind):
        fields = [arrow_array([(value or {}).get(f.name) for value in values], f.type) for f in kind]
        return pa.Array.from_buffers(kind, len(values), [nulls], children=fields)
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(kind, len(values), [nulls, _bits(values, (None, False))])
    if pa.types.is_string(kind):
        encoded = [None if value is None else value.encode("utf-8", "replace") for value in values]
        return arrow_array(encoded, pa.binary()).view(kind)
    if pa.types.is_binary(kind):
        texts = [value or b"" for value in values]
        return pa.Array.from_buffers(
            kind, len(values), [nulls, _offsets(texts), pa.py_buffer(b"".join(texts))]
        )
    numbers = array(_NUMBER_CODES[kind], [0 if value is None else value for value in values])
    return pa.Array.from_buffers(kind, len(values), [nulls, pa.py_buffer(numbers)])


def _offsets(items: Sequence[Any]) -> pa.Buffer:
    return pa.py_buffer(array("i", accumulate(map(len, items), initial=0)))


def _validity(values: Sequence[Any]) -> pa.Buffer:
    """Return Arrow's validity bitmap, which is 0 for a null."""
    return _bits(values, (None,))


def _bits(values: Sequence[Any], zeros: tuple[Any, ...]) -> pa.Buffer:
    """Return a bitmap: bit i, from the lowest bit of the first byte, is 0 for a value of `zeros`."""
    bits = int("".join("0" if value in zeros else "1" for value in reversed(values)) or "0", 2)
    return pa.py_buffer(bits.to_bytes((len(values) + 7) // 8, "little"))


def _carried(refs: Sequence[RowRef]) -> pa.Table:
    """Return the carried columns of these rows, in their order, from the batches that hold them."""
    groups: dict[int, tuple[pa.RecordBatch, list[int], list[int]]] = {}
    for at, ref in enumerate(refs):
        _, positions, indices = groups.setdefault(id(ref.carried), (ref.carried, [], []))
        positions.append(ref.position)
        indices.append(at)
    taken = [batch.take(arrow_array(positions, pa.int64())) for batch, positions, _ in groups.values()]
    table = pa.Table.from_batches(taken)
    inverse = [0] * len(refs)
    for at, index in enumerate(chain.from_iterable(indices for _, _, indices in groups.values())):
        inverse[index] = at
    return table.take(arrow_array(inverse, pa.int64()))
