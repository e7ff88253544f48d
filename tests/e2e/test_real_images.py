"""A real vision model on a real SGLang: its answers are those of transformers, and follow the images."""

# ruff: noqa: PLC0415 - torch takes seconds to import: only tests that need the engine pay
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import batchrunner
from tests.conftest import SMALL_MODEL, require_engine
from tests.support.media import picture

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.filterwarnings("default")]
QUESTION = "What is this?"
TOKENS = 8

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


def make_tiny_qwen2_vl(directory: Path) -> Path:
    """Write a random Qwen2-VL with the tokenizer of the small model and Qwen's tokens of images."""
    import torch
    from transformers import (
        AutoTokenizer,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
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


def _noise(seed: int, size: tuple[int, int] = (84, 84)) -> Image.Image:
    return Image.frombytes("RGB", size, random.Random(seed).randbytes(3 * size[0] * size[1]))


PICTURES = [Image.new("RGB", (64, 48), "red"), _noise(1), _noise(2), _noise(3, (120, 40))]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2-VL."""
    require_engine("sglang")
    return make_tiny_qwen2_vl(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def engine(vision: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[batchrunner.OpenEngine]:
    """It on a launched server."""
    spec = {"kind": "server", "model": str(vision), "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling would take longer than all answers
        with batchrunner.open_engine(spec, log_dir=tmp_path_factory.mktemp("logs")) as opened:
            yield opened


def _ids(engine: batchrunner.OpenEngine, prompt: dict[str, Any], rows: list[dict[str, Any]]) -> list[Any]:
    """Return the tokens of each answer, and the number of its prompt's."""
    table = batchrunner.generate(
        rows,
        prompt=prompt,
        engine=engine,
        sampling={"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
        answers=["output_ids"],
    )
    assert table["error"].to_pylist() == [None] * len(rows)
    return [
        [*ids, tokens]
        for ids, tokens in zip(*(table[n].to_pylist() for n in ("output_ids", "prompt_tokens")), strict=True)
    ]


def _by_transformers(directory: Path, pictures: list[Image.Image]) -> list[list[int]]:
    """Return the tokens that transformers generates for each image, and the number of its prompt's."""
    import torch
    from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(directory)
    model = Qwen2VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for image in pictures:
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        inputs = processor(text=[text], images=[image], return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        length = inputs["input_ids"].shape[1]
        found.append([*out[0, length:].tolist(), length])
    return found


def test_answers_are_those_of_transformers(vision: Path, engine: batchrunner.OpenEngine) -> None:
    """Each image has the answer that transformers gives, in the chat and as a text with its placeholder."""
    rows = [{"image": image} for image in [*PICTURES, PICTURES[0]]]
    found = _ids(engine, {"user": "{{ image }}" + QUESTION, "images": "image"}, rows)
    expected = _by_transformers(vision, PICTURES)
    assert found == [*expected, expected[0]]
    assert len({tuple(ids) for ids in expected}) == len(PICTURES)  # different images, different answers

    end = "{{ '\n' }}"  # a template's last line break would be left out
    text = f"<|im_start|>user\n{{{{ image }}}}{QUESTION}<|im_end|>\n<|im_start|>assistant{end}"
    images = {"columns": ["image"], "placeholder": IMAGE_TEXT}
    assert _ids(engine, {"text": text, "images": images}, rows) == found


def test_a_bad_image_harms_no_other_row(engine: batchrunner.OpenEngine) -> None:
    """Rows with images that we or the server refuse fail; those beside them are answered."""
    wide = io.BytesIO()
    Image.new("RGB", (3000, 2)).save(wide, "PNG")  # Qwen2-VL's processor refuses such a shape
    values = [picture("red"), b"no image", wide.getvalue(), picture("blue")]
    table = batchrunner.generate(
        [{"image": value} for value in values],
        prompt={"user": QUESTION, "images": "image"},
        engine=engine,
        sampling={"max_new_tokens": 2},
    )
    errors = table["error"].to_pylist()
    assert (errors[0], errors[3]) == (None, None)
    assert "cannot be read as an image" in errors[1]
    assert "aspect ratio" in errors[2]
