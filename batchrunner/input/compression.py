"""Recognizes the compression of an input file by its first bytes, and decompresses the file.

The ending of the file's name decides only if the first bytes do not.
"""

import gzip
import io
import shlex
import zlib
from typing import IO, Any, cast

import pyarrow as pa

from batchrunner.core.errors import InputError

HEAD_BYTES = 64
"""Number of bytes at the start of a file that are read to recognize its compression."""
BUFFER_BYTES = 1 << 20
"""Size in bytes of the read buffer."""
DECOMPRESSION_ERRORS: tuple[type[Exception], ...] = (EOFError, zlib.error)
"""Errors of damaged gzip data, besides pyarrow's own."""
_MAGIC = {b"\x1f\x8b\x08": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
"""Names of pyarrow's codecs, by the first bytes of a file."""
_BZ2 = b"BZh"
"""First bytes of a bzip2 file; a digit for the block size follows."""
_BZ2_BLOCK = b"1AY&SY"
"""First bytes of a block. In a bzip2 file, they follow the digit for the block size."""
_SKIPPABLE_FRAME = b"*M\x18"
"""Bytes 2 to 4 of a skippable frame. Parallel compressors begin zstd and lz4 files with such a frame."""
_WORKBOOK = b"[Content_Types].xml"
"""First file in the ZIP archive of an Excel workbook."""
_COMMANDS = {
    "gzip": "gzip -dc", "zstd": "zstd -dc --long=31", "lz4": "lz4 -dc", "bz2": "bzip2 -dc",
    "xz": "xz -dc", "ZIP": "unzip -p",
}  # fmt: skip
"""Shell commands that print the content of a compressed file."""


def codec_of(head: bytes, codec: str | None) -> str | None:
    """Return pyarrow's codec for a file that begins with `head`; None if the file is not compressed.

    `codec` is the codec that the file's name suggests. It decides for brotli, which has no fixed first bytes,
    and for a skippable frame, which may begin a zstd or an lz4 file.
    """
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head.startswith(_BZ2) and head[4:].startswith(_BZ2_BLOCK):
        # Byte 4 of a bzip2 file is a digit for the block size.
        return "bz2"
    if head[1:].startswith(_SKIPPABLE_FRAME):
        # The first byte of a skippable frame has 16 possible values.
        return codec or "zstd"
    return codec if codec == "brotli" else None


def refuse_archive(path: str, head: bytes) -> None:
    """Raise InputError for an archive, such as ZIP, or a compression that pyarrow cannot read."""
    if head.startswith(b"PK\x03\x04") and _WORKBOOK in head:
        raise InputError(f"{path}: is an Excel workbook", hint="save it as CSV")
    if kind := _archive_kind(head):
        raise InputError(f"{path}: is a {kind} file", hint=unpacking(path, head))


def _archive_kind(head: bytes) -> str | None:
    if head.startswith(b"PK\x03\x04"):
        return "ZIP"
    return "xz" if head.startswith(b"\xfd7zXZ\0") else None


def unpacking(path: str, head: bytes) -> str | None:
    """Return a hint with the command that decompresses the file; None if the file is not compressed."""
    kind = _archive_kind(head) or codec_of(head, None)
    return kind and f"unpack it: {_COMMANDS[kind]} {shlex.quote(path)} > NEW_FILE"


def decompressed(stream: pa.NativeFile, codec: str | None) -> io.BufferedReader:
    """Return a buffered reader that decompresses a stream.

    Reading raises the stream's own errors, ArrowException, or one of DECOMPRESSION_ERRORS.
    """
    content: Any = stream
    if codec == "gzip":
        # pyarrow's gzip codec fails if zero bytes follow the compressed data.
        content = gzip.GzipFile(fileobj=cast("IO[bytes]", stream))
    elif codec is not None:
        content = pa.CompressedInputStream(stream, codec)
    return io.BufferedReader(content, BUFFER_BYTES)
