"""Reads rows in a thread, orders and tokenizes them, and adds them to the queue of rows (the backlog)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from batchrunner.core.types import Completion, Outcome
from batchrunner.dispatch.queue import AnswerHistory, Backlog, PendingRow, ResultSink, RowSource
from batchrunner.dispatch.reorder import PrimeTask, Reorderer
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.engines.base import Engine

LONGEST_PRIMING_S = 30.0
"""Maximum seconds to wait until common prefixes are computed before the run. This saves only about one
prefill pass, so a longer wait would not pay."""
ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0}
"""Sampling parameters of a request that only computes a shared prefix."""


@dataclass(slots=True, kw_only=True)
class Feeder:
    """Fills the queue of rows (the backlog), and pauses while it is full.

    Rows pass through `source`, `reorderer`, `tokenizer` and `backlog`, in this order.
    """

    source: RowSource
    reorderer: Reorderer
    tokenizer: RowTokenizer
    backlog: Backlog
    results: ResultSink
    engine: Engine
    urls: Sequence[str]
    """URLs of the engine's servers, on which common prefixes are computed before the rows are sent."""
    keeps_prompts: bool
    """Whether each row also keeps its prompt as it was before tokenization."""
    primes: bool
    """Whether common prefixes are computed before the rows are sent. False if the engine has other users."""

    async def run(self) -> None:
        """Read until the input ends or the run stops.

        Raises the errors of the source, and StorageError.
        """
        batches = self.reorderer.reorder(self.source)
        # `Dispatcher.run` cancels this task once no row remains to be sent.
        with contextlib.suppress(asyncio.CancelledError):
            while not self.backlog.is_over:
                batch = await asyncio.to_thread(next, batches, None)
                if batch is None:
                    break
                await self._add_batch(batch)
        self.backlog.finish_reading()

    async def _add_batch(self, batch: Sequence[PendingRow | PrimeTask | Outcome]) -> None:
        """Prepare the rows of a batch, and add them to the queue of rows.

        Then wait until it has room again.
        """
        rows = [item for item in batch if isinstance(item, PendingRow)]
        self.backlog.expect(len(rows))
        for item in batch:
            if isinstance(item, Outcome):  # a row that could not be rendered comes as an Outcome
                await self.results.put(item)
        if self.primes:
            await self._prime([item for item in batch if isinstance(item, PrimeTask)])
        requests = await self.tokenizer.tokenize([row.request for row in rows])
        for row, request in zip(rows, requests, strict=True):
            if isinstance(request, Outcome):  # the prompt cannot be tokenized, or is too long
                await self.backlog.end(row, request)
                continue
            if self.keeps_prompts:
                # Later requests may extend the chat. They need it before its tokenization, with the prepared
                # media.
                unencoded = row.request._replace(media=request.media)
                row.answers = AnswerHistory(request, unencoded=unencoded)
            row.request = request
            self.backlog.add(row)
        self.backlog.wake()
        await self.backlog.wait_for_room()

    async def _prime(self, tasks: Sequence[PrimeTask]) -> None:
        """Compute common prefixes on an empty engine: send each as a request for one output token.

        A prefix that begins with another one is sent after it, so that the cached one is used. Errors are
        ignored. If a row is at fault, its own request will fail later.
        """
        by_round = attrgetter("round")
        for _, round_tasks in groupby(sorted(tasks, key=by_round), key=by_round):
            tasks_of_round = list(round_tasks)
            requests = [task.row.request._replace(sampling=ONE_TOKEN, asks=None) for task in tasks_of_round]
            tokenized = await self.tokenizer.tokenize(requests)
            answers: list[Coroutine[Any, Any, Completion]] = []
            for task, request in zip(tasks_of_round, tokenized, strict=True):
                if not isinstance(request, Outcome):
                    answers += [self.engine.generate(request, url) for url in self._caches_for(task)]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_PRIMING_S):
                    await asyncio.gather(*answers, return_exceptions=True)
            # From now on the prefixes count as cached, even if their requests took too long.
            for task in tasks_of_round:
                task.row.prefix_ready_at = time.monotonic()

    def _caches_for(self, task: PrimeTask) -> Iterator[str]:
        """Yield the URL of a server for each prefix cache that needs the prefix."""
        group = task.row.group
        if task.on_every_replica or group is None:
            # A server with several caches gets as many requests, and spreads them over its caches itself.
            for copy in range(max(self.reorderer.caches, len(self.urls))):
                yield self.urls[copy % len(self.urls)]
            return
        yield self.backlog.home_of(group).url
