"""Finds and opens the files of `input.path`, and notices if a file changes during the run."""

import contextlib
import glob
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path, PurePath, PurePosixPath
from typing import Any
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from batchrunner.core.errors import (
    BatchrunError,
    InputChangedError,
    InputError,
    StorageError,
    first_line,
    or_away,
)
from batchrunner.core.files import (
    COMPRESSIONS,
    ENDINGS,
    FileFormat,
    format_of,
    is_below,
    is_special,
    known_format,
)
from batchrunner.input.compression import (
    DECOMPRESSION_ERRORS,
    HEAD_BYTES,
    codec_of,
    decompressed,
    refuse_archive,
    unpacking,
)
from batchrunner.input.parquet_copy import NOTES, PROBLEM, write_parquet
from batchrunner.input.spread import spread_blocks
from batchrunner.job.output import StorageSpec
from batchrunner.job.prompt import BatchRules
from batchrunner.job.spec import InputSpec
from batchrunner.output.addresses import check_client, store_address
from batchrunner.output.files import make_directory, one_process_at_a_time, whole_file, writing
from batchrunner.output.run_json import holds_run

log = logging.getLogger(__name__)

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Name in a Hive partition directory that stands for null; Hive and Spark write it."""
READ_BUFFER_BYTES = 1 << 20
"""Size in bytes of the buffers through which files are read."""
SAMPLE_BLOCKS = 64
"""Number of blocks covered by the digest of a Parquet file of more than 1 MiB.

The last block is the end of the file: the footer in it changes with the content. The digest of any other file
covers all its bytes.
"""
SAMPLE_BYTES = 16 << 10
"""Size in bytes of each block that the digest of a large Parquet file covers."""
_DIGEST = b"batchrunner.digest"
"""Metadata key in a Parquet copy for the digest of the original file."""
_NOTES_DECODER = msgspec.json.Decoder(list[str])
"""Decoder of the notes in a Parquet copy."""
COPY_TRIES = 3
"""Maximum number of attempts to make a Parquet copy, because other processes may delete its directory."""
_COMMIT = re.compile(r"@[0-9a-f]{40}(?=/|$)")
"""Commit in a path on the Hugging Face Hub, such as `datasets/OWNER/NAME@COMMIT/data.parquet`."""


def at_commit(fs: pafs.FileSystem, path: str) -> str:
    """Pin a path on the Hugging Face Hub to the current commit of its branch, and return it.

    Later commits then do not change the input. `fs` is the file system of `hf://`. Raises errors of
    huggingface_hub, for example if the dataset does not exist or the token gives no access.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 - an extra

    hub = fs.handler.fs
    resolved = hub.resolve_path(path)
    if not getattr(resolved, "revision", None):
        # A bucket of the Hub has no commits.
        return path
    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    commit = api.repo_info(resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision).sha
    kind = "" if resolved.repo_type == "model" else f"{resolved.repo_type}s/"
    return f"{kind}{resolved.repo_id}@{commit}/{resolved.path_in_repo}".rstrip("/")


def without_commit(path: str) -> str:
    """Return a path on the Hugging Face Hub without its commit; any other path unchanged."""
    return _COMMIT.sub("", path, count=1)


