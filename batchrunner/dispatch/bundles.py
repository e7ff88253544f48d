"""Bundles: several rows for one server that are ready at the same time share one HTTP request.

Each row has its slot, its attempt and its answer as if it were sent alone.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from batchrunner.core.engine_info import LEAST_LOW, EngineInfo, QueueBand
from batchrunner.core.errors import (
    AttemptFailedError,
    BatchrunError,
    BundleRefusedError,
    NoAnswerError,
    RequestError,
)
from batchrunner.core.timing import TIMING
from batchrunner.core.types import BYTES_PER_TOKEN, Completion, Request, RequestBody
from batchrunner.engines.base import Engine
from batchrunner.job.sampling import THINKING
from batchrunner.job.spec import Job
from batchrunner.output.events import EventLog

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BundleTotals:
    """Counts of the requests that were sent since the last start of the run, including retries."""

    requests: int = 0
    """Number of requests, including those with one row."""
    rows: int = 0
    bundles: int = 0
    most_rows: int = 0
    rows_resent: int = 0
    """Number of rows that were sent again, because the engine refused their bundle or did not answer them."""

    def add(self, rows: int) -> None:
        """Count a request with this number of rows."""
        self.requests += 1
        self.rows += rows
        if rows > 1:
            self.bundles += 1
        self.most_rows = max(self.most_rows, rows)

    def as_dict(self) -> dict[str, Any]:
        """Return report.json's `bundles`."""
        totals = asdict(self)
        rows = totals.pop("rows")
        rows_per_request = round(rows / self.requests, 2) if self.requests else None
        return {**totals, "rows_per_request": rows_per_request}


def prompt_tokens(request: Request) -> int:
    """Estimate how many prompt tokens the engine will compute for a row; exact for token ids."""
    if isinstance(request.prompt, RequestBody):
        return len(request.prompt.content) // BYTES_PER_TOKEN
    length = len(request.prompt)
    tokens = length if request.kind == "input_ids" else length // BYTES_PER_TOKEN
    if not request.items:
        return tokens
    if request.item_ids:  # A choose task: the engine computes the prompt once, and each choice after it
        return tokens + sum(map(len, request.item_ids))
    # In other tasks, the engine computes each item together with a copy of the prompt.
    return tokens * len(request.items) + sum(map(len, request.items)) // BYTES_PER_TOKEN


USUAL_TOKENS = 8192
"""Assumed prompt tokens of a forward pass if the server does not report them: SGLang's prefill chunk on GPUs
of 80 GB."""
FIRST_ROW_TOKENS = 256
"""Assumed prompt tokens of a row before any row was sent."""
MEMORY_ROWS = 2000
"""Number of rows over which the prompt length is averaged. Older rows count less and less."""
DEEPEST = 8
"""Longest useful queue of a scheduler, in forward passes of work. Further rows would only wait."""
FIRST_PASSES = 4
"""First concurrency limit of a scheduler, in forward passes of work: one pass is computed, one waits, and the
rows of two passes travel to the server and back."""


class ForwardPasses:
    """Computes how many rows fill a forward pass, for tasks without decoding such as embedding.

    The number follows from the mean prompt length of the rows that were sent.
    """

    def __init__(self, tokens: int | None) -> None:
        """`tokens` is the maximum of prompt tokens in a pass; None if the server does not report it."""
        self.tokens = tokens or USUAL_TOKENS
        self._row_tokens = float(FIRST_ROW_TOKENS)
        self._rows = 0

    def record_sent(self, tokens: int) -> None:
        """Count a sent row with this number of prompt tokens."""
        self._rows += 1
        self._row_tokens += (tokens - self._row_tokens) / min(self._rows, MEMORY_ROWS)

    def rows(self, max_running: int | None) -> int:
        """Return the number of rows in a pass, from 1 to `max_running`, the scheduler's limit of requests."""
        rows = max(1, round(self.tokens / max(1.0, self._row_tokens)))
        return rows if max_running is None else min(rows, max_running)

    def first_window(self, max_running: int | None) -> int:
        """Return the concurrency limit (window) of a scheduler before its first load sample."""
        return max(LEAST_LOW, FIRST_PASSES * self.rows(max_running))

    def band(self, max_running: int | None) -> QueueBand:
        """Return the healthy range of `#queue-req`: from one pass's rows to those of DEEPEST passes."""
        rows = self.rows(max_running)
        low = max(LEAST_LOW, rows)
        return QueueBand(low, DEEPEST * low, f"a forward pass takes about {rows} rows")


