"""What all replies of SGLang have in common: JSON that may need repair, errors, and aborts.

Whatever bytes a server sends, reading them ends with a value or with a RequestError of the row.
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
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
"""A count of tokens, or a token id. It is limited because the columns of the results have 32 bits."""
Word = Annotated[str, msgspec.Meta(max_length=100)]
"""A finish reason. It is limited in length, far above the length of SGLang's reasons."""

LOWEST = -sys.float_info.max
"""Replacement of minus infinity: the lowest finite double."""
REPLACEMENT = "\ufffd"
"""Replacement of half a surrogate pair, which UTF-8 cannot encode."""
_MOST_DIGITS = 300
"""An integer of at most this number of characters certainly fits into a double."""
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
Value = TypeVar("Value")


def strict_json(content: bytes) -> bytes:
    """Return strict JSON unchanged; repair other JSON.

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
    """Decode a reply, after a repair if necessary; raises AttemptFailedError if that fails."""
    try:
        return decoder.decode(content)
    except (ValueError, RecursionError):  # the JSON may need a repair
        pass
    try:
        return decoder.decode(_repaired(content))
    except (ValueError, RecursionError):
        raise AttemptFailedError(
            f"not an answer of SGLang: {short(content.decode(errors='replace'))}"
        ) from None


def _repaired(content: bytes) -> bytes:
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
    number = float(text)
    if math.isfinite(number):
        return number
    return LOWEST if number < 0 else None


def _whole_number(text: str) -> float | int | None:
    return int(text) if len(text) <= _MOST_DIGITS else _number(text)


ERROR_CHARACTERS = 500
"""Maximum number of characters of an error message in a result row."""
_BUSY = {429, 502, 503, 504}
_REFUSED = {400, 404, 413, 422}


def error_of(status: int, body: bytes, retry_after: str | None = None) -> RequestError:
    """Convert a reply without an answer to an error. With status 200 the body was not JSON."""
    body = strict_json(body)
    explanation = short(_sentence_in(body))
    message = error_with_status(status, explanation or "no explanation")
    error: RequestError
    if status == HTTPStatus.OK:
        error = EngineDownError(f"not an answer of SGLang: {explanation or 'nothing'}")
    elif status == HTTPStatus.UNAUTHORIZED:  # every row would be refused
        error = EngineDownError(f"refuses the API key ({message}): see engine.api_key_env")
    elif status in _BUSY:
        pause_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
        error = EngineBusyError(message, pause_s)
    else:
        error = (RowRefusedError if status in _REFUSED else AttemptFailedError)(message)
    error.body = body
    return error


def known_status(code: Any) -> int:
    """Return the status of an error inside a reply with status 200; 500 if `code` is no error status."""
    is_status = type(code) is int and HTTPStatus.BAD_REQUEST <= code < 600  # noqa: PLR2004
    return code if is_status else HTTPStatus.INTERNAL_SERVER_ERROR.value


def short(text: str) -> str:
    """Return the first paragraph as one line of at most 500 characters; a stack trace may follow it."""
    line = " ".join(hidden(text).strip().split("\n\n")[0].split())  # before the cut, which may split a key
    return line if len(line) <= ERROR_CHARACTERS else line[: ERROR_CHARACTERS - 1] + "…"


def _sentence_in(body: bytes) -> str:
    """Return the sentence in an error's body, of which SGLang has several formats."""
    try:
        value = orjson.loads(body)
        for key in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(key):
                value = value[key]
        return value if isinstance(value, str) else orjson.dumps(value).decode()
    except Exception:  # noqa: BLE001 - nothing that a server sends may end a run
        return body.decode(errors="replace")


class FinishReason(msgspec.Struct):
    """Why an output ended, with the status of an abort."""

    type: Word
    matched: Any = None
    message: Any = None
    status_code: Any = None


def raise_abort(reason: FinishReason | str | None) -> None:
    """Raise the error of a row whose output was aborted; a reply with status 200 may report an abort."""
    if not isinstance(reason, FinishReason):
        if reason == "abort":
            raise AttemptFailedError("aborted by the engine")
    elif reason.type == "abort":
        explanation = reason.message if isinstance(reason.message, str) else ""
        body = orjson.dumps({"message": explanation or "aborted by the engine"})
        raise error_of(known_status(reason.status_code), body)
