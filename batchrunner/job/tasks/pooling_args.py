"""Arguments of a server that makes vectors or scores of whole prompts."""

import re
from collections.abc import Mapping
from typing import Any

CPU_ROWS = 256
"""Rows of a forward pass at most on a CPU: short ones would leave it far below its tokens."""
_ENCODER = re.compile("bert", re.IGNORECASE)
"""In the names of encoders: BERT, RoBERTa, ModernBERT, …"""
_DECODER = re.compile("ForCausalLM|Classification|Reward")
"""In the names of decoders, which generate text or have a head for scores instead."""


def pooling_args(config: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return the arguments for a model with this config.json; an encoder computes prompts whole, uncached."""
    args: dict[str, Any] = {"is-embedding": True}
    if is_encoder(config):
        args |= {"disable-radix-cache": True, "chunked-prefill-size": -1}
    if cpu:  # by itself SGLang finds no memory for the cache; and these models have short contexts
        args |= {"mem-fraction-static": 0.3, "context-length": None, "max-running-requests": CPU_ROWS}
    return args


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Tell whether a token attends to later ones, by the names of a config's `architectures`.

    A model that is not known to be a decoder counts as an encoder: a decoder that is taken for one is only
    slower, while an encoder whose prompts are computed in pieces gives wrong numbers.
    """
    names = " ".join(map(str, config.get("architectures") or ()))
    return _ENCODER.search(names) is not None or _DECODER.search(names) is None
