"""Outcomes → parts: Parquet files that are whole when they appear and readable at any moment."""

from __future__ import annotations

import asyncio
import logging
from array import array
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.job import RESULT_COLUMNS
from batchrunner.storage import TEMPORARY, whole_file, writing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from batchrunner.records import Outcome, RowRef

log = logging.getLogger(__name__)

FLUSH_S = 30.0
"""A finished row waits at most this long for its part to be written."""
FLUSH_BYTES = 64 << 20
"""Output text kept in memory, at most, before a part is written."""
_NUMBER_CODES = {pa.int32(): "i", pa.int64(): "q", pa.float64(): "d"}


def result_schema(carried: pa.Schema, *, samples: int, metadata: dict[str, str]) -> pa.Schema:
    """Return the schema of a part: `row`, the carried columns, then the result's own."""

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


class Sink:
    """Collects outcomes and writes a part when there are enough of them, or 30 s have passed."""

    def __init__(self, directory: Path, schema: pa.Schema, *, part_rows: int, samples: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for torn in directory.glob(f"*{TEMPORARY}"):
            torn.unlink()
        self._directory = directory
        self._schema = schema
        self._part_rows = part_rows
        self._samples = samples
        self._next_part = 1 + max((int(p.stem.split("-")[1]) for p in part_files(directory)), default=-1)
        self._buffer: list[Outcome] = []
        self._bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def put(self, outcome: Outcome) -> None:
        """Take one outcome; waits while the disk is a whole part behind.

        Raises StorageError where an earlier part could not be written.
        """
        self._buffer.append(outcome)
        self._set_timer()
        self._bytes += _text_bytes(outcome)
        if len(self._buffer) >= self._part_rows or self._bytes >= FLUSH_BYTES:
            await self._wait()
            if len(self._buffer) >= self._part_rows or self._bytes >= FLUSH_BYTES:
                self._start_writing()

    async def close(self) -> None:
        """Write what is left; raises StorageError where it could not be written."""
        try:
            await self._wait()
            while self._buffer:
                self._start_writing()
                await self._wait()
        finally:
            self._drop_timer()

    async def _wait(self) -> None:
        """Wait for the part that is being written, and pass on what went wrong with it."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def _start_writing(self) -> None:
        """Write the oldest rows, unless a part is being written or could not be written."""
        self._drop_timer()
        if self._writing is None or (self._writing.done() and self._writing.exception() is None):
            # more than a part may have come while the one before was written
            outcomes, self._buffer = self._buffer[: self._part_rows], self._buffer[self._part_rows :]
            self._bytes = sum(map(_text_bytes, self._buffer))
            path = self._directory / f"part-{self._next_part:06d}.parquet"
            self._next_part += 1
            self._writing = asyncio.ensure_future(self._write(path, outcomes))
        self._set_timer()

    def _set_timer(self) -> None:
        if self._buffer and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._start_writing)

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _write(self, path: Path, outcomes: list[Outcome]) -> None:
        with writing(path):
            await asyncio.to_thread(write_part, path, outcomes, self._schema, samples=self._samples)
        log.debug("wrote %s (%d rows)", path.name, len(outcomes))


def _text_bytes(outcome: Outcome) -> int:
    return 0 if outcome.completion is None else sum(map(len, outcome.completion.texts))


def part_files(directory: Path) -> list[Path]:
    """Return the parts of a run, oldest first."""
    return sorted(directory.glob("part-*.parquet"))


def write_part(path: Path, outcomes: Sequence[Outcome], schema: pa.Schema, *, samples: int) -> None:
    """Write one part, its rows in input order; raises OSError, and then leaves no trace."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.ref.row)
    table = _table(ordered, schema, samples=samples)
    with whole_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=1 << 17)


def _table(outcomes: Sequence[Outcome], schema: pa.Schema, *, samples: int) -> pa.Table:
    def of(name: str) -> list[Any]:
        if samples == 1:
            return [getattr(o.completion, name)[0] if o.completion else None for o in outcomes]
        return [getattr(o.completion, name) if o.completion else None for o in outcomes]

    values: dict[str, Any] = {
        "row": [o.ref.row for o in outcomes],
        "output": of("texts"),
        "finish_reason": of("finish_reasons"),
        "prompt_tokens": [o.completion.prompt_tokens if o.completion else None for o in outcomes],
        "cached_tokens": [o.completion.cached_tokens if o.completion else None for o in outcomes],
        "completion_tokens": of("completion_tokens"),
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
    """Make an array of texts, numbers or lists of them, None for null.

    `pa.array` does the same, but imports pandas where that is installed: 47 MB, and 0.2 s while rows wait.
    Lone surrogates, which JSON can carry and Parquet's UTF-8 cannot, become question marks.
    """
    nulls = _validity(values) if None in values else None
    if pa.types.is_list(kind):
        lists = [value or () for value in values]
        inner = arrow_array(list(chain.from_iterable(lists)), kind.value_type)
        return pa.Array.from_buffers(kind, len(values), [nulls, _offsets(lists)], children=[inner])
    if pa.types.is_string(kind):
        texts = [b"" if value is None else value.encode("utf-8", "replace") for value in values]
        return pa.Array.from_buffers(
            kind, len(values), [nulls, _offsets(texts), pa.py_buffer(b"".join(texts))]
        )
    numbers = array(_NUMBER_CODES[kind], [0 if value is None else value for value in values])
    return pa.Array.from_buffers(kind, len(values), [nulls, pa.py_buffer(numbers)])


def _offsets(items: Sequence[Any]) -> pa.Buffer:
    return pa.py_buffer(array("i", accumulate(map(len, items), initial=0)))


def _validity(values: Sequence[Any]) -> pa.Buffer:
    """Arrow's bitmap: bit i, counted from the lowest of the first byte, is 0 where value i is null."""
    bits = int("".join("0" if value is None else "1" for value in reversed(values)), 2)
    return pa.py_buffer(bits.to_bytes((len(values) + 7) // 8, "little"))


def _carried(refs: Sequence[RowRef]) -> pa.Table:
    """Gather the carried columns of these rows, in their order, from the batches that hold them."""
    groups: dict[int, tuple[pa.RecordBatch, list[int], list[int]]] = {}
    for place, ref in enumerate(refs):
        _, indices, places = groups.setdefault(id(ref.carried), (ref.carried, [], []))
        indices.append(ref.position)
        places.append(place)
    taken = [batch.take(arrow_array(indices, pa.int64())) for batch, indices, _ in groups.values()]
    table = pa.Table.from_batches(taken)
    order = [place for _, _, places in groups.values() for place in places]
    back = [0] * len(order)
    for at, place in enumerate(order):
        back[place] = at
    return table.take(arrow_array(back, pa.int64()))
