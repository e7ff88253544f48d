"""Requests whose reply comes whole: of one row, or of a list of rows of a task without decoding."""

import time
from collections.abc import Sequence
from http import HTTPStatus

from batchrunner.core.errors import BundleRefusedError, EngineBusyError, EngineDownError, RequestError
from batchrunner.engines.base import PlacedRequest, RowAnswers
from batchrunner.engines.http import wire
from batchrunner.engines.http.endpoint import Endpoint
from batchrunner.engines.http.load_poller import LoadPoller
from batchrunner.engines.http.model_guard import ModelGuard
from batchrunner.engines.http.poster import RowPoster
from batchrunner.engines.http.reply_errors import error_of
from batchrunner.engines.http.task_replies import answers_of

_OK = HTTPStatus.OK.value  # a look into an enumeration takes as long as ten other lines


class WholeReplies:
    """Posts bodies and returns whole replies."""

    def __init__(self, poster: RowPoster, guard: ModelGuard, poller: LoadPoller) -> None:
        """Take the `poller`, which knows the replicas: a gateway may name one in an error."""
        self._poster = poster
        self._guard = guard
        self._poller = poller

    async def post(
        self, endpoint: Endpoint, path: str, body: bytes, headers: dict[str, str] | None
    ) -> bytes | RequestError:
        """Send a body; return the reply, or what its status means.

        Raises RequestError where none came, and what a replica's death behind a gateway means.
        """
        if endpoint.closed:
            raise EngineDownError(endpoint.closed)
        sent_at = time.monotonic()
        answer = await self._poster.post(endpoint, path, body, headers, sent_at)
        endpoint.answers += 1
        self._poller.failures.record(endpoint.url, alive=True)
        if answer.status == _OK:
            return answer.content
        error = error_of(*answer)
        if isinstance(error, EngineBusyError) and answer.status != HTTPStatus.TOO_MANY_REQUESTS:
            self._guard.doubt(endpoint.url)
        named = next((url for url in self._poller.replicas if f"{url}/" in str(error)), None)
        if named is not None and isinstance(error, EngineDownError):
            raise await self._poller.failures.classify(named, sent_at, str(error))
        return error

    async def post_all(
        self, endpoint: Endpoint, path: str, bodies: Sequence[bytes], headers: dict[str, str] | None
    ) -> list[bytes] | RequestError:
        """Send bodies one after another; return all replies, or what the first other status means."""
        found: list[bytes] = []
        for body in bodies:
            reply = await self.post(endpoint, path, body, headers)
            if isinstance(reply, RequestError):
                return reply
            found.append(reply)
        return found


class ListSender:
    """Sends a list of rows of one task, all of which end with the one reply."""

    def __init__(self, posts: WholeReplies, guard: ModelGuard, *, confirms: bool) -> None:
        """With `confirms` no reply counts before its servers have said again which model they serve."""
        self._posts = posts
        self._guard = guard
        self._confirms = confirms

    async def send(
        self,
        endpoint: Endpoint,
        rows: Sequence[PlacedRequest],
        answers: RowAnswers,
        headers: dict[str, str] | None,
    ) -> None:
        """Send rows in one body and pass on the answer of each; see `Engine.generate_many`.

        A refused list, or a reply that is none to it, says nothing of a row: raises BundleRefusedError.
        """
        requests = [row.request for row in rows]
        task = requests[0].task
        assert task is not None
        try:
            bodies = wire.bodies_of(requests)
        except RequestError as failure:  # one row cannot be written: alone it is found
            raise BundleRefusedError(str(failure)) from None
        given = await self._posts.post_all(endpoint, task.path, bodies, headers)
        if isinstance(given, EngineBusyError):
            raise given
        if isinstance(given, RequestError):
            raise BundleRefusedError(str(given))
        try:
            results = answers_of(requests, task.whole(given))
        except RequestError as failure:
            raise BundleRefusedError(str(failure)) from None
        if self._confirms:
            await self._guard.confirm(endpoint.url)
        if not self._guard.is_settled(endpoint.url):
            await self._guard.settle(endpoint.url)
        for row, result in zip(rows, results, strict=True):
            answers.ended(row.place, result)
