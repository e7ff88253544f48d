"""Renders pages of a PDF document with PDFium, one after the other."""

from collections.abc import Iterator
from typing import Any

from batchrunner.core.media import page_ranges
from batchrunner.input.media.bad_file import BadFileError
from batchrunner.input.media.pictures import MOST_PIXELS, encoded, scale_to

_POINTS_AN_INCH = 72
_ENCRYPTED = "password"


def page_images(content: bytes, pages: str, dpi: float, max_pixels: int | None) -> Iterator[bytes]:
    """Yield pages of a document as PNG files; raises BadFileError.

    Of a range those pages are taken that the document has; it must have the first one.
    """
    import pypdfium2  # noqa: PLC0415 - of an extra, and only for documents

    try:
        document = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as failure:
        what = "is encrypted" if _ENCRYPTED in str(failure).lower() else "is no PDF document that can be read"
        raise BadFileError(f"{what} ({' '.join(str(failure).split())})") from None
    try:
        for number in _numbers(pages, len(document)):
            yield _page(pypdfium2, document, number, dpi, max_pixels)
    finally:
        document.close()


def _numbers(pages: str, count: int) -> Iterator[int]:
    if not count:
        raise BadFileError("has no pages")
    if pages == "all":
        yield from range(1, count + 1)
        return
    for wanted in page_ranges(pages):
        if wanted.start > count:
            raise BadFileError(f"has no page {wanted.start}: it has {count}")
        yield from range(wanted.start, min(wanted.stop, count + 1))


def _page(pdfium: Any, document: Any, number: int, dpi: float, max_pixels: int | None) -> bytes:
    try:
        page = document[number - 1]
        scale = dpi / _POINTS_AN_INCH
        width, height = page.get_size()
        scale *= scale_to(width * scale, height * scale, max_pixels)
        pixels = width * height * scale * scale
        if not 1 <= pixels <= MOST_PIXELS:
            raise BadFileError(f"page {number} would have {pixels:.0f} pixels: the most are {MOST_PIXELS}")
        bitmap = page.render(scale=scale)
        image = encoded(bitmap.to_pil().convert("RGB"))
        bitmap.close()
        page.close()
    except pdfium.PdfiumError as failure:
        raise BadFileError(f"page {number} cannot be rendered: {failure}") from None
    return image