def find_files(
    paths: Sequence[str], run: Path | None = None, storage: StorageSpec | None = None
) -> tuple[pafs.FileSystem, list[str]]:
    """Return the file system and the sorted paths of the input files; raise InputError if there are none.

    `paths` are files, directories and globs. Files in the run directory `run` are skipped, unless a path
    matches only such files. `storage` has the settings of object stores.
    """
    # The keys are resolved paths, so a file that is found by several paths is read once.
    files_by_path: dict[str, str] = {}
    locations = [_locate(name, storage or StorageSpec()) for name in paths]
    fs = locations[0][0]
    for name, (file_system, path) in zip(paths, locations, strict=True):
        if file_system != fs:
            raise InputError(
                f"{name}: is on another file system than {paths[0]}",
                hint="give files of one file system",
            )
        try:
            if isinstance(fs, pafs.LocalFileSystem):
                files, is_directory = _local_files(name, Path(path))
            else:
                files, is_directory = _remote_files(fs, path)
        except InputError:
            # This error names the path already. `read_errors` may contain its base class Exception.
            raise
        except read_errors(fs) as failure:
            # The path exists but cannot be read, for example for lack of permission.
            raise _inaccessible(name, failure) from None
        outside_run = {real: file for real, file in files.items() if not (run and is_below(real, run))}
        # If only files of the run match, the user wants them, for example to read its results again.
        files = outside_run or files
        if is_directory:
            files = _of_one_kind(name, files)
        if not files:
            raise InputError(f"{name}: found no Parquet, CSV, JSON Lines or Arrow file")
        # If a file is found by several names, the first one is kept.
        files_by_path = files | files_by_path
    for file in files_by_path.values():
        try:
            # Arrow and run.json need valid UTF-8.
            file.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"{os.fsencode(file)!r}: the name of the file is not valid UTF-8", hint="rename the file"
            ) from None
    return fs, sorted(files_by_path.values())


def names_run(path: str, storage: StorageSpec) -> bool:
    """Tell whether a path is a run directory; raise InputError if the path is inaccessible."""
    if not store_address(path):
        return "://" not in path and holds_run(Path(path))
    fs, directory = _locate(path, storage)
    try:
        return bool(fs.get_file_info(f"{directory}/run.json").type == pafs.FileType.File)
    except read_errors(fs) as failure:
        raise _inaccessible(path, failure) from None


def _inaccessible(name: str, failure: Exception) -> BatchrunError:
    reason = getattr(failure, "strerror", None) or first_line(failure)
    return or_away(InputError(f"{name}: {reason}"), failure)


def read_errors(fs: pafs.FileSystem) -> tuple[type[Exception], ...]:
    """Return the exceptions that a file system raises if it cannot read.

    A file system of another package, such as huggingface_hub's for hf://, raises exceptions of its network
    library, which may be of any class.
    """
    return (Exception,) if isinstance(fs, pafs.PyFileSystem) else (OSError, pa.ArrowException)


