"""The files of `input.path`: which they are, what is in them, and whether they are still the same."""

import contextlib
import fcntl
import glob
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any
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
    or_away,
)
from batchrunner.core.files import COMPRESSIONS, ENDINGS, FileFormat, format_of, is_special, known_format
from batchrunner.core.timing import TIMING
from batchrunner.input.compression import (
    DECOMPRESSION_ERRORS,
    HEAD_BYTES,
    codec_of,
    decompressed,
    refuse_archive,
    unpacking,
)
from batchrunner.input.parquet_copy import NOTES, PROBLEM, first_line, write_parquet
from batchrunner.job.output import StorageSpec
from batchrunner.job.spec import InputSpec
from batchrunner.output.addresses import check_client, store_address
from batchrunner.output.files import make_directory, whole_file, writing
from batchrunner.output.resume import done_by_all
from batchrunner.output.run_dir import look_at_run
from batchrunner.output.run_json import holds_run, require_run_json

log = logging.getLogger(__name__)

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Directory value that stands for null."""
READ_BUFFER_BYTES = 1 << 20
"""Bytes of the buffers through which a file is streamed, instead of being loaded whole."""
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 16 << 10
"""A digest of a Parquet file reads this many blocks of this many bytes; the last is the footer, which changes
with the content. Of up to their sum (1 MiB), and of other formats, all is read."""
_DIGEST = b"batchrunner.digest"
"""Key of the original's digest in the metadata of a copy."""
_read_notes = msgspec.json.Decoder(list[str])
COPY_TRIES = 3
"""Most tries to make a copy in a directory that other processes may delete."""
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
            raise _inaccessible(name, failure) from None
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


def results_of(given: str, storage: StorageSpec) -> str:
    """Return where the merged results of a run lie, if this is the path of one; any other path as it is.

    They are merged where they are not. Raises InputError where the run is not done, and what merging raises.
    """
    if store_address(given):
        fs, path = _locate(given, storage)
        try:
            is_run = fs.get_file_info(f"{path}/run.json").type == pafs.FileType.File
        except read_errors(fs) as failure:
            raise _inaccessible(given, failure) from None
    else:
        is_run = "://" not in given and holds_run(Path(given))
    if not is_run:
        return given
    from batchrunner.output.merge import merge, merged_rows  # noqa: PLC0415 - only for such an input

    run_dir = look_at_run(given, storage)
    done, total = len(done_by_all(run_dir).rows), require_run_json(run_dir)["rows_total"]
    if done < total:
        raise InputError(
            f"{given}: this run is not done: {done:,} of {total:,} rows",
            hint=f"run it again, or take what is there: {given}/parts",
        )
    if merged_rows(run_dir) < total:
        with _only_one(run_dir.path / ".merging", unfinished=".merge-*/**/*"):
            if merged_rows(run_dir) < total > merge(run_dir).rows:
                raise InputError(f"{given}: this run is still at work", hint="try again when it has ended")
    return f"{given}/merged"


def _inaccessible(name: str, failure: Exception) -> BatchrunError:
    why = getattr(failure, "strerror", None) or first_line(failure)
    return or_away(InputError(f"{name}: {why}"), failure)


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
        check_client(address, InputError)
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
    is_directory = path.is_dir()
    if is_directory:
        found = (file for file in path.rglob("*") if known_format(file.name))
        files = [file for file in found if not (_hidden(file.relative_to(path)) or file.is_dir())]
    elif path.exists():
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
    return {str(file.parent.resolve() / file.name): str(file) for file in files}, is_directory


