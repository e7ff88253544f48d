"""One picture: it is decoded whole, made upright, and in a mode that every model takes."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
from PIL import Image

from batchrunner.input.media.bad_file import BadFileError
from batchrunner.input.media.pictures import MOST_PIXELS, sendable
from tests.support.pictures import file_of, opened, picture

RED, WHITE = (255, 0, 0), (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_good_file_stays(kind: str) -> None:
    """A file that every model takes is sent as it is."""
    content = picture(kind=kind)
    assert sendable(content, None) is content
    assert sendable(content, 64 * 48) is content


def _near(one: Any, other: tuple[int, ...]) -> bool:
    return all(abs(a - b) < 12 for a, b in zip(one, other, strict=True))


def test_larger_image_is_made_smaller() -> None:
    """It keeps its proportions and its format, and has max_pixels at most."""
    for kind in ("PNG", "JPEG"):
        small = opened(sendable(picture(size=(4000, 1000), kind=kind), 100_000))
        assert small.format == kind
        assert 90_000 < small.width * small.height <= 100_000
        assert small.width == pytest.approx(4 * small.height, rel=0.02)
        assert _near(small.getpixel((5, 5)), RED)
    assert opened(sendable(picture(size=(3000, 1)), 784)).size[1] == 1


def test_exif_orientation() -> None:
    """A photo that says it lies on its side is turned upright."""
    photo = Image.new("RGB", (40, 20), "blue")
    photo.paste("red", (0, 0, 20, 20))  # the left half; it is the top when turned clockwise
    exif = Image.Exif()
    exif[0x0112] = 6
    for most in (None, 784):
        found = opened(sendable(file_of(photo, "JPEG", exif=exif, quality=95), most))
        assert found.size[0] < found.size[1]
        assert _near(found.getpixel((found.width // 2, 3)), RED)
        assert found.getexif().get(0x0112, 1) == 1


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif() -> None:
    """Data about a picture that are broken do not harm it."""
    for exif in (b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"):
        content = picture(kind="JPEG", exif=exif)
        assert sendable(content, None) == content
        assert opened(sendable(content, 784)).format == "JPEG"


def _sixteen_bits() -> bytes:
    return file_of(Image.new("I;16", (30, 30), 0x8000))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (file_of(Image.new("CMYK", (30, 30), (0, 255, 255, 0)), "JPEG", quality=95), RED),
        (_sixteen_bits(), (127, 127, 127)),
        (file_of(Image.new("P", (30, 30), 0)), (0, 0, 0)),
        (file_of(Image.new("RGBA", (30, 30), (255, 0, 0, 0))), WHITE),
        (file_of(Image.new("RGBA", (30, 30), (255, 0, 0, 255))), RED),
        (file_of(Image.new("LA", (30, 30), (0, 0))), WHITE),
        (file_of(Image.new("1", (30, 30), 1)), WHITE),
        (file_of(Image.new("RGB", (30, 30), "red"), "TIFF"), RED),
        (file_of(Image.new("RGB", (30, 30), "red"), "BMP"), RED),
        (file_of(Image.new("RGB", (30, 30), "red"), "PNG", transparency=RED), WHITE),
    ],
    ids=["cmyk", "16 bits", "palette", "clear", "opaque", "grey clear", "1 bit", "tiff", "bmp", "one clear"],
)
def test_other_modes(content: bytes, expected: tuple[int, ...]) -> None:
    """What models do not take becomes RGB or grey of 8 bits, on white where it is transparent."""
    found = opened(sendable(content, None))
    assert found.mode in {"RGB", "L"}
    assert _near(found.convert("RGB").getpixel((9, 9)), expected)


def test_first_frame_of_animation() -> None:
    """An animated GIF or WebP file is its first frame."""
    frames = [Image.new("RGB", (30, 30), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP"):
        content = file_of(frames[0], kind, save_all=True, append_images=frames[1:])
        found = opened(sendable(content, None))
        assert getattr(found, "n_frames", 1) == 1
        assert _near(found.convert("RGB").getpixel((9, 9)), RED)


def _huge(width: int, height: int) -> bytes:
    """Return a PNG file of a few bytes that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 99))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is no image that can be read (0 bytes)"),
        (b"hello", "is no image that can be read (5 bytes)"),
        (b"%PDF-1.7 hello", "is no image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no image"),
        (picture(size=(300, 300))[:-40], "is a broken image"),
        (picture(size=(300, 300), kind="JPEG")[:400], "is a broken image"),
        (_huge(31_623, 31_623), f"has more than {MOST_PIXELS} pixels"),
        (_huge(10_000, 9_000), "pixels"),
        (_huge(10, 9_000), "is a broken image"),
        (file_of(Image.new("F", (9, 9), 0.5), "TIFF"), "32-bit numbers"),
    ],
    ids=["empty", "text", "pdf", "svg", "cut png", "cut jpeg", "bomb", "large", "short", "floats"],
)
def test_bad_files(content: bytes, problem: str) -> None:
    """A file that is no good image says what it is; none is decoded that would fill the memory."""
    for most in (None, 1000):
        with pytest.raises(BadFileError) as failure:
            sendable(content, most)
        assert problem in str(failure.value)
