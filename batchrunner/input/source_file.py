"""One file of the input: its content, its digest, and whether it is still the file that was found."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.fs as pafs

from batchrunner.core.errors import InputChangedError, InputError, StoreRequestError
from batchrunner.core.files import COMPRESSIONS, ENDINGS, FileFormat, format_of, known_format
from batchrunner.core.processes import too_many_files
from batchrunner.input.files import first_line, read_errors
from batchrunner.input.formats.arrow import ArrowContent
from batchrunner.input.formats.base import READ_BUFFER_BYTES, Content, OpenContent
from batchrunner.input.formats.batch_lines import BatchHow, BatchLines
from batchrunner.input.formats.csv_records import CsvRecords
from batchrunner.input.formats.json_lines import JsonLinesRecords
from batchrunner.input.formats.parquet import FooterBudget, ParquetContent
from batchrunner.input.formats.text import TextContent, TextSource
from batchrunner.input.hub_files import without_commit
from batchrunner.input.object_state import objects_of

log = logging.getLogger(__name__)

SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 16 << 10
"""A digest of a Parquet file reads this many blocks of this many bytes; the last is the footer, which changes
with the content. Of up to their sum (1 MiB), and of other formats, all is read."""
LARGE_BYTES = 256 << 20
"""Size of a file whose reading at the start takes so long that the log says so."""


class SourceFile:
    """A file of the input, as it was when it was found.

    Another file under its path, or other content in it, is an InputChangedError. The digest decides; where it
    does not cover the whole file, so does the time of its last change.
    """

    def __init__(
        self,
        fs: pafs.FileSystem,
        path: str,
        budget: FooterBudget,
        types: Mapping[str, str] | None = None,
        batch: BatchHow | None = None,
    ) -> None:
        """Find the columns and row groups; raises InputError where the file is missing or unreadable.

        `types` are those of `input.types`, `batch` is `prompt.batch`.
        """
        self._fs = fs
        self.path = path
        self._objects = objects_of(fs)
        self._is_of_hub = isinstance(fs, pafs.PyFileSystem) and self._objects is None
        self.is_local = isinstance(fs, pafs.LocalFileSystem)
        """Whether it costs little to look at the file again."""
        self.read_errors = read_errors(fs)
        """What reading it raises, see `files.read_errors`."""
        self.format = format_of(path) if batch is None else _batch_format(path)
        kind = self.format.kind
        try:
            self._seen = self._look()
            self._size = self._size_now()
            with fs.open_input_file(path) as source:
                self.digest = self._digest_of(source, self._size)
                self._is_sampled = kind == "Parquet" and self._size > SAMPLE_BLOCKS * SAMPLE_BYTES
                source.seek(0)
                self.content: Content = (
                    ParquetContent(fs, path, source, budget)
                    if kind == "Parquet"
                    else _content(fs, path, self._size, self.format, types or {}, batch)
                )
        except InputError:
            raise
        except self.read_errors as failure:
            if too_many_files(failure) or isinstance(failure, StoreRequestError):
                raise InputError(f"{path}: cannot be opened: {first_line(failure)}") from None
            if self._is_of_hub and not isinstance(failure, pa.ArrowException):
                place = f"hf://{without_commit(path)}"
                raise InputError(
                    f"{place}: cannot be opened: {first_line(failure)}",
                    hint="if its page on the Hub asks for it, ask for access there, and set HF_TOKEN",
                    mark=";",
                ) from None
            hint = (
                None
                if known_format(path)
                else f"a name with another ending than {', '.join(ENDINGS)} is read as Parquet"
            )
            raise InputError(
                f"{path}: not a readable {kind} file: {first_line(failure)}", hint=hint, mark=";"
            ) from None
        self.row_groups = self.content.row_groups
        self.rows: int = sum(self.row_groups)

    @property
    def schema(self) -> pa.Schema:
        """Columns of the file."""
        return self.content.schema

    @property
    def is_text(self) -> bool:
        """Whether it is a text file, some of whose records may be wrong."""
        return isinstance(self.content, TextContent)

    def open(self) -> OpenContent:
        """Open the file for reading; raises OSError or ArrowException, or InputChangedError."""
        self.check_before_reading()
        return self.content.open()

    def check_before_reading(self) -> None:
        """Do as `check_unchanged`, where the reading itself would not notice another file.

        A store compares the e_tag with each request for bytes.
        """
        if self._objects is None:
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise InputChangedError where the path has other content now.

        A file that is missing, or cannot be read at present, is not known to have changed.
        """
        try:
            seen = self._look()
            if seen == self._seen:
                return
            size = int(seen[0])
            known = seen[:2] == self._seen[:2] or not self._is_sampled  # an edit between blocks is not seen
            same = known and size == self._size and self._digest_now(size) == self.digest
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
            return self.content.bytes_of(columns)
        except InputError:
            raise
        except self.read_errors as failure:
            raise InputError(f"{self.path}: cannot be read: {first_line(failure)}") from None

    def _look(self) -> tuple[int | str, ...]:
        """Return what changes whenever the file is replaced or written to; raises OSError.

        The first two are its size and the time of its last change, or the e_tag that a store gives it.
        """
        if self.is_local:
            stat = Path(self.path).stat()
            return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns
        if self._objects is not None:
            state = self._objects.state(self.path)
            return state.size, state.e_tag or str(state.changed)
        info = self._fs.get_file_info(self.path)
        if info.type == pafs.FileType.NotFound:
            raise FileNotFoundError(self.path)
        return info.size, info.mtime_ns or 0

    def _size_now(self) -> int:
        size = int(self._seen[0])
        if not size:
            raise InputError(f"{self.path}: is empty (0 bytes): not a {self.format.kind} file")
        return size

    def _digest_now(self, size: int) -> str:
        with self._fs.open_input_file(self.path) as source:
            return self._digest_of(source, size)

    def _digest_of(self, source: pa.NativeFile, size: int) -> str:
        if self.format.kind != "Parquet" or size <= SAMPLE_BLOCKS * SAMPLE_BYTES:
            return _digest(size, iter(lambda: source.read_buffer(READ_BUFFER_BYTES), b""))
        # evenly spread; the last block is the end of the file, with the footer
        starts = [(size - SAMPLE_BYTES) * block // (SAMPLE_BLOCKS - 1) for block in range(SAMPLE_BLOCKS)]
        if self._objects is not None:
            return _digest(size, self._objects.read_samples(self.path, starts, SAMPLE_BYTES))
        return _digest(size, _samples(source, starts))


def _batch_format(path: str) -> FileFormat:
    """Return the format of a batch file: it may have any name, but the ending of a compression counts."""
    known = known_format(path)
    if known is not None and known.kind != "JSON Lines":
        raise InputError(f"{path}: is {known.kind}", hint="a batch file has a JSON object on each line")
    return known or FileFormat("JSON Lines", "", COMPRESSIONS.get(PurePosixPath(path).suffix.lower()))


def _content(
    fs: pafs.FileSystem,
    path: str,
    size: int,
    form: FileFormat,
    types: Mapping[str, str],
    batch: BatchHow | None,
) -> Content:
    """Find the content of a file that has no footer: it is read once."""
    if size >= LARGE_BYTES:
        log.info("%s: is read once to find its rows (%d MiB)", path, size >> 20)
    if form.kind == "Arrow":
        compression = form.compression
        if compression is None:
            return ArrowContent(lambda: fs.open_input_file(path), size, seekable=True)
        return ArrowContent(lambda: fs.open_input_stream(path, compression=compression), size, seekable=False)
    source = TextSource(fs, path, form.compression)
    if batch is not None:
        return TextContent(source, BatchLines(path, batch))
    if form.kind == "JSON Lines":
        return TextContent(source, JsonLinesRecords(path, types))
    return TextContent(source, CsvRecords(path, "\t" if form.ending == ".tsv" else ",", types))


def _samples(source: pa.NativeFile, starts: Iterable[int]) -> Iterator[bytes]:
    for start in starts:
        source.seek(start)
        yield source.read(SAMPLE_BYTES)


def _digest(size: int, blocks: Iterable[bytes]) -> str:
    digest = hashlib.sha256(str(size).encode())
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()
