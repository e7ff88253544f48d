"""What the processes of the pool make of a row's images."""

from __future__ import annotations

import pytest

from batchrunner.core.media import MediaRules, PromptFile
from batchrunner.input.media import prepare as module
from batchrunner.input.media.prepare import prepare
from tests.support.pictures import document, picture

RULES = MediaRules("/", confined=False, allow_urls=False, max_pixels=None)


def _image(content: bytes, rules: MediaRules = RULES) -> PromptFile:
    return PromptFile(b"key", 1, "column 'image'", content, "", "all", rules)


def test_images_and_pages() -> None:
    """Each image is one file, and a document one for each page; their tokens are those of their pixels."""
    red = picture("red", (280, 280))
    pages = _image(document(3, (280, 280)), RULES._replace(dpi=72))
    found = prepare((_image(red), pages))
    assert isinstance(found, list)
    assert found[0] == ((red,), 100)
    assert (len(found[1][0]), found[1][1]) == (3, 300)


def test_bad_file() -> None:
    """The first bad image is the row's error."""
    assert prepare((_image(picture()), _image(b"no"))) == (
        "prompt.images: column 'image': is no image that can be read (2 bytes)"
    )


def test_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row may have so many images, and so many bytes of them."""
    pages = _image(document(4), RULES._replace(dpi=72))
    monkeypatch.setattr(module, "MOST_FILES", 3)
    assert "more than 3 images" in prepare((pages,))
    monkeypatch.undo()
    monkeypatch.setattr(module, "MOST_SENT_BYTES", 100)
    assert "MiB of them" in prepare((_image(picture()),))
