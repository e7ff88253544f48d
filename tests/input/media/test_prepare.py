"""A row's files: images and pages as every model takes them, their tokens, and what is wrong with them."""

import struct
import zlib
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.media import BadFileError, KindName, MediaRules, PromptFile
from batchrunner.input.media import prepare as module
from batchrunner.input.media.pictures import page_images, sendable
from batchrunner.input.media.prepare import prepare
from batchrunner.input.media.prompts import FileColumn
from batchrunner.job.prompt import ImagesSpec, PdfSpec
from batchrunner.job.sampling import FromColumn
from batchrunner.runner.stream import ProgramColumns
from tests.support.media import document, file_of, opened, picture, sound, video

RULES = MediaRules("/", confined=False, allow_urls=False, max_pixels=None)


def _file(content: bytes, kind: KindName = "image", dpi: float | None = None) -> PromptFile:
    rules = RULES._replace(kind=kind, dpi=dpi)
    return PromptFile(b"key", 1, "column 'file'", content, "", "all", rules)


def test_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row may have so many files, and so many bytes of them."""
    monkeypatch.setattr(module, "MOST_FILES", 3)
    assert "more than 3 files" in prepare((_file(document(4), dpi=72),))
    monkeypatch.setattr(module, "MOST_SENT_BYTES", 100)
    assert "MiB of files" in prepare((_file(picture()),))


def test_a_broken_file() -> None:
    """The first bad file is the row's error; sound and videos are sent as they are."""
    told = prepare((_file(sound(), "audio"), _file(b"no"), _file(b"other")))
    assert told == "prompt.images: column 'file': cannot be read as an image (2 bytes)"
    assert prepare((_file(sound(), "audio"), _file(video(), "video"))) == [((sound(),), 25), ((video(),), 1)]


