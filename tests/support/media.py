"""Files of images, documents, audio and video for tests."""

import io
import math
import struct
import wave
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


def sound(hertz: float = 440) -> bytes:
    """Return a WAV file with half a second of a tone."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        tone = (int(12_000 * math.sin(2 * math.pi * hertz * at / 16_000)) for at in range(8_000))
        file.writeframes(struct.pack("<8000h", *tone))
    return stream.getvalue()


def box(name: bytes, content: bytes = b"") -> bytes:
    """Return a box of an MP4 file."""
    return struct.pack(">I4s", 8 + len(content), name) + content


def video(content: bytes = b"frames") -> bytes:
    """Return a file with the boxes of an MP4 file, and no frames that a decoder could read."""
    return box(b"ftyp", b"isom\0\0\0\0isom") + box(b"moov", b"index") + box(b"mdat", content)
