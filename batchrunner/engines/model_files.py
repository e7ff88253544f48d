"""A model's name → its directory, its identity in a run's fingerprint, and what its config.json says."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchrunner.core.errors import EngineStartError
from batchrunner.core.files import read_json
from batchrunner.job.fields import is_hub_name

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Keys for the number of experts of a layer. 0, 1 and null mean a dense model."""
_STEPS = ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq", "moe_layer_interval")
"""Keys that are 1 where each layer has experts: other numbers, and lists, say in which layers they are."""
_LANGUAGE_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Keys below which a model that takes more than text describes its language model; a later one wins, as in
SGLang (`get_hf_text_config`)."""
_MISTRAL: dict[str, str] = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size",
    "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
_MISTRAL_EXPERTS: dict[str, str] = {
    "num_experts": "n_routed_experts", "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts", "first_k_dense_replace": "first_k_dense_replace",
}  # fmt: skip
"""Keys of Mistral's params.json, and of `moe` in it, whose names in a config.json are others."""


def language_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the values of its language model at the top, where these stand in a part of it."""
    found = dict(config)
    for name in _LANGUAGE_PARTS:
        part = config.get(name)
        if isinstance(part, dict):
            found |= language_part(part)
    return found


def of_mistral(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a params.json, Mistral's own format, by the names of a config.json.

    Weights without a type are of 16 bits, as in SGLang (`mistral_utils`).
    """
    if not params:
        return {}
    found: dict[str, Any] = {"dtype": "bfloat16"}
    found |= {_MISTRAL.get(name, name): value for name, value in params.items()}
    if params.get("quantization"):
        found["quantization_config"] = params["quantization"]
    experts = params.get("moe")
    if isinstance(experts, dict):
        found |= {_MISTRAL_EXPERTS.get(str(name), str(name)): value for name, value in experts.items()}
    return found


def experts_of(config: Mapping[str, Any]) -> int:
    """Return how many experts a layer has that tokens choose among; 0 for a dense model."""
    inner = config.get("ffn_config")  # of Dbrx
    parts = [config, inner] if isinstance(inner, dict) else [config]
    return max((_largest(part.get(name)) for part in parts for name in EXPERTS), default=0)


def has_experts(config: Mapping[str, Any]) -> bool:
    """Tell whether the model is a mixture of experts."""
    return experts_of(config) > 1


def has_uneven_experts(config: Mapping[str, Any]) -> bool:
    """Tell whether only some of the layers have experts, or whether that is not plain from the keys."""
    first_dense = any(config.get(name) for name in ("first_k_dense_replace", "num_dense_layers"))
    listed = any(config.get(name) for name in ("mlp_only_layers", "moe_layers", "moe_layers_enum"))
    return first_dense or listed or any(config.get(name, 1) not in (1, None) for name in _STEPS)


def has_latent_attention(config: Mapping[str, Any]) -> bool:
    """Tell whether attention keeps a compressed KV cache (MLA), which all heads share.

    DeepSeek-V4 (`compress_ratios`) has the keys, but another attention, as in SGLang's model_config.
    """
    return bool(
        _largest(config.get("kv_lora_rank"))
        and config.get("use_mla") is not False
        and not config.get("compress_ratios")
    )


def has_sparse_attention(config: Mapping[str, Any]) -> bool:
    """Tell whether an indexer chooses the tokens that attention reads (DSA): SGLang has backends for it."""
    return _largest(config.get("index_topk")) > 0


def _largest(value: Any) -> int:
    """Return a count, the largest of a list of counts; 0 for anything else."""
    values = value if isinstance(value, list) else [value]
    return max((count for count in values if type(count) is int), default=0)


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
    """The sizes that decide how much memory a model takes."""

    layers: int
    kv_heads: int
    head_dim: int
    parameters: float

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
    experts = experts_of(config)
    experts = experts if experts > 1 else 0
    expert = 3 * hidden * int((experts and config.get("moe_intermediate_size")) or inner)
    shared = 3 * hidden * int(config.get("shared_expert_intermediate_size") or 0)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    # of each layer: attention, the router that chooses experts, the expert that all tokens pass
    common = hidden * head_dim * (2 * heads + 2 * kv_heads) + hidden * experts + shared
    return ModelShape(layers, kv_heads, head_dim, embeddings + layers * (common + expert * max(experts, 1)))


_NOT_COVERED = {
    "kv_lora_rank": "attention with a compressed KV cache (MLA)",
    "layer_types": "layers of several kinds",
    "sliding_window": "attention in a sliding window",
    "vision_config": "a part for images",
    "text_config": "a part beside the language model",
    "language_config": "a part beside the language model",
    "llm_config": "a part beside the language model",
    "thinker_config": "a part beside the language model",
    "linear_num_value_heads": "layers with linear attention",
    "hybrid_layer_pattern": "layers of several kinds",
    "attention_chunk_size": "attention in chunks",
    "mamba_d_state": "Mamba layers",
    "encoder_layers": "an encoder",
}
"""Fields of a config.json whose model `ModelShape` does not describe."""


def model_of_config(config: Mapping[str, Any]) -> ModelShape:
    """Read a model's config.json, as transformers writes it for dense models and mixtures of experts.

    Raises UnknownShapeError for a kind of model that `ModelShape` does not describe.
    """
    kinds = set(config.get("layer_types") or []) - {"full_attention"}
    for name, what in _NOT_COVERED.items():
        of_window = name == "sliding_window" and config.get("use_sliding_window") is False
        if config.get(name) and not of_window and (name != "layer_types" or kinds):
            raise UnknownShapeError(f"the sizes of {what} are not known ({name} in config.json)")
    if has_uneven_experts(config):
        raise UnknownShapeError("the sizes of experts in some of the layers only are not known")
    return shape_of(config)
