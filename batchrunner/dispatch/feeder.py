"""Rows from their source → the dispatch queue: read in a thread, reordered, tokenised."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from batchrunner.core.types import Outcome
from batchrunner.dispatch.pending_row import PendingRow
from batchrunner.dispatch.prefix_order.priming import PrefixPrimer
from batchrunner.dispatch.prefix_order.reorder import PrimeTask, Reorderer
from batchrunner.dispatch.queue import Backlog, ResultSink
from batchrunner.dispatch.source import RowSource
from batchrunner.dispatch.tokenize import RowTokenizer

SLICE_BYTES, SLICE_MEDIA_BYTES = 4 << 20, 64 << 20
"""Bytes of the prompts that are tokenised together, and of their files, as far as known: token ids take many
times the memory of the text, and a file more than its path."""


class Feeder:
    """Fills the backlog and pauses while it is full."""

    def __init__(
        self,
        source: RowSource,
        reorderer: Reorderer,
        primer: PrefixPrimer,
        tokenizer: RowTokenizer,
        backlog: Backlog,
        results: ResultSink,
        *,
        keeps_prompts: bool = False,
    ) -> None:
        """Take the parts in the order in which rows pass through them.

        With `keeps_prompts` rows keep their prompts as they were before they were tokenised.
        """
        self._keeps_prompts = keeps_prompts
        self._source = source
        self._reorderer = reorderer
        self._primer = primer
        self._tokenizer = tokenizer
        self._backlog = backlog
        self._results = results

    async def run(self) -> None:
        """Read until the source ends or the run stops; raises what reading raises, and StorageError."""
        items = self._reorderer.reorder(self._source)
        with contextlib.suppress(asyncio.CancelledError):
            while not self._backlog.is_over:
                batch = await asyncio.to_thread(next, items, None)
                if batch is None:
                    break
                await self._take(batch)
        self._backlog.finish_reading()

    async def _take(self, batch: list[PendingRow | PrimeTask | Outcome]) -> None:
        rows = [item for item in batch if isinstance(item, PendingRow)]
        self._backlog.expect(len(rows))
        for item in batch:
            if isinstance(item, Outcome):  # the row could not be rendered
                await self._results.put(item)
        await self._primer.prime([item for item in batch if isinstance(item, PrimeTask)])
        for some in _slices(rows):
            requests = await self._tokenizer.tokenize([row.request for row in some])
            for row, request in zip(some, requests, strict=True):
                if isinstance(request, Outcome):  # it cannot be tokenised, or is too long
                    await self._backlog.end(row, request)
                else:
                    if self._keeps_prompts:
                        row.unencoded = row.request._replace(media=request.media)
                    row.request = request
                    self._backlog.add(row)
            self._backlog.wake_dispatcher()
            await self._backlog.wait_for_room()


def _slices(rows: Sequence[PendingRow]) -> Iterator[list[PendingRow]]:
    """Cut rows into lists of `SLICE_BYTES` and `SLICE_MEDIA_BYTES` at most, one row at least."""
    some: list[PendingRow] = []
    size = media = 0
    for row in rows:
        own = sum(file.expected_size for file in row.request.media)
        if some and (size + row.prompt_bytes > SLICE_BYTES or media + own > SLICE_MEDIA_BYTES):
            yield some
            some, size, media = [], 0, 0
        some.append(row)
        size += row.prompt_bytes
        media += own
    if some:
        yield some
