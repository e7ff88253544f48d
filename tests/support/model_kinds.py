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
    "Qwen3-Next-80B-A3B": (
        {
            "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
            "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "num_experts": 512,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 4,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        },
        True, False,
    ),
    "LongCat-Flash-Chat": (
        {
            "architectures": ["LongcatFlashForCausalLM"], "hidden_size": 6144, "ffn_hidden_size": 12288,
            "expert_ffn_hidden_size": 2048, "num_layers": 28, "num_attention_heads": 64,
            "vocab_size": 131072, "n_routed_experts": 512, "moe_topk": 12, "zero_expert_num": 256,
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        True, True,
    ),
    "MiMo-V2-Flash": (
        {
            "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "hidden_size": 4096,
            "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 64,
            "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "vocab_size": 152576,
            "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "moe_layer_freq": [0, *[1] * 47], "sliding_window": 128,
            "hybrid_layer_pattern": [int(n > 0 and (n + 1) % 6 != 0) for n in range(48)],
        },
        True, False,
    ),
    "step3": (
        {
            "architectures": ["Step3VLForConditionalGeneration"], "model_type": "step3_vl",
            "text_config": {
                "model_type": "step3_text", "hidden_size": 7168, "intermediate_size": 18432,
                "num_hidden_layers": 61, "num_attention_heads": 64, "num_attention_groups": 1,
                "head_dim": 256, "share_q_dim": 2048, "vocab_size": 128815, "moe_num_experts": 48,
                "moe_top_k": 3, "moe_intermediate_size": 5120, "share_expert_dim": 5120,
                "moe_layers_enum": ",".join(map(str, range(4, 60))),
            },
            "vision_config": {"hidden_size": 1792, "num_hidden_layers": 63},
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
    "MiniCPM3-4B": (
        {
            "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "hidden_size": 2560,
            "num_hidden_layers": 62, "num_attention_heads": 40, "kv_lora_rank": 256, "vocab_size": 73448,
        },
        False, True,
    ),
    "Hunyuan-7B": (
        {
            "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan", "num_experts": 1,
            "hidden_size": 4096,
        },
        False, False,
    ),
    "gemma-4-E4B": (
        {
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
            "text_config": {"hidden_size": 2560, "num_experts": None, "enable_moe_block": False},
        },
        False, False,
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

MISTRAL_LARGE_3: dict[str, Any] = {
    "dim": 7168, "n_layers": 61, "head_dim": 128, "hidden_dim": 16384, "n_heads": 128, "n_kv_heads": 128,
    "vocab_size": 131072, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "kv_lora_rank": 512, "v_head_dim": 128,
    "moe": {
        "expert_parallel": 1, "expert_model_parallel": 1, "route_every_n": 1, "first_k_dense_replace": 3,
        "num_experts": 128, "num_experts_per_tok": 4, "num_expert_groups": 1, "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0, "expert_hidden_dim": 4096, "num_shared_experts": 1,
    },
}  # fmt: skip
"""Keys of a params.json in Mistral's own format, as SGLang's mistral_utils reads them."""
