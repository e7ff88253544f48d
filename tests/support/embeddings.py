"""Replies of `/v1/embeddings` as SGLang 0.5.23 writes them, with vectors that a test can tell in advance."""

from __future__ import annotations

import base64
import math
import struct
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.fake_sglang import Sent

LENGTH = 8
"""Numbers of a vector."""


def prompts_of(body: dict[str, Any]) -> list[Any]:
    """Return the prompts of a body: one, or a list of texts or of token ids."""
    given = body["input"]
    is_list = isinstance(given, list) and not isinstance(given[0], int)
    return given if is_list else [given]


def vector_for(prompt: str) -> list[float]:
    """Return the vector of a prompt, in numbers that 16 bits hold."""
    return [((crc32(f"{prompt} {n}".encode()) % 2001) - 1000) / 1024 for n in range(LENGTH)]


def vector_of(sent: Sent) -> list[float]:
    """Return the vector of a prompt; of the length that was asked for."""
    return vector_for(sent.prompt)[: sent.body.get("dimensions")]


def embeddings(body: dict[str, Any], vectors: Sequence[list[float]], *, as_floats: bool) -> dict[str, Any]:
    """Return the reply with these vectors."""
    prompts = prompts_of(body)
    tokens = sum(len(prompt) if isinstance(prompt, list) else len(prompt.split()) for prompt in prompts)
    as_text = body.get("encoding_format") == "base64" and not as_floats
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            if as_text
            else [number if math.isfinite(number) else None for number in vector],
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return {"object": "list", "data": data, "model": body["model"], "usage": usage}
