"""Exports the results of a run, in input order, to one file of any format that is read as input too."""

import contextlib
import io
import secrets
import select
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from batchrunner.core.errors import BatchrunError, OutputError, ResumeError
from batchrunner.core.file_format import COMPRESSIONS, ENDINGS, FileFormat, known_format
from batchrunner.core.regular_files import is_special
from batchrunner.job.fields import user_path
from batchrunner.output.files import cannot_write, link_part, refuse_uri, whole_file, writing
from batchrunner.output.merge import distinct_rows, finished_parts, in_order
from batchrunner.output.opened import look_at_run
from batchrunner.output.run_dir import RunDir
from batchrunner.output.table_file import TableFile, table_file

STANDARD_OUTPUT = "-"
"""Name that stands for standard output."""


class _StandardOutput(io.RawIOBase):
    """Standard output, which stays open when this is closed; nothing that cannot be written is kept."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._raw: Any = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        while left:
            written = self._raw.write(left)
            if written is None:  # a pipe that does not block, and is full
                select.select([], [self._raw], [])
            left = left[written or 0 :]
        return len(data)


def export(
    run: str | Path | RunDir, file: str, *, form: str | None = None, force: bool = False
) -> int | None:
    """Write the rows of all parts in input order to a file, or to standard output.

    Return how many rows of the input they are; None where the reader of standard output wanted no more. The
    ending of `file`, or `form`, an ending without its dot such as "csv.gz", tells the format. The file is
    whole when it appears; an existing one is replaced with `force` only. Raises OutputError, also where there
    is nothing to export, or ResumeError where a part is damaged.
    """
    run_dir = look_at_run(run)
    kind = _format(file, form)
    target = None if file == STANDARD_OUTPUT else _target(file, run_dir, force=force)
    parts = finished_parts(run_dir)
    work = run_dir.path / f".export-{secrets.token_hex(4)}"
    try:
        with writing(run_dir.path, OutputError):
            work.mkdir()
        tables = in_order(run_dir, parts, work)
        with _sink(target, force=force) as sink:
            return _write(tables, sink, kind)
    except BrokenPipeError:  # the reader of standard output has what it wants
        return None
    except FileExistsError:
        raise _exists(file) from None
    except OSError as failure:
        if target is not None:
            raise cannot_write(target, failure, OutputError) from None
        raise OutputError(f"standard output: cannot be written: {failure.strerror or failure}") from None
    except (KeyError, pa.ArrowException) as failure:  # for example parts of another run
        raise ResumeError(f"{run_dir.parts}: cannot be exported: {str(failure).splitlines()[0]}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _format(file: str, form: str | None) -> FileFormat:
    endings = ", ".join(ending[1:] for ending in ENDINGS)
    compressions = ", ".join(COMPRESSIONS)
    if form is not None:
        found = known_format(f"x.{form.removeprefix('.')}")
        if found is None:
            raise OutputError(
                f"--format {form}", hint=f"give one of {endings}; all but parquet may end with {compressions}"
            )
        return found
    if file == STANDARD_OUTPUT:
        raise OutputError("standard output has no ending", hint=f"give its --format: {endings}")
    found = known_format(file)
    if found is None:
        raise OutputError(
            f"{file}: its ending names no format",
            hint=f"give one of {endings}, or --format; all but parquet may end with {compressions}",
        )
    return found


def _target(file: str, run_dir: RunDir, *, force: bool) -> Path:
    """Return the path to write; raises OutputError where that cannot be."""
    refuse_uri(file, file)
    try:
        path = Path(user_path(file))
        if path.is_dir():
            raise OutputError(f"{file}: is a directory", hint="give a file")
        if is_special(path):
            raise OutputError(f"{file}: is a device or a pipe", hint="give a file, or - for standard output")
        if not path.parent.is_dir():
            raise OutputError(f"{file}: there is no directory {path.parent}", hint="make it first")
        if path.exists() and not force:
            raise _exists(file)
        inside = {path.parent.resolve(), *path.parent.resolve().parents}
    except (OSError, ValueError) as failure:
        raise OutputError(
            f"{file}: cannot be written: {getattr(failure, 'strerror', None) or failure}"
        ) from None
    ours = (run_dir.parts, run_dir.merged, run_dir.tasks, run_dir.leases)
    if inside & {directory.resolve() for directory in ours} or path.name.startswith("."):
        raise OutputError(
            f"{file}", hint=f"give a visible name outside of what {run_dir.name} keeps in directories"
        )
    return path


def _exists(file: str) -> BatchrunError:
    return OutputError(f"{file}: exists", hint="take another name, or --force to replace it")


@contextlib.contextmanager
def _sink(target: Path | None, *, force: bool) -> Iterator[IO[bytes] | io.RawIOBase]:
    if target is None:
        yield _StandardOutput()
        return
    publish = Path.replace if force else link_part
    with whole_file(target, secrets.token_hex(4), publish) as temporary, temporary.open("wb") as sink:
        yield sink


def _write(tables: Iterator[pa.Table], sink: IO[bytes] | io.RawIOBase, form: FileFormat) -> int:
    rows = 0
    writer: TableFile | None = None
    with contextlib.ExitStack() as stack:
        stream: Any = stack.enter_context(pa.PythonFile(sink, "w"))
        if form.compression:
            stream = stack.enter_context(pa.CompressedOutputStream(stream, form.compression))
        for table in tables:
            if writer is None:
                writer = stack.enter_context(contextlib.closing(table_file(form, stream, table.schema)))
            writer.write(table)
            rows += distinct_rows(table)
    return rows