def _locate(path_or_uri: str, storage: StorageSpec) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a path or URI of the job, and the path on it."""
    if "://" not in path_or_uri:
        return pafs.LocalFileSystem(), path_or_uri
    # Object stores are read by obstore, all other schemes by pyarrow.
    address = store_address(path_or_uri)
    if address is not None:
        check_client(address, InputError)
        from batchrunner.input.object_files import ObjectFiles  # noqa: PLC0415 - an extra

        files = pafs.PyFileSystem(ObjectFiles(address.scheme, storage))
        return files, f"{address.bucket}/{address.key}".rstrip("/")
    try:
        fs, path = pafs.FileSystem.from_uri(path_or_uri)
        return fs, at_commit(fs, path) if path_or_uri.startswith("hf://") else path
    except Exception as failure:  # noqa: BLE001 - the package of a URI's scheme may raise any error
        raise InputError(
            f"{path_or_uri}: cannot be opened: {first_line(failure)}",
            hint="give a path on this machine, or one that begins with s3://, gs://, az://, hdfs:// or hf://",
        ) from None


def _local_files(pattern: str, path: Path) -> tuple[dict[str, str], bool]:
    """Return the files of a local path or glob, and whether the path is a directory.

    The keys are the paths with the symbolic links of directories resolved, so that a file is read once
    although several paths lead to its directory. A link that is itself the file is not resolved.
    """
    is_directory = path.is_dir()
    if is_directory:
        data_files = (file for file in path.rglob("*") if known_format(file.name))
        files = [file for file in data_files if not (_is_hidden(file.relative_to(path)) or file.is_dir())]
    elif path.exists():
        if is_special(path):
            raise InputError(
                f"{path}: is a device or a pipe",
                hint="save the data to a file, which can be read several times",
            )
        files = [path]
    elif glob.has_magic(pattern):
        files = [p for p in map(Path, glob.glob(pattern, recursive=True)) if p.is_file()]  # noqa: PTH207 - it may be absolute
    else:
        hint = None if path.is_absolute() else f"relative paths are looked up in {Path.cwd()}"
        raise InputError(f"{pattern}: no such file or directory", hint=hint)
    # Only the directory is resolved: two links in it that lead to the same file are two input files.
    real_directories = {directory: directory.resolve() for directory in {file.parent for file in files}}
    return {str(real_directories[file.parent] / file.name): str(file) for file in files}, is_directory


def _of_one_kind(directory: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return the Parquet files of a directory, or else its files, which must be of one kind.

    Files of other kinds beside Parquet files, such as a description in JSON, are ignored with a warning.
    Raises InputError if there are several kinds and none is Parquet.
    """
    files_by_kind: dict[str, dict[str, str]] = {}
    for real_path, path in files.items():
        file_format = known_format(path)
        if file_format is not None:
            files_by_kind.setdefault(file_format.kind, {})[real_path] = path
    if len(files_by_kind) < 2:  # noqa: PLR2004
        return next(iter(files_by_kind.values()), {})
    parquet_files = files_by_kind.pop("Parquet", None)
    if parquet_files is not None:
        ignored = sorted(path for other_files in files_by_kind.values() for path in other_files.values())
        # A run writes files such as report.json beside its Parquet files. These need no warning.
        example = next((path for path in ignored if not holds_run(Path(path).parent)), None)
        if example is not None:
            log.warning(
                "%s: only the Parquet files are read; files of other kinds, such as %s, are ignored",
                directory, example,
            )  # fmt: skip
        return parquet_files
    # The hint shows a pattern for one of the kinds.
    ending = next(ending for ending, kind in ENDINGS.items() if kind == min(files_by_kind))
    raise InputError(
        f"{directory}: has {' and '.join(sorted(files_by_kind))} files",
        hint=f"give files of one kind, such as {directory}/**/*{ending}",
    )


def _remote_files(fs: pafs.FileSystem, path: str) -> tuple[dict[str, str], bool]:
    """Return the files of a path or glob in a remote file system, as `_local_files` does."""
    kind = fs.get_file_info(path).type
    files: list[str] = []
    if kind == pafs.FileType.File:
        files = [path]
    elif kind == pafs.FileType.Directory:
        below = _files_below(fs, path)
        files = [file for file in below if not _is_hidden(PurePosixPath(file.removeprefix(path)))]
    elif "*" in path:
        # The wildcards are `*`, any text without a slash, and `**/`, any number of directories. `?` and `[`
        # are plain characters here, because `?` begins the query of a URI.
        pattern = re.escape(path).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        top = path.partition("*")[0].rpartition("/")[0]
        files = [file for file in _files_below(fs, top) if re.fullmatch(pattern, file)]
    return {file: file for file in files}, kind == pafs.FileType.Directory


def _files_below(fs: pafs.FileSystem, directory: str) -> list[str]:
    selector = pafs.FileSelector(directory, allow_not_found=True, recursive=True)
    return [entry.path for entry in fs.get_file_info(selector) if entry.is_file]


def _is_hidden(path: PurePath) -> bool:
    """Tell whether a file's name, or that of a directory in its path, begins with a dot or an underscore."""
    return any(name.startswith((".", "_")) for name in path.parts)


def hive_partitions(path: str) -> dict[str, str | None]:
    """Return the partition values in a path with Hive directories `name=value`; None stands for null."""
    partitions: dict[str, str | None] = {}
    for directory in Path(path).parts[:-1]:
        key, separator, value = directory.partition("=")
        if separator:
            partitions[unquote(key)] = None if value == HIVE_NULL else unquote(value)
    return partitions


