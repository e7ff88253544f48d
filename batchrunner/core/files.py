"""Files by their names, and files that are read whole: formats, URIs, JSON objects, the cache directory."""

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
"""Names of pyarrow's codecs, by the ending that comes last; Parquet compresses by itself."""

LONGEST_LINE_BYTES = 64 << 20
"""Longest line of a text file that is read; a record with a longer one fails."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """The format of a file."""

    kind: Kind
    ending: str
    """The ending without that of the compression, such as ".csv"."""
    compression: str | None
    """Name of pyarrow's codec; None for a file that is not compressed."""


def known_format(path: str) -> FileFormat | None:
    """Return the format that the ending of a path names; None for any other ending."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    ending = "".join((suffixes[:-1] if compression else suffixes)[-1:])
    kind = ENDINGS.get(ending)
    if kind is None or (kind == "Parquet" and compression):
        return None
    return FileFormat(kind, ending, compression)


def format_of(path: str) -> FileFormat:
    """Return the format of a file that was named: Parquet where its ending says nothing."""
    return known_format(path) or FileFormat("Parquet", "", None)


def is_special(path: Path) -> bool:
    """Tell whether a path that is there is a device, a pipe or a socket; raises OSError."""
    return not path.is_file() and not path.is_dir()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} where the file is missing or holds no valid JSON object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def cache_directory() -> Path:
    """Return the directory of our files, in XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "batchrunner"


_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Beginning of a URI; a `Path` of it has one slash only."""


def is_uri(given: str) -> bool:
    """Tell whether a text is a URI and no path on this machine."""
    return _URI.match(given) is not None
