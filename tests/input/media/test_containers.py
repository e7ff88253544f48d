"""Files of audio and video are known by their first bytes; those that are cut are found."""

from __future__ import annotations

import struct

import pytest

from batchrunner.core.media import KindName
from batchrunner.input.media.bad_file import BadFileError
from batchrunner.input.media.containers import media_type_of, seconds_of_wav, sendable
from tests.support.pictures import picture
from tests.support.sounds import box, sound, video

RIFF = b"RIFF\0\0\0\0"
MPEG_TS = (b"\x47" + bytes(187)) * 3


@pytest.mark.parametrize(
    ("content", "audio", "as_video"),
    [
        (sound(), "audio/wav", None),
        (b"RF64\xff\xff\xff\xffWAVEds64", "audio/wav", None),
        (b"fLaC\0\0\0\x22", "audio/flac", None),
        (b"ID3\x04\0\0\0\0\0\0", "audio/mpeg", None),
        (b"\xff\xfb\x90\x64", "audio/mpeg", None),
        (b"\xff\xf3\x40\xc0", "audio/mpeg", None),
        (b"\xff\xf1\x50\x80", "audio/aac", None),
        (b"FORM\0\0\0\0AIFF", "audio/aiff", None),
        (b"#!AMR\n", "audio/amr", None),
        (b"\0\0\0\x20ftypM4A ", "audio/mp4", None),
        (b"OggS\0\x02", "audio/ogg", "video/ogg"),
        (b"\x1a\x45\xdf\xa3", "audio/webm", "video/webm"),
        (video(), "audio/mp4", "video/mp4"),
        (b"\0\0\0\x08wide\0\0\0\0mdat", "audio/mp4", "video/mp4"),
        (RIFF + b"AVI LIST", "audio/x-msvideo", "video/x-msvideo"),
        (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "audio/x-ms-asf", "video/x-ms-asf"),
        (b"FLV\x01\x05", None, "video/x-flv"),
        (b"\0\0\x01\xba\x44", None, "video/mpeg"),
        (MPEG_TS, None, "video/mp2t"),
        (b"GIF89a", None, "image/gif"),
        (RIFF + b"WEBPVP8 ", None, None),
        (picture(), None, None),
        (picture(kind="JPEG"), None, None),
        (b"<html>404 not found</html>", None, None),
        (b"%PDF-1.7", None, None),
        (b"\xff\xfe<\0?\0", None, None),  # text in UTF-16
        (b"", None, None),
        (b"\x47", None, None),
    ],
)
def test_known_files(content: bytes, audio: str | None, as_video: str | None) -> None:
    """What a file is sent as; None for one that is no audio, or no video."""
    assert (media_type_of(content, "audio"), media_type_of(content, "video")) == (audio, as_video)


@pytest.mark.parametrize(
    ("content", "kind", "why"),
    [
        (b"<html>", "audio", "is no audio file that is known here (6 bytes)"),
        (sound(), "video", "is no video file that is known here"),
        (picture(), "video", "is no video file"),
        (sound()[:-1000], "audio", "ends after 15000 of 16000 bytes of samples"),
        (sound(0), "audio", "without samples"),
        (sound()[:30], "audio", "broken WAV file"),
        (video()[:-1], "video", f"ends after {len(video()) - 1} of {len(video())} bytes"),
        (box(b"ftyp", b"isom") + box(b"mdat", b"x"), "video", "has no index"),
        (box(b"ftyp", b"isom"), "audio", "has no index"),
    ],
)
def test_broken_files(content: bytes, kind: KindName, why: str) -> None:
    """A file of another kind, and one that was cut, are told."""
    with pytest.raises(BadFileError) as caught:
        sendable(content, kind)
    assert why in str(caught.value)


def test_whole_files_are_sent_as_they_are() -> None:
    """So are those of programs that write to a pipe, and those whose last box has no size or a long one."""
    head = sound()[:40]
    piped = head + struct.pack("<I", 0xFFFFFFFF) + sound()[44:]
    endless = video() + struct.pack(">I4s", 0, b"mdat") + b"more"
    long = video() + struct.pack(">I4sQ", 1, b"mdat", 20) + b"long"
    in_pieces = box(b"ftyp", b"isom") + box(b"moof") + box(b"mdat", b"x")
    for content, kind in [(sound(), "audio"), (piped, "audio")]:
        assert sendable(content, "audio") == content, kind
    for content in (video(), endless, long, in_pieces):
        assert sendable(content, "video") == content


def test_seconds() -> None:
    """A WAV file says how long it plays."""
    assert seconds_of_wav(sound(2)) == pytest.approx(2)
    assert seconds_of_wav(video()) is None
    assert seconds_of_wav(sound()[:30]) is None
