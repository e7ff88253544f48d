"""File formats by the ending of a name, URIs, the cache directory, and reading of small JSON files."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

Kind = Literal["Parquet", "CSV", "JSON Lines", "Arrow"]
ENDINGS: dict[str, Kind] = {
    ".parquet": "Parquet",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".jsonl": "JSON Lines",
    ".ndjson": "JSON Lines",
    ".json": "JSON Lines",
    ".arrow": "Arrow",
    ".arrows": "Arrow",
    ".feather": "Arrow",
    ".ipc": "Arrow",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4", ".br": "brotli"}
"""pyarrow's codecs, by the last ending of a file name.

Parquet files have no such ending, because they compress their data inside the file.
"""
LONGEST_LINE_BYTES = 64 << 20
"""Maximum length of a line in a text file, in bytes. A record with a longer line fails."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """The format of a file."""

    kind: Kind
    ending: str
    """Ending of the name, such as ".csv", without the ending of the compression."""
    compression: str | None
    """Name of pyarrow's codec; None for an uncompressed file."""


def known_format(path: str) -> FileFormat | None:
    """Return the format that the ending of a path names; None for an unknown ending."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    ending = suffixes[-1] if suffixes else ""
    kind = ENDINGS.get(ending)
    # A name such as x.parquet.gz is unknown, because Parquet compresses inside the file.
    if kind is None or (kind == "Parquet" and compression):
        return None
    return FileFormat(kind, ending, compression)


def format_of(path: str) -> FileFormat:
    """Return the format that the ending of a path names; Parquet for an unknown ending."""
    return known_format(path) or FileFormat("Parquet", "", None)


def is_below(path: str, directory: Path) -> bool:
    """Tell whether a path lies in a directory, at any depth, by comparing the two texts.

    An input may have many thousand files, and `Path.parents` takes several times as long.
    """
    return path.startswith(f"{directory}/")


def is_special(path: Path) -> bool:
    """Tell whether an existing path is a device, a pipe or a socket.

    Raises OSError if the path cannot be examined.
    """
    return not path.is_file() and not path.is_dir()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing or has none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def cache_directory() -> Path:
    """Return the directory of this package's files, in XDG_CACHE_HOME or ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # The XDG specification says that a relative path is ignored.
        base = Path.home() / ".cache"
    return base / "batchrunner"


_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Start of a URI. One slash is enough, because `Path` turns two slashes into one."""


def is_uri(text: str) -> bool:
    """Tell whether a text is a URI instead of a path on this machine."""
    return _URI.match(text) is not None
