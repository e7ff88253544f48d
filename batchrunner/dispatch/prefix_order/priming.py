"""Computes shared prefixes on an empty engine before the rows that need them are sent."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from batchrunner.core.types import Outcome, Request, RequestBody
from batchrunner.dispatch.prefix_order.reorder import PrimeTask
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.engines.base import Engine
from batchrunner.input.request_bodies import with_one_token

MOST_S = 30.0
"""Longest wait for a round of primes, in seconds: they save a prefill pass or two."""
ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0}


class PrefixPrimer:
    """Sends a row with one output token, so that its prefix is in the cache."""

    def __init__(self, engine: Engine, tokenizer: RowTokenizer, routes: Sequence[str], caches: int) -> None:
        """Build a primer for so many prefix `caches` behind the `routes`."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._routes = routes
        self._caches = caches

    async def prime(self, tasks: Sequence[PrimeTask]) -> None:
        """Compute prefixes, round by round; errors are ignored, since the rows themselves will show them."""
        by_round = attrgetter("round")
        for _, group in groupby(sorted(tasks, key=by_round), key=by_round):
            some = list(group)
            probes = [_probe(task.row.request) for task in some]
            sent = [
                self._engine.generate(probe._replace(affinity=key), route)
                for task, probe in zip(some, await self._tokenizer.tokenize(probes), strict=True)
                if not isinstance(probe, Outcome)
                for key, route in self._targets(task)
            ]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MOST_S):
                    await asyncio.gather(*sent, return_exceptions=True)
            for task in some:
                task.row.prefix_ready_at = time.monotonic()

    def _targets(self, task: PrimeTask) -> Iterator[tuple[str, str]]:
        """Yield affinity key and route of each cache that needs the prefix."""
        row, routes = task.row, self._routes
        if task.on_every_replica or row.group is None:
            for copy in range(max(self._caches, len(routes))):
                yield f"{row.request.ref.row}.primer.{copy}", routes[copy % len(routes)]
            return
        if row.group.route is None:
            row.group.route = routes[row.request.ref.row % len(routes)]
        yield row.affinity, row.group.route


def _probe(request: Request) -> Request:
    """Return a request for one token of the answer, of which nothing else is read."""
    prompt = request.prompt
    if isinstance(prompt, RequestBody):
        prompt = with_one_token(prompt)
    return request._replace(prompt=prompt, sampling=ONE_TOKEN, asks=None)