MOST_ROWS = 64
"""Maximum number of rows in a bundle. At each event of a request, SGLang's front process wakes all waiting
rows of this request. So its work grows with the square of their number, and more than 16 rows save little."""
MOST_LIST_ROWS = 256
"""Maximum number of rows in a bundle of a task without decoding. One reply holds the vectors of all its
rows."""
MOST_TOKENS = 1 << 15
"""Number of prompt tokens at which a bundle is full. The server does nothing else while it parses the JSON of
a bundle, so parsing must not take long."""
LEAST_ROWS_S = 25.0
"""Rows are bundled only if at least this many end per second. With fewer, the server's front process has
little to do, and bundles save nothing."""
FIRST_ROWS = 16
"""First bundle size, in rows, if answers are short. Otherwise the first size is 1."""
SHORT_TOKENS = 16
"""Answers count as short if the job's `max_new_tokens` is at most this."""
PERIOD_S = 0.25
"""The bundle size is computed from the rows that ended in a period of at least this many seconds."""
SHARE = 4
"""A bundle holds at most the outstanding rows of its server divided by this. A larger bundle would wait for
rows that have only just begun, and the server would run low on rows in the meantime."""


class BundleSize:
    """Bundle size for one server: the number of rows that end within the time that a bundle may wait.

    An engine often ends many rows in one step, and then none for a while. So the rows are counted in bursts.
    A burst lasts as long as a bundle may wait. The size is that of the burst in which the average row ended.

    In a task without decoding, a bundle is as large as a forward pass, however quickly rows end.
    """

    def __init__(
        self,
        fill_s: float,
        fixed: int | None = None,
        *,
        short: bool = False,
        passes: ForwardPasses | None = None,
    ) -> None:
        """Start with one row in each bundle, or with more if `short` answers are expected.

        A bundle is sent after at most `fill_s` seconds; `fixed` sets its number of rows. `passes` describes
        the forward passes of a task without decoding; None for a generate task.
        """
        self.most_tokens = MOST_TOKENS if passes is None else passes.tokens
        """Maximum prompt tokens of a bundle. A single row may have more."""
        self._fill_s, self._fixed, self._passes = fill_s, fixed, passes
        self._rows = FIRST_ROWS if short else 1
        if passes is not None:
            self._rows = MOST_LIST_ROWS
        self._since: float | None = None
        """Time at which the measuring period began; None before the first row."""
        self._burst_began = 0.0
        self._burst = 0
        """Number of rows that have ended in the present burst."""
        self._ended = 0
        """Number of rows in the finished bursts of this measuring period."""
        self._squares = 0
        """Sum of the squared sizes of the finished bursts."""

    def record_sent(self, request: Request) -> None:
        """Count a sent row."""
        if self._passes is not None:
            self._passes.record_sent(prompt_tokens(request))

    def record_end(self, now: float) -> None:
        """Count a row that ended at time `now`, in seconds of the monotonic clock."""
        if self._passes is not None:
            # Without decoding, a bundle fills a forward pass, however quickly rows end.
            return
        if self._since is None:
            self._since = self._burst_began = now
        if now - self._burst_began > self._fill_s:
            self._ended += self._burst
            self._squares += self._burst * self._burst
            self._burst_began, self._burst = now, 0
            self._end_period(now, now - self._since)
        self._burst += 1

    def rows(self, outstanding: int) -> int:
        """Return the bundle size in rows; 0, like 1, means no bundle.

        `outstanding` is the number of rows that are in flight or wait in a bundle.
        """
        if self._fixed is not None:
            return self._fixed
        # A bundle holds at most 1/SHARE of the outstanding rows, so that the server keeps enough of them.
        return min(self._rows, outstanding // SHARE)

    def _end_period(self, now: float, span_s: float) -> None:
        """Compute the bundle size, unless the measuring period of `span_s` seconds is still too short.

        The rows are counted in bursts: rows that ended within the time that a bundle may wait.
        """
        if span_s >= PERIOD_S:
            is_fast = self._ended >= LEAST_ROWS_S * span_s
            # The mean size of the bursts, weighted by their rows: sum of squared sizes / number of rows. This
            # is the size of the burst in which an average row ended.
            self._rows = min(MOST_ROWS, self._squares // self._ended) if is_fast else 1
            self._since, self._ended, self._squares = now, 0, 0


MOST_REFUSALS = 32
"""An engine that refused this many bundles, and has answered none, gets no more bundles."""


class BundledRow(NamedTuple):
    """A row that waits for its answer."""

    request: Request
    answer: asyncio.Future[Completion | None]
    """The future answer. None means that the row must be sent alone."""


class Bundle:
    """Rows that are sent in one request, or that wait until their bundle is full."""

    def __init__(self, rows: Iterable[BundledRow] = ()) -> None:
        self.rows = [*rows]
        self.tokens = 0
        """Prompt tokens of the rows so far, while the bundle is being filled."""
        self.answers = 0
        """Number of rows that have received an answer or a refusal of their own."""

    @property
    def unanswered(self) -> list[BundledRow]:
        """Rows that have no answer yet."""
        return [row for row in self.rows if not row.answer.done()]

    def end_row(self, index: int, result: Completion | RequestError) -> None:
        """Set the answer or the error of a row of the bundle; a second one for the same row is ignored."""
        answer = self.rows[index].answer
        if answer.done():
            return
        self.answers += 1
        if isinstance(result, RequestError):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def fail(self, error: Exception) -> None:
        """End all rows that have no answer yet with an error."""
        for row in self.unanswered:
            row.answer.set_exception(error)


@dataclass(slots=True, kw_only=True)
class BundleSender:
    """Sends the rows for one server, several rows in a request if that is faster."""

    engine: Engine
    url: str
    size: BundleSize
    totals: BundleTotals
    events: EventLog
    one_by_one: str | None
    """Reason why rows must not share requests; None if they may."""
    _logged: set[str] = field(default_factory=set)
    """Reasons for sending rows one by one that are already in the log."""
    _works: bool = False
    """Whether the engine has answered a bundle."""
    _refused: int = 0
    """Number of bundles in which the engine answered no row at all."""
    _outstanding: int = 0
    """Number of rows that are in flight or wait in a bundle."""
    _filling: Bundle | None = None
    """The bundle that waits for further rows; None if no row waits."""
    _sending: set[asyncio.Task[None]] = field(default_factory=set)

    async def send(self, request: Request, *, alone: bool) -> Completion:
        """Send a request once, alone or in a bundle, and wait for its answer; see `Engine.generate`.

        With `alone`, the request does not share a bundle.
        """
        self._outstanding += 1
        try:
            self.size.record_sent(request)
            most = self.size.rows(self._outstanding)
            if most > 1 and not alone and self._may_share(request):
                completion = await self._send_shared(request, most)
                if completion is not None:
                    return completion
            self.totals.add(1)
            return await self.engine.generate(request, self.url)
        finally:
            self._outstanding -= 1
            self.size.record_end(time.monotonic())
            self._send_if_nothing_else_comes()

    async def close(self) -> None:
        """Cancel the bundles that are not answered yet."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _may_share(self, request: Request) -> bool:
        """Tell whether a request may be sent in a bundle; log each reason against it once."""
        # The reason against all bundles is logged first, before a reason that concerns only this request.
        why = self.one_by_one or why_alone(request)
        if why is not None and why not in self._logged:
            self._logged.add(why)
            log.info("rows are sent one by one: %s", why)
            self.events.write("bundles_off", route=self.url, why=why)
        return why is None

    async def _send_shared(self, request: Request, most: int) -> Completion | None:
        """Send a request in a bundle of at most `most` rows; return None if it must be sent alone instead.

        The bundle is sent once it is full, once no other row can join it, or after TIMING.bundle_fill
        seconds.
        """
        loop, tokens = asyncio.get_running_loop(), prompt_tokens(request)
        row = BundledRow(request, loop.create_future())
        most_tokens = self.size.most_tokens
        filling = self._filling
        if filling is not None and filling.tokens + tokens > most_tokens:
            self._send_filled(filling)
            filling = None
        if filling is None:
            filling = self._filling = Bundle()
            # The call does nothing if the bundle was sent before.
            loop.call_later(TIMING.bundle_fill, self._send_filled, filling)
        filling.rows.append(row)
        filling.tokens += tokens
        if len(filling.rows) >= most or filling.tokens >= most_tokens:
            self._send_filled(filling)
        self._send_if_nothing_else_comes()
        return await row.answer

    def _send_filled(self, filling: Bundle) -> None:
        """Send this bundle, unless it was sent before."""
        if self._filling is filling:
            self._filling = None
            self._send_rows(filling.unanswered)

    def _send_if_nothing_else_comes(self) -> None:
        """Send the bundle that is being filled if all outstanding rows wait in it."""
        filling = self._filling
        if filling is not None and len(filling.rows) == self._outstanding:
            # Send it in the next turn of the event loop, so that rows sent in this turn can still join.
            asyncio.get_running_loop().call_soon(self._send_filled, filling)

    def _send_rows(self, rows: Sequence[BundledRow]) -> None:
        """Send rows in one request. A single row goes back to its `send` call, which sends it alone."""
        if len(rows) > 1 and self.one_by_one is None:
            task = asyncio.ensure_future(self._send_bundle(Bundle(rows)))
            # `close` cancels the tasks in this set. The set also keeps them from being garbage collected.
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            return
        for row in rows:
            row.answer.set_result(None)

    async def _send_bundle(self, bundle: Bundle) -> None:
        """Send a bundle once. Rows without an answer are sent again in smaller bundles, or fail."""
        requests = [row.request for row in bundle.rows]
        self.totals.add(len(requests))
        why = "the engine answered none of the rows in them"
        try:
            await self.engine.generate_many(requests, self.url, bundle.end_row)
        except BundleRefusedError as refusal:
            why = str(refusal)
        except AttemptFailedError as failure:
            why = str(failure)
            # An engine that has answered no bundle may not support them. Then its rows are sent again in
            # smaller requests. Otherwise they fail.
            if self._works or bundle.answers or isinstance(failure, NoAnswerError):
                bundle.fail(failure)
        except (RequestError, BatchrunError) as failure:
            # The rows fail, each with this error. Without an answer, the failure also counts as a sign that
            # the engine does not support bundles.
            why = str(failure)
            if not bundle.answers:
                self._refused += 1
            bundle.fail(failure)
        except Exception as failure:
            # An unexpected error is no fault of the rows, so they are sent again.
            log.debug("a bundle failed", exc_info=failure)
        self._resend_unanswered(bundle, why)

    def _resend_unanswered(self, bundle: Bundle, why: str) -> None:
        """Send the unanswered rows of a bundle again; `why` is the reason in words."""
        self._works = self._works or bundle.answers > 0
        unanswered = bundle.unanswered
        if unanswered and not bundle.answers:
            self._refused += 1
        # An engine that has answered no bundle, and has refused many, does not support bundles.
        if not self._works and self._refused >= MOST_REFUSALS and self.one_by_one is None:
            self.one_by_one = f"the engine refused {self._refused} requests with several rows: {why}"
        self.totals.rows_resent += len(unanswered)
        if bundle.answers:  # The engine accepts bundles, so only rows that it did not answer are sent alone.
            for row in unanswered:
                row.answer.set_result(None)  # A result of None tells `send` to send the row alone.
            return
        # A single row may cause the refusal. Halving the bundle isolates it in few requests.
        half = len(unanswered) // 2
        self._send_rows(unanswered[:half])
        self._send_rows(unanswered[half:])


class BundleSenders:
    """Creates a sender for each server of an engine, according to the job's `bundle`."""

    def __init__(
        self,
        job: Job,
        engine: Engine,
        info: EngineInfo,
        passes: ForwardPasses | None,
        totals: BundleTotals,
        events: EventLog,
    ) -> None:
        """Prepare senders; `passes` describes the forward passes of a task without decoding, else None."""
        self._engine = engine
        self._totals = totals
        self._events = events
        self._passes = passes
        self._fixed = job.bundle if isinstance(job.bundle, int) else None
        if job.bundle == "off":
            self._fixed = 1
        if info.simulated:  # a simulated engine has no tokenizer process, so bundles save nothing
            self._fixed = 1
        most_tokens = job.sampling.max_new_tokens
        self._short = isinstance(most_tokens, int) and most_tokens <= SHORT_TOKENS
        self._one_by_one: str | None = None
        """Why no rows share a request; None if they may."""
        # Without decoding, a bundle gets a single reply, so the engine's reasons against bundles do not
        # apply.
        if passes is None:
            # `only_short_share` speaks only against bundles of rows with long outputs.
            self._one_by_one = info.one_by_one or (None if self._short else info.only_short_share)

    def sender_to(self, url: str) -> BundleSender:
        """Return a new sender of rows to a server."""
        size = BundleSize(TIMING.bundle_fill, self._fixed, short=self._short, passes=self._passes)
        return BundleSender(
            engine=self._engine,
            url=url,
            size=size,
            totals=self._totals,
            events=self._events,
            one_by_one=self._one_by_one,
        )


def why_alone(request: Request) -> str | None:
    """Return why a row needs a request of its own; None if it may share one."""
    # A task without decoding has a single reply per bundle, so none of the following reasons applies.
    if request.task is not None:
        return None
    if request.kind != "input_ids":
        return "the engine tokenizes their prompts"
    sampling = request.sampling
    if (sampling.get("n") or 1) > 1:
        return "sampling.n is more than 1"
    if THINKING in sampling:  # one field of the request switches thinking on for all of its rows
        return f"sampling.{THINKING}"
    # A bundle is streamed. While streaming, SGLang holds back text that may begin a stop string, but not text
    # that may begin a match of stop_regex. So a streamed answer could contain part of the match.
    return "sampling.stop_regex" if sampling.get("stop_regex") else None
