"""A model's name → its directory, its identity in a run's fingerprint, and what its config.json says."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchrunner.core.errors import EngineStartError
from batchrunner.core.files import read_json
from batchrunner.engines.model_kinds import chosen_of, experts_of, language_part, of_mistral
from batchrunner.job.fields import is_hub_name

_SIZES_NEEDED = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size",
)  # fmt: skip
CONFIG, MISTRAL_CONFIG = "config.json", "params.json"
"""Files that describe a model: Hugging Face's, or Mistral's own where that is missing."""


def model_identity(model: str) -> str:
    """Return the model's full path if it is a directory, else its name as it is."""
    path = _local(model)
    return str(path.resolve()) if path else model


def _local(model: str) -> Path | None:
    """Return the path of a model that is on this machine; None for other names, and for no path at all."""
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long; no such user as in ~name; a NUL
        return None


def model_directory(model: str, revision: str | None = None) -> Path:
    """Return where a model's files are, or would be: its directory, or a snapshot in Hugging Face's cache.

    The cache is that of huggingface_hub, the snapshot that of the revision, which is `main` by default.
    """
    if path := _local(model):
        return path
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    repository = cache / f"models--{model.replace('/', '--')}"
    commit = revision or "main"
    with contextlib.suppress(OSError, ValueError):  # it is a commit itself, or the model is not there
        commit = (repository / "refs" / commit).read_text(encoding="utf-8").strip()
    return repository / "snapshots" / commit


def check_model(model: str) -> None:
    """Raise EngineStartError for a model that is plainly a path and is not there."""
    path = Path(model).expanduser()
    # "org/name" is a model's name in a hub, unless a folder `org` is here
    looks_like_path = not is_hub_name(model) or ("/" in model and path.parent.is_dir())
    if looks_like_path and not path.exists():
        raise EngineStartError(
            f"engine.model: {model}: no such model directory",
            hint="give a folder that is there, or a name on the Hub (OWNER/NAME)",
            mark=";",
        )
    if path.is_dir() and not any((path / name).exists() for name in (CONFIG, MISTRAL_CONFIG)):
        raise EngineStartError(f"engine.model: {model}: not a model directory (no config.json)")


def read_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """Return a model's config.json, with its language model's values at the top; empty where it is not here.

    A model that takes more than text describes its language model in `text_config`, whose values win, as they
    do in SGLang. A model of Mistral's own format has a params.json instead.
    """
    directory = model_directory(model, revision)
    config = read_json(directory / CONFIG)
    return language_part(config) if config else of_mistral(read_json(directory / MISTRAL_CONFIG))


def takes_mean(model: str) -> bool:
    """Tell whether a model's authors take the mean over all tokens as its vector, by its files.

    sentence-transformers writes them; False where they are not on this machine.
    """
    pooling = read_json(model_directory(model) / "1_Pooling" / "config.json")
    return pooling.get("pooling_mode_mean_tokens") is True


def vocabulary_of(model: str) -> int | None:
    """Return the number of token ids that a model knows, or None where its files are not on this machine."""
    size = read_config(model).get("vocab_size")
    return size if type(size) is int and size > 0 else None


def class_names(model: str) -> tuple[str, ...]:
    """Return the names of a classification model's classes, in order; empty where its files are not here."""
    names = read_config(model).get("id2label")
    if not isinstance(names, dict):
        return ()
    return tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(len(names)))


def weights_dtype(config: Mapping[str, Any]) -> str:
    """Return the type of the weights as they are stored, by torch's name."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


class UnknownShapeError(ValueError):
    """A config.json does not say how large the model is; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide how much memory a model takes and how long its passes take."""

    layers: int
    attention: int
    """Width of attention: query heads x head_dim, the hidden size in most models."""
    kv_heads: int
    head_dim: int
    parameters: float
    active: float
    """Parameters that one token passes; fewer than all in a mixture of experts."""

    def kv_bytes(self, width: float) -> float:
        """Return the bytes of KV cache that a token takes, at `width` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Count the parameters of a dense decoder, or of one with experts in every layer, by its config.json.

    Raises UnknownShapeError where a size is missing.
    """
    sizes = {"intermediate_size": config.get("moe_intermediate_size"), **config}
    if missing := [name for name in _SIZES_NEEDED if not (isinstance(sizes.get(name), int) and sizes[name])]:
        raise UnknownShapeError(f"config.json lacks {missing[0]}")
    layers, hidden, heads, vocabulary, inner = (sizes[name] for name in _SIZES_NEEDED)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    experts, chosen = experts_of(config), chosen_of(config)
    experts = experts if experts > 1 else 0
    expert = 3 * hidden * int((experts and config.get("moe_intermediate_size")) or inner)
    shared = 3 * hidden * int(config.get("shared_expert_intermediate_size") or 0)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    # of each layer: attention, the router that chooses experts, the expert that all tokens pass
    common = hidden * head_dim * (2 * heads + 2 * kv_heads) + hidden * experts + shared
    return ModelShape(
        layers, heads * head_dim, kv_heads, head_dim,
        parameters=embeddings + layers * (common + expert * max(experts, 1)),
        active=embeddings + layers * (common + expert * max(chosen if experts else 1, 1)),
    )  # fmt: skip
