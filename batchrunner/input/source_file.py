"""One file of the input: its content, its digest, and whether it is still the file that was found."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from batchrunner.core.errors import InputChangedError, InputError
from batchrunner.core.files import COMPRESSIONS, ENDINGS, FileFormat, format_of, known_format
from batchrunner.input.files import first_line, hive_partitions, read_errors, without_commit
from batchrunner.input.parquet_copy import PROBLEM, normalized, write_parquet
from batchrunner.output.files import make_directory, whole_file, writing

log = logging.getLogger(__name__)

READ_BUFFER_BYTES = 1 << 20
"""Bytes of the buffers through which a file is streamed, instead of being loaded whole."""
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 16 << 10
"""A digest of a Parquet file reads this many blocks of this many bytes; the last is the footer, which changes
with the content. Of up to their sum (1 MiB), and of other formats, all is read."""
LARGE_BYTES = 256 << 20
"""Size of a file whose copy takes so long that the log says so."""
_DIGEST = b"batchrunner.digest"
"""Key of the original's digest in the metadata of a copy."""


class SourceFile:
    """A file of the input, as it was when it was found.

    A file that is not Parquet is read from a Parquet copy of it. Another file under its path, or other
    content in it, is an InputChangedError. The digest decides; where it does not cover the whole file, so
    does the time of its last change.
    """

    def __init__(
        self, fs: pafs.FileSystem, path: str, copies: Path, types: Mapping[str, str], is_batch: bool
    ) -> None:
        """Find the columns and row groups; raises InputError where the file is missing or unreadable.

        `copies` is the directory of the Parquet copies, `types` are those of `input.types`; the lines of a
        batch file are requests.
        """
        self._fs = fs
        self.path = path
        self.is_local = isinstance(fs, pafs.LocalFileSystem)
        """Whether it is on this machine."""
        self.read_errors = read_errors(fs)
        """What reading it raises, see `files.read_errors`."""
        self.format = _batch_format(path) if is_batch else format_of(path)
        self._parquet: tuple[pafs.FileSystem, str] = (fs, path)  # what is read: the file, or its copy
        try:
            self._seen = self._look()
            self._size = int(self._seen[0])
            if self.format.kind == "Parquet":
                self.digest = self._digest_now()
            else:
                self._parquet = pafs.LocalFileSystem(), str(self._find_copy(copies, types, is_batch))
            with contextlib.closing(self._opened()) as file:
                footer, schema = file.metadata, file.schema_arrow
        except InputError:
            raise
        except self.read_errors as failure:
            raise self._unreadable(failure) from None
        if self.format.kind != "Parquet":
            self.digest = schema.metadata[_DIGEST].decode()
        self.has_problems = PROBLEM in schema.names
        """Whether some of its records cannot be read."""
        self.schema = normalized(pa.schema([field for field in schema if field.name != PROBLEM]))
        """Columns of the file."""
        self._group_rows = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        self.rows: int = sum(self._group_rows)
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

    def open(self) -> pq.ParquetFile:
        """Open the file for reading; raises OSError or ArrowException, or InputChangedError."""
        opened = self._opened()
        self.check_after_reading()
        return opened

    def check_after_reading(self) -> None:
        """Do as `check_unchanged`, for a file whose next bytes may be those of another one.

        A store compares the e_tag with each request for bytes, and a commit of the Hub never changes.
        """
        if not self._e_tag() and without_commit(self.path) == self.path:
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the path has other content now.

        A file that is missing, or cannot be read at present, is not known to have changed.
        """
        try:
            seen = self._look()
            if seen == self._seen:
                return
            known = seen[:2] == self._seen[:2] or not self._is_sampled  # an edit between blocks is not seen
            same = known and seen[0] == self._size and self._digest_now() == self.digest
        except self.read_errors:
            return
        if not same:
            raise InputChangedError(
                f"the input file {self.path} changed during the run",
                hint="put the old file back and run the same "
                "command again, or take another output.path for the new one",
            )
        self._seen = seen  # it was touched, or replaced by a copy of itself

    def _opened(self) -> pq.ParquetFile:
        fs, path = self._parquet
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

    def _e_tag(self) -> str | None:
        """Return what a store changes whenever an object is replaced, as it was seen last."""
        e_tags: dict[str, str] = getattr(getattr(self._fs, "handler", None), "e_tags", {})
        return e_tags.get(self.path)

    @property
    def _is_sampled(self) -> bool:
        """Whether its digest reads blocks of it only."""
        return self.format.kind == "Parquet" and self._size > SAMPLE_BLOCKS * SAMPLE_BYTES

    def _digest_now(self) -> str:
        digest = hashlib.sha256(str(self._size).encode())
        if e_tag := self._e_tag():
            digest.update(e_tag.encode())
            return digest.hexdigest()
        with self._fs.open_input_file(self.path) as source:
            whole = iter(lambda: source.read_buffer(READ_BUFFER_BYTES), b"")
            for block in _samples(source, self._size) if self._is_sampled else whole:
                digest.update(block)
        return digest.hexdigest()

    def _find_copy(self, copies: Path, types: Mapping[str, str], is_batch: bool) -> Path:
        """Return the Parquet copy of the file, which is made unless it is there.

        One of several processes makes it, where the file system has locks. Raises InputError or StorageError,
        and what reading raises.
        """
        about = repr((self.path, self._seen, sorted(types.items()), is_batch))
        copy = copies / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.parquet"
        if copy.exists():
            return copy
        with writing(copy):
            make_directory(copies)
        with _only_one(copy.with_suffix(".lock")):
            if not copy.exists():
                if self._size >= LARGE_BYTES:
                    log.info("%s: a Parquet copy is made of it (%d MiB)", self.path, self._size >> 20)
                self.digest = self._digest_now()
                with writing(copy), whole_file(copy, secrets.token_hex(4)) as temporary:
                    write_parquet(self._rows(types, is_batch), temporary, {_DIGEST: self.digest.encode()})
                    self.check_unchanged()  # it was read after its digest was made
        return copy

    def _rows(self, types: Mapping[str, str], is_batch: bool) -> Iterator[pa.RecordBatch]:
        """Read the file once, from its beginning to its end; raises InputError."""
        from batchrunner.input.text_files import batches_of_file  # noqa: PLC0415 - not for Parquet

        try:
            with self._fs.open_input_stream(self.path, compression=self.format.compression) as opened:
                source = io.BufferedReader(opened, READ_BUFFER_BYTES)
                yield from batches_of_file(source, self.path, self.format, types, is_batch=is_batch)
        except InputError:
            raise
        except self.read_errors as failure:
            raise self._unreadable(failure) from None

    def _unreadable(self, failure: Exception) -> InputError:
        place, hint = self.path, None
        if isinstance(getattr(self._fs, "handler", None), pafs.FSSpecHandler):
            place = f"hf://{without_commit(self.path)}"
            hint = "if its page on the Hub asks for it, ask for access there, and set HF_TOKEN"
        elif not known_format(self.path):
            hint = f"a name with another ending than {', '.join(ENDINGS)} is read as Parquet"
        return InputError(
            f"{place}: not a readable {self.format.kind} file: {first_line(failure)}", hint=hint
        )


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Wait until no other process is in this block with the same path; a killed one is in none."""
    with writing(path), path.open("wb") as file:
        with contextlib.suppress(OSError):  # a file system without locks: several may do the same
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
