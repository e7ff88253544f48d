"""What a file is, by its first bytes, and whether audio and video are whole, by the outer parts of the file.

No decoder is needed for these: the server has one. What is found here is what goes wrong most: another kind
of file, an error page, a file that was cut.
"""

import re
import struct
from collections.abc import Iterator
from typing import Final

from batchrunner.core.media import KindName
from batchrunner.input.media.bad_file import BadFileError

WAV: Final = "audio/wav"
_CHUNK_HEAD = 8
"""Bytes of the name and the size of a chunk of RIFF, or of a box of MP4."""
_UNKNOWN_SIZES = {0, 0xFFFFFFFF}
"""Sizes in WAV files of programs that write to a pipe."""
_ONLY_IMAGE = frozenset({"image"})
_ONLY_AUDIO, _ONLY_VIDEO, _BOTH = frozenset({"audio"}), frozenset({"video"}), frozenset({"audio", "video"})
_KNOWN: tuple[tuple[re.Pattern[bytes], str, frozenset[str]], ...] = tuple(
    (re.compile(start, re.DOTALL), media_type, kinds)
    for start, media_type, kinds in (
        (rb"\x89PNG", "image/png", _ONLY_IMAGE),
        (rb"\xff\xd8", "image/jpeg", _ONLY_IMAGE),
        (rb"RIFF.{4}WEBP", "image/webp", _ONLY_IMAGE),
        (rb"(RIFF|RF64).{4}WAVE", WAV, _ONLY_AUDIO),
        (rb"RIFF.{4}AVI ", "{kind}/x-msvideo", _BOTH),
        (rb"FORM.{4}AIF[FC]", "audio/aiff", _ONLY_AUDIO),
        (rb"fLaC", "audio/flac", _ONLY_AUDIO),
        (rb"ID3", "audio/mpeg", _ONLY_AUDIO),
        (rb"#!AMR", "audio/amr", _ONLY_AUDIO),
        (rb"\xff[\xf0\xf1\xf8\xf9]", "audio/aac", _ONLY_AUDIO),
        (rb"\xff[\xe2-\xe5\xf2-\xf5\xfa-\xfd][\x00-\xef]", "audio/mpeg", _ONLY_AUDIO),
        (rb".{4}ftyp(M4A |M4B |M4P |F4A )", "audio/mp4", _ONLY_AUDIO),
        (rb".{4}(ftyp|moov|mdat|free|skip|wide|pnot)", "{kind}/mp4", _BOTH),
        (rb"OggS", "{kind}/ogg", _BOTH),
        (rb"\x1a\x45\xdf\xa3", "{kind}/webm", _BOTH),  # Matroska too
        (rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "{kind}/x-ms-asf", _BOTH),
        (rb"FLV\x01", "video/x-flv", _ONLY_VIDEO),
        (rb"\x00\x00\x01[\xba\xb3]", "video/mpeg", _ONLY_VIDEO),
        (rb"\x47.{187}\x47", "video/mp2t", _ONLY_VIDEO),
        (rb"GIF8", "image/gif", _ONLY_VIDEO),
    )
)
"""First bytes of a file, its media type, and what it can be sent as. Frames of MPEG audio begin with eleven
bits of one, then say version, layer and bit rate; packets of a transport stream are 188 bytes apart."""


def sendable(content: bytes, kind: KindName) -> bytes:
    """Return a file of audio or video as it is sent, which is as it is; raises BadFileError."""
    media_type = media_type_of(content, kind)
    if media_type is None:
        raise BadFileError(f"is no {kind} file that is known here ({len(content)} bytes)")
    if media_type == WAV:
        _check_wav(content)
    elif media_type.endswith("/mp4"):
        _check_boxes(content)
    return content


def media_type_of(content: bytes, kind: KindName) -> str | None:
    """Return the media type of a file that can be sent as one of this kind; None for any other file."""
    found = next((known for known in _KNOWN if known[0].match(content)), None)
    return found[1].format(kind=kind) if found is not None and kind in found[2] else None


def seconds_of_wav(content: bytes) -> float | None:
    """Return how long a WAV file plays, in seconds; None for any other file, or where it does not say."""
    if media_type_of(content, "audio") != WAV:
        return None
    bytes_a_second = 0
    for name, start, size in _chunks(content):
        if name == b"fmt " and len(content) >= start + 12:
            bytes_a_second = struct.unpack_from("<I", content, start + 8)[0]
        elif name == b"data" and bytes_a_second:
            return min(size, len(content) - start) / bytes_a_second
    return None


def _chunks(content: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and size of each chunk of a WAV file, up to that of its samples."""
    at = 12
    while at + _CHUNK_HEAD <= len(content):
        name, size = struct.unpack_from("<4sI", content, at)
        yield name, at + _CHUNK_HEAD, size
        if name == b"data":
            return
        at += _CHUNK_HEAD + size + size % 2


def _check_wav(content: bytes) -> None:
    chunks = {name: (start, size) for name, start, size in _chunks(content)}
    if b"fmt " not in chunks or b"data" not in chunks:
        raise BadFileError("is a broken WAV file: it has no samples, or does not say how they are written")
    start, size = chunks[b"data"]
    if size not in _UNKNOWN_SIZES and start + size > len(content):
        raise BadFileError(
            f"is a broken WAV file: it ends after {len(content) - start} of {size} bytes of samples"
        )
    if start == len(content):
        raise BadFileError("is a WAV file without samples")


def _check_boxes(content: bytes) -> None:
    """Check that each box of an MP4 file is there whole, and one of them says what the file holds."""
    at, names = 0, set[bytes]()
    while at + _CHUNK_HEAD <= len(content):
        size, name = struct.unpack_from(">I4s", content, at)
        if size == 1 and at + 16 <= len(content):  # a long one says its size behind its name
            size = struct.unpack_from(">Q", content, at + _CHUNK_HEAD)[0]
        names.add(name)
        if size == 0:  # up to the end
            break
        at += max(size, _CHUNK_HEAD)
        if at > len(content):
            raise BadFileError(f"is a broken MP4 file: it ends after {len(content)} of {at} bytes")
    if not names & {b"moov", b"moof"}:
        raise BadFileError("is a broken MP4 file: it has no index (no box `moov`)")
