"""A random Qwen2-VL, made in a few seconds: a real SGLang serves images with it on a CPU."""

# ruff: noqa: PLC0415 - torch takes seconds to import: only tests that need the engine pay
from __future__ import annotations

from pathlib import Path

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
"""What stands for an image in a prompt of this model."""
PATCH, MERGE = 14, 2
"""Pixels of a patch's side, and patches of a token's side."""
TOKEN_PIXELS = (PATCH * MERGE) ** 2
"""Pixels of an image that become one token."""
MOST_IMAGE_PIXELS = 64 * TOKEN_PIXELS
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or part['type'] == 'image_url' %}"
    f"{IMAGE_TEXT}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_qwen2_vl(directory: Path, tokenizer_from: Path) -> Path:
    """Write a seeded random Qwen2-VL (float32) with its processor and return its folder.

    The tokenizer is that of the model folder `tokenizer_from`, with Qwen's tokens of images added.
    """
    import torch
    from transformers import (
        AutoTokenizer,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in SPECIAL)
    hidden = 64
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": hidden,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "in_chans": 3,  # as the config files of the real models have it
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2VLForConditionalGeneration(config).to(torch.float32)
        for name, values in model.named_parameters():  # as they come, all images would look alike to it
            if "norm" not in name:
                torch.nn.init.normal_(values, std=0.2)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    size = {"shortest_edge": TOKEN_PIXELS, "longest_edge": MOST_IMAGE_PIXELS}
    Qwen2VLProcessor(
        Qwen2VLImageProcessor(size=size),
        tokenizer,
        Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
