"""About how many tokens an image takes in a prompt."""

import io

PIXELS_A_TOKEN = 28 * 28
"""Pixels of an image for each token, as of the Qwen-VL and InternVL families; others are near it."""
USUAL_TOKENS = 1024
"""Tokens that an image is expected to take whose size is not known before it is opened."""
MOST_TOKENS = 16_384
"""Most tokens that an image is expected to take: more than the processors of models let through."""


def tokens_of(pixels: float, most_pixels: int | None = None) -> int:
    """Return the tokens of an image with so many pixels, which has `most_pixels` when it is sent."""
    sent = pixels if most_pixels is None else min(pixels, most_pixels)
    return max(1, min(MOST_TOKENS, round(sent / PIXELS_A_TOKEN)))


def tokens_of_file(content: bytes, most_pixels: int | None = None) -> int:
    """Return the tokens of an image by the first bytes of its file, or those of most images."""
    try:
        from PIL import Image  # noqa: PLC0415 - an extra, and heavy

        with Image.open(io.BytesIO(content)) as image:
            return tokens_of(image.width * image.height, most_pixels)
    except Exception:  # noqa: BLE001 - what is wrong with a file is said when it is prepared
        return tokens_of(USUAL_TOKENS * PIXELS_A_TOKEN, most_pixels)
