"""What prompts have in common: their beginnings, as bytes.

An engine keeps what it has computed for a prompt and uses it for the next one that begins with the same
tokens. Bytes stand for tokens here: texts with a common beginning have one in tokens too, but for a token or
two at its end.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchrunner.records import Request

BYTES_A_TOKEN = 4
"""Of token ids exactly; of English text on average, until answers tell better."""


def prefix_of(request: Request) -> bytes:
    """Return the bytes whose beginning decides what of the cache a row can use: its prompt, in full.

    Rows with another LoRA adapter share nothing: its name comes first.
    """
    adapter = f"{request.lora_path}\0".encode() if request.lora_path else b""
    if request.kind == "input_ids":
        return adapter + _ids(request.prompt)
    if request.kind == "text":
        return adapter + _bytes(request.prompt)
    return adapter + b"".join(map(_message, request.prompt))


def common(one: bytes, other: bytes) -> int:
    """Return how many bytes two prompts have in common at their beginning."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    low, step = 0, 64  # the first `low` bytes are equal
    while one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(low + step, most)  # and somewhere before `high` they differ
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def shared(prefixes: Iterable[bytes]) -> int:
    """Return how many bytes of some prompts an engine need not compute, if it still has all the others'."""
    return sum(common(one, other) for one, other in pairwise(sorted(prefixes)))


def _ids(ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f">{len(ids)}i", *ids)
    except struct.error:  # no token has such an id: the row is refused when it is sent
        return repr(ids).encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _message(message: Any) -> bytes:
    if isinstance(message, dict) and message.keys() == {"role", "content"}:
        return _bytes(f"{message['role']}\0{message['content']}\0")
    return _bytes(repr(message))
