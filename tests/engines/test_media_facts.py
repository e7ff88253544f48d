"""What servers say of the media that their models take."""

from __future__ import annotations

from typing import Any

import pytest

from batchrunner.engines.media_facts import media_taken


def _model(*, images: object = None, audio: object = None, architecture: str = "Any") -> dict[str, Any]:
    return {
        "has_image_understanding": images,
        "has_audio_understanding": audio,
        "architectures": [architecture],
    }


_PIXTRAL = _model(images=True, architecture="PixtralForConditionalGeneration")


@pytest.mark.parametrize(
    ("models", "version", "expected"),
    [
        ([_model(images=True, audio=False)], "0.5.23", (True, False, None)),
        ([_model(images=False, audio=True)], "0.5.23", (False, True, False)),
        ([_model(images=True, audio=True), _model(images=True, audio=False)], None, (True, False, None)),
        ([{}], "0.4.0", (None, None, None)),
        ([_model(images="yes", audio=1)], "0.5.23", (None, None, None)),
        (
            [_PIXTRAL],
            "0.5.23",
            (True, None, False),
        ),
        ([_PIXTRAL], "0.6.0", (True, None, None)),
        ([_PIXTRAL], "main", (True, None, None)),
        ([{**_model(images=True), "architectures": None}], "0.5.23", (True, None, None)),
    ],
)
def test_media_taken(models: list[dict[str, Any]], version: str | None, expected: tuple[Any, ...]) -> None:
    """Each kind as the servers say, in all of them; videos need a part for images, and a reader of videos."""
    assert media_taken(models, version) == expected
