"""What prompts have in common: their beginnings, as bytes.

An engine keeps what it has computed for a prompt and uses it for the next one that begins with the same
tokens. Bytes stand for tokens here: texts with a common beginning have one in tokens too, but for a token or
two at its end.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.core.types import Request


BLOCK_BYTES, BLOCK_SHARE = 64, 16
"""A sort key looks at blocks of so many bytes, and deep in a prompt of this part of the way that lies before
them: two that have 10 kB in common may count as having 9.5 kB, and the key of a megabyte has 520 bytes."""


def _blocks(longest: int) -> list[tuple[int, int]]:
    blocks = [(0, BLOCK_BYTES)]
    while (start := blocks[-1][1]) < longest:
        blocks.append((start, start + max(BLOCK_BYTES, start // BLOCK_SHARE)))
    return blocks


_BLOCKS = _blocks(1 << 30)
_ENDS = [end for _, end in _BLOCKS[:-1]]


def sort_key(prefix: bytes) -> tuple[bytes, int]:
    """Return a short key, and what tells prompts with the same key apart.

    In the order of keys those that begin alike stand together, at every depth, and one that goes on where
    another ends comes behind it: a key is a checksum (4 bytes) of each whole block of the prompt.
    """
    whole = bisect_right(_ENDS, len(prefix))
    sums = array("I", [crc32(prefix[start:end]) for start, end in _BLOCKS[:whole]])
    return sums.tobytes(), crc32(prefix[_BLOCKS[whole][0] :])


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
