"""Parsing of SGLang's replies, the same for all endpoints: JSON that may need repair, errors, and aborts.

Whatever bytes a server sends, the result is a value or the RequestError of a row.
"""

import json
import math
import re
import sys
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec
import orjson

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDownError,
    RequestError,
    RowRefusedError,
    error_with_status,
    hidden,
)

MOST_TOKENS = (1 << 31) - 1
"""Maximum value of a token count or token id: result columns have signed 32-bit integers."""
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
"""A count of tokens, or a token id, in a reply."""
Word = Annotated[str, msgspec.Meta(max_length=100)]
"""A finish reason in a reply, with a length limit far above SGLang's finish reasons."""

LOWEST = -sys.float_info.max
"""Number that replaces minus infinity in a reply: the lowest finite double."""
REPLACEMENT = "\ufffd"
"""Character that replaces half a surrogate pair in a reply, because UTF-8 cannot encode it."""
_MOST_DIGITS = 300
"""Maximum number of characters of a JSON integer that stays an integer.

Such an integer fits into a double, which holds integers of up to 309 digits.
"""
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
Value = TypeVar("Value")


def strict_json(content: bytes) -> bytes:
    """Return the body of a reply as strict JSON, repaired if necessary.

    NaN, infinity and numbers too large for a double become null. Minus infinity and numbers too low for a
    double become LOWEST. Half a surrogate pair becomes REPLACEMENT. Content that cannot be repaired is
    returned unchanged.
    """
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError:
        return _repaired(content)
    return content


def decode_reply(decoder: msgspec.json.Decoder[Value], content: bytes) -> Value:
    """Decode the body of a reply, repaired if necessary; raise AttemptFailedError if it is invalid."""
    try:
        return decoder.decode(content)
    except (ValueError, RecursionError):
        pass  # Repair the JSON and try again.
    try:
        return decoder.decode(_repaired(content))
    except (ValueError, RecursionError):
        raise AttemptFailedError(
            f"not an answer of SGLang: {short(content.decode(errors='replace'))}"
        ) from None


def _repaired(content: bytes) -> bytes:
    """Return JSON with substitutes for values that strict JSON does not allow, such as NaN.

    `strict_json` describes the substitutes. Content that cannot be repaired is returned unchanged.
    """
    # Unlike orjson, `json` reads NaN, numbers of any size, and half surrogate pairs.
    try:
        value = json.loads(
            content.decode("utf-8", "surrogatepass"),
            parse_constant=_number,
            parse_float=_number,
            parse_int=_whole_number,
        )
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return content
    return _HALF_A_PAIR.sub(REPLACEMENT, text).encode()


def _number(text: str) -> float | None:
    """Return a JSON number as a double. Minus infinity becomes LOWEST; NaN and infinity become None."""
    number = float(text)
    if math.isfinite(number):
        return number
    return LOWEST if number < 0 else None


def _whole_number(text: str) -> float | int | None:
    """Return a JSON integer as an integer; one that may not fit into a double is converted by `_number`."""
    return int(text) if len(text) <= _MOST_DIGITS else _number(text)


ERROR_CHARACTERS = 500
"""Maximum length in characters of an error message in a result row."""
_BUSY = {429, 502, 503, 504}
"""HTTP statuses of a server that is overloaded or restarting, and would refuse any other row too."""
_REFUSED = {400, 404, 413, 422}
"""HTTP statuses with which a server refuses one row for good."""


def error_of(status: int, body: bytes, retry_after: str | None = None) -> RequestError:
    """Return the error for a reply without an answer.

    `status` is the HTTP status. A reply with status 200 has no answer if its body is not JSON. `retry_after`
    is the value of the header `Retry-After`.
    """
    body = strict_json(body)
    explanation = short(_sentence_in(body))
    message = error_with_status(status, explanation or "no explanation")
    error: RequestError
    if status == HTTPStatus.OK:
        error = EngineDownError(f"not an answer of SGLang: {explanation or 'empty reply'}")
    elif status == HTTPStatus.UNAUTHORIZED:  # Every row would be refused, so the engine counts as down.
        error = EngineDownError(f"the server refuses the API key ({message}): see engine.api_key_env")
    elif status in _BUSY:
        pause_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
        error = EngineBusyError(message, pause_s)
    elif status in _REFUSED:
        error = RowRefusedError(message)
    else:
        error = AttemptFailedError(message)
    error.body = body
    return error


def known_status(code: Any) -> int:
    """Return the status `code` of an error inside a reply; 500 if `code` is not an HTTP error status."""
    is_status = type(code) is int and HTTPStatus.BAD_REQUEST <= code < 600  # noqa: PLR2004
    return code if is_status else HTTPStatus.INTERNAL_SERVER_ERROR.value


def short(text: str) -> str:
    """Return the first paragraph of an error as one line of at most ERROR_CHARACTERS.

    The other paragraphs may be a stack trace.
    """
    # Secrets are hidden first: shortening could cut a key in two, and half a key is not recognized.
    line = " ".join(hidden(text).strip().split("\n\n")[0].split())
    return line if len(line) <= ERROR_CHARACTERS else line[: ERROR_CHARACTERS - 1] + "…"


def _sentence_in(body: bytes) -> str:
    """Return the message in the body of an error reply; SGLang has several formats."""
    try:
        value = orjson.loads(body)
        # In one format, the value of `error` is an object with the key `message`.
        for key in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(key):
                value = value[key]
        return value if isinstance(value, str) else orjson.dumps(value).decode()
    except Exception:  # noqa: BLE001 - nothing that a server sends may end a run
        return body.decode(errors="replace")


class FinishReason(msgspec.Struct):
    """The finish reason of an output, as an object. An abort has a message and an HTTP status."""

    type: Word
    matched: Any = None
    message: Any = None
    status_code: Any = None


def raise_abort(reason: FinishReason | str | None) -> None:
    """Raise the error of a row if the finish reason of its output is an abort.

    SGLang may report an abort in a reply with status 200.
    """
    if reason == "abort":
        raise AttemptFailedError("aborted by the engine")
    if isinstance(reason, FinishReason) and reason.type == "abort":
        explanation = reason.message if isinstance(reason.message, str) else ""
        body = orjson.dumps({"message": explanation or "aborted by the engine"})
        raise error_of(known_status(reason.status_code), body)
