"""What the processes of the pool make of a row's files: those of another kind, or cut, are told."""

from __future__ import annotations

import struct

import pytest

from batchrunner.core.media import KINDS, KindName, MediaRules, PromptFile
from batchrunner.input.media import prepare as module
from batchrunner.input.media.prepare import media_type_of, prepare, tokens_of_file
from tests.support.media import box, document, picture, sound, video

RULES = MediaRules("/", confined=False, allow_urls=False, max_pixels=None)


def _file(content: bytes, kind: KindName = "image", dpi: float | None = None) -> PromptFile:
    rules = RULES._replace(kind=kind, dpi=dpi)
    return PromptFile(b"key", 1, "column 'file'", content, "", "all", rules)


def test_images_and_pages() -> None:
    """Each image is one file, and a document one for each page; their tokens are those of their pixels."""
    red = picture("red", (280, 280))
    found = prepare((_file(red), _file(document(3, (280, 280)), dpi=72)))
    assert isinstance(found, list)
    assert found[0] == ((red,), 100)
    assert (len(found[1][0]), found[1][1]) == (3, 300)


def test_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row may have so many files, and so many bytes of them."""
    monkeypatch.setattr(module, "MOST_FILES", 3)
    assert "more than 3 files" in prepare((_file(document(4), dpi=72),))
    monkeypatch.setattr(module, "MOST_SENT_BYTES", 100)
    assert "MiB of them" in prepare((_file(picture()),))


@pytest.mark.parametrize(
    ("content", "audio", "as_video"),
    [
        (sound(), "audio/wav", None),
        (b"RF64\xff\xff\xff\xffWAVEds64", "audio/wav", None),
        (b"ID3\x04\0\0\0\0\0\0", "audio/mpeg", None),
        (b"\xff\xfb\x90\x64", "audio/mpeg", None),
        (b"\xff\xf1\x50\x80", "audio/aac", None),
        (b"\0\0\0\x20ftypM4A ", "audio/mp4", None),
        (b"OggS\0\x02", "audio/ogg", "video/ogg"),
        (video(), "audio/mp4", "video/mp4"),
        (b"RIFF\0\0\0\0AVI LIST", "audio/x-msvideo", "video/x-msvideo"),
        ((b"\x47" + bytes(187)) * 3, None, "video/mp2t"),
        (b"GIF89a", None, "image/gif"),
        (picture(kind="JPEG"), None, None),
        (b"<html>404 not found</html>", None, None),
        (b"\xff\xfe<\0?\0", None, None),  # text in UTF-16
        (b"", None, None),
    ],
)
def test_known_files(content: bytes, audio: str | None, as_video: str | None) -> None:
    """What a file is sent as; None for one that is no audio, or no video."""
    assert (media_type_of(content, "audio"), media_type_of(content, "video")) == (audio, as_video)


@pytest.mark.parametrize(
    ("content", "kind", "why"),
    [
        (b"no", "image", "is no image that can be read (2 bytes)"),
        (b"<html>", "audio", "is no audio file that is known here (6 bytes)"),
        (sound(), "video", "is no video file that is known here"),
        (sound()[:-1000], "audio", "ends after 15044 of 16044 bytes"),
        (video()[:-1], "video", f"ends after {len(video()) - 1} of {len(video())} bytes"),
    ],
)
def test_broken_files(content: bytes, kind: KindName, why: str) -> None:
    """The first bad file is the row's error."""
    told = prepare((_file(content, kind), _file(b"other", kind)))
    assert str(told).startswith(f"prompt.{KINDS[kind].field}: column 'file': is ")
    assert why in told


PIPED = sound()[:40] + struct.pack("<I", 0xFFFFFFFF) + sound()[44:]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (sound(), "audio"),
        (PIPED, "audio"),
        (sound()[:30], "audio"),
        (video(), "video"),
        (video() + struct.pack(">I4s", 0, b"mdat") + b"more, without a size", "video"),
        (video() + struct.pack(">I4sQ", 1, b"mdat", 20) + b"long", "video"),
        (box(b"ftyp", b"isom") + box(b"moof") + box(b"mdat", b"x"), "video"),
    ],
)
def test_whole_files_are_sent_as_they_are(content: bytes, kind: KindName) -> None:
    """So are those of programs that write to a pipe, and those whose last box has no size or a long one."""
    assert prepare((_file(content, kind),)) == [((content,), tokens_of_file(content, kind))]


def test_tokens_of_sound() -> None:
    """A WAV file says how long it plays, other files play as long as most of their size."""
    assert tokens_of_file(sound(2), "audio") == pytest.approx(50, abs=1)
    assert tokens_of_file(b"ID3" + bytes(31_997), "audio") == 50