def _of_one_kind(given: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return those files of a directory that are input: Parquet files, or else those of one other kind.

    Beside Parquet files there may be descriptions in JSON, or a list in CSV: those are named in the log.
    Raises InputError where there are several other kinds.
    """
    kinds: dict[str, dict[str, str]] = {}
    for real, path in files.items():
        if found := known_format(path):
            kinds.setdefault(found.kind, {})[real] = path
    if len(kinds) < 2:  # noqa: PLR2004
        return next(iter(kinds.values()), {})
    if parquet := kinds.pop("Parquet", None):
        others = sorted(path for kind in kinds.values() for path in kind.values())
        if other := next((path for path in others if not holds_run(Path(path).parent)), None):
            log.warning("%s: only its Parquet files are read; others, such as %s, are not", given, other)
        return parquet
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


def join_paths(path: str | Sequence[str]) -> str:
    """Return `input.path`, which may be a list, as one text for messages."""
    return path if isinstance(path, str) else ", ".join(path)


class SourceFile:
    """A file of the input, as it was when it was found.

    A file that is not Parquet is read from a Parquet copy of it. Another file under its path, or other
    content in it, is an InputChangedError. The digest decides; where it does not cover the whole file, so
    does the time of its last change.
    """

    def __init__(
        self, fs: pafs.FileSystem, path: str, copies: Path, source: InputSpec, is_batch: bool
    ) -> None:
        """Find the columns and row groups; raises InputError where the file is missing or unreadable.

        `copies` is the directory of the Parquet copies, `source` says how texts are read; the lines of a
        batch file are requests.
        """
        self._fs = fs
        self.path = path
        self.is_local = isinstance(fs, pafs.LocalFileSystem)
        """Whether it is on this machine."""
        self.read_errors = read_errors(fs)
        """What reading it raises, see `files.read_errors`."""
        self.format = _batch_format(path) if is_batch else format_of(path)
        self._copies, self._source, self._is_batch = copies, source, is_batch
        self.digest = ""
        """Digest of its content; empty until it is known."""
        self.notes: list[str] = []
        """What a person should know of its records: which fail, and why a column is text."""
        self._copy: Path | None = None  # what is read of a file that is not Parquet
        try:
            self._seen = self._look()
            self._size = int(self._seen[0])
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
        """Columns of the file, as they are stored."""
        self._group_rows = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        self.rows: int = sum(self._group_rows)
        self.grown_from: str | None = None
        """Digest that it had when a run knew it, and that is its own no more: rows were appended since."""
        self.has_grown = False
        """Whether rows were appended since it was found."""
        self.partitions = hive_partitions(path)
        """Values of Hive partition columns in the path (`year=2024/`); None is null."""
        self.starts: list[int] = []
        """Ordinals of the first row of each row group, and of the row after the last one."""

    def begin_at(self, row: int) -> None:
        """Give the file's first row its ordinal in the whole input."""
        self.starts = [*accumulate(self._group_rows, initial=row)]

    @property
    def is_text(self) -> bool:
        """Whether the types of its columns come from values, or from `input.types`."""
        return self.format.kind in {"CSV", "JSON Lines"}

    def facts(self) -> dict[str, Any]:
        """Return what a resumed run recognises it by."""
        found = {"path": self.path, "rows": self.rows, "digest": self.digest, "size": self._size}
        return found if self.grown_from is None else {**found, "grown_from": self.grown_from}

    def recognize(self, before: Mapping[str, Any]) -> None:
        """Find out whether it is a file that had these `facts`, to which rows were appended since."""
        size = before.get("size", self._size)
        if size < self._size and self._begins_with(size, before["digest"]):
            self.grown_from = before["digest"]
            log.info(
                "%s grew: its first %d rows are those of this run, %d came after them",
                self.path, before["rows"], self.rows - before["rows"],
            )  # fmt: skip

    def _begins_with(self, size: int, digest: str) -> bool:
        """Tell whether its first bytes, to the end of a line, are a whole file of this size and digest."""
        if not self._may_grow or self._digest_of(size) != digest:
            return False
        with Path(self.path).open("rb") as file:
            file.seek(size - 1)
            return not {*b"\r\n"}.isdisjoint(file.read(2))

    @property
    def _may_grow(self) -> bool:
        """Whether lines can be appended to it and leave those before as they are."""
        return self.is_local and self.is_text and self.format.compression is None

    def open(self) -> pq.ParquetFile:
        """Open the file for reading; raises OSError or ArrowException, or InputChangedError."""
        opened = self._opened()
        self.check_after_reading()
        return opened

    def check_after_reading(self) -> None:
        """Do as `check_unchanged`, for a file whose next bytes may be those of another one.

        A copy stays as it is, a store compares the e_tag with each request for bytes, and a commit of the Hub
        never changes.
        """
        if self._copy is None and not self._e_tag() and without_commit(self.path) == self.path:
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the path has other content now; appended lines are none.

        A file that is missing, or cannot be read at present, is not known to have changed.
        """
        try:
            seen = self._look()
            if seen == self._seen:
                return
            known = seen[:2] == self._seen[:2] or not self._is_sampled  # an edit between blocks is not seen
            self.has_grown = int(seen[0]) > self._size and self._begins_with(self._size, self.digest)
            is_old = known and seen[0] == self._size and self._digest_of(self._size) == self.digest
        except self.read_errors:
            return
        if not (is_old or self.has_grown):
            raise InputChangedError(
                f"the input file {self.path} changed during the run",
                hint="put the old file back and run the same "
                "command again, or take another output.path for the new one",
            )
        self._seen = seen  # it was touched, or replaced by a copy of itself

    def _opened(self) -> pq.ParquetFile:
        """Open the file or its copy, which is made again where another process has deleted it."""
        if self._copy is None:
            return _open_parquet(self._fs, self.path)
        try:
            return _open_parquet(pafs.LocalFileSystem(), str(self._copy))
        except FileNotFoundError:
            self.check_unchanged()
            self._copy = self._find_copy()
            return _open_parquet(pafs.LocalFileSystem(), str(self._copy))

    def _look(self) -> tuple[int | str, ...]:
        """Return what changes whenever the file is replaced or written to; raises OSError.

        The first two are its size and the time of its last change, or the e_tag that a store gives it.
        """
        if self.is_local:
            stat = Path(self.path).stat()
            return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns
        info = self._fs.get_file_info(self.path)
        if info.type == pafs.FileType.NotFound:
            raise FileNotFoundError(self.path)
        return info.size, self._e_tag() or info.mtime_ns or 0

    def _e_tag(self) -> str | None:
        """Return what a store changes whenever an object is replaced, as it was seen last."""
        e_tags: dict[str, str] = getattr(getattr(self._fs, "handler", None), "e_tags", {})
        return e_tags.get(self.path)

    @property
    def _is_sampled(self) -> bool:
        """Whether its digest reads blocks of it only."""
        return self.format.kind == "Parquet" and self._size > SAMPLE_BLOCKS * SAMPLE_BYTES

    def _digest_of(self, size: int) -> str:
        """Return the digest of its first bytes, as it is now; of another format than text it is of all."""
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
        """Return the Parquet copy of the file, which is made unless it is there.

        Raises InputError or StorageError, and what reading raises.
        """
        texts = self._source.types, self._source.delimiter, self._source.encoding
        about = repr((self.path, self._seen, texts, self._is_batch))
        copy = self._copies / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.parquet"
        tries = 0
        while not copy.exists():
            tries += 1
            try:
                self._make_copy(copy)
            except (FileNotFoundError, StorageError):
                # a process that ends the run deletes the directory of the copies
                was_deleted = not copy.parent.exists()
                if tries == COPY_TRIES or not was_deleted:
                    raise
        return copy

    def _make_copy(self, copy: Path) -> None:
        """Make the Parquet copy. One of several processes makes it, where the file system has locks."""
        with writing(copy):
            make_directory(copy.parent)
        with _only_one(copy.with_suffix(".lock"), unfinished=f".{copy.name}*"):
            if not copy.exists():
                self.digest = self.digest or self._digest_of(self._size)  # of what an earlier copy has
                with writing(copy), whole_file(copy, secrets.token_hex(4)) as temporary:
                    write_parquet(self._rows(), temporary, {_DIGEST: self.digest.encode()}, self.path)
                    self.check_unchanged()  # it was read after its digest was made

    def _rows(self) -> Iterator[pa.RecordBatch]:
        """Read the file once, from its beginning to its end; raises InputError."""
        from batchrunner.input.text_files import batches_of_file  # noqa: PLC0415 - not for Parquet

        try:
            with self._fs.open_input_file(self.path) as file:
                source = decompressed(file.get_stream(0, self._size), self.format.compression)
                yield from batches_of_file(
                    source, self.path, self.format, self._source, is_batch=self._is_batch
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
            hint = "if its page on the Hub asks for it, ask for access there, and set HF_TOKEN"
        elif self.format.compression == "zstd" and "too much memory" in str(failure):
            hint = f"its window is too large; {unpacking(self.path, head_of(self._fs, self.path))}"
        elif self.format.kind == "Parquet":
            others = f"a name with another ending than {', '.join(ENDINGS)} is read as Parquet"
            hints = [unpacking(self.path, head_of(self._fs, self.path))]
            hints += [] if known_format(self.path) else [others]
            hint = "; ".join(filter(None, hints)) or None
        elif self.format.kind == "JSON Lines" and isinstance(failure, pa.ArrowInvalid):
            hint = "give the column a type in input.types: string keeps its values as they are"
        told = f"{place}: not a readable {self.format.kind} file: {first_line(failure)}"
        return or_away(InputError(told, hint=hint), failure)


def head_of(fs: pafs.FileSystem, path: str) -> bytes:
    """Return the first bytes of a file; none where it cannot be read."""
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


@contextlib.contextmanager
def _only_one(lock: Path, *, unfinished: str) -> Iterator[None]:
    """Wait while another process is in this block with the same lock; a killed one is in none.

    What several processes make at once is alike, and appears whole. So a process whose `unfinished` files, a
    pattern beside the lock, do not change for `TIMING.silent_copy` is not waited for: its machine sleeps.
    """
    with writing(lock), lock.open("wb") as file:
        size, changed_at = -1, time.monotonic()
        while _is_locked_elsewhere(file) and time.monotonic() - changed_at < TIMING.silent_copy:
            time.sleep(TIMING.launch_poll)
            size_now = _bytes_of_files(lock.parent, unfinished)
            if size_now != size:
                size, changed_at = size_now, time.monotonic()
        yield


def _is_locked_elsewhere(file: IO[bytes]) -> bool:
    """Lock a file; tell whether another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: several processes may do the same
        return False
    return False


def _bytes_of_files(directory: Path, pattern: str) -> int:
    """Return the bytes of the files that a pattern names."""
    size = 0
    for file in directory.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # it was renamed just now
            size += file.stat().st_size
    return size


def size_of(footer: pq.FileMetaData, columns: Iterable[str], group: int) -> int:
    """Return the uncompressed bytes of these columns in a row group."""
    tops = tuple(f"{name}." for name in columns)  # leaf columns have paths such as `column.list.element`
    leaves = map(footer.row_group(group).column, range(footer.num_columns))
    return sum(leaf.total_uncompressed_size for leaf in leaves if f"{leaf.path_in_schema}.".startswith(tops))


def _batch_format(path: str) -> FileFormat:
    """Return the format of a batch file: it may have any name, but the ending of a compression counts."""
    known = known_format(path)
    if known is not None and known.kind != "JSON Lines":
        raise InputError(f"{path}: is {known.kind}", hint="a batch file has a JSON object on each line")
    return known or FileFormat("JSON Lines", "", COMPRESSIONS.get(PurePosixPath(path).suffix.lower()))


def _samples(source: pa.NativeFile, size: int) -> Iterator[bytes]:
    """Yield blocks that are evenly spread; the last one is the end of the file, with the footer."""
    for block in range(SAMPLE_BLOCKS):
        source.seek((size - SAMPLE_BYTES) * block // (SAMPLE_BLOCKS - 1))
        yield source.read(SAMPLE_BYTES)
