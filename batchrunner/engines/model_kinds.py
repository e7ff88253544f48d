"""What kind of model a config.json describes, by its keys: experts, compressed attention. Pure.

The names of the keys are those of the config classes of transformers and of SGLang 0.5.23 (`srt/configs`,
`srt/models`). A model's class says less: each release brings new ones.
"""

from collections.abc import Mapping
from typing import Any

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Keys for the number of experts of a layer. 0, 1 and null mean a dense model."""
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "num_experts_per_token")
"""Keys for the number of experts that a token passes."""
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


def chosen_of(config: Mapping[str, Any]) -> int:
    """Return how many of its experts a token passes; 0 where that is not known."""
    return max((_largest(config.get(name)) for name in CHOSEN), default=0)


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
