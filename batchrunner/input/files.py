"""Finds the files of `input.path`, and the Hive partition columns in their paths."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from batchrunner.core.errors import InputError
from batchrunner.core.files import ENDINGS, is_special, known_format
from batchrunner.job.output import StorageSpec
from batchrunner.output.addresses import NEEDS_EXTRA, has_client, store_address

_COMMIT = re.compile(r"@[0-9a-f]{40}(?=/|$)")


def at_commit(fs: pafs.FileSystem, path: str) -> str:
    """Return a path with the commit that its branch has now, so that a later one does not change the input.

    `fs` is that of `hf://`, by huggingface_hub, which is imported by then. Raises what it does, also where
    there is no such data set, or the token may not see it.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 - an extra

    hub = fs.handler.fs
    found = hub.resolve_path(path)
    if not getattr(found, "revision", None):  # a bucket has no commits
        return path
    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    commit = api.repo_info(found.repo_id, repo_type=found.repo_type, revision=found.revision).sha
    kind = "" if found.repo_type == "model" else f"{found.repo_type}s/"
    return f"{kind}{found.repo_id}@{commit}/{found.path_in_repo}".rstrip("/")


def without_commit(path: str) -> str:
    """Return the path of a file of the Hub without its commit, and any other as it is."""
    return _COMMIT.sub("", path, count=1)


HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Directory value that stands for null."""


def find_files(
    given: Sequence[str], run: Path | None = None, storage: StorageSpec | None = None
) -> tuple[pafs.FileSystem, list[str]]:
    """Return the file system and the sorted paths of the files; raises InputError where there are none.

    Files in the run directory `run` are left out, unless a path names no others. `storage` says how object
    stores are reached.
    """
    found: dict[str, str] = {}
    located = [_locate(name, storage or StorageSpec()) for name in given]
    fs = located[0][0]
    for name, (its_fs, path) in zip(given, located, strict=True):
        if its_fs != fs:
            raise InputError(f"{name}: lies on another file system than {given[0]}: one input lies on one")
        try:
            local = isinstance(fs, pafs.LocalFileSystem)
            files, is_directory = _local_files(name, Path(path)) if local else _remote_files(fs, path)
        except InputError:
            raise
        except read_errors(fs) as failure:  # a name is too long, a directory not accessible
            raise InputError(f"{name}: {getattr(failure, 'strerror', None) or first_line(failure)}") from None
        files = {real: file for real, file in files.items() if run not in Path(real).parents} or files
        if is_directory:
            files = _of_one_kind(name, files)
        if not files:
            raise InputError(f"{name}: no Parquet file there, and no CSV, JSON Lines or Arrow file")
        found = files | found
    for file in found.values():
        try:
            file.encode()  # Arrow and run.json need it
        except UnicodeEncodeError:
            raise InputError(
                f"{os.fsencode(file)!r}: its name is not valid UTF-8", hint="rename it"
            ) from None
    return fs, sorted(found.values())


def read_errors(fs: pafs.FileSystem) -> tuple[type[Exception], ...]:
    """Return what a file system raises where it cannot read.

    That of another package (hf://, by huggingface_hub) raises what its network library does.
    """
    return (Exception,) if isinstance(fs, pafs.PyFileSystem) else (OSError, pa.ArrowException)


def _locate(given: str, storage: StorageSpec) -> tuple[pafs.FileSystem, str]:
    if "://" not in given:
        return pafs.LocalFileSystem(), given
    address = store_address(given)
    if address is not None:
        if not has_client():
            raise InputError(f"{address}: object stores need a package", hint=NEEDS_EXTRA)
        from batchrunner.input.object_files import ObjectFiles  # noqa: PLC0415 - an extra

        files = pafs.PyFileSystem(ObjectFiles(address.scheme, storage))
        return files, f"{address.bucket}/{address.key}".rstrip("/")
    try:
        fs, path = pafs.FileSystem.from_uri(given)
        return fs, at_commit(fs, path) if given.startswith("hf://") else path
    except Exception as failure:  # noqa: BLE001 - hf:// and others are opened by packages with their own errors
        raise InputError(
            f"{given}: cannot be opened: {first_line(failure)}",
            hint="give a path on this machine, or one that begins with s3://, gs://, az://, hdfs:// or hf://",
        ) from None


def _local_files(given: str, path: Path) -> tuple[dict[str, str], bool]:
    """Return files by their real paths, as one may have several, and whether it is a directory."""
    if path.is_dir():
        return dict(_local_files_below(path)), True
    if path.exists():
        files = [path]
        if is_special(path):
            raise InputError(
                f"{path}: is a device or a pipe", hint="save it to a file: it is read several times"
            )
    elif glob.has_magic(given):
        files = [p for p in map(Path, glob.glob(given, recursive=True)) if p.is_file()]  # noqa: PTH207 - `given` may be absolute
    else:
        begins = None if path.is_absolute() else f"relative paths begin in {Path.cwd()}"
        raise InputError(f"{given}: no such file or directory", hint=begins)
    return {str(file.parent.resolve() / file.name): str(file) for file in files}, False


def _local_files_below(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield files by their real paths; a directory that may not be looked into has none."""

    def refuse(failure: OSError) -> None:
        if not isinstance(failure, PermissionError):
            raise failure

    for parent, _, names in os.walk(directory, onerror=refuse):
        place = Path(parent)
        real = place.resolve()
        for name in names:
            if not _hidden(place.relative_to(directory) / name):
                yield str(real / name), str(place / name)


def _of_one_kind(given: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return those files of a directory that are input: Parquet files, or else those of one other kind.

    Beside Parquet files there may be descriptions in JSON, or a list in CSV. Raises InputError where there
    are several other kinds.
    """
    kinds: dict[str, dict[str, str]] = {}
    for real, path in files.items():
        if found := known_format(path):
            kinds.setdefault(found.kind, {})[real] = path
    if "Parquet" in kinds or len(kinds) < 2:  # noqa: PLR2004
        return kinds.get("Parquet") or next(iter(kinds.values()), {})
    example = next(ending for ending, kind in ENDINGS.items() if kind == min(kinds))
    raise InputError(
        f"{given}: has {' and '.join(sorted(kinds))} files",
        hint=f"name those of one kind, such as {given}/**/*{example}",
    )


def _remote_files(fs: pafs.FileSystem, path: str) -> tuple[dict[str, str], bool]:
    kind = fs.get_file_info(path).type
    files: list[str] = []
    if kind == pafs.FileType.File:
        files = [path]
    elif kind == pafs.FileType.Directory:
        found = _files_below(fs, path)
        files = [file for file in found if not _hidden(PurePosixPath(file.removeprefix(path)))]
    elif "*" in path:  # the only magic character in a URI, where `?` begins the query
        pattern = re.escape(path).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        top = path.partition("*")[0].rpartition("/")[0]
        files = [file for file in _files_below(fs, top) if re.fullmatch(pattern, file)]
    return {file: file for file in files}, kind == pafs.FileType.Directory


def _files_below(fs: pafs.FileSystem, directory: str) -> list[str]:
    selector = pafs.FileSelector(directory, allow_not_found=True, recursive=True)
    return [entry.path for entry in fs.get_file_info(selector) if entry.is_file]


def _hidden(path: PurePath) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def hive_partitions(path: str) -> dict[str, str | None]:
    """Return the partition columns in a file's path, from directories named `name=value`; None is null."""
    pairs = (part.split("=", 1) for part in Path(path).parts[:-1] if "=" in part)
    return {unquote(key): None if value == HIVE_NULL else unquote(value) for key, value in pairs}


def partition_types(partitions: Sequence[dict[str, str | None]]) -> dict[str, pa.DataType]:
    """Return the type of each partition column that all files have: int64 for whole numbers, else string."""
    types: dict[str, pa.DataType] = {}
    for name in sorted(set(partitions[0]).intersection(*partitions)):
        values = [value for of_file in partitions if (value := of_file[name]) is not None]
        whole = bool(values) and all(re.fullmatch(r"-?\d{1,18}", value) for value in values)
        types[name] = pa.int64() if whole else pa.string()
    return types


def first_line(failure: BaseException) -> str:
    """Return the first line of an error's text; Arrow may add a stack trace below it."""
    return str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__


def join_paths(path: str | Sequence[str]) -> str:
    """Return `input.path`, which may be a list, as one text for messages."""
    return path if isinstance(path, str) else ", ".join(path)
