"""Common prefixes of prompts, in bytes.

An engine's prefix cache reuses what was computed for a prompt when another one begins with the same tokens.
Bytes stand for tokens here: texts with a common prefix have about the same one in tokens, except for a token
or two at its end.
"""

import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from batchrunner.core.media import PromptFile, file_of_part
from batchrunner.core.types import Request, RequestBody
from batchrunner.input.request_bodies import prompt_of

BLOCK_BYTES, BLOCK_SHARE = 64, 16
"""Size of the blocks of a prompt whose checksums are its sort key: a block has BLOCK_BYTES, or 1/BLOCK_SHARE
of the bytes before it where that is more. So a common prefix of 10 kB may count as 9.5 kB, and the key of a
prompt of 1 MB has 520 bytes."""


BYTES_A_TOKEN = 4
"""Bytes that stand for each token of an image."""


def _blocks(longest: int) -> list[tuple[int, int]]:
    blocks = [(0, BLOCK_BYTES)]
    while (start := blocks[-1][1]) < longest:
        blocks.append((start, start + max(BLOCK_BYTES, start // BLOCK_SHARE)))
    return blocks


_BLOCKS = _blocks(1 << 30)
_ENDS = [end for _, end in _BLOCKS[:-1]]


def sort_key(prompt: bytes) -> tuple[bytes, int]:
    """Return a short sort key for a prompt, and a checksum of its rest, which is no whole block.

    The key is a 4-byte checksum of each whole block. Sorted by it, prompts with a common prefix are
    neighbours, whatever its length, and a prompt comes right before those that continue it.
    """
    whole = bisect_right(_ENDS, len(prompt))
    sums = array("I", [crc32(prompt[start:end]) for start, end in _BLOCKS[:whole]])
    return sums.tobytes(), crc32(prompt[_BLOCKS[whole][0] :])


def prompt_bytes(request: Request) -> bytes:
    """Return the whole prompt as bytes, after the name of the LoRA adapter, since adapters share no cache."""
    adapter = f"{request.lora_path}\0".encode() if request.lora_path else b""
    if request.kind == "input_ids":
        return adapter + _ids(request.prompt)
    if isinstance(request.prompt, RequestBody):
        return prompt_of(request.prompt)
    if request.kind == "text":
        return adapter + b"".join(map(_file, request.media)) + _bytes(request.prompt)
    if request.tools is not None and request.tools.by_row:  # chat templates write them at the beginning
        adapter += _bytes(repr(request.tools.tools))
    if request.media:
        return adapter + b"".join(_message_with(message, request.media) for message in request.prompt)
    return adapter + b"".join(map(_message, request.prompt))


def common_length(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of two prompts, in bytes."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    low, step = 0, 64  # invariant: the first `low` bytes are equal
    while one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(low + step, most)  # and they differ before `high`
    differ = int.from_bytes(one[low:high]) ^ int.from_bytes(other[low:high])
    return high - (differ.bit_length() + 7) // 8


def _ids(ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f">{len(ids)}i", *ids)
    except struct.error:  # an id over 32 bits: the engine refuses the row
        return repr(ids).encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _message(message: Any) -> bytes:
    if isinstance(message, dict) and message.keys() == {"role", "content"}:
        return _bytes(f"{message['role']}\0{message['content']}\0")
    return _bytes(repr(message))


def _file(file: PromptFile) -> bytes:
    """Return bytes that stand for the tokens of a file: equal files have equal ones."""
    length = BYTES_A_TOKEN * file.tokens
    return (file.key * (length // len(file.key) + 1))[:length]


def _message_with(message: dict[str, Any], files: Sequence[PromptFile]) -> bytes:
    """Return the bytes of a message whose content may have files."""
    content = message.get("content")
    if not isinstance(content, list):
        return _message(message)
    pieces = [_bytes(f"{message['role']}\0")]
    for part in content:
        own = file_of_part(part)
        pieces.append(_bytes(repr(part)) if own is None else _file(files[own]))
    others = {name: value for name, value in message.items() if name not in {"role", "content"}}
    return b"".join([*pieces, _bytes(repr(others)) if others else b"", b"\0"])
