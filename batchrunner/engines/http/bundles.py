"""Posts several rows in one request, and gives each its answer when it comes.

SGLang answers a list of prompts with `stream: true` by events, each with the `index` of its row: one when a
row ends, and one after its first token where more follow.
"""

import logging
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from batchrunner.core.errors import BundleRefusedError, EngineBusyError, EngineDownError, RequestError
from batchrunner.engines.base import PlacedRequest, RowAnswers
from batchrunner.engines.http import replies, wire
from batchrunner.engines.http.endpoint import Endpoint
from batchrunner.engines.http.failures import FailureClassifier
from batchrunner.engines.http.model_guard import ModelGuard
from batchrunner.engines.http.poster import RowPoster
from batchrunner.engines.http.reply_errors import error_of
from batchrunner.engines.http.reply_shapes import EndOfRow
from batchrunner.input.tokenize.detokenizer import Detokenizer

log = logging.getLogger(__name__)

EVENTS_A_ROW = 4
"""Events a row, two of which are usual, above which a server does not heed `stream_interval`."""
_END = b"[DONE]"


class _EventMeta(msgspec.Struct):
    finish_reason: Any = None


class _Event(msgspec.Struct):
    index: int | None = None
    meta_info: _EventMeta | None = None
    error: Any = None


_read_event = msgspec.json.Decoder(_Event)


class BundleAnswer:
    """The answer to a bundle: reads its events, and passes on those that end a row, each once."""

    def __init__(
        self,
        rows: Sequence[PlacedRequest],
        answers: RowAnswers,
        endpoint: Endpoint,
        guard: ModelGuard,
        detokenizer: Detokenizer | None,
        *,
        confirms: bool,
    ) -> None:
        """With `confirms` no answer counts before its servers have said again which model they serve."""
        self._rows = rows
        self._answers = answers
        self._endpoint = endpoint
        self._guard = guard
        self._detokenizer = detokenizer
        self._confirms = confirms
        self._ended: set[int] = set()
        self.events = 0
        """Events that came so far."""
        self.error: bytes | None = None
        """Event that says why the request failed."""

    @property
    def is_over(self) -> bool:
        """Whether each row has its answer."""
        return len(self._ended) == len(self._rows)

    async def take(self, events: Sequence[bytes]) -> None:
        """Take the data of events; one that cannot be read, or of no row that is left, counts for nothing.

        Raises AnotherModelError where the server serves another model.
        """
        if self._confirms:
            await self._guard.confirm(self._endpoint.url)
        for event in events:
            if event == _END:
                continue
            self.events += 1
            end = replies.end_of_row(event) if self._detokenizer is None else None
            index = self._index_in(event) if end is None else end.index
            if index is not None and 0 <= index < len(self._rows) and index not in self._ended:
                self._ended.add(index)
                await self._end(index, end, event)

    def _index_in(self, event: bytes) -> int | None:
        """Return the index of the row that an event ends."""
        try:
            found: _Event = replies.decoded(_read_event, event)
        except Exception:  # noqa: BLE001 - nothing that a server sends may end a run
            log.debug("an event of %s cannot be read: %.200r", self._endpoint.url, event)
            return None
        if found.error is not None and found.index is None:
            self.error = event
        is_end = found.meta_info is not None and found.meta_info.finish_reason is not None
        return found.index if is_end else None

    def refusal(self) -> RequestError | None:
        """Return the error that the answer said instead of rows; None where it said none."""
        if self.error is None:
            return None
        try:
            code = int(msgspec.json.decode(self.error)["error"]["code"])
        except Exception:  # noqa: BLE001 - as above
            code = 0
        known = HTTPStatus.BAD_REQUEST <= code < 600  # noqa: PLR2004
        return error_of(code if known else HTTPStatus.INTERNAL_SERVER_ERROR.value, self.error)

    async def _end(self, index: int, end: EndOfRow | None, event: bytes) -> None:
        self._endpoint.answers += 1
        place, request = self._rows[index]
        url = self._endpoint.url
        try:
            if end is None:
                completion = replies.completion_of(request, event, self._detokenizer)
            else:
                completion = replies.completion_of_end(request, end, event)
            if not self._guard.accepts(url, completion.weights):
                await self._guard.settle(url)
                await self._guard.check_answer(url, completion.weights)
        except RequestError as failure:
            self._answers.ended(place, failure)
        else:
            self._answers.ended(place, completion)


class BundlePoster:
    """Sends bundles to endpoints."""

    def __init__(
        self,
        poster: RowPoster,
        guard: ModelGuard,
        failures: FailureClassifier,
        detokenizer: Detokenizer | None,
        *,
        confirms: bool,
    ) -> None:
        """With `confirms` no answer counts before its servers have said again which model they serve."""
        self._poster = poster
        self._guard = guard
        self._failures = failures
        self._detokenizer = detokenizer
        self._confirms = confirms

    async def post(
        self,
        endpoint: Endpoint,
        rows: Sequence[PlacedRequest],
        answers: RowAnswers,
        headers: dict[str, str] | None,
    ) -> None:
        """Send requests in one body, and pass on the answer of each; see `Engine.generate_many`."""
        if endpoint.closed:
            raise EngineDownError(endpoint.closed)
        answer = BundleAnswer(
            rows, answers, endpoint, self._guard, self._detokenizer, confirms=self._confirms
        )
        whole = await self._poster.post_for_events(
            endpoint, wire.GENERATE_PATH, _body(rows), headers, answer, time.monotonic()
        )
        self._failures.record(endpoint.url, alive=True)
        if answer.events > EVENTS_A_ROW * len(rows):
            answers.discourage(f"the server sent {answer.events} events for {len(rows)} rows")
        error = answer.refusal()
        if whole is not None:
            endpoint.answers += 1
            error = error_of(*whole)
            if whole.status == HTTPStatus.OK:
                error = BundleRefusedError("the answer to several rows is no stream of events")
        if isinstance(error, EngineBusyError):
            if whole is None or whole.status != HTTPStatus.TOO_MANY_REQUESTS:
                self._guard.doubt(endpoint.url)
            raise error
        if error is not None:
            raise BundleRefusedError(str(error))


def _body(rows: Sequence[PlacedRequest]) -> bytes:
    try:
        return wire.bytes_of(wire.bundle_body([row.request for row in rows]))
    except RequestError as failure:  # one row cannot be written: alone it is found
        raise BundleRefusedError(str(failure)) from None
