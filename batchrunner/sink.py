"""Outcomes → journal → parts: Parquet files that are whole when they appear and readable at any moment."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from array import array
from itertools import accumulate, chain, count
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.job import RESULT_COLUMNS
from batchrunner.journal import Journal, read_journal
from batchrunner.storage import (
    TEMPORARY,
    make_directory,
    name_part,
    number_of,
    sync_directory,
    whole_file,
    writing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from batchrunner.claim import Claim
    from batchrunner.disk import Disk
    from batchrunner.records import Outcome, RowRef
    from batchrunner.storage import RunDir

log = logging.getLogger(__name__)

PART_S = 30.0
"""A finished row waits at most this long for its part to be written."""
EARLY = 0.7
"""Of the time in which a row must be durable passes before it is written: the rest is for the disk."""
FLUSH_BYTES = 64 << 20
"""Bytes kept in memory, at most, before a part is written."""
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
    """Makes finished rows durable in a journal, and parts of them, by number of rows or every 30 s.

    A disk that takes nothing is waited for: rows then wait in memory, and those that no longer fit there
    hold their places, so that the run pauses.
    """

    def __init__(
        self,
        run_dir: RunDir,
        schema: pa.Schema,
        *,
        part_rows: int,
        samples: int,
        durable_s: float,
        claim: Claim,
        landed: Callable[[BitMap64], None],
        disk: Disk,
    ) -> None:
        """`claim` is held on the task; `landed` is told of rows that are in parts.

        Raises StorageError.
        """
        with writing(run_dir.parts):
            make_directory(run_dir.parts)
        self._run_dir = run_dir
        self._schema = schema
        self._part_rows = part_rows
        self._samples = samples
        self._disk = disk
        self._durable_s = durable_s
        self._claim = claim
        self._landed = landed
        self._buffer: list[Outcome] = []
        self._bytes = 0
        self._part = _Part(run_dir, 1 + max(map(number_of, run_dir.own_parts()), default=-1), claim)
        self._writing: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # uvloop's handle does not know, where that is at once

    async def put(self, outcome: Outcome) -> None:
        """Take one outcome; waits while the disk is behind.

        Raises StorageError where earlier rows could not be written.
        """
        self._buffer.append(outcome)
        self._bytes += _text_bytes(outcome)
        if len(self._buffer) == 1:
            self._set_timer()
        if self._is_full():
            await self._wait()
            if self._is_full():
                self._start_writing()

    def check(self) -> None:
        """Raise the StorageError of a write that failed for good, in the background."""
        for task in (self._writing, self._publishing):
            if task is not None and task.done():
                task.result()

    async def close(self) -> None:
        """Write what is left as a part; raises StorageError where it could not be written."""
        try:
            await self._wait()
            while self._buffer or self._part.rows or self._is_writing():
                self._start_writing(last=True)
                await self._wait()
            await self._published()
        finally:
            if self._publishing is not None:  # where something else has failed, this may not go on either
                self._publishing.cancel()
                await asyncio.gather(self._publishing, return_exceptions=True)
            self._drop_timer()
            self._part.close()

    def _is_full(self) -> bool:
        return self._part.rows + len(self._buffer) >= self._part_rows or self._bytes >= FLUSH_BYTES

    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def _wait(self) -> None:
        """Wait for what is being written, and pass on what went wrong with it."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def _start_writing(self, *, last: bool = False) -> None:
        """Write the oldest rows, unless some are being written or could not be written."""
        self._drop_timer()
        if self._writing is None or (self._writing.done() and not self._writing.exception()):
            room = self._part_rows - self._part.rows  # more may have come while others were written
            outcomes, self._buffer = self._buffer[:room], self._buffer[room:]
            self._bytes = sum(map(_text_bytes, self._buffer))
            self._writing = asyncio.ensure_future(self._write(outcomes, last=last))

    async def _write(self, outcomes: list[Outcome], *, last: bool) -> None:
        part = self._part
        if outcomes:
            part.take(await asyncio.to_thread(_table, outcomes, self._schema, samples=self._samples))
        whole = part.rows >= self._part_rows or part.bytes >= FLUSH_BYTES
        if part.rows and (last or whole or time.monotonic() - part.began >= PART_S):
            await self._published()  # the part before: two are in memory at most
            self._publishing = asyncio.ensure_future(self._publish(part))
            self._part = _Part(self._run_dir, part.number + 1, self._claim)
        elif outcomes:
            await self._disk.do(part.path, part.keep)
        self._set_timer()

    async def _publish(self, part: _Part) -> None:
        """Write a part, while the rows that end meanwhile go into the next one's journal."""
        await self._disk.do(part.path, part.publish)
        self._part.number = max(self._part.number, part.number + 1)
        await self._disk.do(part.path, functools.partial(self._landed, part.row_numbers()))
        log.debug("wrote %s (%d rows)", part.path.name, part.rows)

    async def _published(self) -> None:
        if self._publishing is not None:
            await asyncio.shield(self._publishing)

    def _set_timer(self) -> None:
        """Look again when the first of the buffer's rows is due to be durable, or the part to be written."""
        if not self._buffer and not self._part.rows:
            return
        due = self._part.began + PART_S - time.monotonic() if self._part.rows else PART_S
        wait_s = max(0.0, min(self._durable_s * EARLY, due) if self._buffer else due)
        at = time.monotonic() + wait_s
        if self._timer is None or at < self._timer_at:
            self._drop_timer()
            self._timer, self._timer_at = (
                asyncio.get_running_loop().call_later(wait_s, self._start_writing),
                at,
            )

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Part:
    """The rows of one part to come: in its journal, and in memory. Its methods block, and may be repeated.

    One that was stopped for a while may have lost its task meanwhile, to somebody who tidied up after it. So
    that nothing of it appears later, it asks when its file is there and before that file counts.
    """

    def __init__(self, run_dir: RunDir, number: int, claim: Claim) -> None:
        self._run_dir = run_dir
        self._claim = claim
        self.number = number
        self.rows = 0
        self.bytes = 0
        self.began = 0.0
        self._journal_path = run_dir.journal(number, claim.token)
        self._journal: Journal | None = None
        self._tables: list[pa.Table] = []

    @property
    def path(self) -> Path:
        """Where it is to be, unless another part is there."""
        return self._run_dir.part(self.number)

    def take(self, table: pa.Table) -> None:
        """Add rows, which are then to be kept, or published."""
        self.began = self.began or time.monotonic()
        self._tables.append(table)
        self.rows += table.num_rows
        self.bytes += table.nbytes

    def keep(self) -> None:
        """Make the rows that were taken last durable."""
        if self._journal is None:
            make_directory(self._journal_path.parent)
            self._journal = Journal(self._journal_path)
        self._claim.verify()
        self._journal.append(self._tables[-1])

    def publish(self) -> None:
        """Write the part, which from now on stands for its journal."""
        number = write_part(self._run_dir, self.number, self._tables, self._claim)
        self.close()
        self._journal_path.unlink(missing_ok=True)
        self.number = number  # now: a repeated try is to see the same parts

    def row_numbers(self) -> BitMap64:
        """Return the rows in it."""
        return BitMap64(row for table in self._tables for row in table.column("row").to_pylist())

    def close(self) -> None:
        """Let go of the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def _text_bytes(outcome: Outcome) -> int:
    return 0 if outcome.completion is None else sum(map(len, outcome.completion.texts))


def write_part(run_dir: RunDir, first: int, tables: Sequence[pa.Table], claim: Claim) -> int:
    """Write rows, in input order, as the part of the first number that is free; return the number.

    A part that has it already stays: one that an old listing did not show, or ours, of a try that failed
    afterwards. Rows that it holds are not written again. Raises OSError or ClaimLostError, and then leaves
    no trace.
    """
    table = pa.concat_tables(tables).sort_by("row")
    for number in count(first):
        path = run_dir.part(number)
        try:
            with whole_file(path, claim.token, name_part) as temporary:
                pq.write_table(table, temporary, compression="zstd", row_group_size=1 << 17)
                claim.verify()
            break
        except FileExistsError:
            table = _without(table, path)
            if not table.num_rows:
                sync_directory(path.parent)  # that may be where it failed
                break
            log.warning("%s: is there, and not of this start: it is kept, and the next number used", path)
    return number


def _without(table: pa.Table, path: Path) -> pa.Table:
    """Return the rows that a part does not hold; one that cannot be read, or has just gone, holds none."""
    try:
        with pq.ParquetFile(path) as part:
            there = part.read(["row"]).column("row").cast(pa.int64()).combine_chunks()
    except (FileNotFoundError, KeyError, pa.ArrowException):
        return table
    return table.filter(pc.invert(pc.is_in(table.column("row"), value_set=there)))


def tidy(run_dir: RunDir, claim: Claim) -> None:
    """Clear up after a start that did not come to its end: torn parts go, and journals become parts.

    `claim` is held on the task. Raises OSError.
    """
    for torn in run_dir.parts.glob(f".part-{run_dir.task}-*{TEMPORARY}"):
        torn.unlink(missing_ok=True)
    for path in run_dir.journals():
        if tables := list(read_journal(path)):
            make_directory(run_dir.parts)
            write_part(run_dir, number_of(path), tables, claim)
        path.unlink(missing_ok=True)


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
    """Make an array of texts, bytes, numbers or lists of them, None for null.

    `pa.array` does the same, but imports pandas where that is installed: 47 MB, and 0.2 s while rows wait.
    Lone surrogates, which JSON can carry and Parquet's UTF-8 cannot, become question marks.
    """
    nulls = _validity(values) if None in values else None
    if pa.types.is_list(kind):
        lists = [value or () for value in values]
        inner = arrow_array(list(chain.from_iterable(lists)), kind.value_type)
        return pa.Array.from_buffers(kind, len(values), [nulls, _offsets(lists)], children=[inner])
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
