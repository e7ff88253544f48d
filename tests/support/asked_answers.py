"""What a request asks of its answer besides the text, in the form in which SGLang 0.5.23 gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ASKED = ("return_logprob", "return_text_in_logprobs", "top_logprobs_num", "logprob_start_len")
"""Fields of `/generate` that ask for it."""


def logprobs_of(words: Sequence[str]) -> list[list[Any]]:
    """Return the tokens of a text, which are its words: log probability, id and text of each."""
    return [[-0.5 - number, 100 + number, word] for number, word in enumerate(words)]


def add_asked(body: Mapping[str, Any], prompt: str, text: str, meta: dict[str, Any]) -> None:
    """Add to the `meta_info` of an answer what its request asks for."""
    if not (body.get("return_logprob") or body.get("logprobs")):
        return
    tokens = logprobs_of(text.split())
    meta["output_token_logprobs"] = tokens
    top = body.get("top_logprobs_num") or body.get("top_logprobs")
    if top:
        meta["output_top_logprobs"] = [[token] * top for token in tokens]
    if body.get("logprob_start_len") == 0:
        first, *rest = logprobs_of(prompt.split())
        meta["input_token_logprobs"] = [[None, *first[1:]], *rest]
