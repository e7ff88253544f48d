"""Rows from their source → order → tokens → the backlog. The source is read in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from batchrunner.core.types import Outcome
from batchrunner.dispatch.queue import AnswerHistory, Backlog, PendingRow, ResultSink, RowSource
from batchrunner.dispatch.reorder import PrimeTask, Reorderer
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.engines.base import Engine

LONGEST_PRIMING_S = 30.0
"""Longest wait for a round of primes, in seconds; priming saves one prefill pass (`PrimeTask`)."""
ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0}


@dataclass(slots=True, kw_only=True)
class Feeder:
    """Fills the backlog and pauses while it is full. Rows pass through its parts in this order."""

    source: RowSource
    reorderer: Reorderer
    tokenizer: RowTokenizer
    backlog: Backlog
    results: ResultSink
    engine: Engine
    urls: Sequence[str]
    """Servers of the engine, on which shared prefixes are computed first."""
    keeps_prompts: bool
    """Whether rows keep their prompts as they were before they were tokenised."""
    primes: bool
    """Whether shared prefixes are computed first: not where the engine serves others."""

    async def run(self) -> None:
        """Read until the source ends or the run stops; raises the errors of the source, and StorageError."""
        items = self.reorderer.reorder(self.source)
        with contextlib.suppress(asyncio.CancelledError):
            while not self.backlog.is_over:
                batch = await asyncio.to_thread(next, items, None)
                if batch is None:
                    break
                await self._take(batch)
        self.backlog.finish_reading()

    async def _take(self, batch: Sequence[PendingRow | PrimeTask | Outcome]) -> None:
        rows = [item for item in batch if isinstance(item, PendingRow)]
        self.backlog.expect(len(rows))
        for item in batch:
            if isinstance(item, Outcome):  # the row could not be rendered
                await self.results.put(item)
        if self.primes:
            await self._prime([item for item in batch if isinstance(item, PrimeTask)])
        requests = await self.tokenizer.tokenize([row.request for row in rows])
        for row, request in zip(rows, requests, strict=True):
            if isinstance(request, Outcome):  # it cannot be tokenised, or is too long
                await self.backlog.end(row, request)
            else:
                if self.keeps_prompts:
                    unencoded = row.request._replace(media=request.media)
                    row.answers = AnswerHistory(request, unencoded=unencoded)
                row.request = request
                self.backlog.add(row)
        self.backlog.wake()
        await self.backlog.wait_for_room()

    async def _prime(self, tasks: Sequence[PrimeTask]) -> None:
        """Compute prefixes on an empty engine, round by round, by rows with one output token.

        Errors are ignored, since the rows themselves will show them.
        """
        by_round = attrgetter("round")
        for _, round_tasks in groupby(sorted(tasks, key=by_round), key=by_round):
            batch = list(round_tasks)
            requests = [task.row.request._replace(sampling=ONE_TOKEN, asks=None) for task in batch]
            tokenized = await self.tokenizer.tokenize(requests)
            answers = [
                self.engine.generate(request, url)
                for task, request in zip(batch, tokenized, strict=True)
                if not isinstance(request, Outcome)
                for url in self._caches_for(task)
            ]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_PRIMING_S):
                    await asyncio.gather(*answers, return_exceptions=True)
            for task in batch:
                task.row.prefix_ready_at = time.monotonic()

    def _caches_for(self, task: PrimeTask) -> Iterator[str]:
        """Yield the server of each cache that needs the prefix."""
        group = task.row.group
        if task.on_every_replica or group is None:
            for copy in range(max(self.reorderer.caches, len(self.urls))):
                yield self.urls[copy % len(self.urls)]
            return
        yield self.backlog.home_of(group).url
