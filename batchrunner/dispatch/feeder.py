"""Rows from their source → the dispatch queue: read in a thread, reordered, tokenised."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from batchrunner.core.types import Outcome, RequestBody
from batchrunner.dispatch.pending_row import PendingRow, ResultSink, RowSource
from batchrunner.dispatch.queue import Backlog
from batchrunner.dispatch.reorder import PrimeTask, Reorderer
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.engines.base import Engine
from batchrunner.input.request_bodies import with_one_token

SLICE_BYTES, SLICE_MEDIA_BYTES = 4 << 20, 64 << 20
"""Bytes of the prompts that are tokenised together, and of their files, as far as known: token ids take many
times the memory of the text, and a file more than its path."""
LONGEST_PRIMING_S = 30.0
"""Longest wait for a round of primes, in seconds: they save a prefill pass or two."""
ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0}


class Feeder:
    """Fills the backlog and pauses while it is full."""

    def __init__(
        self,
        source: RowSource,
        reorderer: Reorderer,
        tokenizer: RowTokenizer,
        backlog: Backlog,
        results: ResultSink,
        engine: Engine,
        routes: Sequence[str],
        *,
        keeps_prompts: bool = False,
    ) -> None:
        """Take the parts in the order in which rows pass through them.

        Shared prefixes are computed on the `routes` of the `engine` first. With `keeps_prompts` rows keep
        their prompts as they were before they were tokenised.
        """
        self._source = source
        self._reorderer = reorderer
        self._tokenizer = tokenizer
        self._backlog = backlog
        self._results = results
        self._engine = engine
        self._routes = routes
        self._keeps_prompts = keeps_prompts

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
        await self._prime([item for item in batch if isinstance(item, PrimeTask)])
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

    async def _prime(self, tasks: Sequence[PrimeTask]) -> None:
        """Compute prefixes on an empty engine, round by round, by rows with one output token.

        Errors are ignored, since the rows themselves will show them.
        """
        by_round = attrgetter("round")
        for _, group in groupby(sorted(tasks, key=by_round), key=by_round):
            some = list(group)
            requests = [task.row.request._replace(sampling=ONE_TOKEN, asks=None) for task in some]
            probes = [
                each._replace(prompt=with_one_token(each.prompt))
                if isinstance(each.prompt, RequestBody)
                else each
                for each in requests
            ]
            sent = [
                self._engine.generate(probe._replace(affinity=key), route)
                for task, probe in zip(some, await self._tokenizer.tokenize(probes), strict=True)
                if not isinstance(probe, Outcome)
                for key, route in self._caches_for(task)
            ]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_PRIMING_S):
                    await asyncio.gather(*sent, return_exceptions=True)
            for task in some:
                task.row.prefix_ready_at = time.monotonic()

    def _caches_for(self, task: PrimeTask) -> Iterator[tuple[str, str]]:
        """Yield affinity key and route of each cache that needs the prefix."""
        row, routes = task.row, self._routes
        if task.on_every_replica or row.group is None:
            for copy in range(max(self._reorderer.caches, len(routes))):
                yield f"{row.request.ref.row}.primer.{copy}", routes[copy % len(routes)]
            return
        if row.group.route is None:
            row.group.route = routes[row.request.ref.row % len(routes)]
        yield row.affinity, row.group.route


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
