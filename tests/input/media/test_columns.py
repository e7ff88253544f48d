"""Values of columns as images: equal ones have equal keys, and each has about the tokens it will take."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.media import PromptFile
from batchrunner.input.live_rows import LiveColumns
from batchrunner.input.media.columns import FileColumn
from batchrunner.input.media.estimates import USUAL_TOKENS
from batchrunner.job.prompt import ImagesSpec, PdfSpec
from batchrunner.job.sampling import FromColumn
from tests.support.pictures import document, picture


def _column(values: list[Any], spec: ImagesSpec | PdfSpec | None = None) -> FileColumn:
    source = LiveColumns(pa.table({"image": values}).schema)
    field = "pdf" if isinstance(spec, PdfSpec) else "images"
    return FileColumn("image", spec or ImagesSpec(columns=["image"]), source, field)


def _one(value: Any, spec: ImagesSpec | PdfSpec | None = None, pages: Any = None) -> PromptFile:
    (image,) = _column([value], spec).files(0, value, pages)
    return image


def test_equal_images_have_equal_keys() -> None:
    """The key is of the content, or of the path; pages are part of it."""
    red, blue = picture("red"), picture("blue")
    assert _one(red).key == _one({"bytes": red, "path": "a.png"}).key != _one(blue).key
    assert _one("a.png").key == _one({"bytes": None, "path": "a.png"}).key != _one("b.png").key
    spec = PdfSpec(column="image", pages=FromColumn(column="page"))
    assert _one("a.pdf", spec, 1).key != _one("a.pdf", spec, 2).key
    assert len(red) > len(_one(red).key) == 16


def test_expected_tokens() -> None:
    """They follow the pixels, up to `max_pixels`; a file that is not read yet counts as a usual one."""
    assert _one(picture(size=(280, 280))).tokens == 100
    assert _one(picture(size=(280, 280)), ImagesSpec(columns=["image"], max_pixels=7840)).tokens == 10
    assert _one("a.png").tokens == USUAL_TOKENS
    one = _one(document(9), PdfSpec(column="image", pages=1)).tokens
    assert _one(document(9), PdfSpec(column="image", pages="1-3")).tokens == 3 * one
    assert _one(b"nonsense").tokens == USUAL_TOKENS


@pytest.mark.parametrize(("pages", "expected"), [(1, "1"), (2.0, "2"), ("1-3", "1-3"), ("all", "all")])
def test_pages_of_a_row(pages: Any, expected: str) -> None:
    """A row says its pages as numbers or texts."""
    assert _one("a.pdf", PdfSpec(column="image", pages=FromColumn(column="page")), pages).pages == expected


@pytest.mark.parametrize("pages", [None, 0, -1, 1.5, "", "one", "2-1", "1-", float("nan")])
def test_bad_pages_of_a_row(pages: Any) -> None:
    """What is no page fails the row."""
    with pytest.raises(RowRefusedError, match=r"prompt\.pdf: "):
        _one("a.pdf", PdfSpec(column="image", pages=FromColumn(column="page")), pages)


def test_lists() -> None:
    """A list is several images, and says which of them is wrong."""
    column = _column([["a.png", "b.png"]])
    assert [image.place for image in column.files(0, ["a.png", "b.png"])] == ["a.png", "b.png"]
    assert column.files(0, []) == []
    with pytest.raises(RowRefusedError, match="item 2 is null"):
        column.files(0, ["a.png", None])
