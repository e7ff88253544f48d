"""Files of audio and video for tests."""

from __future__ import annotations

import io
import math
import struct
import wave


def sound(seconds: float = 0.5, hertz: float = 440, rate: int = 16_000) -> bytes:
    """Return a WAV file with a tone."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        tone = (int(12_000 * math.sin(2 * math.pi * hertz * at / rate)) for at in range(int(seconds * rate)))
        file.writeframes(struct.pack(f"<{int(seconds * rate)}h", *tone))
    return stream.getvalue()


def box(name: bytes, content: bytes = b"") -> bytes:
    """Return a box of an MP4 file."""
    return struct.pack(">I4s", 8 + len(content), name) + content


def video(content: bytes = b"frames") -> bytes:
    """Return a file with the boxes of an MP4 file, and no frames that a decoder could read."""
    return box(b"ftyp", b"isom\0\0\0\0isom") + box(b"moov", b"index") + box(b"mdat", content)
