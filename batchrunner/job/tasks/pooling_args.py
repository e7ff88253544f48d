"""Arguments of a server that makes vectors or scores of whole prompts."""

from typing import Any


def pooling_args(*, sees_later: bool, cpu: bool) -> dict[str, Any]:
    """Return the arguments; where a token `sees_later` ones, each prompt is computed whole and uncached."""
    args: dict[str, Any] = {"is-embedding": True}
    if sees_later:
        args |= {"disable-radix-cache": True, "chunked-prefill-size": -1}
    if cpu:  # by itself SGLang finds no memory for the cache; and these models have short contexts
        args |= {"mem-fraction-static": 0.3, "context-length": None}
    return args
