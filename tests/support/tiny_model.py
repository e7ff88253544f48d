"""A random Llama, made in a second, that a real SGLang serves thousands of tokens a second with."""

# ruff: noqa: PLC0415 - torch takes seconds to import: only tests that need the engine pay
import shutil
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONTEXT_TOKENS = 8192


def make_tiny_llama(
    directory: Path,
    tokenizer_from: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    head: int = 16,
    vocabulary: int | None = None,
) -> Path:
    """Write a seeded random Llama (float32, heads of `head` numbers) and return its folder.

    The tokenizer and chat template are copied from the model folder `tokenizer_from`, so that
    prompts have real lengths; the tokens that come out mean nothing. `vocabulary` leaves it only so many
    of its tokens, the first: sampling from fewer costs less. A folder that already holds
    the model is left as it is.
    """
    if (directory / "model.safetensors").is_file():
        return directory
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    config = LlamaConfig(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        head_dim=head,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():  # seeded here, without reseeding whoever calls
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.float32)
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copyfile(tokenizer_from / name, directory / name)
    model.save_pretrained(directory)
    return directory
