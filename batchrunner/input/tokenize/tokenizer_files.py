"""Reads the tokenizer files of a model directory."""

from pathlib import Path
from typing import Any

from batchrunner.core.errors import CannotTokenizeError


def load_tokenizer(directory: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of tokenizer.json, which neither truncates nor pads.

    Raises CannotTokenizeError where the file is missing or broken.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - only where it is asked for

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CannotTokenizeError(f"{directory}: no tokenizer.json")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as failure:  # noqa: BLE001 - the library raises Exception itself
        raise CannotTokenizeError(f"{path}: {failure}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_text(token: Any) -> Any:
    """Return the text of a special token, which a configuration gives as a text or as `{"content": …}`."""
    return token.get("content") if isinstance(token, dict) else token
