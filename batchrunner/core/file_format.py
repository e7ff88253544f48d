"""A file's format, told from the ending of its name."""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

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
