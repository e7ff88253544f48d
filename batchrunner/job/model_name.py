"""Whether a text can be a model: a folder or file, or a name on Hugging Face's Hub or a hub like it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from batchrunner.core.errors import WrongValueError
from batchrunner.job.fields import UserPath

_HOST = r"(?:[\w.-]+|\[[\da-f:.]+\])"
_ADDRESS = re.compile(
    rf"{_HOST}:\d+(?:/.*)?|(?:localhost|\d+(?:\.\d+){{3}})(?:/.*)?|h\w*:/.*|https?[:/].*",
    re.IGNORECASE | re.DOTALL,
)
"""An address, also one without a scheme or with a misspelt one: `host:30000`, `http:/host`, `https//host`."""
_HUB_PAGE = re.compile(r"(?:https?://(?:www\.)?(?:huggingface|hf)\.co/|hf://)(?:models/)?([^/]+/[^/?#]+).*")
_NAME = r"(?![.-])(?!.*(?:--|\.\.))[\w.-]+(?<![.-])"
_HUB_NAME = re.compile(rf"{_NAME}|{_NAME}/{_NAME}(?::[\w.-]+)?|{_NAME}/{_NAME}/.+\.gguf")
"""A name as huggingface_hub takes it; SGLang also takes OWNER/NAME:QUANTIZATION and OWNER/NAME/FILE.gguf."""


def is_address(text: str) -> bool:
    """Tell whether a text is the address of a server, maybe a misspelt one, and of no page of the Hub."""
    return _ADDRESS.fullmatch(text.strip()) is not None and not is_hub_page(text)


def is_hub_page(text: str) -> bool:
    """Tell whether a text is the address of a model's page on the Hub."""
    return _HUB_PAGE.fullmatch(text) is not None


def is_hub_name(text: str) -> bool:
    """Tell whether a text can be the name of a model, or of a GGUF file, on the Hub."""
    return _HUB_NAME.fullmatch(text) is not None


def is_misspelt(text: str, names: Sequence[str]) -> bool:
    """Tell whether a text is nearly one of these names, and no folder."""
    return bool(get_close_matches(text.strip().lower(), names, cutoff=0.7)) and not Path(text).exists()


def as_folder(path: os.PathLike[str]) -> str:
    """Return a path as a text that is not taken for a name on the Hub where nothing is at the path."""
    text = os.fspath(path)
    return text if Path(text).exists() or text.startswith(("/", ".", "~")) else f"./{text}"


def _checked_model(model: str) -> str:
    """Return a model as it is; raises WrongValueError for what is no model, wherever one would look.

    Whether a folder is there is not asked: it may be on another machine.
    """
    if model and Path(model).exists():
        return model
    if page := _HUB_PAGE.fullmatch(model):
        raise WrongValueError("a page of the Hub is no model", hint=f"give the model's name, {page[1]}")
    if is_address(model):
        raise WrongValueError(
            "an address is no model", hint="give http://HOST:PORT as `urls` of an engine of `kind: attach`"
        )
    looks_like_path = (
        model.startswith(("/", "./", "../", "~")) or model in {".", ".."} or model.count("/") > 1
    )
    if looks_like_path or is_hub_name(model):
        return model
    raise WrongValueError(
        "no model is named so",
        hint="give a folder (./NAME), a name on the Hub (OWNER/NAME), or the address of a server as `urls` "
        "of an engine of `kind: attach`",
    )


ModelName: TypeAlias = Annotated[UserPath, AfterValidator(_checked_model)]
"""A model's directory or name."""