def partition_types(partitions: Sequence[dict[str, str | None]]) -> dict[str, pa.DataType]:
    """Return the types of the partition columns that all paths have.

    `partitions` has the values of each path. A column is int64 if all its values are integers, else string.
    """
    types: dict[str, pa.DataType] = {}
    for name in sorted(set(partitions[0]).intersection(*partitions)):
        values = [values_of_file[name] for values_of_file in partitions]
        texts = [value for value in values if value is not None]
        # Integers of up to 18 digits always fit into 64 bits.
        are_integers = bool(texts) and all(re.fullmatch(r"-?\d{1,18}", text) for text in texts)
        types[name] = pa.int64() if are_integers else pa.string()
    return types


def join_paths(path: str | Sequence[str]) -> str:
    """Return `input.path` as one text for messages; it may be a list."""
    return path if isinstance(path, str) else ", ".join(path)


class SourceFile:
    """An input file, with the content that it had when it was opened.

    A file in another format is read from a Parquet copy. Reading raises InputChangedError if the file's
    digest has changed since it was opened. If the digest covers only sampled blocks, a new modification time
    counts as a change too.
    """

    def __init__(
        self,
        fs: pafs.FileSystem,
        path: str,
        *,
        copies: Path,
        source: InputSpec,
        batch_rules: BatchRules | None,
    ) -> None:
        """Read the schema and the row groups; raise InputError if the file is missing or unreadable.

        `copies` is the directory of the Parquet copies. `source` has the options of CSV and JSON Lines files.
        `batch_rules` means that the file is a batch file, in which each line is a request.
        """
        self._fs = fs
        self.path = path
        self.is_local = isinstance(fs, pafs.LocalFileSystem)
        self.read_errors = read_errors(fs)
        """Exceptions that its file system raises if the file cannot be read."""
        self.format = _batch_format(path) if batch_rules else format_of(path)
        self._copies = copies
        self._source = source
        self._batch_rules = batch_rules
        self.digest = ""
        """Digest of the file's content; empty until it is computed."""
        self.notes: list[str] = []
        """Notes on the file for the user, such as the number of unreadable records."""
        self._copy: Path | None = None
        """Parquet copy of a file in another format; None for a Parquet file."""
        try:
            # A change of the signature or the size shows later that the file has changed or grown.
            self._signature = self._current_signature()
            self._size = int(self._signature[0])
            if self.format.kind == "Parquet":
                self.digest = self._digest_of(self._size)
            else:
                self.format = format_in(fs, path, self.format)
                self._copy = self._existing_or_new_copy()
            with contextlib.closing(self._open_file_or_copy()) as file:
                footer, schema = file.metadata, file.schema_arrow
        except BatchrunError:
            raise
        except self.read_errors as failure:
            raise self._unreadable(failure) from None
        if self.format.kind != "Parquet":
            # The digest and the notes were stored in the Parquet copy when it was made.
            self.digest = schema.metadata[_DIGEST].decode()
            self.notes = _NOTES_DECODER.decode(footer.metadata[NOTES])
        self.has_problems = PROBLEM in schema.names
        self.schema = pa.schema([field for field in schema if field.name != PROBLEM])
        """Columns of the file, with the types in which they are stored."""
        self._group_rows = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        self.rows: int = sum(self._group_rows)
        self.grown_from: str | None = None
        """Digest of the file at an earlier start of the run, if rows were appended since then; else None."""
        self.has_grown = False
        """Whether rows were appended since the file was opened."""
        self.partitions = hive_partitions(path)
        """Values of the Hive partition columns in the file's path (`year=2024/`). None stands for null."""
        self.starts: list[int] = []
        """Row number, in the whole input, at which each row group begins.

        At the end, the number after the last row.
        """

    def begin_at(self, row: int) -> None:
        """Set `starts`; `row` is the number of the file's first row in the whole input."""
        self.starts = [*accumulate(self._group_rows, initial=row)]

    @property
    def is_text(self) -> bool:
        """Whether the file is CSV or JSON Lines.

        Their columns get types from the values or from `input.types`.
        """
        return self.format.kind in {"CSV", "JSON Lines"}

    def facts(self) -> dict[str, Any]:
        """Return the facts about the file that are stored, so that a resumed run recognizes the file."""
        facts = {"path": self.path, "rows": self.rows, "digest": self.digest, "size": self._size}
        return facts if self.grown_from is None else {**facts, "grown_from": self.grown_from}

    def record_growth(self, earlier_facts: Mapping[str, Any]) -> None:
        """Set `grown_from` if rows were appended since an earlier start of the run.

        `earlier_facts` is the result of `facts()` at that start.
        """
        # If the facts have no size, the file counts as not grown.
        earlier_size = earlier_facts.get("size", self._size)
        earlier_digest = earlier_facts["digest"]
        if earlier_size < self._size and self._begins_with(earlier_size, earlier_digest):
            self.grown_from = earlier_digest
            earlier_rows = earlier_facts["rows"]
            log.info(
                "%s has grown: the first %d rows are those of this run, and %d rows were appended",
                self.path, earlier_rows, self.rows - earlier_rows,
            )  # fmt: skip

    def _begins_with(self, size: int, digest: str) -> bool:
        """Tell whether the first `size` bytes of the file have this digest and end with a whole line.

        The result is False for a file to which no lines can be appended, such as a compressed file.
        """
        if not self._may_grow or self._digest_of(size) != digest:
            return False
        with Path(self.path).open("rb") as file:
            # A line break must be the last of these bytes or the first one appended.
            file.seek(size - 1)
            return any(byte in b"\r\n" for byte in file.read(2))

    @property
    def _may_grow(self) -> bool:
        """Whether lines can be appended without changing the bytes before them."""
        return self.is_local and self.is_text and self.format.compression is None

    def open(self) -> pq.ParquetFile:
        """Open the file for reading; raise OSError, ArrowException, or InputChangedError."""
        file = self._open_file_or_copy()
        self.check_after_reading()
        return file

    def check_after_reading(self) -> None:
        """Raise InputChangedError if the bytes that were just read may be those of a changed file.

        No check is needed in three cases: nobody changes a Parquet copy, an object store compares the ETag in
        each request, and a commit on the Hugging Face Hub never changes.
        """
        if self._copy is None and not self._e_tag() and without_commit(self.path) == self.path:
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the content of the file has changed. Appended lines are no change.

        A file that is missing, or that cannot be read at present, does not count as changed.
        """
        try:
            signature = self._current_signature()
            if signature == self._signature:
                return
            size = int(signature[0])
            self.has_grown = size > self._size and self._begins_with(self._size, self.digest)
            is_changed = not self.has_grown and not self._has_same_content(signature)
        except self.read_errors:
            return
        if is_changed:
            raise InputChangedError(
                f"the input file {self.path} changed during the run",
                hint="put the old file back and run the same command again, or give another output.path for "
                "the new file",
            )
        # The content is the same, or lines were appended. The new signature avoids another comparison.
        self._signature = signature

    def _has_same_content(self, signature: tuple[int | str, ...]) -> bool:
        """Tell whether a file with a new `signature` still has the content that it had when it was opened."""
        size, modified, *_ = signature
        if size != self._size:
            return False
        # A sampled digest can miss an edit between its blocks, but the modification time shows it.
        if self._is_sampled and modified != self._signature[1]:
            return False
        return self._digest_of(self._size) == self.digest

    def _open_file_or_copy(self) -> pq.ParquetFile:
        """Open the file or its Parquet copy. A copy that another process has deleted is made again."""
        if self._copy is None:
            return _open_parquet(self._fs, self.path)
        try:
            return _open_parquet(pafs.LocalFileSystem(), str(self._copy))
        except FileNotFoundError:
            # The new copy must have the same rows as the deleted one.
            self.check_unchanged()
            self._copy = self._existing_or_new_copy()
            return _open_parquet(pafs.LocalFileSystem(), str(self._copy))

    def _current_signature(self) -> tuple[int | str, ...]:
        """Return values that change if the file is replaced or written to; raise OSError.

        The first value is the size. The second is the modification time, or the ETag in an object store.
        """
        if self.is_local:
            stat = Path(self.path).stat()
            # The inode shows that a file was replaced, and ctime that it was edited and its old mtime
            # restored.
            return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns
        info = self._fs.get_file_info(self.path)
        if info.type == pafs.FileType.NotFound:
            raise FileNotFoundError(self.path)
        return info.size, self._e_tag() or info.mtime_ns or 0

    def _e_tag(self) -> str | None:
        """Return the ETag at the last lookup of the file; None outside of an object store."""
        e_tags: dict[str, str] = getattr(getattr(self._fs, "handler", None), "e_tags", {})
        return e_tags.get(self.path)

    @property
    def _is_sampled(self) -> bool:
        """Whether the digest covers only some blocks of the file."""
        return self.format.kind == "Parquet" and self._size > SAMPLE_BLOCKS * SAMPLE_BYTES

    def _digest_of(self, size: int) -> str:
        """Return the digest of the file's present first `size` bytes.

        The digest of a large Parquet file covers only sampled blocks. For an object with an ETag, it covers
        only the size and the ETag.
        """
        digest = hashlib.sha256(str(size).encode())
        if e_tag := self._e_tag():
            digest.update(e_tag.encode())
            return digest.hexdigest()
        with self._fs.open_input_file(self.path) as source:
            if self._is_sampled:
                blocks = _samples(source, size)
            else:
                stream = source.get_stream(0, size)
                blocks = iter(lambda: stream.read(READ_BUFFER_BYTES), b"")
            for block in blocks:
                digest.update(block)
        return digest.hexdigest()

    def _existing_or_new_copy(self) -> Path:
        """Return the path of the file's Parquet copy, and make the copy if it does not exist.

        Raises InputError, StorageError, or one of `read_errors`.
        """
        # Everything that changes the content of the copy is part of its name.
        options = self._source.types, self._source.delimiter, self._source.encoding
        origin = repr((self.path, self._signature, options, self._batch_rules))
        copy = self._copies / f"{hashlib.sha256(origin.encode()).hexdigest()[:32]}.parquet"
        tries = 0
        while not copy.exists():
            tries += 1
            try:
                self._make_copy(copy)
            except (FileNotFoundError, StorageError):
                # Another process of the run may have ended the run, and deleted the directory of copies.
                was_deleted = not copy.parent.exists()
                if tries == COPY_TRIES or not was_deleted:
                    raise
        return copy

    def _make_copy(self, copy: Path) -> None:
        """Write the Parquet copy. If the file system has locks, only one process writes it."""
        with writing(copy):
            make_directory(copy.parent)
        with one_process_at_a_time(copy.with_suffix(".lock"), unfinished=f".{copy.name}*"):
            # Another process may have written it while this one waited for the lock.
            if not copy.exists():
                # The digest is known if an earlier copy was read.
                self.digest = self.digest or self._digest_of(self._size)
                with writing(copy), whole_file(copy, secrets.token_hex(4)) as temporary:
                    write_parquet(self._rows(), temporary, {_DIGEST: self.digest.encode()}, self.path)
                    # The digest was computed before the rows were read. The file may have changed in between.
                    self.check_unchanged()

    def _rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows of a file that is not Parquet; raise InputError if it cannot be read."""
        from batchrunner.input.text_files import batches_of_file  # noqa: PLC0415 - not for Parquet

        try:
            with self._fs.open_input_file(self.path) as file:
                source = decompressed(file.get_stream(0, self._size), self.format.compression)
                yield from batches_of_file(
                    source, self.path, self.format, self._source, batch_rules=self._batch_rules
                )
        except BatchrunError:
            raise
        except EOFError:
            # gzip raises EOFError for a truncated file.
            raise self._unreadable(OSError("Truncated compressed data")) from None
        except self.read_errors + DECOMPRESSION_ERRORS as failure:
            raise self._unreadable(failure) from None

    def _unreadable(self, failure: Exception) -> BatchrunError:
        """Return the error for an unreadable file, with a hint at the likely cause."""
        name, hint = self.path, None
        if isinstance(getattr(self._fs, "handler", None), pafs.FSSpecHandler):
            # The file is on the Hugging Face Hub (hf://).
            name = f"hf://{without_commit(self.path)}"
            hint = "if the dataset's page on the Hub asks for it, request access there, and set HF_TOKEN"
        elif self.format.compression == "zstd" and "too much memory" in str(failure):
            hint = f"the zstd window is too large; {unpacking(self.path, head_of(self._fs, self.path))}"
        elif self.format.kind == "Parquet":
            hints = [unpacking(self.path, head_of(self._fs, self.path))]
            if not known_format(self.path):
                hints.append(f"a file with an ending other than {', '.join(ENDINGS)} is read as Parquet")
            hint = "; ".join(filter(None, hints)) or None
        elif self.format.kind == "JSON Lines" and isinstance(failure, pa.ArrowInvalid):
            hint = "give the column a type in input.types: string keeps the values unchanged"
        message = f"{name}: not a readable {self.format.kind} file: {first_line(failure)}"
        return or_away(InputError(message, hint=hint), failure)


