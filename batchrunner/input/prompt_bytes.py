"""Turns prompts into bytes, by which they are compared and sorted, and requests into digests.

Comparing bytes is nearly as exact as comparing tokens: texts that share a prefix also share its tokens,
except for one or two tokens at its end. Requests are equal if their digests are equal.
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

BLOCK_BYTES = 64
"""Minimum size in bytes of a block of a prompt. A sort key has a checksum of each block."""
BLOCK_SHARE = 16
"""A block has 1/BLOCK_SHARE of the bytes before it, but at least BLOCK_BYTES.

Growing blocks keep sort keys short: 520 bytes for a prompt of 1 MB. Only whole blocks count, so a common
prefix of 10 kB may count as 9.5 kB.
"""


def prompt_bytes(request: Request) -> bytes:
    """Return the whole prompt of a request as bytes.

    The name of the LoRA adapter comes first, because each adapter has its own prefix cache. A media file is
    represented by its key, repeated to the length of a text with as many tokens.
    """
    adapter = f"{request.lora_path}\0".encode() if request.lora_path else b""
    if request.kind == "input_ids":
        return adapter + _packed_ids(request.prompt)
    if isinstance(request.prompt, RequestBody):
        return prompt_of(request.prompt)
    if request.kind == "text":
        files = b"".join(map(_file_bytes, request.media))
        return adapter + files + _encoded(request.prompt)
    if request.tools is not None and request.tools.by_row:
        # Chat templates put the tools at the start of the prompt.
        adapter += _encoded(repr(request.tools.tools))
    if request.media:
        return adapter + b"".join(_message_with_files(message, request.media) for message in request.prompt)
    return adapter + b"".join(map(_message_bytes, request.prompt))


def _packed_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes, four for each id."""
    try:
        # The machine's own byte order is three times faster.
        return struct.pack(f"{len(ids)}i", *ids)
    except struct.error:
        # An id needs more than 32 bits. The engine will refuse this row.
        return repr(ids).encode()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


_MESSAGE_KEYS = {"role", "content"}


def _message_bytes(message: Any) -> bytes:
    """Return a message as bytes that begin with its role and content, as in a rendered prompt."""
    if isinstance(message, dict) and message.keys() == _MESSAGE_KEYS:
        return _encoded(f"{message['role']}\0{message['content']}\0")
    return _encoded(repr(message))


def _file_bytes(file: PromptFile) -> bytes:
    """Return the key of a media file, repeated to BYTES_PER_TOKEN bytes for each of its tokens."""
    length = BYTES_PER_TOKEN * file.tokens
    return (file.key * (length // len(file.key) + 1))[:length]


def _message_with_files(message: dict[str, Any], files: Sequence[PromptFile]) -> bytes:
    """Return a message as bytes, with a file's bytes in place of each part that refers to the file."""
    content = message.get("content")
    if not isinstance(content, list):
        return _message_bytes(message)

    # Texts contain no null bytes, so these can end the role and the message.
    chunks = [_encoded(f"{message['role']}\0")]
    for part in content:
        index = file_of_part(part)
        chunks.append(_encoded(repr(part)) if index is None else _file_bytes(files[index]))

    other_fields = {name: value for name, value in message.items() if name not in {"role", "content"}}
    if other_fields:
        chunks.append(_encoded(repr(other_fields)))
    return b"".join([*chunks, b"\0"])


def common_length(one: bytes, other: bytes) -> int:
    """Return the length in bytes of the common prefix of two prompts."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    # Slices compare much faster than single bytes, so the first difference is searched in growing slices. The
    # first `low` bytes are equal, and the prompts differ before `high`.
    low, step = 0, 64
    while one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(low + step, shorter)
    # The slices are read as big-endian integers. Equal leading bytes become zeros in the XOR, so its length
    # in bytes is the distance from the first difference to the end.
    difference = int.from_bytes(one[low:high]) ^ int.from_bytes(other[low:high])
    different_bytes = (difference.bit_length() + 7) // 8
    return high - different_bytes


def _block_bounds(longest: int) -> list[tuple[int, int]]:
    """Return the start and the end of each block, for prompts of at most `longest` bytes."""
    blocks = [(0, BLOCK_BYTES)]
    while (start := blocks[-1][1]) < longest:
        blocks.append((start, start + max(BLOCK_BYTES, start // BLOCK_SHARE)))
    return blocks


_BLOCKS = _block_bounds(1 << 30)
"""Start and end in bytes of each block, for prompts of up to 1 GiB."""
_ENDS = [end for _, end in _BLOCKS[:-1]]
"""End in bytes of each block except the last."""


def sort_key(prompt: bytes) -> tuple[bytes, int]:
    """Return a short sort key of a prompt, and a checksum of the bytes after its last whole block.

    The key has a 4-byte checksum of each whole block. In the order of the keys, prompts with a common prefix
    are neighbours, and a prompt precedes the prompts that continue it.
    """
    whole_blocks = bisect_right(_ENDS, len(prompt))
    checksums = array("I", [crc32(prompt[start:end]) for start, end in _BLOCKS[:whole_blocks]])
    rest_start, _ = _BLOCKS[whole_blocks]
    return checksums.tobytes(), crc32(prompt[rest_start:])


def is_repeatable(request: Request) -> bool:
    """Tell whether equal requests get the same answer: at temperature 0, or without decoding."""
    return request.task is not None or request.sampling.get("temperature") == 0


class RequestDigests:
    """Computes the digests of requests. Equal requests have equal digests, also in different runs.

    A digest covers everything in a request. It does not cover the model and the checks of answers, which are
    the same for the whole run.
    """

    def __init__(self) -> None:
        self._fields: tuple[Any, ...] = ()
        self._fields_digest = b""

    def write(self, request: Request, prompt: bytes) -> None:
        """Store the digest of a request in `request.ref.digests`, if the run keeps digests.

        `prompt` is the result of `prompt_bytes(request)`.
        """
        digests = request.ref.digests
        if digests is not None:
            digests[request.ref.position] = self.of(request, prompt)

    def of(self, request: Request, prompt: bytes) -> bytes:
        """Return the digest of a request; `prompt` is the result of `prompt_bytes(request)`."""
        # All fields after `ref`, `kind` and `prompt`.
        fields = request[3:]
        if fields != self._fields:
            # Nearly all rows have the same fields, so these are rarely digested again.
            self._fields = fields
            self._fields_digest = xxh3_128_digest(_settings(request))
        if isinstance(request.prompt, RequestBody):
            # The whole body counts, because it includes the sampling parameters.
            prompt = request.prompt.content
        return xxh3_128_digest(self._fields_digest + prompt)


def _settings(request: Request) -> bytes:
    """Return a request's settings besides the prompt, as bytes that are the same in every process."""
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
            # The folder is left out here, because the prompt has a key of each file that depends on it.
            [file.rules._replace(folder="") for file in request.media],
            request.items,
        ))
    )  # fmt: skip
