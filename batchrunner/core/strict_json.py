"""Servers' JSON with values that JSON does not have (NaN, -Infinity, half a surrogate pair) → JSON."""

import json
import math
import re
import sys
from typing import TypeVar

import msgspec
import orjson

LOWEST = -sys.float_info.max
"""What stands for minus infinity, which JSON cannot write: the lowest number of 64 bits."""
REPLACEMENT = "\ufffd"
"""What stands for half a surrogate pair, which no text in UTF-8 can hold."""
_MOST_DIGITS = 300
"""Most digits of a whole number that surely fits into a double."""
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
Value = TypeVar("Value")


def strict_json(content: bytes) -> bytes:
    """Return JSON as it is where all can read it; else NaN, and what is too large for a double, as null.

    Minus infinity becomes LOWEST and half a surrogate pair REPLACEMENT. Content that is no JSON even then
    comes back as it is.
    """
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError:
        return _rewritten(content)
    return content


def decode_reply(decoder: msgspec.json.Decoder[Value], content: bytes) -> Value:
    """Decode a reply, else what `strict_json` makes of it; raises what the decoder raises."""
    try:
        return decoder.decode(content)
    except (ValueError, RecursionError):
        return decoder.decode(_rewritten(content))


def _rewritten(content: bytes) -> bytes:
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
