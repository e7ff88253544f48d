"""What a model's server says of the media that it takes: images, audio, videos. Pure.

`/model_info` of SGLang 0.5.23 has `has_image_understanding` and `has_audio_understanding`, by the model's
config.json. It has nothing of videos: these need a part for images at least.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_IMAGES, _AUDIO = "has_image_understanding", "has_audio_understanding"
"""Keys of `/model_info`."""
_KNOWN_VERSION = (0, 5, 23)
"""Version of SGLang up to which `_PASS_OVER_VIDEOS` is known."""
_PASS_OVER_VIDEOS = {
    "Cohere2VisionForConditionalGeneration", "DeepseekOCRForCausalLM", "DeepseekV4ForCausalLM",
    "DeepseekVL2ForCausalLM", "DotsOCRForCausalLM", "DotsVLMForCausalLM", "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration", "GlmImageForConditionalGeneration", "KimiK25ForConditionalGeneration",
    "KimiVLForConditionalGeneration", "Lfm2VlForConditionalGeneration",
    "LightOnOCRForConditionalGeneration", "Llama4ForConditionalGeneration",
    "LocateAnythingForConditionalGeneration", "MllamaForConditionalGeneration", "MultiModalityCausalLM",
    "Phi4MMForCausalLM", "PixtralForConditionalGeneration", "Sarashina2VisionForCausalLM",
    "UnlimitedOCRForCausalLM",
}  # fmt: skip
"""Architectures whose processors (srt/multimodal/processors) read no `video_data`: a model would answer as
if there were no video."""


class MediaTaken(NamedTuple):
    """Whether models take media in prompts; None where that is not known."""

    images: bool | None
    audio: bool | None
    videos: bool | None


def media_taken(models: Sequence[Mapping[str, Any]], version: str | None) -> MediaTaken:
    """Return what models take, by the `/model_info` of each and the version of SGLang."""
    videos = [_takes_videos(model, version) for model in models]
    return MediaTaken(_in_all(models, _IMAGES), _in_all(models, _AUDIO), False if False in videos else None)


def _takes_videos(model: Mapping[str, Any], version: str | None) -> bool | None:
    if model.get(_IMAGES) is False:
        return False
    numbers = tuple(map(int, re.findall(r"\d+", version or "")[:3]))
    names = model.get("architectures")
    known = bool(numbers) and numbers <= _KNOWN_VERSION and isinstance(names, list)
    return False if known and any(name in _PASS_OVER_VIDEOS for name in names or ()) else None


def _in_all(models: Sequence[Mapping[str, Any]], key: str) -> bool | None:
    told = [model.get(key) for model in models]
    return all(told) if all(isinstance(each, bool) for each in told) else None
