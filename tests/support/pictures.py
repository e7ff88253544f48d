"""Image files and PDF documents for tests."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image


def picture(
    colour: Any = "red", size: tuple[int, int] = (64, 48), kind: str = "PNG", **options: Any
) -> bytes:
    """Return a file of one colour."""
    return file_of(Image.new("RGB", size, colour), kind, **options)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture as a file."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def opened(content: bytes) -> Image.Image:
    """Return a file as a picture, decoded."""
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


def document(pages: int, size: tuple[int, int] = (200, 100), dpi: float = 72) -> bytes:
    """Return a PDF document with a grey tone of its own on each page, which has `dpi` pixels an inch."""
    tones = [Image.new("RGB", size, (40 * number % 256,) * 3) for number in range(1, pages + 1)]
    return file_of(tones[0], "PDF", save_all=True, append_images=tones[1:], resolution=dpi)
