"""The files of `input.path`: finding them, opening them, and noticing that one has changed."""

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
from batchrunner.core.files import COMPRESSIONS, ENDINGS, FileFormat, format_of, is_special, known_format
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
"""Value of a partition directory that stands for null."""
READ_BUFFER_BYTES = 1 << 20
"""Size of the buffers through which files are streamed."""
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 16 << 10
"""Number and size of the blocks that the digest of a Parquet file of more than 1 MiB covers. The last block
is the footer, which changes with the content. The digest of any other file covers the whole file."""
_DIGEST = b"batchrunner.digest"
"""Key of the original file's digest in the metadata of its Parquet copy."""
_read_notes = msgspec.json.Decoder(list[str])
COPY_TRIES = 3
"""Maximum number of attempts to make a copy in a directory that other processes may delete."""
_COMMIT = re.compile(r"@[0-9a-f]{40}(?=/|$)")


def at_commit(fs: pafs.FileSystem, path: str) -> str:
    """Pin a path on the Hub to the current commit of its branch. Later commits then do not change the input.

    `fs` is the file system of `hf://`. Raises errors of huggingface_hub, for example if the dataset does not
    exist or the token gives no access.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 - an extra

    hub = fs.handler.fs
    resolved = hub.resolve_path(path)
    if not getattr(resolved, "revision", None):  # a bucket has no commits
        return path
    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    commit = api.repo_info(resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision).sha
    kind = "" if resolved.repo_type == "model" else f"{resolved.repo_type}s/"
    return f"{kind}{resolved.repo_id}@{commit}/{resolved.path_in_repo}".rstrip("/")


def without_commit(path: str) -> str:
    """Return the path of a file on the Hub without its commit; any other path as it is."""
    return _COMMIT.sub("", path, count=1)


def find_files(
    paths: Sequence[str], run: Path | None = None, storage: StorageSpec | None = None
) -> tuple[pafs.FileSystem, list[str]]:
    """Return the file system and the sorted paths of the files; raises InputError if there are none.

    Files in the run directory `run` are skipped, unless one of the paths names no other files. `storage` says
    how object stores are reached.
    """
    files_by_path: dict[str, str] = {}
    located = [_locate(name, storage or StorageSpec()) for name in paths]
    fs = located[0][0]
    for name, (its_fs, path) in zip(paths, located, strict=True):
        if its_fs != fs:
            raise InputError(
                f"{name}: lies on another file system than {paths[0]}",
                hint="give the files of one file system",
            )
        try:
            local = isinstance(fs, pafs.LocalFileSystem)
            files, is_directory = _local_files(name, Path(path)) if local else _remote_files(fs, path)
        except InputError:
            raise
        except read_errors(fs) as failure:  # a name is too long, a directory not accessible
            raise _inaccessible(name, failure) from None
        files = {real: file for real, file in files.items() if run not in Path(real).parents} or files
        if is_directory:
            files = _of_one_kind(name, files)
        if not files:
            raise InputError(f"{name}: no Parquet file there, and no CSV, JSON Lines or Arrow file")
        files_by_path = files | files_by_path
    for file in files_by_path.values():
        try:
            file.encode()  # Arrow and run.json need valid UTF-8
        except UnicodeEncodeError:
            raise InputError(
                f"{os.fsencode(file)!r}: its name is not valid UTF-8", hint="rename it"
            ) from None
    return fs, sorted(files_by_path.values())


def names_run(path: str, storage: StorageSpec) -> bool:
    """Tell whether a path is the directory of a run. Raises InputError if the path is inaccessible."""
    if not store_address(path):
        return "://" not in path and holds_run(Path(path))
    fs, directory = _locate(path, storage)
    try:
        return bool(fs.get_file_info(f"{directory}/run.json").type == pafs.FileType.File)
    except read_errors(fs) as failure:
        raise _inaccessible(path, failure) from None


def _inaccessible(name: str, failure: Exception) -> BatchrunError:
    why = getattr(failure, "strerror", None) or first_line(failure)
    return or_away(InputError(f"{name}: {why}"), failure)


def read_errors(fs: pafs.FileSystem) -> tuple[type[Exception], ...]:
    """Return the errors that a file system raises when it cannot read.

    The file system of another package (hf://, by huggingface_hub) raises the errors of its network library.
    """
    return (Exception,) if isinstance(fs, pafs.PyFileSystem) else (OSError, pa.ArrowException)


def _locate(path_or_uri: str, storage: StorageSpec) -> tuple[pafs.FileSystem, str]:
    if "://" not in path_or_uri:
        return pafs.LocalFileSystem(), path_or_uri
    address = store_address(path_or_uri)
    if address is not None:
        check_client(address, InputError)
        from batchrunner.input.object_files import ObjectFiles  # noqa: PLC0415 - an extra

        files = pafs.PyFileSystem(ObjectFiles(address.scheme, storage))
        return files, f"{address.bucket}/{address.key}".rstrip("/")
    try:
        fs, path = pafs.FileSystem.from_uri(path_or_uri)
        return fs, at_commit(fs, path) if path_or_uri.startswith("hf://") else path
    except Exception as failure:  # noqa: BLE001 - hf:// and others are opened by packages with their own errors
        raise InputError(
            f"{path_or_uri}: cannot be opened: {first_line(failure)}",
            hint="give a path on this machine, or one that begins with s3://, gs://, az://, hdfs:// or hf://",
        ) from None


def _local_files(pattern: str, path: Path) -> tuple[dict[str, str], bool]:
    """Return files by their real paths, and whether the path is a directory.

    The keys are real paths, so that a file to which several paths lead is found once.
    """
    is_directory = path.is_dir()
    if is_directory:
        data_files = (file for file in path.rglob("*") if known_format(file.name))
        files = [file for file in data_files if not (_hidden(file.relative_to(path)) or file.is_dir())]
    elif path.exists():
        files = [path]
        if is_special(path):
            raise InputError(
                f"{path}: is a device or a pipe", hint="save it to a file, which can be read several times"
            )
    elif glob.has_magic(pattern):
        files = [p for p in map(Path, glob.glob(pattern, recursive=True)) if p.is_file()]  # noqa: PTH207 - it may be absolute
    else:
        hint = None if path.is_absolute() else f"relative paths begin in {Path.cwd()}"
        raise InputError(f"{pattern}: no such file or directory", hint=hint)
    return {str(file.parent.resolve() / file.name): str(file) for file in files}, is_directory


def _of_one_kind(directory: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a directory that are input: its Parquet files, or else the files of the only kind.

    Descriptions in JSON or a list in CSV often lie beside Parquet files. Such files are ignored, and the log
    names one of them. Raises InputError if there are several kinds and none is Parquet.
    """
    kinds: dict[str, dict[str, str]] = {}
    for real, path in files.items():
        if form := known_format(path):
            kinds.setdefault(form.kind, {})[real] = path
    if len(kinds) < 2:  # noqa: PLR2004
        return next(iter(kinds.values()), {})
    if parquet := kinds.pop("Parquet", None):
        ignored = sorted(path for kind in kinds.values() for path in kind.values())
        if other := next((path for path in ignored if not holds_run(Path(path).parent)), None):
            log.warning("%s: only its Parquet files are read; others, such as %s, are not", directory, other)
        return parquet
    example = next(ending for ending, kind in ENDINGS.items() if kind == min(kinds))
    raise InputError(
        f"{directory}: has {' and '.join(sorted(kinds))} files",
        hint=f"give the files of one kind, such as {directory}/**/*{example}",
    )


def _remote_files(fs: pafs.FileSystem, path: str) -> tuple[dict[str, str], bool]:
    kind = fs.get_file_info(path).type
    files: list[str] = []
    if kind == pafs.FileType.File:
        files = [path]
    elif kind == pafs.FileType.Directory:
        below = _files_below(fs, path)
        files = [file for file in below if not _hidden(PurePosixPath(file.removeprefix(path)))]
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
    """Return the values of partition columns in a path (directories named `name=value`); None is null."""
    partitions: dict[str, str | None] = {}
    for directory in Path(path).parts[:-1]:
        key, separator, value = directory.partition("=")
        if separator:
            partitions[unquote(key)] = None if value == HIVE_NULL else unquote(value)
    return partitions


def partition_types(partitions: Sequence[dict[str, str | None]]) -> dict[str, pa.DataType]:
    """Return the type of each partition column that all paths have: int64 for whole numbers, else string."""
    types: dict[str, pa.DataType] = {}
    for name in sorted(set(partitions[0]).intersection(*partitions)):
        values = [values_of_file[name] for values_of_file in partitions]
        texts = [value for value in values if value is not None]
        are_whole_numbers = bool(texts) and all(re.fullmatch(r"-?\d{1,18}", text) for text in texts)
        types[name] = pa.int64() if are_whole_numbers else pa.string()
    return types


def join_paths(path: str | Sequence[str]) -> str:
    """Return `input.path`, which may be a list, as one text for messages."""
    return path if isinstance(path, str) else ", ".join(path)


class SourceFile:
    """A file of the input, with the content that it had when it was opened.

    A file that is not Parquet is read from a Parquet copy. If the content at the path changes, reading raises
    InputChangedError. A new digest means a change. If the digest covers only sampled blocks, a new
    modification time means a change too.
    """

    def __init__(
        self, fs: pafs.FileSystem, path: str, copies: Path, source: InputSpec, batch_rules: BatchRules | None
    ) -> None:
        """Find the columns and row groups; raises InputError if the file is missing or unreadable.

        `copies` is the directory of the Parquet copies. `source` has the options of text files.
        With `batch_rules`, each line is a request.
        """
        self._fs = fs
        self.path = path
        self.is_local = isinstance(fs, pafs.LocalFileSystem)
        """Whether it is on this machine."""
        self.read_errors = read_errors(fs)
        """Errors of reading it, see the function `read_errors`."""
        self.format = _batch_format(path) if batch_rules else format_of(path)
        self._copies, self._source, self._batch_rules = copies, source, batch_rules
        self.digest = ""
        """Digest of its content; empty until it has been computed."""
        self.notes: list[str] = []
        """Sentences for users that say which of its records fail, and why columns became JSON text."""
        self._copy: Path | None = None  # read in place of a file that is not Parquet
        try:
            self._signature = self._current_signature()
            self._size = int(self._signature[0])
            if self.format.kind == "Parquet":
                self.digest = self._digest_of(self._size)
            else:
                self.format = format_in(fs, path, self.format)
                self._copy = self._find_copy()
            with contextlib.closing(self._opened()) as file:
                footer, schema = file.metadata, file.schema_arrow
        except BatchrunError:
            raise
        except self.read_errors as failure:
            raise self._unreadable(failure) from None
        if self.format.kind != "Parquet":
            self.digest = schema.metadata[_DIGEST].decode()
            self.notes = _read_notes.decode(footer.metadata[NOTES])
        self.has_problems = PROBLEM in schema.names
        """Whether some of its records cannot be read."""
        self.schema = pa.schema([field for field in schema if field.name != PROBLEM])
        """Columns of the file, with the types in which they are stored."""
        self._group_rows = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        self.rows: int = sum(self._group_rows)
        self.grown_from: str | None = None
        """Digest of the file in an earlier attempt, if rows have been appended since; None otherwise."""
        self.has_grown = False
        """Whether rows have been appended since the file was opened."""
        self.partitions = hive_partitions(path)
        """Values of Hive partition columns in its path (`year=2024/`); None is null."""
        self.starts: list[int] = []
        """Ordinal of the first row of each row group, and the ordinal after the last row."""

    def begin_at(self, row: int) -> None:
        """Set `starts`; `row` is the ordinal of the file's first row in the whole input."""
        self.starts = [*accumulate(self._group_rows, initial=row)]

    @property
    def is_text(self) -> bool:
        """Whether its columns get their types from values, or from `input.types`."""
        return self.format.kind in {"CSV", "JSON Lines"}

    def facts(self) -> dict[str, Any]:
        """Return the facts by which a resumed run recognizes it."""
        facts = {"path": self.path, "rows": self.rows, "digest": self.digest, "size": self._size}
        return facts if self.grown_from is None else {**facts, "grown_from": self.grown_from}

    def recognize(self, before: Mapping[str, Any]) -> None:
        """Set `grown_from` if rows were appended since the file had the facts `before`."""
        size = before.get("size", self._size)
        if size < self._size and self._begins_with(size, before["digest"]):
            self.grown_from = before["digest"]
            log.info(
                "%s grew: its first %d rows are those of this run, %d rows were appended",
                self.path, before["rows"], self.rows - before["rows"],
            )  # fmt: skip

    def _begins_with(self, size: int, digest: str) -> bool:
        """Tell whether the first `size` bytes have this digest, and a line ends there."""
        if not self._may_grow or self._digest_of(size) != digest:
            return False
        with Path(self.path).open("rb") as file:
            file.seek(size - 1)
            return not {*b"\r\n"}.isdisjoint(file.read(2))

    @property
    def _may_grow(self) -> bool:
        """Whether lines can be appended so that the earlier bytes stay as they are."""
        return self.is_local and self.is_text and self.format.compression is None

    def open(self) -> pq.ParquetFile:
        """Open the file for reading; raises OSError or ArrowException, or InputChangedError."""
        opened = self._opened()
        self.check_after_reading()
        return opened

    def check_after_reading(self) -> None:
        """Call `check_unchanged`, unless the bytes just read certainly belong to the file that was opened.

        A Parquet copy stays as it is, an object store compares the ETag in each request, and a commit on the
        Hub never changes.
        """
        if self._copy is None and not self._e_tag() and without_commit(self.path) == self.path:
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the path has other content now, except for appended lines.

        A file that is missing, or cannot be read at present, does not count as changed.
        """
        try:
            signature = self._current_signature()
            if signature == self._signature:
                return
            self.has_grown = int(signature[0]) > self._size and self._begins_with(self._size, self.digest)
            # a sampled digest does not show an edit between its blocks
            digest_decides = signature[:2] == self._signature[:2] or not self._is_sampled
            is_same_size = signature[0] == self._size
            is_same = digest_decides and is_same_size and self._digest_of(self._size) == self.digest
        except self.read_errors:
            return
        if not (is_same or self.has_grown):
            raise InputChangedError(
                f"the input file {self.path} changed during the run",
                hint="put the old file back and run the same command again, or give another output.path for "
                "the new file",
            )
        self._signature = signature  # it was touched, replaced by an equal file, or has grown

    def _opened(self) -> pq.ParquetFile:
        """Open the file, or its copy, which is made again if another process has deleted it."""
        if self._copy is None:
            return _open_parquet(self._fs, self.path)
        try:
            return _open_parquet(pafs.LocalFileSystem(), str(self._copy))
        except FileNotFoundError:
            self.check_unchanged()
            self._copy = self._find_copy()
            return _open_parquet(pafs.LocalFileSystem(), str(self._copy))

    def _current_signature(self) -> tuple[int | str, ...]:
        """Return values that differ once the file is replaced or written to; raises OSError.

        The first is its size. The second is its modification time, or its ETag in an object store.
        """
        if self.is_local:
            stat = Path(self.path).stat()
            return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns
        info = self._fs.get_file_info(self.path)
        if info.type == pafs.FileType.NotFound:
            raise FileNotFoundError(self.path)
        return info.size, self._e_tag() or info.mtime_ns or 0

    def _e_tag(self) -> str | None:
        """Return the ETag of an object when it was last looked up; None outside of an object store."""
        e_tags: dict[str, str] = getattr(getattr(self._fs, "handler", None), "e_tags", {})
        return e_tags.get(self.path)

    @property
    def _is_sampled(self) -> bool:
        """Whether its digest covers some of its blocks only."""
        return self.format.kind == "Parquet" and self._size > SAMPLE_BLOCKS * SAMPLE_BYTES

    def _digest_of(self, size: int) -> str:
        """Return the digest of its first `size` bytes as they are now.

        The digest of a large Parquet file covers sampled blocks, and that of an object with an ETag covers
        only the size and the ETag.
        """
        digest = hashlib.sha256(str(size).encode())
        if e_tag := self._e_tag():
            digest.update(e_tag.encode())
            return digest.hexdigest()
        with self._fs.open_input_file(self.path) as source:
            stream = source.get_stream(0, size)
            whole = iter(lambda: stream.read(READ_BUFFER_BYTES), b"")
            for block in _samples(source, size) if self._is_sampled else whole:
                digest.update(block)
        return digest.hexdigest()

    def _find_copy(self) -> Path:
        """Return the Parquet copy of the file; make it if it does not exist.

        Raises InputError or StorageError, and `read_errors`.
        """
        texts = self._source.types, self._source.delimiter, self._source.encoding
        about = repr((self.path, self._signature, texts, self._batch_rules))
        copy = self._copies / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.parquet"
        tries = 0
        while not copy.exists():
            tries += 1
            try:
                self._make_copy(copy)
            except (FileNotFoundError, StorageError):
                # another process may have ended the run and deleted the directory of copies
                was_deleted = not copy.parent.exists()
                if tries == COPY_TRIES or not was_deleted:
                    raise
        return copy

    def _make_copy(self, copy: Path) -> None:
        """Make the Parquet copy. On a file system with locks, only one of several processes makes it."""
        with writing(copy):
            make_directory(copy.parent)
        with one_process_at_a_time(copy.with_suffix(".lock"), unfinished=f".{copy.name}*"):
            if not copy.exists():
                self.digest = self.digest or self._digest_of(self._size)  # known if an earlier copy was read
                with writing(copy), whole_file(copy, secrets.token_hex(4)) as temporary:
                    write_parquet(self._rows(), temporary, {_DIGEST: self.digest.encode()}, self.path)
                    self.check_unchanged()  # the digest was computed before the rows were read

    def _rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows of a file that is not Parquet; raises InputError."""
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
            raise self._unreadable(OSError("Truncated compressed data")) from None
        except self.read_errors + DECOMPRESSION_ERRORS as failure:
            raise self._unreadable(failure) from None

    def _unreadable(self, failure: Exception) -> BatchrunError:
        place, hint = self.path, None
        if isinstance(getattr(self._fs, "handler", None), pafs.FSSpecHandler):
            place = f"hf://{without_commit(self.path)}"
            hint = "if its page on the Hub requires it, request access there, and set HF_TOKEN"
        elif self.format.compression == "zstd" and "too much memory" in str(failure):
            hint = f"its window is too large; {unpacking(self.path, head_of(self._fs, self.path))}"
        elif self.format.kind == "Parquet":
            other_ending = f"a name with another ending than {', '.join(ENDINGS)} is read as Parquet"
            hints = [unpacking(self.path, head_of(self._fs, self.path))]
            hints += [] if known_format(self.path) else [other_ending]
            hint = "; ".join(filter(None, hints)) or None
        elif self.format.kind == "JSON Lines" and isinstance(failure, pa.ArrowInvalid):
            hint = "give the column a type in input.types: string keeps its values as they are"
        message = f"{place}: not a readable {self.format.kind} file: {first_line(failure)}"
        return or_away(InputError(message, hint=hint), failure)


def head_of(fs: pafs.FileSystem, path: str) -> bytes:
    """Return the first bytes of a file; none if it cannot be read."""
    try:
        with fs.open_input_file(path) as file:
            return bytes(file.read(HEAD_BYTES))
    except read_errors(fs):
        return b""


def format_in(fs: pafs.FileSystem, path: str, form: FileFormat) -> FileFormat:
    """Return the format of a file that is not Parquet, with the compression that its content has.

    Raises InputError for a kind of compression that cannot be read.
    """
    head = head_of(fs, path)
    refuse_archive(path, head)
    return replace(form, compression=codec_of(head, form.compression))


def _open_parquet(fs: pafs.FileSystem, path: str) -> pq.ParquetFile:
    is_local = isinstance(fs, pafs.LocalFileSystem)
    return pq.ParquetFile(
        fs.open_input_file(path), pre_buffer=not is_local, buffer_size=READ_BUFFER_BYTES if is_local else 0
    )


def size_of(footer: pq.FileMetaData, columns: Iterable[str], group: int) -> int:
    """Return the uncompressed bytes of these columns in a row group of a Parquet file."""
    tops = tuple(f"{name}." for name in columns)  # leaf columns have paths such as `column.list.element`
    leaves = map(footer.row_group(group).column, range(footer.num_columns))
    return sum(leaf.total_uncompressed_size for leaf in leaves if f"{leaf.path_in_schema}.".startswith(tops))


def _batch_format(path: str) -> FileFormat:
    """Return the format of a batch file; an ending such as .gz sets the compression.

    Raises InputError for the ending of another format. Any other name is allowed.
    """
    form = known_format(path)
    if form is not None and form.kind != "JSON Lines":
        raise InputError(f"{path}: is {form.kind}", hint="a batch file has a JSON object on each line")
    return form or FileFormat("JSON Lines", "", COMPRESSIONS.get(PurePosixPath(path).suffix.lower()))


def _samples(source: pa.NativeFile, size: int) -> Iterator[bytes]:
    """Yield evenly spread blocks of a file; the last one is its end, with the footer."""
    for block in spread_blocks(size, blocks=SAMPLE_BLOCKS, size=SAMPLE_BYTES):
        source.seek(block.start)
        yield source.read(SAMPLE_BYTES)
