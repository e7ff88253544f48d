"""Errors of SGLang's HTTP interface, and of a gateway's, → errors of a row. Pure."""

from http import HTTPStatus
from typing import Any

import orjson

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDownError,
    RequestError,
    RowRefusedError,
)

ERROR_CHARACTERS = 500
"""Most characters of an error message in a result row."""
_BUSY = {429, 502, 503, 504}
_REFUSED = {400, 404, 413, 422}
_REPLICA_DOWN = (
    "call_upstream_",
    "read_response_",
    "no_workers",
    "no_available_workers",
    "no_healthy_workers",
)
"""Beginnings of a gateway's error codes where no replica took the row, or where the replica ended before the
answer was complete. sglang_router 0.3.2 gives them with status 500."""


def error_of(status: int, body: bytes, retry_after: str | None = None) -> RequestError:
    """Return the error that a reply with another status means for the row."""
    try:
        code, said = _code_of(body), _message_of(body)
    except Exception:  # noqa: BLE001 - nothing that a server sends may end a run
        code, said = "", short(body.decode(errors="replace"))
    error = _error_of_status(status, code, f"{status}: {said}", retry_after)
    error.body = body
    return error


def _error_of_status(status: int, code: str, message: str, retry_after: str | None) -> RequestError:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and code.startswith(_REPLICA_DOWN):
        return EngineDownError(message)
    if status == HTTPStatus.UNAUTHORIZED:  # it would be so for any row
        return EngineDownError(f"refuses the API key ({message}): see engine.api_key_env")
    if status in _BUSY:
        return EngineBusyError(message, _seconds(retry_after))
    if status in _REFUSED:
        return RowRefusedError(message)
    return AttemptFailedError(message)


def _seconds(retry_after: str | None) -> float | None:
    """Return the pause that a `Retry-After` asks for; None without one, or for a date."""
    if retry_after is None or not (retry_after.isascii() and retry_after.isdigit()):
        return None
    return float(retry_after)


def _code_of(body: bytes) -> str:
    """Return the gateway's code of an error; empty where the body is not a gateway's."""
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""


def _message_of(body: bytes) -> str:
    """Return the sentence in an error body, of which SGLang has several formats."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return short(body.decode(errors="replace")) or "no explanation"
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return short(found if isinstance(found, str) else orjson.dumps(found).decode())


def short(text: str) -> str:
    """Return the first paragraph as one line, cut to 500 characters: a stack trace may follow it."""
    line = " ".join(text.strip().split("\n\n")[0].split())
    return line if len(line) <= ERROR_CHARACTERS else line[: ERROR_CHARACTERS - 1] + "…"
