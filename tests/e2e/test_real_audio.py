"""A real audio model on a real SGLang: its answers are those of transformers, and follow the sounds."""

# ruff: noqa: PLC0415 - torch takes seconds to import: only tests that need the engine pay
from __future__ import annotations

import io
import wave
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import batchrunner
from tests.conftest import SMALL_MODEL, require_engine
from tests.support.sounds import sound
from tests.support.tiny_audio import AUDIO_TEXT, make_tiny_qwen2_audio

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
QUESTION = "What is this?"
TOKENS = 8
SOUNDS = [sound(1, 220), sound(1, 880), sound(2.5, 440)]


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2-Audio."""
    require_engine("sglang")
    return make_tiny_qwen2_audio(tmp_path_factory.mktemp("audio") / "model", SMALL_MODEL)


@pytest.fixture(scope="module")
def engine(hearing: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[batchrunner.OpenEngine]:
    """It on a launched server."""
    spec = {"kind": "server", "model": str(hearing), "device": "cpu"}
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


def _by_transformers(directory: Path) -> list[list[int]]:
    """Return the tokens that transformers generates for each sound, and the number of its prompt's.

    Its model does not hear what comes after the end of a sound; that of SGLang 0.5.23 hears the silence up to
    30 s too, and so does this one here.
    """
    import torch
    from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

    processor = AutoProcessor.from_pretrained(directory)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    tower = model.model.audio_tower if hasattr(model, "model") else model.audio_tower
    hear = tower.forward
    tower.forward = lambda features, **options: hear(features, **{**options, "attention_mask": None})
    found = []
    for content in SOUNDS:
        chat = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": QUESTION}]}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        with wave.open(io.BytesIO(content)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2") / 2**15
            rate = file.getframerate()
        inputs = processor(text=[text], audio=[samples], sampling_rate=rate, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        length = inputs["input_ids"].shape[1]
        found.append([*out[0, length:].tolist(), length])
    return found


def test_answers_are_those_of_transformers(hearing: Path, engine: batchrunner.OpenEngine) -> None:
    """Each sound has the answer that transformers gives, in the chat and as a text with its placeholder."""
    assert (engine.info.takes_audio, engine.info.takes_images, engine.info.takes_videos) == (
        True,
        False,
        False,
    )
    rows = [{"voice": content} for content in [*SOUNDS, SOUNDS[0]]]
    found = _ids(engine, {"user": "{{ voice }}" + QUESTION, "audio": "voice"}, rows)
    expected = _by_transformers(hearing)
    assert found == [*expected, expected[0]]
    assert len({tuple(ids) for ids in expected}) == len(SOUNDS)  # different sounds, different answers

    end = "{{ '\n' }}"  # a template's last line break would be left out
    text = f"<|im_start|>user\n{{{{ voice }}}}{QUESTION}<|im_end|>\n<|im_start|>assistant{end}"
    audio = {"columns": ["voice"], "placeholder": AUDIO_TEXT}
    assert _ids(engine, {"text": text, "audio": audio}, rows) == found


def test_several_sounds_and_samples(engine: batchrunner.OpenEngine) -> None:
    """The order of two sounds matters, and each of several samples hears both."""
    one, two = SOUNDS[:2]
    prompt = {"user": "{{ voice }}" + QUESTION, "audio": "voice"}
    first, swapped = _ids(engine, prompt, [{"voice": [one, two]}, {"voice": [two, one]}])
    assert first[:-1] != swapped[:-1]
    assert first[-1] == swapped[-1]
    table = batchrunner.generate(
        [{"voice": [one, two]}],
        prompt={"text": "{{ voice }}" + QUESTION, "audio": {"columns": ["voice"], "placeholder": AUDIO_TEXT}},
        engine=engine,
        sampling={"temperature": 1, "max_new_tokens": 2, "n": 2},
    )
    assert table["error"].to_pylist() == [None]
    assert table["prompt_tokens"].to_pylist()[0] > 2 * 25  # a second of each


def test_a_bad_sound_harms_no_other_row(engine: batchrunner.OpenEngine) -> None:
    """Rows with files that we or the server refuse fail; those beside them are answered."""
    values = [SOUNDS[0], b"no sound", b"fLaC" + bytes(100), SOUNDS[1]]
    table = batchrunner.generate(
        [{"voice": value} for value in values],
        prompt={"user": QUESTION, "audio": "voice"},
        engine=engine,
        sampling={"max_new_tokens": 2},
    )
    errors = table["error"].to_pylist()
    assert (errors[0], errors[3]) == (None, None)
    assert "is no audio file that is known here" in errors[1]
    assert "decode" in errors[2].lower()
