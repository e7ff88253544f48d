"""Values of columns as files: equal ones have equal keys, and each has about the tokens it will take."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.media import PromptFile
from batchrunner.input.media.prepare import USUAL_TOKENS
from batchrunner.input.media.prompts import FileColumn
from batchrunner.job.prompt import ImagesSpec, PdfSpec
from batchrunner.job.sampling import FromColumn
from batchrunner.runner.stream import ProgramColumns
from tests.support.media import document, picture

BY_ROW = PdfSpec(column="file", pages=FromColumn(column="page"))


def _files(value: Any, spec: ImagesSpec | PdfSpec | None = None, pages: Any = None) -> list[PromptFile]:
    source = ProgramColumns(pa.table({"file": [value]}).schema)
    field = "pdf" if isinstance(spec, PdfSpec) else "images"
    return FileColumn("file", field, spec or ImagesSpec(columns=["file"]), source).files(0, value, pages)


def test_equal_files_have_equal_keys() -> None:
    """The key is of the content, or of the path; pages are part of it."""
    red = picture("red")
    same: list[list[Any]] = [[red, {"bytes": red, "path": "a.png"}], ["a.png", {"path": "a.png"}], ["b.png"]]
    keys = [{_files(value)[0].key for value in values} for values in same]
    keys += [{_files("a.pdf", BY_ROW, page)[0].key} for page in (1, 2)]
    assert [len(some) for some in keys] == [1] * 5
    assert len(set().union(*keys)) == 5


def test_expected_tokens() -> None:
    """They follow the pixels, up to `max_pixels`; a file that is not read yet counts as a usual one."""
    red = picture(size=(280, 280))
    small = ImagesSpec(columns=["file"], max_pixels=7840)
    found = [_files(*given)[0].tokens for given in ((red,), (red, small), ("a.png",), (b"nonsense",))]
    assert found == [100, 10, USUAL_TOKENS, USUAL_TOKENS]
    one, three = (_files(document(9), BY_ROW, pages)[0].tokens for pages in ("1", "1-3"))
    assert three == 3 * one


@pytest.mark.parametrize(("pages", "expected"), [(1, "1"), (2.0, "2"), ("1-3", "1-3"), ("all", "all")])
def test_pages_of_a_row(pages: Any, expected: str) -> None:
    """A row says its pages as numbers or texts."""
    assert _files("a.pdf", BY_ROW, pages)[0].pages == expected


@pytest.mark.parametrize("pages", [None, 0, -1, 1.5, "", "one", "2-1", "1-", float("nan")])
def test_bad_pages_of_a_row(pages: Any) -> None:
    """What is no page fails the row."""
    with pytest.raises(RowRefusedError, match=r"prompt\.pdf: "):
        _files("a.pdf", BY_ROW, pages)


def test_lists() -> None:
    """A list is several images, and says which of them is wrong."""
    assert [image.place for image in _files(["a.png", "b.png"])] == ["a.png", "b.png"]
    with pytest.raises(RowRefusedError, match="item 2 is null"):
        _files(["a.png", None])
