"""About how many tokens a file takes in a prompt."""

import io

from batchrunner.core.media import KindName
from batchrunner.input.media.containers import seconds_of_wav

PIXELS_A_TOKEN = 28 * 28
"""Pixels of an image for each token, as of the Qwen-VL and InternVL families; others are near it."""
USUAL_TOKENS = 1024
"""Tokens that a file is expected to take whose size is not known before it is opened."""
MOST_TOKENS = 16_384
"""Most tokens that a file is expected to take: more than the processors of models let through."""
TOKENS_A_SECOND = 25
"""Tokens of a second of audio, as of the Qwen Audio and Omni families; others are near it."""
AUDIO_BYTES_A_SECOND = 16_000
"""Bytes of a second of audio in a compressed file, at 128 kbit/s."""
VIDEO_BYTES_A_TOKEN = 500
"""Bytes of a video for each token: 1 Mbit/s, and 250 tokens for the two frames of each second."""


def tokens_of(pixels: float, most_pixels: int | None = None) -> int:
    """Return the tokens of an image with so many pixels, which has `most_pixels` when it is sent."""
    sent = pixels if most_pixels is None else min(pixels, most_pixels)
    return _between(sent / PIXELS_A_TOKEN)


def tokens_of_file(content: bytes, kind: KindName = "image", most_pixels: int | None = None) -> int:
    """Return the tokens of a file by its first bytes and its size, or those of most files of its kind."""
    if not content:
        return tokens_of(USUAL_TOKENS * PIXELS_A_TOKEN, most_pixels)
    if kind == "video":
        return _between(len(content) / VIDEO_BYTES_A_TOKEN)
    if kind == "audio":
        seconds = seconds_of_wav(content)
        seconds = len(content) / AUDIO_BYTES_A_SECOND if seconds is None else seconds
        return _between(TOKENS_A_SECOND * seconds)
    return _of_image(content, most_pixels)


def _of_image(content: bytes, most_pixels: int | None) -> int:
    try:
        from PIL import Image  # noqa: PLC0415 - an extra, and heavy

        with Image.open(io.BytesIO(content)) as image:
            return tokens_of(image.width * image.height, most_pixels)
    except Exception:  # noqa: BLE001 - what is wrong with a file is said when it is prepared
        return tokens_of(USUAL_TOKENS * PIXELS_A_TOKEN, most_pixels)


def _between(tokens: float) -> int:
    return max(1, min(MOST_TOKENS, round(tokens)))
