"""Images in a form that every model accepts: pictures decoded by Pillow, and pages drawn by PDFium."""

import io
import math
import warnings
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from batchrunner.core.media import BadFileError, page_ranges

MOST_PIXELS = 89_478_485
"""Maximum number of pixels in an image, against decompression bombs. A decoded image then takes 358 MB."""
QUALITY = 95
"""Quality, of at most 100, with which a changed picture is written as JPEG."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "TGA")
"""Formats that are read if this Pillow supports them. Others are rare, or need another program (EPS)."""
_SENT_AS_IS = {"PNG", "JPEG", "WEBP"}
_LOSSY = {"JPEG", "MPO", "WEBP", "AVIF", "JPEG2000"}
_PLAIN_MODES = {"RGB", "L"}
_ORIENTATION = 0x0112
_WHITE = (255, 255, 255)
_POINTS_AN_INCH = 72

Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2  # Pillow warns above this number, refuses above twice it
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def sendable(content: bytes, max_pixels: int | None) -> bytes:
    """Return a picture's file in the form that is sent; raises BadFileError.

    A file that needs no change stays as it is. An animated picture becomes its first frame.
    """
    Image.init()
    formats = [name for name in _FORMATS if name in Image.OPEN]
    try:
        with Image.open(io.BytesIO(content), formats=formats) as image:
            return _checked(image, content, max_pixels)
    except (BadFileError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadFileError(f"cannot be read as an image ({len(content)} bytes)") from None
    except Exception as failure:  # noqa: BLE001 - Pillow raises what its many decoders raise
        why = " ".join(str(failure).split()) or type(failure).__name__
        raise BadFileError(f"is a broken image: {why}") from None


def _checked(image: Any, content: bytes, max_pixels: int | None) -> bytes:
    kind, is_one = str(image.format), getattr(image, "n_frames", 1) == 1
    scale = _scale_to(image.width, image.height, max_pixels)
    if scale < 1:  # a JPEG file can be decoded at about the wanted size, which is faster
        image.draft(None, tuple(math.ceil(side * scale) for side in image.size))
    image.load()
    upright = _is_upright(image)
    is_plain = image.mode in _PLAIN_MODES and not image.has_transparency_data
    if kind in _SENT_AS_IS and is_plain and upright and is_one and scale == 1:
        return content
    plain = _plain(image if upright else ImageOps.exif_transpose(image))
    if scale < 1:
        again = _scale_to(plain.width, plain.height, max_pixels)
        size = tuple(max(1, math.floor(side * again)) for side in plain.size)
        plain = plain.resize(size, Image.Resampling.LANCZOS)
    return _encoded(plain, lossy=kind in _LOSSY)


def _scale_to(width: float, height: float, max_pixels: int | None) -> float:
    """Return the factor by which a picture is scaled down; 1 if it is small enough."""
    return 1.0 if max_pixels is None else min(1.0, math.sqrt(max_pixels / (width * height)))


def _is_upright(image: Any) -> bool:
    try:
        return image.getexif().get(_ORIENTATION, 1) in {0, 1}
    except Exception:  # noqa: BLE001 - broken metadata do not harm the picture
        return True


def _plain(image: Any) -> Any:
    """Return a picture in RGB or 8-bit grey, with white in place of transparency."""
    if image.mode.startswith("I"):  # 16 bits, or 32
        image = image.convert("I")
        _, most = image.getextrema()
        return image.point(lambda value: value / 257).convert("L") if most > 255 else image.convert("L")  # noqa: PLR2004
    if image.mode == "F":
        raise BadFileError("has 32-bit pixels: save it with 8 or 16 bits per channel")
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        ground = Image.new("RGB", clear.size, _WHITE)
        ground.paste(clear, mask=clear.getchannel("A"))
        return ground
    return image if image.mode in _PLAIN_MODES else image.convert("RGB")


def _encoded(image: Image.Image, *, lossy: bool = False) -> bytes:
    """Return a picture as a file: JPEG if it was lossy before, else PNG."""
    stream = io.BytesIO()
    if lossy:
        image.save(stream, "JPEG", quality=QUALITY, subsampling=0)
    else:
        image.save(stream, "PNG", compress_level=3)
    return stream.getvalue()


def page_images(content: bytes, pages: str, dpi: float, max_pixels: int | None) -> Iterator[bytes]:
    """Yield pages of a document as PNG files; raises BadFileError.

    A range may go beyond the end of the document, but its first page must exist.
    """
    import pypdfium2  # noqa: PLC0415 - only for documents

    try:
        with pypdfium2.PdfDocument(content) as document:
            for page_range in page_ranges(pages):
                if page_range.start > len(document):
                    raise BadFileError(f"has no page {page_range.start}: it has only {len(document)}")
                for number in page_range[: len(document) + 1 - page_range.start]:
                    page = document[number - 1]
                    scale = dpi / _POINTS_AN_INCH
                    width, height = page.get_size()
                    scale *= _scale_to(width * scale, height * scale, max_pixels or MOST_PIXELS)
                    bitmap = page.render(scale=scale)
                    yield _encoded(bitmap.to_pil().convert("RGB"))
    except pypdfium2.PdfiumError as failure:
        raise BadFileError(f"cannot be read as a PDF document ({failure})") from None
