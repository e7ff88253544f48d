"""Checks and converts one picture with Pillow: decoded whole, upright, of a kind that every model takes."""

import io
import math
import warnings
from functools import cache
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from batchrunner.input.media.bad_file import BadFileError

MOST_PIXELS = 89_478_485
"""Most pixels of an image, Pillow's own limit against decompression bombs: decoded they take 358 MB."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "TGA")
"""Formats that are read, where Pillow was built with them. Others are rare, or start programs (EPS)."""
_SENT_AS_IS = {"PNG", "JPEG", "WEBP"}
_PLAIN_MODES = {"RGB", "L"}
_LOSSY = {"JPEG", "MPO", "WEBP", "AVIF", "JPEG2000"}
_ORIENTATION = 0x0112
_WHITE = (255, 255, 255)
QUALITY = 95
"""Quality of a JPEG file that is written again, of 100."""

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # our own limit is the same


def sendable(content: bytes, max_pixels: int | None) -> bytes:
    """Return a picture's file as it is sent; raises BadFileError.

    The file stays as it is where nothing has to be changed. An animated picture becomes its first frame.
    """
    try:
        with Image.open(io.BytesIO(content), formats=_known_formats()) as image:
            return _checked(image, content, max_pixels)
    except BadFileError:
        raise
    except UnidentifiedImageError:
        raise BadFileError(f"is no image that can be read ({len(content)} bytes)") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadFileError(f"has more than {MOST_PIXELS} pixels") from None
    except MemoryError:
        raise
    except Exception as failure:  # noqa: BLE001 - Pillow raises what its many decoders raise
        why = " ".join(str(failure).split()) or type(failure).__name__
        raise BadFileError(f"is a broken image: {why}") from None


@cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def encoded(image: Image.Image, *, lossy: bool = False) -> bytes:
    """Return a picture in RGB or grey as a file: JPEG where it was lossy before, else PNG."""
    stream = io.BytesIO()
    if lossy:
        image.save(stream, "JPEG", quality=QUALITY, subsampling=0)
    else:
        image.save(stream, "PNG", compress_level=3)
    return stream.getvalue()


def scale_to(width: float, height: float, max_pixels: int | None) -> float:
    """Return the factor by which a picture becomes smaller; 1 where it may stay."""
    if max_pixels is None or width * height <= max_pixels:
        return 1.0
    return math.sqrt(max_pixels / (width * height))


def _checked(image: Any, content: bytes, max_pixels: int | None) -> bytes:
    kind, (width, height) = str(image.format), image.size
    if width * height > MOST_PIXELS:
        raise BadFileError(f"has {width} x {height} pixels: the most are {MOST_PIXELS}")
    scale = scale_to(width, height, max_pixels)
    if scale < 1 and kind == "JPEG":  # decoded in a size that is near the one wanted
        image.draft(None, (math.ceil(width * scale), math.ceil(height * scale)))
    many = kind in _SENT_AS_IS and getattr(image, "n_frames", 1) > 1
    image.load()
    upright = _is_upright(image)
    as_is = kind in _SENT_AS_IS and image.mode in _PLAIN_MODES and upright and not many and scale == 1
    if as_is and "transparency" not in image.info:
        return content
    plain = _plain(image if upright else ImageOps.exif_transpose(image))
    if scale < 1:
        width, height = plain.size
        again = scale_to(width, height, max_pixels)
        size = max(1, math.floor(width * again)), max(1, math.floor(height * again))
        plain = plain.resize(size, Image.Resampling.LANCZOS)
    return encoded(plain, lossy=kind in _LOSSY)


def _is_upright(image: Any) -> bool:
    try:
        return image.getexif().get(_ORIENTATION, 1) in {0, 1}
    except Exception:  # noqa: BLE001 - data about the picture that are broken do not harm it
        return True


def _plain(image: Any) -> Any:
    """Return a picture in RGB or 8 bits of grey, on white where it is transparent."""
    if image.mode in {"I;16", "I;16L", "I;16B", "I;16N"}:
        return image.convert("I").point(lambda value: value / 257).convert("L")
    if image.mode == "I":  # a PNG file of 16 bits in some versions of Pillow
        _, most = image.getextrema()
        return image.point(lambda value: value / 257).convert("L") if most > 255 else image.convert("L")  # noqa: PLR2004
    if image.mode == "F":
        raise BadFileError("has pixels of 32-bit numbers: write it with 8 or 16 bits")
    if image.mode in {"RGBA", "LA", "PA", "RGBa", "La"} or "transparency" in image.info:
        clear = image.convert("RGBA")
        ground = Image.new("RGB", clear.size, _WHITE)
        ground.paste(clear, mask=clear.getchannel("A"))
        return ground
    return image if image.mode in _PLAIN_MODES else image.convert("RGB")
