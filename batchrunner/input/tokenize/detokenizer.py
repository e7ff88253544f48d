"""Token ids → the text that SGLang's detokenizer makes of them, for an engine that runs without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchrunner.core.errors import CannotTokenizeError
from batchrunner.core.jsonfile import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from batchrunner.core.types import Request

PROMPT_TOKENS = 5
"""Of the prompt's end that are read along, so that a space before the first word stays
(INIT_INCREMENTAL_DETOKENIZATION_OFFSET of SGLang 0.5.23)."""
_MORE_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Tokens that end an answer where a tokenizer has them (_ADDITIONAL_STOP_TOKEN_TEXTS of SGLang 0.5.23)."""


def load_tokenizer(directory: Path) -> Any:
    """Load a model directory's tokenizer.json; raises CannotTokenizeError with what is missing or broken."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - only where it is asked for

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CannotTokenizeError(f"{directory}: no tokenizer.json")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as failure:  # noqa: BLE001 - it raises Exception itself, for whatever is wrong
        raise CannotTokenizeError(f"{path}: {failure}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Detokenizer:
    """What SGLang's tokenizer knows of answers: where they end, and their text."""

    def __init__(self, directory: Path) -> None:
        """Load it; raises CannotTokenizeError where transformers would add to what tokenizer.json says."""
        self._tokenizer = load_tokenizer(directory)
        config = read_json(directory / "tokenizer_config.json")
        known = self._tokenizer.get_added_tokens_decoder()
        for number, token in (config.get("added_tokens_decoder") or {}).items():
            here = known.get(int(number))
            if here is None or (here.content, here.special) != (token["content"], token.get("special")):
                raise CannotTokenizeError(
                    f"{directory}: token {number} differs between tokenizer.json and tokenizer_config.json"
                )
        ends = {_content(config.get("eos_token")), *_MORE_ENDS}
        self._ends = sorted(n for n in map(self._tokenizer.token_to_id, ends - {None}) if n is not None)

    def with_ends(self, request: Request) -> Request:
        """Name the tokens that end an answer: the engine knows only those of the model's configuration."""
        if not self._ends or request.sampling.get("ignore_eos"):
            return request
        ends = {*(request.sampling.get("stop_token_ids") or ()), *self._ends}
        return request._replace(sampling={**request.sampling, "stop_token_ids": sorted(ends)})

    def text(self, request: Request, ids: Sequence[int], reason: Any) -> str:
        """Return an answer's text; `reason` is SGLang's `finish_reason`, with the token that `matched`."""
        sampling: Mapping[str, Any] = request.sampling
        matched = reason.get("matched") if isinstance(reason, dict) else None
        ids = [*ids]
        if isinstance(matched, int) and not sampling.get("no_stop_trim"):
            del ids[-1:]
        skip = sampling.get("skip_special_tokens", True)
        before = request.prompt[-PROMPT_TOKENS:]
        text: str = self._tokenizer.decode([*before, *ids], skip_special_tokens=skip)
        return text[len(self._tokenizer.decode(before, skip_special_tokens=skip)) :]


def _content(token: Any) -> str | None:
    """Return a token's text; a configuration has it plain or with its properties."""
    return token.get("content") if isinstance(token, dict) else token
