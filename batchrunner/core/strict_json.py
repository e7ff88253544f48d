"""Repair of replies that are not strict JSON: with NaN, -Infinity or half a surrogate pair."""

import json
import math
import re
import sys
from typing import TypeVar

import msgspec
import orjson

LOWEST = -sys.float_info.max
"""Replacement of minus infinity: the lowest finite double."""
REPLACEMENT = "\ufffd"
"""Replacement of half a surrogate pair, which UTF-8 cannot encode."""
_MOST_DIGITS = 300
"""Most characters of an integer that fits into a double for certain."""
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
    """Decode a reply; if that fails, repair and decode it again. Raises the errors of the decoder."""
    try:
        return decoder.decode(content)
    except (ValueError, RecursionError):
        return decoder.decode(_repaired(content))


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
