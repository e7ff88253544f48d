"""An input path, or several, → the files there are, and what their paths say of their rows."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from batchrunner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def discover(paths: list[str]) -> tuple[pafs.FileSystem, list[str]]:
    """Return the files, in sorted order, and where they lie; raises InputError where there are none."""
    if any("://" in path for path in paths):
        return _discover_remote(paths)
    found: set[str] = set()
    for given in paths:
        try:
            found |= _local_files(given)
        except OSError as failure:  # a name that is too long, a directory that may not be entered
            raise InputError(f"{given}: {failure.strerror}") from None
    return pafs.LocalFileSystem(), sorted(found)


def _local_files(given: str) -> set[str]:
    path = Path(given).expanduser()
    if path.is_dir():
        files = {str(p) for p in path.rglob("*.parquet") if not _hidden(p.relative_to(path))}
        if not files:
            raise InputError(f"{given}: no *.parquet file in this directory")
    elif path.exists():
        files = {str(path)}
    elif glob.has_magic(given):
        files = {p for p in glob.glob(str(path), recursive=True) if Path(p).is_file()}  # noqa: PTH207 - `given` may be absolute
        if not files:
            raise InputError(f"{given}: no file matches")
    else:
        raise InputError(f"{given}: no such file or directory")
    return files


def _discover_remote(paths: list[str]) -> tuple[pafs.FileSystem, list[str]]:
    found: set[str] = set()
    for given in paths:
        try:
            fs, path = pafs.FileSystem.from_uri(given)
            info = fs.get_file_info(path)
            if info.type == pafs.FileType.Directory:
                entries = fs.get_file_info(pafs.FileSelector(path, recursive=True))
                files = {e.path for e in entries if e.path.endswith(".parquet") and e.is_file}
            else:
                files = {path} if info.type == pafs.FileType.File else set()
        except (OSError, pa.ArrowException) as failure:
            raise InputError(f"{given}: cannot be opened: {first_line(failure)}") from None
        if not files:
            raise InputError(f"{given}: no Parquet file there")
        found |= files
    return fs, sorted(found)


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def hive_partitions(path: str) -> dict[str, str | None]:
    """Return the columns that a file's path holds, `name=value` a directory."""
    pairs = (part.split("=", 1) for part in Path(path).parts[:-1] if "=" in part)
    return {unquote(key): None if value == HIVE_NULL else unquote(value) for key, value in pairs}


def partition_types(partitions: Sequence[dict[str, str | None]]) -> dict[str, pa.DataType]:
    """Columns that every file has a partition value for: int64 where all are whole numbers, else string."""
    types: dict[str, pa.DataType] = {}
    for name in sorted(set(partitions[0]).intersection(*partitions)):
        values = [value for of_file in partitions if (value := of_file[name]) is not None]
        whole = bool(values) and all(re.fullmatch(r"-?\d{1,18}", value) for value in values)
        types[name] = pa.int64() if whole else pa.string()
    return types


def first_line(failure: BaseException) -> str:
    """Say what went wrong without the stack that Arrow may add."""
    return str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__


def shown(path: str | Sequence[str]) -> str:
    """Write an input path, or a list of them, as a person did."""
    return path if isinstance(path, str) else ", ".join(path)