def head_of(fs: pafs.FileSystem, path: str) -> bytes:
    """Return the first bytes of a file, which show its compression; b"" if the file is unreadable."""
    try:
        with fs.open_input_file(path) as file:
            return bytes(file.read(HEAD_BYTES))
    except read_errors(fs):
        return b""


def format_in(fs: pafs.FileSystem, path: str, name_format: FileFormat) -> FileFormat:
    """Return the format of a file that is not Parquet, with the compression that its first bytes show.

    `name_format` is the format that the file's name suggests. Raises InputError for a compression that cannot
    be read.
    """
    head = head_of(fs, path)
    refuse_archive(path, head)
    return replace(name_format, compression=codec_of(head, name_format.compression))


def _open_parquet(fs: pafs.FileSystem, path: str) -> pq.ParquetFile:
    # A remote file is read in few large requests, a local one in small blocks.
    is_local = isinstance(fs, pafs.LocalFileSystem)
    return pq.ParquetFile(
        fs.open_input_file(path), pre_buffer=not is_local, buffer_size=READ_BUFFER_BYTES if is_local else 0
    )


def size_of(footer: pq.FileMetaData, columns: Iterable[str], group: int) -> int:
    """Return the uncompressed size in bytes of these columns in a row group of a Parquet file."""
    # Paths of leaf columns begin with the name of their column, such as `column.list.element`.
    beginnings = tuple(f"{name}." for name in columns)
    leaves = map(footer.row_group(group).column, range(footer.num_columns))
    return sum(
        leaf.total_uncompressed_size for leaf in leaves if f"{leaf.path_in_schema}.".startswith(beginnings)
    )


def _batch_format(path: str) -> FileFormat:
    """Return the format of a batch file: JSON Lines, with the compression that an ending such as .gz names.

    Raises InputError if the name ends like that of another format. Any other name is allowed.
    """
    file_format = known_format(path)
    if file_format is None:
        return FileFormat("JSON Lines", "", COMPRESSIONS.get(PurePosixPath(path).suffix.lower()))
    if file_format.kind != "JSON Lines":
        raise InputError(
            f"{path}: is a {file_format.kind} file, not a batch file",
            hint="a batch file has a JSON object on each line",
        )
    return file_format


def _samples(source: pa.NativeFile, size: int) -> Iterator[bytes]:
    """Yield evenly spread blocks of a Parquet file; the last one ends with the file's footer."""
    for block in spread_blocks(size, blocks=SAMPLE_BLOCKS, size=SAMPLE_BYTES):
        source.seek(block.start)
        yield source.read(SAMPLE_BYTES)
