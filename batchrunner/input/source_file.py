"""One file of the input: its content, its digest, and whether it is still the file that was found."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from batchrunner.core.errors import InputChangedError, InputError, StoreRequestError
from batchrunner.core.files import COMPRESSIONS, ENDINGS, FileFormat, format_of, known_format
from batchrunner.core.processes import too_many_files
from batchrunner.input.files import first_line, read_errors, without_commit
from batchrunner.input.parquet_copy import PROBLEM, write_parquet
from batchrunner.output.files import make_directory, whole_file, writing

if TYPE_CHECKING:
    from batchrunner.input.batch_lines import BatchFile, BatchHow

log = logging.getLogger(__name__)

READ_BUFFER_BYTES = 1 << 20
"""Bytes of the buffers through which a file is streamed, instead of being loaded whole."""
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 16 << 10
"""A digest of a Parquet file reads this many blocks of this many bytes; the last is the footer, which changes
with the content. Of up to their sum (1 MiB), and of other formats, all is read."""
LARGE_BYTES = 256 << 20
"""Size of a file whose copy takes so long that the log says so."""
POLL_S = 0.2
"""Seconds between two looks whether another process has made a copy."""
_DIGEST = b"batchrunner.digest"
"""Key of the original's digest in the metadata of a copy."""


