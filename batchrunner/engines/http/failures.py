"""What a failed request means for its row: by the status of a reply, or by the death of a server."""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    RequestError,
    RowRefusedError,
)

ERROR_CHARACTERS = 500
"""Most characters of an error message in a result row."""
_BUSY = {429, 502, 503, 504}
_REFUSED = {400, 404, 413, 422}
_REPLICA_DOWN = re.compile(rb'"(call_upstream_|read_response_|no_(available_|healthy_)?workers)')
"""A gateway's error codes where no replica took the row, or where the replica ended before the answer was
complete. sglang_router 0.3.2 gives them with status 500."""


def error_of(status: int, body: bytes, retry_after: str | None = None) -> RequestError:
    """Return the error that a reply with a status other than 200 means for the row."""
    message = f"{status}: {short(_sentence_in(body)) or 'no explanation'}"
    error: RequestError
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and _REPLICA_DOWN.search(body):
        error = EngineDownError(message)
    elif status == HTTPStatus.UNAUTHORIZED:  # it would be so for any row
        error = EngineDownError(f"refuses the API key ({message}): see engine.api_key_env")
    elif status in _BUSY:
        pause_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
        error = EngineBusyError(message, pause_s)
    else:
        error = (RowRefusedError if status in _REFUSED else AttemptFailedError)(message)
    error.body = body
    return error


def known_status(code: Any) -> int:
    """Return the status that an error tells inside of a reply with status 200; 500 where it tells none."""
    is_status = type(code) is int and HTTPStatus.BAD_REQUEST <= code < 600  # noqa: PLR2004
    return code if is_status else HTTPStatus.INTERNAL_SERVER_ERROR.value


def short(text: str) -> str:
    """Return the first paragraph as one line, cut to 500 characters: a stack trace may follow it."""
    line = " ".join(text.strip().split("\n\n")[0].split())
    return line if len(line) <= ERROR_CHARACTERS else line[: ERROR_CHARACTERS - 1] + "…"


def _sentence_in(body: bytes) -> str:
    """Return the sentence in an error's body, of which SGLang has several formats."""
    try:
        found = orjson.loads(body)
        for key in ("error", "message", "detail"):
            if isinstance(found, dict) and found.get(key):
                found = found[key]
        return found if isinstance(found, str) else orjson.dumps(found).decode()
    except Exception:  # noqa: BLE001 - nothing that a server sends may end a run
        return body.decode(errors="replace")


def in_words(failure: Exception) -> str:
    """Say in one line why a server gave no answer; some of aiohttp's errors do not say it, or in several."""
    if isinstance(failure, aiohttp.TooManyRedirects):
        return "its redirects lead in a circle"
    return " ".join(str(getattr(failure, "os_error", failure)).split()) or type(failure).__name__


class FailureClassifier:
    """Judges whether a row was cut off by its own fault, its server's death, or neither."""

    def __init__(
        self,
        is_alive: Callable[[str], Awaitable[bool]],
        excuses: Callable[[str, float], Awaitable[bool]] | None,
    ) -> None:
        """Take what asks a server whether it answers.

        For servers that this run started take too what tells whether one ended after a time for a reason
        that is no row's fault.
        """
        self._is_alive = is_alive
        self._excuses = excuses
        self._questions: dict[str, asyncio.Future[bool]] = {}
        self._dead: set[str] = set()  # servers that did not answer when last asked
        self._died_at: dict[str, float] = {}

    def record(self, url: str, *, alive: bool) -> None:
        """Record whether a server is alive now."""
        if alive:
            self._dead.discard(url)
        elif url not in self._dead:
            self._dead.add(url)
            self._died_at[url] = time.monotonic()

    async def classify(self, url: str, sent_at: float, what: str) -> RequestError:
        """Return the error of a row that was sent to a server at `sent_at` and cut off; `what` is its text.

        If the server is alive, the row may be at fault, and the attempt counts against it. If the server
        died after the row was sent, it may have died of the row, unless its death excuses all rows. If it
        was dead before, no row is at fault.
        """
        alive = await self._ask(url)
        if sent_at < self._died_at.get(url, -math.inf):
            excused = self._excuses is not None and await self._excuses(url, sent_at)
            return EngineDownError(what) if excused else EngineDiedError(what)
        return AttemptFailedError(what) if alive else EngineDownError(what)

    async def _ask(self, url: str) -> bool:
        """Ask a server, once for all rows that were cut off together."""
        question = self._questions.get(url)
        if question is None:
            question = self._questions[url] = asyncio.ensure_future(self._is_alive(url))
            question.add_done_callback(lambda _: self._questions.pop(url, None))
        alive = await asyncio.shield(question)
        self.record(url, alive=alive)
        return alive
