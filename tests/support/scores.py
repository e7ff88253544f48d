"""Replies of `/generate` to prompts for which SGLang 0.5.23 is asked for probabilities of tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.fake_sglang import Sent


HEAD = {"is_generation": False, "architectures": ["BertForSequenceClassification"]}
"""What a server of a model with a head for scores says of it."""


def is_score(body: dict[str, Any]) -> bool:
    """Tell whether a body asks for probabilities, and for no new token."""
    return bool(body.get("return_logprob")) and body["sampling_params"].get("max_new_tokens") == 0


def bodies_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bodies of single prompts that a body with lists stands for."""
    count = len(body["input_ids"] if "input_ids" in body else body["text"])
    if "sampling_params" not in body:  # /encode
        prompts = body["input_ids"] if "input_ids" in body else body["text"]
        return [{**body, "model": "any", "prompt": prompt} for prompt in prompts]
    lists = {name: value for name, value in body.items() if isinstance(value, list)}
    assert {len(value) for value in lists.values()} == {count}
    return [{**body, **{name: value[at] for name, value in lists.items()}} for at in range(count)]


def logprob_for(prompt: str, token: int) -> float:
    """Return the logarithm of a made-up probability of a token after a prompt, below 1/8."""
    return math.log((crc32(f"{prompt} {token}".encode()) % 1000 + 1) / 8008)


def score_of(sent: Sent, logprob: Callable[[str, int], float | None], classes: int = 3) -> dict[str, Any]:
    """Return the result of a prompt; the tokens of its end have probabilities where they are asked for."""
    if sent.path == "/encode":
        numbers = [logprob(sent.prompt, number) for number in range(classes)]
        return {
            "embedding": numbers[0] if sent.body.get("is_cross_encoder_request") else numbers,
            "meta_info": {"prompt_tokens": 5, "cached_tokens": 0, "weight_version": "default"},
        }
    ids = sent.body.get("input_ids")
    meta: dict[str, Any] = {
        "id": f"{sent.prompt}-{sent.tries}",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(ids) if ids is not None else len(sent.prompt.split()),
        "cached_tokens": 1,
        "completion_tokens": 0,
        "weight_version": "default",
        "input_token_logprobs": [],
        "output_token_logprobs": [],
    }
    if labels := sent.body.get("token_ids_logprob"):
        scores = [[logprob(sent.prompt, label), label, None] for label in labels]
        meta["input_token_ids_logprobs"], meta["output_token_ids_logprobs"] = [], [scores]
    start = sent.body["logprob_start_len"]
    if ids is not None and start >= 0:
        told = [[logprob(str(ids[:at]), ids[at]), ids[at], None] for at in range(start + 1, len(ids))]
        meta["input_token_logprobs"] = [[None, ids[start], None], *told]
    return {"text": "", "output_ids": [], "meta_info": meta}
