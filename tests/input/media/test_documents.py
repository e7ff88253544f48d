"""Pages of PDF documents as images."""

from __future__ import annotations

from typing import Any

import pytest

from batchrunner.input.media.bad_file import BadFileError
from batchrunner.input.media.documents import page_images
from tests.support.pictures import document, opened, picture


def _sizes(content: bytes, pages: str, dpi: float = 72, most: int | None = None) -> list[tuple[int, int]]:
    return [opened(page).size for page in page_images(content, pages, dpi, most)]


def _tones(content: bytes, pages: str) -> list[Any]:
    return [opened(page).convert("L").getpixel((50, 50)) for page in page_images(content, pages, 72, None)]


def test_pages() -> None:
    """All pages, one, or ranges in the order asked for; a range ends where the document does."""
    three = document(3)
    assert _tones(three, "all") == pytest.approx([40, 80, 120], abs=3)
    assert _tones(three, "2") == pytest.approx([80], abs=3)
    assert _tones(three, "3,1") == pytest.approx([120, 40], abs=3)
    assert _tones(three, "2-99") == pytest.approx([80, 120], abs=3)
    assert _tones(document(1), "1-3") == pytest.approx([40], abs=3)


def test_sizes() -> None:
    """The dots an inch say how large an image is, and max_pixels how large at most."""
    assert _sizes(document(1), "1") == [(200, 100)]
    assert _sizes(document(1), "1", dpi=144) == [(400, 200)]
    ((width, height),) = _sizes(document(1), "1", dpi=720, most=20_000)
    assert width * height <= 20_600  # PDFium rounds up
    assert width == pytest.approx(2 * height, rel=0.03)


@pytest.mark.parametrize(
    ("content", "pages", "problem"),
    [
        (b"%PDF-1.7 nothing more", "1", "is no PDF document that can be read"),
        (picture(), "1", "is no PDF document that can be read"),
        (document(2)[:200], "1", "is no PDF document that can be read"),
        (document(2), "3", "has no page 3: it has 2"),
        (document(2), "1,5-9", "has no page 5: it has 2"),
    ],
    ids=["text", "picture", "cut", "page", "range"],
)
def test_bad_documents(content: bytes, pages: str, problem: str) -> None:
    """A broken document, or a page that it lacks, is said."""
    with pytest.raises(BadFileError) as failure:
        list(page_images(content, pages, 72, None))
    assert problem in str(failure.value)


def test_huge_page() -> None:
    """A page that would have too many pixels is refused, unless max_pixels makes it small."""
    with pytest.raises(BadFileError, match=r"page 1 would have \d+ pixels"):
        list(page_images(document(1, (100, 100), dpi=0.5), "all", 150, None))
    assert len(_sizes(document(1, (100, 100), dpi=0.5), "all", 150, 10_000)) == 1


ENCRYPTED = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
    b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>endobj\n"
    b"4 0 obj<</Filter/Standard/V 1/R 2/P -4/O<" + b"41" * 32 + b">/U<" + b"42" * 32 + b">>>endobj\n"
    b"trailer<</Root 1 0 R/Encrypt 4 0 R/ID[<41><41>]/Size 5>>\n%%EOF\n"
)
"""A document whose password is not empty."""


def test_encrypted_document() -> None:
    """A document that needs a password is said to be encrypted."""
    with pytest.raises(BadFileError, match="is encrypted"):
        list(page_images(ENCRYPTED, "all", 72, None))
