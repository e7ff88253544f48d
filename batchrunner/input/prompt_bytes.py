"""Prompts as bytes, by which they are compared and sorted, and the digests that recognize equal requests.

Bytes can stand in for tokens: if two texts share a prefix, their tokens share about the same prefix, except
for a token or two at its end.
"""

import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from xxhash import xxh3_128_digest

from batchrunner.core.media import PromptFile, file_of_part
from batchrunner.core.types import BYTES_PER_TOKEN, Request, RequestBody
from batchrunner.input.request_bodies import prompt_of

BLOCK_BYTES, BLOCK_SHARE = 64, 16
"""The sort key of a prompt consists of the checksums of its blocks. A block has BLOCK_BYTES bytes, or
1/BLOCK_SHARE of the number of bytes before it if that is more. Only whole blocks count, so a common prefix of
10 kB may count as 9.5 kB. The key of a prompt of 1 MB has 520 bytes."""


def prompt_bytes(request: Request) -> bytes:
    """Return the whole prompt as bytes.

    The bytes begin with the name of the LoRA adapter, because adapters share no cache. A media file
    contributes its key, repeated to the length of a text with as many tokens.
    """
    adapter = f"{request.lora_path}\0".encode() if request.lora_path else b""
    if request.kind == "input_ids":
        return adapter + _packed_ids(request.prompt)
    if isinstance(request.prompt, RequestBody):
        return prompt_of(request.prompt)
    if request.kind == "text":
        files = b"".join(map(_file_bytes, request.media))
        return adapter + files + _encoded(request.prompt)
    if request.tools is not None and request.tools.by_row:  # chat templates write tools at the beginning
        adapter += _encoded(repr(request.tools.tools))
    if request.media:
        return adapter + b"".join(_message_with_files(message, request.media) for message in request.prompt)
    return adapter + b"".join(map(_message_bytes, request.prompt))


def _packed_ids(ids: Sequence[int]) -> bytes:
    try:  # native byte order: the other one takes three times as long
        return struct.pack(f"{len(ids)}i", *ids)
    except struct.error:  # an id over 32 bits: the engine refuses the row
        return repr(ids).encode()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _message_bytes(message: Any) -> bytes:
    if isinstance(message, dict) and message.keys() == {"role", "content"}:
        return _encoded(f"{message['role']}\0{message['content']}\0")
    return _encoded(repr(message))


def _file_bytes(file: PromptFile) -> bytes:
    """Return the key of a file, repeated to the number of bytes that stand for its tokens."""
    length = BYTES_PER_TOKEN * file.tokens
    return (file.key * (length // len(file.key) + 1))[:length]


def _message_with_files(message: dict[str, Any], files: Sequence[PromptFile]) -> bytes:
    content = message.get("content")
    if not isinstance(content, list):
        return _message_bytes(message)

    pieces = [_encoded(f"{message['role']}\0")]
    for part in content:
        number = file_of_part(part)
        pieces.append(_encoded(repr(part)) if number is None else _file_bytes(files[number]))

    extras = {name: value for name, value in message.items() if name not in {"role", "content"}}
    if extras:
        pieces.append(_encoded(repr(extras)))
    return b"".join([*pieces, b"\0"])


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


def _block_bounds(longest: int) -> list[tuple[int, int]]:
    blocks = [(0, BLOCK_BYTES)]
    while (start := blocks[-1][1]) < longest:
        blocks.append((start, start + max(BLOCK_BYTES, start // BLOCK_SHARE)))
    return blocks


_BLOCKS = _block_bounds(1 << 30)
_ENDS = [end for _, end in _BLOCKS[:-1]]


def sort_key(prompt: bytes) -> tuple[bytes, int]:
    """Return a short sort key of a prompt, and a checksum of the bytes behind its last whole block.

    The key has a 4-byte checksum of each whole block. In the order of the keys, prompts with a common prefix
    of any length are neighbours, and a prompt comes right before the prompts that continue it.
    """
    whole = bisect_right(_ENDS, len(prompt))
    sums = array("I", [crc32(prompt[start:end]) for start, end in _BLOCKS[:whole]])
    return sums.tobytes(), crc32(prompt[_BLOCKS[whole][0] :])


def is_repeatable(request: Request) -> bool:
    """Tell whether equal rows are sure to get the same answer: at temperature 0, or without decoding."""
    return request.task is not None or request.sampling.get("temperature") == 0


class RequestDigests:
    """Makes digests that are equal for equal requests, in every run.

    A digest covers everything that a request asks for. It does not cover the model and the checks of the
    answer, because those are the same for the whole run.
    """

    def __init__(self) -> None:
        self._fields: tuple[Any, ...] = ()
        self._fields_digest = b""

    def write(self, request: Request, prompt: bytes) -> None:
        """Store the digest of a request in its row reference, if that has a list for digests.

        `prompt` is the request's `prompt_bytes`.
        """
        digests = request.ref.digests
        if digests is not None:
            digests[request.ref.position] = self.of(request, prompt)

    def of(self, request: Request, prompt: bytes) -> bytes:
        """Return the digest of a request, whose `prompt_bytes` is `prompt`."""
        fields = request[3:]
        if fields != self._fields:  # nearly always all rows have the same settings
            self._fields = fields
            self._fields_digest = xxh3_128_digest(_settings(request))
        if isinstance(request.prompt, RequestBody):
            prompt = request.prompt.content
        return xxh3_128_digest(self._fields_digest + prompt)


def _settings(request: Request) -> bytes:
    """Return what a request asks for besides its prompt, as bytes that are the same in every process."""
    asks = request.asks
    return _encoded(
        repr((
            sorted(request.sampling.items()),
            request.lora_path,
            request.chat_template_kwargs,
            request.continues,
            asks and (sorted(asks.names), asks.top_logprobs),
            request.row,
            request.task,
            request.tools,
            [file.rules._replace(folder="") for file in request.media],
            request.items,
        ))
    )  # fmt: skip
