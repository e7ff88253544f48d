"""The keys of config.json of models that have experts or a compressed KV cache, as published.

Only keys are here that say what kind of model it is, and how large.
"""

from __future__ import annotations

from typing import Any

KINDS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "Llama-4-Scout": (
        {
            "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
                "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048, "num_local_experts": 16,
                "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192,
            },
            "vision_config": {"hidden_size": 1408, "num_hidden_layers": 34},
        },
        True, False,
    ),
    "GLM-5": (
        {
            "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144,
            "intermediate_size": 12288, "num_hidden_layers": 78, "num_attention_heads": 64,
            "vocab_size": 154880, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "kv_lora_rank": 512,
            "q_lora_rank": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
        },
        True, True,
    ),
    "DeepSeek-V3": (
        {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
            "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_layer_freq": 1,
            "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "kv_lora_rank": 512,
        },
        True, True,
    ),
    "DeepSeek-VL2-tiny, without MLA": (
        {
            "architectures": ["DeepseekVLV2ForCausalLM"], "model_type": "deepseek_vl_v2",
            "language_config": {
                "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 1280, "n_routed_experts": 64,
                "num_experts_per_tok": 6, "kv_lora_rank": None, "use_mla": False, "num_hidden_layers": 12,
            },
        },
        True, False,
    ),
    "dbrx": (
        {
            "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 6144, "n_layers": 40,
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
        True, False,
    ),
    "Qwen3-8B": (
        {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
            "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        },
        False, False,
    ),
}  # fmt: skip
"""A model's config.json, whether it has experts, and whether its KV cache is compressed (MLA)."""


LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
