"""A tokenizer directory made in no time: byte-level BPE as most models have it, and a chat template."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, START, END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(directory: Path, chat_template: str | None = CHATML, *, vocabulary: int = 400) -> Path:
    """Write tokenizer.json, tokenizer_config.json, config.json and the template; return the directory.

    Prompts of plain text get `<s>` before them, those of a chat do not.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BOS, EOS, START, END]
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": EOS, "lstrip": False, "rstrip": False, "normalized": False}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": eos}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    size = tokenizer.get_vocab_size()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template)
    return directory