RED, WHITE = (255, 0, 0), (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_good_file_stays(kind: str) -> None:
    """A file that every model takes is sent as it is."""
    content = picture(kind=kind)
    assert sendable(content, None) is content
    assert sendable(content, 64 * 48) is content


def _near(one: Any, other: tuple[int, ...]) -> bool:
    return all(abs(a - b) < 12 for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_larger_image_is_made_smaller(kind: str) -> None:
    """It keeps its proportions and its format, and has max_pixels at most."""
    small = opened(sendable(picture(size=(4000, 1000), kind=kind), 100_000))
    assert small.format == kind
    assert 90_000 < small.width * small.height <= 100_000
    assert small.width == pytest.approx(4 * small.height, rel=0.02)
    assert _near(small.getpixel((5, 5)), RED)
    assert opened(sendable(picture(size=(3000, 1), kind=kind), 784)).size[1] == 1


@pytest.mark.parametrize("most", [None, 784])
def test_exif_orientation(most: int | None) -> None:
    """A photo that says it lies on its side is turned upright."""
    photo = Image.new("RGB", (40, 20), "blue")
    photo.paste("red", (0, 0, 20, 20))  # the left half; it is the top when turned clockwise
    exif = Image.Exif()
    exif[0x0112] = 6
    found = opened(sendable(file_of(photo, "JPEG", exif=exif, quality=95), most))
    assert found.size[0] < found.size[1]
    assert _near(found.getpixel((found.width // 2, 3)), RED)
    assert found.getexif().get(0x0112, 1) == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (file_of(Image.new("CMYK", (30, 30), (0, 255, 255, 0)), "JPEG", quality=95), RED),
        (file_of(Image.new("I;16", (30, 30), 0x8000)), (127, 127, 127)),
        (file_of(Image.new("RGBA", (30, 30), (255, 0, 0, 0))), WHITE),
        (file_of(Image.new("RGB", (30, 30), "red"), "PNG", transparency=RED), WHITE),
    ],
    ids=["cmyk", "16 bits", "clear", "one clear"],
)
def test_other_modes(content: bytes, expected: tuple[int, ...]) -> None:
    """What models do not take becomes RGB or grey of 8 bits, on white where it is transparent."""
    found = opened(sendable(content, None))
    assert found.mode in {"RGB", "L"}
    assert _near(found.convert("RGB").getpixel((9, 9)), expected)


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_first_frame_of_animation(kind: str) -> None:
    """An animated file is its first frame."""
    frames = [Image.new("RGB", (30, 30), colour) for colour in ("red", "blue")]
    found = opened(sendable(file_of(frames[0], kind, save_all=True, append_images=frames[1:]), None))
    assert getattr(found, "n_frames", 1) == 1
    assert _near(found.convert("RGB").getpixel((9, 9)), RED)


def _huge(width: int, height: int) -> bytes:
    """Return a PNG file of a few bytes that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"hello", "cannot be read as an image (5 bytes)"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read as an image"),
        (picture(size=(300, 300))[:-40], "is a broken image"),
        (picture(size=(300, 300), kind="JPEG")[:400], "is a broken image"),
        (_huge(10_000, 9_000), "pixels) exceeds limit"),
        (_huge(10, 9_000), "is a broken image"),
        (file_of(Image.new("F", (9, 9), 0.5), "TIFF"), "32-bit pixels"),
    ],
    ids=["text", "svg", "cut png", "cut jpeg", "bomb", "short", "floats"],
)
def test_bad_files(content: bytes, problem: str) -> None:
    """A file that is no good image says what it is; none is decoded that would fill the memory."""
    for most in (None, 1000):
        with pytest.raises(BadFileError) as failure:
            sendable(content, most)
        assert problem in str(failure.value)


@pytest.mark.parametrize(
    ("pages", "tones"),
    [("all", [40, 80, 120]), ("2", [80]), ("3,1", [120, 40]), ("2-99", [80, 120])],
)
def test_pages(pages: str, tones: list[int]) -> None:
    """All pages, one, or ranges in the order asked for; a range ends where the document does."""
    found = [opened(page).convert("L") for page in page_images(document(3), pages, 72, None)]
    assert [page.getpixel((50, 50)) for page in found] == pytest.approx(tones, abs=3)


ENCRYPTED = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
    b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>endobj\n"
    b"4 0 obj<</Filter/Standard/V 1/R 2/P -4/O<" + b"41" * 32 + b">/U<" + b"42" * 32 + b">>>endobj\n"
    b"trailer<</Root 1 0 R/Encrypt 4 0 R/ID[<41><41>]/Size 5>>\n%%EOF\n"
)
"""A document whose password is not empty."""


@pytest.mark.parametrize(
    ("content", "pages", "problem"),
    [
        (picture(), "1", "cannot be read as a PDF document"),
        (document(2)[:200], "1", "cannot be read as a PDF document"),
        (ENCRYPTED, "all", "Incorrect password"),
        (document(2), "1,5-9", "has no page 5, but only 2 pages"),
    ],
    ids=["picture", "cut", "encrypted", "range"],
)
def test_bad_documents(content: bytes, pages: str, problem: str) -> None:
    """A broken document, or a page that it lacks, is said."""
    with pytest.raises(BadFileError) as failure:
        list(page_images(content, pages, 72, None))
    assert problem in str(failure.value)


BY_ROW = PdfSpec(column="file", pages=FromColumn(column="page"))


def _files(value: Any, spec: ImagesSpec | PdfSpec | None = None, pages: Any = None) -> list[PromptFile]:
    source = ProgramColumns(pa.table({"file": [value]}).schema)
    field = "pdf" if isinstance(spec, PdfSpec) else "images"
    return FileColumn("file", field, spec or ImagesSpec(columns=["file"]), source).files(0, value, pages)


def test_equal_files_have_equal_keys() -> None:
    """The key is of the content, or of the path; pages are part of it, however many a row names."""
    red = picture("red")
    same: list[list[Any]] = [[red, {"bytes": red, "path": "a.png"}], ["a.png", {"path": "a.png"}], ["b.png"]]
    keys = [{_files(value)[0].key for value in values} for values in same]
    keys += [{_files("a.pdf", BY_ROW, page)[0].key} for page in (1, f"2-{'9' * 30}")]
    assert [len(some) for some in keys] == [1] * 5
    assert len(set().union(*keys)) == 5


@pytest.mark.parametrize("pages", [None, 0, -1, 1.5, "", "one", "2-1", "1-", float("nan")])
def test_bad_pages_of_a_row(pages: Any) -> None:
    """What is no page fails the row."""
    with pytest.raises(RowRefusedError, match=r"prompt\.pdf: "):
        _files("a.pdf", BY_ROW, pages)
