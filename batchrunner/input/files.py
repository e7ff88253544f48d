"""An input path, or several, → the files there are, and what their paths say of their rows."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from batchrunner.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def discover(given: Sequence[str], run: Path | None = None) -> tuple[pafs.FileSystem, list[str]]:
    """Return where the files lie, and their sorted paths; raises InputError where there are none.

    Files under `run`, the run's own directory, are left out, unless a path names nothing else.
    """
    found: dict[str, str] = {}
    places = [_place(name) for name in given]
    fs = places[0][0]
    for name, (own_fs, path) in zip(given, places, strict=True):
        if own_fs != fs:
            raise InputError(f"{name}: lies on another file system than {given[0]}: one input lies on one")
        try:
            local = isinstance(fs, pafs.LocalFileSystem)
            files = _local_files(name, Path(path)) if local else _remote_files(name, fs, path)
        except (OSError, pa.ArrowException) as failure:  # a name that is too long, a place we may not enter
            raise InputError(f"{name}: {getattr(failure, 'strerror', None) or first_line(failure)}") from None
        others = {place: file for place, file in files.items() if run not in Path(place).parents}
        for place, file in (others or files).items():
            _check_name(file)
            found.setdefault(place, file)
    return fs, sorted(found.values())


def _check_name(file: str) -> None:
    """Raise InputError where a name on disk is no text: Arrow and our own records take nothing else."""
    try:
        file.encode()
    except UnicodeEncodeError:
        raise InputError(f"{os.fsencode(file)!r}: its name is not valid UTF-8: rename it") from None


def _place(given: str) -> tuple[pafs.FileSystem, str]:
    if "://" not in given:
        return pafs.LocalFileSystem(), given
    try:
        fs, path = pafs.FileSystem.from_uri(given)
    except (OSError, pa.ArrowException) as failure:
        raise InputError(f"{given}: cannot be opened: {first_line(failure)}") from None
    return fs, path


def _local_files(given: str, path: Path) -> dict[str, str]:
    """Return files by where they lie: the name of a directory may be written in several ways."""
    path = path.expanduser()
    if path.is_dir():
        files = [p for p in path.rglob("*.parquet") if not _hidden(p.relative_to(path))]
        if not files:
            raise InputError(f"{given}: no *.parquet file in this directory")
    elif path.exists():
        files = [path]
    elif glob.has_magic(str(path)):
        files = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]  # noqa: PTH207 - `given` may be absolute
        if not files:
            raise InputError(f"{given}: no file matches")
    else:
        raise InputError(f"{given}: no such file or directory")
    return {str(file.parent.resolve() / file.name): str(file) for file in files}


def _remote_files(given: str, fs: pafs.FileSystem, path: str) -> dict[str, str]:
    kind = fs.get_file_info(path).type
    files: list[str] = []
    if kind == pafs.FileType.File:
        files = [path]
    elif kind == pafs.FileType.Directory:
        below = [file for file in _below(fs, path) if file.endswith(".parquet")]
        files = [file for file in below if not _hidden(PurePosixPath(file.removeprefix(path)))]
    elif "*" in path:  # all that a glob can have in a URI, where a `?` begins the query
        pattern = re.escape(path).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        top = path.partition("*")[0].rpartition("/")[0]
        files = [file for file in _below(fs, top) if re.fullmatch(pattern, file)]
    if not files:
        raise InputError(f"{given}: no Parquet file there")
    return {file: file for file in files}


def _below(fs: pafs.FileSystem, directory: str) -> list[str]:
    selector = pafs.FileSelector(directory, allow_not_found=True, recursive=True)
    return [entry.path for entry in fs.get_file_info(selector) if entry.is_file]


def _hidden(path: PurePath) -> bool:
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
