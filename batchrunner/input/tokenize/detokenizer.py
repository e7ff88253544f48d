"""Turns the token ids of answers into text like SGLang's detokenizer, for an engine that runs without one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchrunner.core.errors import CannotTokenizeError
from batchrunner.core.files import read_json
from batchrunner.core.types import Request
from batchrunner.input.tokenize.chat_template import load_tokenizer, token_text

PROMPT_TOKENS = 5
"""Last tokens of the prompt that are decoded together with the answer, so that a space before its first word
is kept (INIT_INCREMENTAL_DETOKENIZATION_OFFSET of SGLang 0.5.23)."""
_STOP_TOKENS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Tokens that end an answer if the tokenizer has them (_ADDITIONAL_STOP_TOKEN_TEXTS of SGLang 0.5.23)."""


class Detokenizer:
    """Decodes answers, and knows which tokens end them."""

    def __init__(self, directory: Path) -> None:
        """Load the tokenizer of a model directory.

        Raises CannotTokenizeError where it is missing or broken, or where tokenizer_config.json changes
        tokens of tokenizer.json: transformers would apply these changes.
        """
        self._tokenizer = load_tokenizer(directory)
        config = read_json(directory / "tokenizer_config.json")
        known = self._tokenizer.get_added_tokens_decoder()
        for number, token in (config.get("added_tokens_decoder") or {}).items():
            ours = known.get(int(number))
            if ours is None or (ours.content, ours.special) != (token["content"], token.get("special")):
                raise CannotTokenizeError(
                    f"{directory}: token {number} differs between tokenizer.json and tokenizer_config.json"
                )
        ends = {token_text(config.get("eos_token")), *_STOP_TOKENS}
        self._stop_ids = sorted(n for n in map(self._tokenizer.token_to_id, ends - {None}) if n is not None)

    def with_stop_ids(self, request: Request) -> Request:
        """Add the tokens that end an answer to a request; the engine knows only those in config.json."""
        if not self._stop_ids or request.sampling.get("ignore_eos"):
            return request
        ends = {*(request.sampling.get("stop_token_ids") or ()), *self._stop_ids}
        return request._replace(sampling={**request.sampling, "stop_token_ids": sorted(ends)})

    def text(self, request: Request, ids: Sequence[int], matched: Any) -> str:
        """Return the text of an answer; `matched` is the token or text that its finish reason names."""
        sampling: Mapping[str, Any] = request.sampling
        ids = [*ids]
        if isinstance(matched, int) and not sampling.get("no_stop_trim"):
            del ids[-1:]
        skip = sampling.get("skip_special_tokens", True)
        before = request.prompt[-PROMPT_TOKENS:]
        text: str = self._tokenizer.decode([*before, *ids], skip_special_tokens=skip)
        return text[len(self._tokenizer.decode(before, skip_special_tokens=skip)) :]
