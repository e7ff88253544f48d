"""Handlers of the calls for operators: `/health`, `/ready`, and metrics for Prometheus."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder

from batchrunner.core.console import installed_version
from batchrunner.serve.api_errors import ApiError
from batchrunner.serve.batches import Batches
from batchrunner.serve.owners import Owners, queued_requests
from batchrunner.serve.records import OWNER_OF_CALL
from batchrunner.serve.state import BATCHES, FILES, FINAL_STATUSES, OWNER, Record, State

CHECK_EVERY_S = 2.0
"""Minimum time in seconds between two checks of readiness, however many clients ask."""
READ_S = 2.0
"""Seconds within which the server's directory must answer."""
PREFIX = "batchrunner_serve_"
OUTCOMES, KINDS = ("completed", "failed"), ("input", "output")
"""Values of the label `outcome` of requests, and of the label `kind` of tokens."""


class Readiness:
    """Checks whether the server can work: its records can be read, and its engine answers."""

    def __init__(self, state: State, batches: Batches) -> None:
        self._state, self._batches = state, batches
        self._check: asyncio.Task[str | None] | None = None
        """The current or last check. All clients wait for this one task."""
        self._checked_at = 0.0
        """Time of the monotonic clock at which the last check began."""
        self._look: asyncio.Future[int] | None = None
        """The last read of the directory, which never ends if its file system hangs."""
        self.disk_free: int | None = None
        """Free bytes of the disk; None if unknown."""

    async def problem(self) -> str | None:
        """Return why the server is not ready, in a sentence; None if it is ready."""
        now = time.monotonic()
        if self._check is None or (self._check.done() and now - self._checked_at >= CHECK_EVERY_S):
            self._check, self._checked_at = asyncio.create_task(self._find_problem()), now
        return await asyncio.shield(self._check)

    async def _find_problem(self) -> str | None:
        """Return why the server is not ready; None if its directory and its engine answer in time."""
        look = self._look
        # If the last read still hangs, wait for it again, so that only one thread hangs.
        if look is None or look.done():
            look = self._look = asyncio.ensure_future(asyncio.to_thread(self._state.look))
        await asyncio.wait([look], timeout=READ_S)
        self.disk_free = look.result() if look.done() and look.exception() is None else None
        if self.disk_free is None:
            return "The records of the server cannot be read."
        return None if await self._batches.engine_answers() else "The engine does not answer."


class BatchTally:
    """Counts batches and requests without reading all records each time.

    Batches that have ended do not change, so only unfinished and new ones are read.
    """

    def __init__(self, state: State) -> None:
        """Count the batches in `state`. Their requests do not count as ended in this process."""
        self._state = state
        self._newest: str | None = None
        """ID of the newest batch that was counted."""
        self._unfinished: dict[str, Record] = {}
        """Last known counts of requests of the unfinished batches, by ID of the batch."""
        self._resumed = set[str]()
        """IDs of unfinished batches that an earlier process began. Requests that ended in that process must
        not count. When such a batch next reports its progress, their number is known, and the ID is removed.
        """
        self.ended_batches = Counter[tuple[str, str]]()
        """Number of batches with a final status, by owner and status."""
        self.ended_requests = Counter[tuple[str, str]]()
        """Number of requests that ended in this process, by owner and outcome."""
        self.tokens = Counter[tuple[str, str]]()
        """Number of tokens of the batches that ended in this process, by owner and kind."""
        for name, batch in state.records[BATCHES].items():
            self._newest = name
            if batch["status"] in FINAL_STATUSES:
                self.ended_batches[batch.get(OWNER, ""), batch["status"]] += 1
            else:
                self._unfinished[name] = batch["request_counts"]
                self._resumed.add(name)

    def update(self) -> list[Record]:
        """Bring the counts up to date; return the unfinished batches."""
        batches = self._state.records[BATCHES]
        # The batches after `_newest` have not been counted yet.
        for name in reversed(batches):
            if name == self._newest:
                break
            self._unfinished[name] = {}
        self._newest = next(reversed(batches), None)
        for name, last_counts in [*self._unfinished.items()]:
            batch = batches[name]
            owner, counts = batch.get(OWNER, ""), batch["request_counts"]
            if counts is not last_counts and name in self._resumed:
                # The first counts that a run reports include requests that an earlier process answered. Only
                # later changes count.
                self._resumed.remove(name)
            else:
                for outcome in OUTCOMES:
                    # A count that has fallen adds nothing.
                    ended = counts[outcome] - last_counts.get(outcome, 0)
                    self.ended_requests[owner, outcome] += max(0, ended)
            self._unfinished[name] = counts
            if batch["status"] in FINAL_STATUSES:
                del self._unfinished[name]
                self.ended_batches[owner, batch["status"]] += 1
                for kind in KINDS:
                    self.tokens[owner, kind] += (batch["usage"] or {}).get(f"{kind}_tokens", 0)
        return [batches[name] for name in self._unfinished]


