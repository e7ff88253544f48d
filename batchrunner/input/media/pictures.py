"""Converts images to formats that every model accepts (Pillow), and renders pages of PDFs (PDFium)."""

import io
import math
import warnings
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from batchrunner.core.media import BadFileError, page_ranges

MOST_PIXELS = 89_478_485
"""Maximum number of pixels in an image, against decompression bombs.

An image of this size takes 358 MB once decoded.
"""
QUALITY = 95
"""JPEG quality (at most 100) of an image that had to be converted."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "TGA")
"""Pillow's names of the formats that can be read, if the installed Pillow supports them.

Other formats are rare, or need another program, as EPS does.
"""
_SENT_UNCHANGED = {"PNG", "JPEG", "WEBP"}
"""Formats that need no conversion."""
_LOSSY = {"JPEG", "MPO", "WEBP", "AVIF", "JPEG2000"}
_PLAIN_MODES = {"RGB", "L"}
"""Pillow's modes of colour images and of 8-bit grey images."""
_ORIENTATION = 0x0112
_WHITE = (255, 255, 255)
_POINTS_PER_INCH = 72
"""Unit of the size of a PDF page."""

# Pillow warns above this number of pixels, and refuses an image of more than twice as many.
Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def sendable(content: bytes, max_pixels: int | None) -> bytes:
    """Return an image file as it is sent to the server; raise BadFileError if it cannot be read.

    A file that needs no conversion is returned unchanged. Of an animated image, the first frame is sent. An
    image of more than `max_pixels` is scaled down.
    """
    Image.init()
    formats = [name for name in _FORMATS if name in Image.OPEN]
    try:
        with Image.open(io.BytesIO(content), formats=formats) as image:
            return _checked(image, content, max_pixels)
    except (BadFileError, MemoryError):
        # Running out of memory does not mean that the file is bad.
        raise
    except UnidentifiedImageError:
        raise BadFileError(f"cannot be read as an image ({len(content)} bytes)") from None
    except Exception as failure:  # noqa: BLE001 - Pillow's decoders may raise any error
        reason = " ".join(str(failure).split()) or type(failure).__name__
        raise BadFileError(f"is a broken image: {reason}") from None


def _checked(image: Any, content: bytes, max_pixels: int | None) -> bytes:
    """Return the bytes to send for an opened image; `content` is the original file."""
    scale = _scale_to(image.width, image.height, max_pixels)
    if scale < 1:
        # A JPEG file can be decoded directly at a smaller size, which is faster.
        image.draft(None, tuple(math.ceil(side * scale) for side in image.size))
    image.load()
    is_upright = _is_upright(image)
    needs_no_change = (
        image.format in _SENT_UNCHANGED
        and image.mode in _PLAIN_MODES
        and not image.has_transparency_data
        and is_upright
        and getattr(image, "n_frames", 1) == 1
        and scale == 1
    )
    if needs_no_change:
        return content
    plain_image = _plain(image if is_upright else ImageOps.exif_transpose(image))
    if scale < 1:
        # `draft` above may have made the image smaller already.
        remaining_scale = _scale_to(plain_image.width, plain_image.height, max_pixels)
        size = tuple(max(1, math.floor(side * remaining_scale)) for side in plain_image.size)
        plain_image = plain_image.resize(size, Image.Resampling.LANCZOS)
    return _encoded(plain_image, lossy=image.format in _LOSSY)


def _scale_to(width: float, height: float, max_pixels: int | None) -> float:
    """Return the factor by which the sides shrink to give `max_pixels` pixels.

    1 if the image is small enough.
    """
    return 1.0 if max_pixels is None else min(1.0, math.sqrt(max_pixels / (width * height)))


def _is_upright(image: Any) -> bool:
    """Tell whether an image needs no rotation or mirroring, by its EXIF orientation."""
    try:
        return image.getexif().get(_ORIENTATION, 1) in {0, 1}
    except Exception:  # noqa: BLE001 - broken metadata do not harm the pixels
        return True


def _plain(image: Any) -> Any:
    """Return an image in RGB or 8-bit grey, with white in place of transparency; raise BadFileError."""
    if image.mode.startswith("I"):
        # The image is grey with 16 or 32 bits per pixel.
        image = image.convert("I")
        _, largest_value = image.getextrema()
        if largest_value > 255:  # noqa: PLR2004 - values of 16 bits; 65535 / 257 is 255
            image = image.point(lambda value: value / 257)
        return image.convert("L")
    if image.mode == "F":
        raise BadFileError("has 32-bit pixels: save it with 8 or 16 bits per channel")
    if image.has_transparency_data:
        transparent_image = image.convert("RGBA")
        plain_image = Image.new("RGB", transparent_image.size, _WHITE)
        plain_image.paste(transparent_image, mask=transparent_image.getchannel("A"))
        return plain_image
    return image if image.mode in _PLAIN_MODES else image.convert("RGB")


def _encoded(image: Image.Image, *, lossy: bool = False) -> bytes:
    """Return an image as a JPEG file if `lossy`, else as a PNG file."""
    stream = io.BytesIO()
    if lossy:
        image.save(stream, "JPEG", quality=QUALITY, subsampling=0)
    else:
        image.save(stream, "PNG", compress_level=3)
    return stream.getvalue()


def page_images(content: bytes, pages: str, dpi: float, max_pixels: int | None) -> Iterator[bytes]:
    """Yield pages of a PDF document as PNG files; raise BadFileError if the document cannot be read.

    `pages` has ranges such as `1-3,7`. A range may go beyond the last page, but its first page must exist.
    Pages are rendered at `dpi` dots per inch, or at fewer if they would exceed `max_pixels`.
    """
    import pypdfium2  # noqa: PLC0415 - only for documents

    try:
        with pypdfium2.PdfDocument(content) as document:
            for page_range in page_ranges(pages):
                if page_range.start > len(document):
                    raise BadFileError(f"has no page {page_range.start}, but only {len(document)} pages")
                # The slice drops pages of the range that the document does not have.
                for number in page_range[: len(document) + 1 - page_range.start]:
                    page = document[number - 1]
                    scale = dpi / _POINTS_PER_INCH
                    width, height = page.get_size()
                    scale *= _scale_to(width * scale, height * scale, max_pixels or MOST_PIXELS)
                    bitmap = page.render(scale=scale)
                    yield _encoded(bitmap.to_pil().convert("RGB"))
    except pypdfium2.PdfiumError as failure:
        raise BadFileError(f"cannot be read as a PDF document ({failure})") from None