class SourceFile:
    """A file of the input, as it was when it was found.

    A file that is not Parquet is read from a Parquet copy of it. Another file under its path, or other
    content in it, is an InputChangedError. The digest decides; where it does not cover the whole file, so
    does the time of its last change.
    """

    def __init__(
        self,
        fs: pafs.FileSystem,
        path: str,
        copies: Path,
        types: Mapping[str, str] | None = None,
        batch: BatchHow | None = None,
    ) -> None:
        """Find the columns and row groups; raises InputError where the file is missing or unreadable.

        `copies` is the directory of the Parquet copies, `types` are those of `input.types`, and `batch` is
        what becomes of bad lines in a batch file; None for any other file.
        """
        self._fs = fs
        self.path = path
        self.is_local = isinstance(fs, pafs.LocalFileSystem)
        self._is_of_hub = isinstance(getattr(fs, "handler", None), pafs.FSSpecHandler)
        """Whether it costs little to look at the file again."""
        self.read_errors = read_errors(fs)
        """What reading it raises, see `files.read_errors`."""
        self.format = format_of(path) if batch is None else _batch_format(path)
        self._place: tuple[pafs.FileSystem, str] = (fs, path)  # of the Parquet file
        try:
            self._seen = self._look()
            self._size = self._size_of(self._seen)
            if self.is_parquet:
                self.digest = self._digest_now()
            else:
                copy = self._find_copy(copies, types or {}, batch)
                self._place = pafs.LocalFileSystem(), str(copy)
            with contextlib.closing(self._opened()) as file:
                footer, schema = file.metadata, file.schema_arrow
        except InputError:
            raise
        except self.read_errors as failure:
            raise self._unreadable(failure) from None
        if not self.is_parquet:
            self.digest = schema.metadata[_DIGEST].decode()
        self.has_problems = PROBLEM in schema.names
        """Whether some of its records cannot be read."""
        self.schema = pa.schema([field for field in schema if field.name != PROBLEM])
        """Columns of the file."""
        self.row_groups = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
        self.rows: int = sum(self.row_groups)

    @property
    def is_parquet(self) -> bool:
        """Whether it is read itself, and not a copy of it."""
        return self.format.kind == "Parquet"

    @property
    def is_text(self) -> bool:
        """Whether the types of its columns come from values, or from `input.types`."""
        return self.format.kind in {"CSV", "JSON Lines"}

    def open(self) -> pq.ParquetFile:
        """Open the file for reading; raises OSError or ArrowException, or InputChangedError."""
        self.check_before_reading()
        return self._opened()

    def check_before_reading(self) -> None:
        """Do as `check_unchanged`; a store compares the e_tag with each request for bytes."""
        if not self._e_tag():
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the path has other content now.

        A file that is missing, or cannot be read at present, is not known to have changed.
        """
        try:
            seen = self._look()
            if seen == self._seen:
                return
            is_sampled = self.is_parquet and self._size > SAMPLE_BLOCKS * SAMPLE_BYTES
            known = seen[:2] == self._seen[:2] or not is_sampled  # an edit between blocks is not seen
            same = known and int(seen[0]) == self._size and self._digest_now() == self.digest
        except self.read_errors:
            return
        if not same:
            raise InputChangedError(
                f"the input file {self.path} changed during the run",
                hint="put the old file back and run the same "
                "command again, or take another output.path for the new one",
            )
        self._seen = seen  # it was touched, or replaced by a copy of itself

    def bytes_of(self, columns: Iterable[str]) -> int:
        """Return the uncompressed bytes of these columns; raises InputError."""
        try:
            with contextlib.closing(self._opened()) as file:
                return sum(sizes_of(file.metadata, columns))
        except self.read_errors as failure:
            raise InputError(f"{self.path}: cannot be read: {first_line(failure)}") from None

    def _opened(self) -> pq.ParquetFile:
        fs, path = self._place
        is_local = isinstance(fs, pafs.LocalFileSystem)
        return pq.ParquetFile(
            fs.open_input_file(path),
            pre_buffer=not is_local,
            buffer_size=READ_BUFFER_BYTES if is_local else 0,
        )

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

    def _size_of(self, seen: tuple[int | str, ...]) -> int:
        size = int(seen[0])
        if not size:
            raise InputError(f"{self.path}: is empty (0 bytes): not a {self.format.kind} file")
        return size

    def _e_tag(self) -> str | None:
        """Return what a store changes whenever an object is replaced, as it was seen last."""
        e_tags: dict[str, str] = getattr(getattr(self._fs, "handler", None), "e_tags", {})
        return e_tags.get(self.path)

    def _digest_now(self) -> str:
        digest = _Digest(self._size)
        if e_tag := self._e_tag():
            digest.add(e_tag.encode())
            return digest.text
        with self._fs.open_input_file(self.path) as source:
            is_sampled = self.is_parquet and self._size > SAMPLE_BLOCKS * SAMPLE_BYTES
            whole = iter(lambda: source.read_buffer(READ_BUFFER_BYTES), b"")
            for block in _samples(source, self._size) if is_sampled else whole:
                digest.add(block)
        return digest.text

    def _find_copy(self, copies: Path, types: Mapping[str, str], batch: BatchHow | None) -> Path:
        """Return the Parquet copy of the file, which is made unless it is there.

        One of several processes makes it, where the file system has locks. Raises InputError or StorageError,
        and what reading raises.
        """
        about = repr((self.path, self._seen, sorted(types.items()), batch))
        copy = copies / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.parquet"
        if copy.exists():
            return copy
        with writing(copy):
            make_directory(copies)
        with _only_one(copy.with_suffix(".lock")):
            if not copy.exists():
                if self._size >= LARGE_BYTES:
                    log.info("%s: a Parquet copy is made of it (%d MiB)", self.path, self._size >> 20)
                self._write_copy(copy, types, batch)
        return copy

    def _write_copy(self, copy: Path, types: Mapping[str, str], batch: BatchHow | None) -> None:
        from batchrunner.input.batch_lines import BatchFile  # noqa: PLC0415 - not for Parquet

        lines = BatchFile(self.path, batch) if batch else None
        digest = _Digest(self._size)
        with writing(copy), whole_file(copy, secrets.token_hex(4)) as temporary:
            write_parquet(
                self._rows(digest, lines, types),
                temporary,
                lambda: {_DIGEST: (self._digest_now() if self._e_tag() else digest.text).encode()},
                lines.finish if lines else lambda batch: batch,
            )

    def _rows(
        self, digest: _Digest, lines: BatchFile | None, types: Mapping[str, str]
    ) -> Iterator[pa.RecordBatch]:
        """Read the file once, from its beginning to its end; raises InputError."""
        from batchrunner.input.text_files import batches_of_file, text_lines  # noqa: PLC0415 - not for Parquet

        try:
            with self._fs.open_input_stream(self.path, compression=None) as opened:
                raw = _DigestedFile(opened, digest)
                plain = (
                    raw
                    if self.format.compression is None
                    else pa.CompressedInputStream(pa.PythonFile(raw, "r"), self.format.compression)
                )
                source = io.BufferedReader(plain, READ_BUFFER_BYTES)
                if lines is not None:
                    yield from lines.batches(text_lines(source, self.path))
                else:
                    yield from batches_of_file(source, self.path, self.format, types)
                while raw.read(READ_BUFFER_BYTES):
                    pass  # what is behind the last record counts too
        except InputError:
            raise
        except self.read_errors as failure:
            raise self._unreadable(failure) from None

    def _unreadable(self, failure: Exception) -> InputError:
        told, hint = f"not a readable {self.format.kind} file", None
        if too_many_files(failure) or isinstance(failure, StoreRequestError):
            told = "cannot be opened"
        elif self._is_of_hub and not isinstance(failure, pa.ArrowException):
            told = "cannot be opened"
            hint = "if its page on the Hub asks for it, ask for access there, and set HF_TOKEN"
        elif not known_format(self.path):
            hint = f"a name with another ending than {', '.join(ENDINGS)} is read as Parquet"
        place = f"hf://{without_commit(self.path)}" if self._is_of_hub else self.path
        return InputError(f"{place}: {told}: {first_line(failure)}", hint=hint, mark=";")


class _Digest:
    """SHA-256 of a size and of bytes."""

    def __init__(self, size: int) -> None:
        self._sha = hashlib.sha256(str(size).encode())
        self.add = self._sha.update

    @property
    def text(self) -> str:
        return self._sha.hexdigest()


class _DigestedFile(io.RawIOBase):
    """A file that is read once, from its beginning, and whose bytes go into a digest."""

    def __init__(self, source: pa.NativeFile, digest: _Digest) -> None:
        super().__init__()
        self._source = source
        self._digest = digest

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read the next bytes."""
        count: int = self._source.readinto(buffer)
        self._digest.add(memoryview(buffer)[:count])
        return count


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Wait until no other process is in this block with the same path; a killed one is in none."""
    with writing(path), path.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_S)
                continue
            except OSError:  # a file system without locks: several may do the same
                pass
            break
        yield


def sizes_of(footer: pq.FileMetaData, columns: Iterable[str]) -> Iterator[int]:
    """Yield the uncompressed bytes of these columns in each row group."""
    tops = tuple(f"{name}." for name in columns)  # leaf columns have paths such as `column.list.element`
    paths = (f"{footer.schema.column(leaf).path}." for leaf in range(footer.num_columns))
    leaves = [leaf for leaf, path in enumerate(paths) if path.startswith(tops)]
    for group in range(footer.num_row_groups):
        found = footer.row_group(group)
        yield sum(found.column(leaf).total_uncompressed_size for leaf in leaves)


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
