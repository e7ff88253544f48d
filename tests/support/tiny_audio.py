"""A random Qwen2-Audio, made in a few seconds: a real SGLang hears with it on a CPU."""

# ruff: noqa: PLC0415 - torch takes seconds to import: only tests that need the engine pay
from __future__ import annotations

from pathlib import Path

SPECIAL = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
AUDIO_TEXT = "<|audio_bos|><|AUDIO|><|audio_eos|>"
"""What stands for a sound in a prompt of this model."""
MEL_BINS = 128
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' or part['type'] == 'audio_url' %}"
    f"{AUDIO_TEXT}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_qwen2_audio(directory: Path, tokenizer_from: Path) -> Path:
    """Write a seeded random Qwen2-Audio (float32) with its processor and return its folder.

    The tokenizer is that of the model folder `tokenizer_from`, with Qwen's tokens of sounds added.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    hidden = 64
    config = Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": MEL_BINS,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 2 * hidden,
            "d_model": hidden,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2AudioForConditionalGeneration(config).to(torch.float32)
        for name, values in model.named_parameters():  # as they come, all sounds would be alike to it
            if "norm" not in name:
                torch.nn.init.normal_(values, std=0.2)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    weights = directory / "model.safetensors"  # transformers 5.19 writes other names than the real model has
    names = {name.replace("model.model.", "model."): value for name, value in load_file(weights).items()}
    save_file(names, weights, {"format": "pt"})
    extractor = WhisperFeatureExtractor(feature_size=MEL_BINS)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=TEMPLATE).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
