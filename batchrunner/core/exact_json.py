"""JSON whose numbers stay as they are written, also those that 64 bits cannot hold."""

from typing import Any
from urllib.parse import unquote

import msgspec
import orjson

DEEPEST = 250
"""Most levels of lists and objects that are written: readers differ in how many they take."""


class WrittenNumber(float):
    """A number with a fraction or an exponent, which JSON text holds as it was written."""

    def __init__(self, written: str) -> None:
        """Make the nearest float of a number in JSON; one that is too large is infinite."""
        self.written = written


_decoder = msgspec.json.Decoder(float_hook=WrittenNumber)
_encoder = msgspec.json.Encoder(enc_hook=lambda number: msgspec.Raw(number.written.encode()))


def read_exactly(text: str | bytes) -> Any:
    """Return the value of JSON text; of a key that an object has twice, the last value counts.

    Whole numbers have any size, other numbers are `WrittenNumber`. Raises orjson.JSONDecodeError.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return orjson.loads(text)  # says what is wrong and where; it reads more levels


def write_exactly(value: Any) -> str:
    """Return a value of `read_exactly` as JSON text; raises RecursionError below DEEPEST levels."""
    if has_more_levels(value, DEEPEST):
        raise RecursionError
    return _encoder.encode(value).decode()


def has_more_levels(value: object, most: int) -> bool:
    """Tell whether a list or mapping has more levels than `most`; one that contains itself has."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, (list, tuple)):
        return False
    return not most or any(
        has_more_levels(part, most - 1) for part in value if isinstance(part, (list, tuple, dict))
    )


def part_at(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference leads to; raises LookupError where it leads nowhere.

    A reference is `#` and a JSON pointer (RFC 6901) in the form of a URI: `%20` stands for a space.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise LookupError(reference)
    found = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal():
            found = found[int(name)]
        elif isinstance(found, dict):
            found = found[name]
        else:
            raise LookupError(reference)
    return found
