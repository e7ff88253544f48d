"""Replies of SGLang's own endpoints `/generate`, `/encode` and `/classify` to tasks without decoding.

Each prompt has a result with a `meta_info` of its own; several prompts have a list of them, in order.
"""

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any

import msgspec

from batchrunner.core.errors import AttemptFailedError, EngineBusyError, RequestError, RowRefusedError
from batchrunner.core.types import Completion, Request

_COUNT_MOST = (1 << 31) - 1
_BUSY = {429, 503}

TokenCount = Annotated[int, msgspec.Meta(ge=0, le=_COUNT_MOST)]
TokenScore = tuple[float | None, int, Any]
"""Log probability (null where it is no number), token id, and the token's text, where that is asked for."""


class NativeMeta(msgspec.Struct):
    """The `meta_info` of a result."""

    finish_reason: Any = None
    prompt_tokens: TokenCount | None = None
    cached_tokens: TokenCount | None = None
    weight_version: Any = None
    output_token_ids_logprobs: list[list[TokenScore] | None] | None = None
    input_token_logprobs: list[TokenScore] | None = None


class NativeResult(msgspec.Struct):
    """What came of one prompt."""

    meta_info: NativeMeta
    embedding: list[float | None] | float | None = None


_read = msgspec.json.Decoder(NativeResult | list[NativeResult])


def results_in(reply: bytes, count: int) -> list[NativeResult]:
    """Read a reply; raises AttemptFailedError where it has not `count` results, and what msgspec raises."""
    found = _read.decode(reply)
    results = found if isinstance(found, list) else [found]
    if len(results) != count:
        raise AttemptFailedError(f"{len(results)} results came for {count} prompts")
    return results


def abort_of(results: Sequence[NativeResult]) -> RequestError | None:
    """Return what the first abort among results means for their row; None where there is none."""
    for result in results:
        reason = result.meta_info.finish_reason
        if isinstance(reason, dict) and reason.get("type") == "abort":
            said, status = str(reason.get("message") or "aborted by the engine"), reason.get("status_code")
            if status in _BUSY:
                return EngineBusyError(f"{status}: {said}")
            return RowRefusedError(said) if status == HTTPStatus.BAD_REQUEST else AttemptFailedError(said)
    return None


def completion_with(results: Sequence[NativeResult], columns: dict[str, Any]) -> Completion:
    """Return the answer of a row with these values of its columns; tokens are those of all its prompts."""
    metas = [result.meta_info for result in results]
    version = metas[0].weight_version
    return Completion(
        [], [], [],
        _total([meta.prompt_tokens for meta in metas]),
        _total([meta.cached_tokens for meta in metas]),
        weights=version if isinstance(version, str) else None,
        columns={name: [value] for name, value in columns.items()},
    )  # fmt: skip


def adapters_of(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the field of a body that names the LoRA adapter of each prompt; none where there are none."""
    adapters = [request.lora_path for request in requests for _ in range(max(1, len(request.items)))]
    return {"lora_path": adapters} if any(adapters) else {}


def prompts_of(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the field of a body with the prompts of requests, all of texts or all of token ids."""
    name = "input_ids" if requests[0].kind == "input_ids" else "text"
    return {name: [request.prompt for request in requests]}


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return min(sum(known), _COUNT_MOST) if len(known) == len(counts) else None


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