class MetricsApi:
    """Handlers of `/health`, `/ready` and `/metrics`, and the collector of the metrics."""

    def __init__(self, *, state: State, batches: Batches, owners: Owners) -> None:
        """Collect metrics of the server, its batches and its owners."""
        self._state, self._owners, self._info = state, owners, batches.info
        self._readiness, self._tally = Readiness(state, batches), BatchTally(state)
        self._is_ready = False
        """Whether the server was ready when the metrics were last read."""
        self._responses = Counter[int]()
        """Number of replies by HTTP status."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    async def health(self, _: web.Request) -> Record:
        """Tell that the server is alive, because it handles calls."""
        return {"status": "ok"}

    async def ready(self, _: web.Request) -> Record:
        """Tell that the server is ready; raises ApiError with status 503 if it is not."""
        problem = await self._readiness.problem()
        if problem is not None:
            raise ApiError(503, problem)
        return {"status": "ok"}

    async def count_response(self, _: web.Request, response: web.StreamResponse) -> None:
        """Count a reply. aiohttp calls this method before it sends the reply."""
        self._responses[response.status] += 1

    async def metrics(self, request: web.Request) -> web.Response:
        """Return the metrics in the format that the client accepts, by default that of Prometheus."""
        if not request[OWNER_OF_CALL].admin:
            raise ApiError(403, "Only an admin may read the metrics.")
        # `encode` calls `collect`, which cannot wait. So readiness is checked before.
        self._is_ready = await self._readiness.problem() is None
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. `prometheus_client` calls this method each time the metrics are read."""
        info = {
            "version": installed_version("batchrunner") or "",
            "model": self._info.model,
            "simulated": str(self._info.simulated).lower(),
        }
        yield InfoMetricFamily(PREFIX.rstrip("_"), "Properties of the server.", value=info)
        yield GaugeMetricFamily(
            f"{PREFIX}ready", "1 if the records can be read and the engine answers, else 0.", self._is_ready
        )
        yield from self._of_batches()
        yield from self._of_files()
        yield from self._of_owners()
        yield _family(
            CounterMetricFamily,
            "http_responses",
            "Replies of the server by HTTP status.",
            labels=["code"],
            values={str(status): count for status, count in self._responses.items()},
        )

    def _of_batches(self) -> Iterator[Metric]:
        """Yield the numbers of batches, of requests and of tokens."""
        # Each owner has a value from the start, even without a batch.
        tally, queued = self._tally, Counter[str](dict.fromkeys(self._owners.names, 0))
        unfinished = tally.update()
        batches = Counter(tally.ended_batches)
        for batch in unfinished:
            owner = batch.get(OWNER, "")
            batches[owner, batch["status"]] += 1
            queued[owner] += queued_requests(batch)
        yield _family(
            GaugeMetricFamily,
            "batches",
            "Batches, ended ones too.",
            labels=["owner", "status"],
            values=batches,
        )
        yield _family(
            GaugeMetricFamily,
            "queued_requests",
            "Requests without a result.",
            labels=["owner"],
            values=queued,
        )
        yield _family(
            CounterMetricFamily,
            "requests",
            "Requests that ended since the start of the server.",
            labels=["owner", "outcome"],
            values={**self._zeros(OUTCOMES), **tally.ended_requests},
        )
        yield _family(
            CounterMetricFamily,
            "tokens",
            "Tokens of the batches that ended since the start of the server.",
            labels=["owner", "kind"],
            values={**self._zeros(KINDS), **tally.tokens},
        )

    def _zeros(self, values: Iterable[str]) -> dict[tuple[str, str], int]:
        """Return 0 for each owner and value of a label.

        Prometheus cannot see an increase from a missing counter, so counters begin at 0.
        """
        return dict.fromkeys(product(self._owners.names, values), 0)

    def _of_files(self) -> Iterator[Metric]:
        """Yield the numbers and sizes of files, and the free disk space."""
        files = Counter[str](file.get(OWNER, "") for file in self._state.records[FILES].values())
        yield _family(
            GaugeMetricFamily,
            "files",
            "Files, results too.",
            labels=["owner"],
            values=files,
        )
        yield _family(
            GaugeMetricFamily,
            "file_size_bytes",
            "Size of all files.",
            labels=["owner"],
            values=self._state.stored_bytes,
        )
        free = self._readiness.disk_free
        if free is not None:
            yield GaugeMetricFamily(f"{PREFIX}disk_free_bytes", "Free space of the disk of --dir.", free)

    def _of_owners(self) -> Iterator[Metric]:
        """Yield the tokens that owners have used on this day, and their limits."""
        used, limits = self._owners.tokens_of_day()
        yield _family(
            GaugeMetricFamily,
            "day_tokens",
            "Tokens that were used on this day (UTC).",
            labels=["owner"],
            values=used,
        )
        yield _family(
            GaugeMetricFamily,
            "day_tokens_limit",
            "Maximum number of tokens a day.",
            labels=["owner"],
            values=limits,
        )


def _family(kind: Any, name: str, text: str, *, labels: list[str], values: Mapping[Any, int]) -> Any:
    """Return a metric of prometheus_client's class `kind`, with a value for each combination of `labels`.

    The keys of `values` are the combinations: tuples of texts, or texts if there is only one label.
    """
    family = kind(f"{PREFIX}{name}", text, labels=labels)
    for combination, value in values.items():
        family.add_metric(combination if len(labels) > 1 else [combination], value)
    return family
