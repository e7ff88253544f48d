"""Recognizes the compression of an input file by its first bytes, and decompresses the file.

The ending of the file's name decides only if the first bytes do not show the compression.
"""

import gzip
import io
import shlex
import zlib
from typing import IO, Any, cast

import pyarrow as pa

from batchrunner.core.errors import InputError

HEAD_BYTES = 64
"""Number of bytes at the beginning of a file that are read to recognize its compression."""
BUFFER_BYTES = 1 << 20
"""Size in bytes of the buffer through which a file is read."""
DECOMPRESSION_ERRORS: tuple[type[Exception], ...] = (EOFError, zlib.error)
"""Errors of damaged gzip data, in addition to the errors of reading the file."""
_MAGIC = {b"\x1f\x8b\x08": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
"""Names of pyarrow's codecs, by the first bytes of a file."""
_BZ2 = b"BZh"
"""First bytes of a bzip2 file. A digit for the block size follows."""
_BZ2_BLOCK = b"1AY&SY"
"""Bytes of a bzip2 file after the digit for the block size: the beginning of the first block."""
_SKIPPABLE_FRAME = b"*M\x18"
"""Bytes 2 to 4 of a skippable frame of zstd or lz4, with which files of parallel compressors begin."""
_WORKBOOK = b"[Content_Types].xml"
"""Name of the first file in the ZIP archive of an Excel workbook."""
_COMMANDS = {
    "gzip": "gzip -dc", "zstd": "zstd -dc --long=31", "lz4": "lz4 -dc", "bz2": "bzip2 -dc",
    "xz": "xz -dc", "ZIP": "unzip -p",
}  # fmt: skip
"""Shell commands that print the content of a compressed file, by the kind of compression."""


def codec_of(head: bytes, codec: str | None) -> str | None:
    """Return pyarrow's codec for a file whose first bytes are `head`; None if the file is not compressed.

    `codec` is the codec by the ending of the file's name. It decides in two cases: a brotli file begins with
    no fixed bytes, and a skippable frame may begin a file of zstd or of lz4.
    """
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head.startswith(_BZ2) and head[4:].startswith(_BZ2_BLOCK):
        # Byte 4 of a bzip2 file is the digit for the block size.
        return "bz2"
    if head[1:].startswith(_SKIPPABLE_FRAME):
        # The first byte of a skippable frame may have any of 16 values.
        return codec or "zstd"
    return codec if codec == "brotli" else None


def refuse_archive(path: str, head: bytes) -> None:
    """Raise InputError for an archive, such as ZIP, and for a compression that pyarrow cannot read."""
    if head.startswith(b"PK\x03\x04") and _WORKBOOK in head:
        raise InputError(f"{path}: is an Excel workbook", hint="save it as CSV")
    if kind := _archive_kind(head):
        raise InputError(f"{path}: is a {kind} file", hint=unpacking(path, head))


def _archive_kind(head: bytes) -> str | None:
    if head.startswith(b"PK\x03\x04"):
        return "ZIP"
    return "xz" if head.startswith(b"\xfd7zXZ\0") else None


def unpacking(path: str, head: bytes) -> str | None:
    """Return a hint with the command that unpacks a compressed file; None if it is not compressed."""
    kind = _archive_kind(head) or codec_of(head, None)
    return kind and f"unpack it: {_COMMANDS[kind]} {shlex.quote(path)} > NEW_FILE"


def decompressed(stream: pa.NativeFile, codec: str | None) -> io.BufferedReader:
    """Return a buffered reader of the decompressed content of a stream.

    Reading raises the errors of the stream, ArrowException, or one of DECOMPRESSION_ERRORS.
    """
    content: Any = stream
    if codec == "gzip":
        # pyarrow's own codec for gzip fails if zero bytes follow the compressed data.
        content = gzip.GzipFile(fileobj=cast("IO[bytes]", stream))
    elif codec is not None:
        content = pa.CompressedInputStream(stream, codec)
    return io.BufferedReader(content, BUFFER_BYTES)
