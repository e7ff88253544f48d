"""Part files and journals, which hold the finished rows of a run.

A part file is a complete Parquet file. A journal holds newer rows: they are appended and synced to disk long
before their part file is written.

A journal consists of frames. Each frame has three little-endian 32-bit numbers (the payload's size in bytes,
its CRC-32, its number of rows) and the payload, an Arrow IPC stream with its own schema. If a crash or a full
disk interrupts a write, the last frame is incomplete, and readers stop there.
"""

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrunner.core.errors import ResumeError, StorageError, first_line
from batchrunner.output.counts import counts_in, sum_of, with_counts
from batchrunner.output.files import TEMPORARY, make_directory, sync_directory, whole_file
from batchrunner.output.run_dir import RunDir, number_of
from batchrunner.output.task_lock import TaskLock

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<III")


class Journal:
    """Writer of a new journal, a file to which finished rows are appended.

    Each method may raise OSError, and may be called again after that.
    """

    def __init__(self, path: Path) -> None:
        """Create the journal, and overwrite a file that an earlier failed call left at `path`."""
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        self._end = 0  # Size in bytes of the tables that are completely on disk.
        try:
            sync_directory(path.parent)
        except OSError:
            os.close(self._file)
            raise

    def append(self, table: pa.Table) -> None:
        """Append rows. Once this method has returned, they survive a power failure."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        payload = sink.getvalue()
        frame = memoryview(_HEADER.pack(payload.size, zlib.crc32(payload), table.num_rows) + payload)
        written = 0
        # The write begins after the last complete frame. It overwrites an incomplete frame of a failed call.
        while written < len(frame):
            written += os.pwrite(self._file, frame[written:], self._end + written)
        os.fsync(self._file)
        self._end += len(frame)

    def close(self) -> None:
        """Close the file, which stays on disk."""
        os.close(self._file)


def read_journal(path: Path) -> Iterator[pa.Table]:
    """Yield the tables of a journal, up to the first that is incomplete or damaged.

    Raises FileNotFoundError if the journal was deleted, for example because its rows are in a part file now.
    """
    with path.open("rb") as file:
        remaining = path.stat().st_size
        while remaining >= _HEADER.size:
            size, checksum, _ = _HEADER.unpack(file.read(_HEADER.size))
            remaining -= _HEADER.size + size
            # After a power failure, a file may end in zeros that no process wrote, so a size of 0 is the end.
            if size == 0 or remaining < 0 or zlib.crc32(payload := file.read(size)) != checksum:
                return
            with pa.ipc.open_stream(payload) as reader:
                yield reader.read_all()


@contextlib.contextmanager
def open_part(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a part file for reading.

    Raises FileNotFoundError if it is missing, StorageError if the disk cannot read it, and ResumeError if it
    is damaged.
    """
    try:
        with pq.ParquetFile(path) as part:
            yield part
    except FileNotFoundError:
        raise
    except (OSError, KeyError, pa.ArrowException) as failure:  # A missing column raises KeyError.
        # Only failed system calls have an error number. Other errors are about the file's content.
        number = getattr(failure, "errno", None)
        if number is not None:
            raise StorageError(
                f"{path}: cannot be read: {os.strerror(number)}",
                hint="the file is kept; run the same command again once the disk can be read",
            ) from None
        raise ResumeError(
            f"{path}: is damaged",
            hint=f"move the file away, and its rows will be sent again ({first_line(failure)})",
        ) from None


def write_part(run_dir: RunDir, first_number: int, tables: Sequence[pa.Table], lock: TaskLock) -> int:
    """Write rows, in input order, as a part file; return its number.

    The number is the first free one from `first_number` on. A part file that exists under one of these
    numbers is kept, and its rows are not written again. If no rows remain, its number is returned. Such a
    file exists if the listing was stale, or if an earlier try of this call failed after writing it.

    Raises OSError if the file cannot be written, and TaskLockLostError if another process has taken the lock.
    Then no file is left behind.
    """
    remaining = [*tables]
    for number in count(first_number):
        path = run_dir.part(number)
        try:
            with whole_file(path, lock.token, run_dir.store.add) as temporary:
                counts = sum_of([counts_in(table.schema) for table in remaining])
                rows = with_counts(pa.concat_tables(remaining).sort_by("row"), counts)
                pq.write_table(rows, temporary, compression="zstd", row_group_size=1 << 17)
                # The end of this block publishes the file. Only the process that holds the lock may do so.
                lock.verify()
            break
        except FileExistsError:
            remaining = [rows for table in remaining if (rows := _without(table, path)).num_rows]
            if not remaining:
                # An earlier try may have written this file, but failed before it synced the directory.
                sync_directory(path.parent)
                break
            log.warning(
                "%s: was written by another attempt: the file is kept, and the next number is used", path
            )
    return number


def _without(table: pa.Table, path: Path) -> pa.Table:
    """Return the rows of a table that are not in a part file; all rows if the file is damaged or missing."""
    try:
        with pq.ParquetFile(path) as part:
            existing = part.read(["row"]).column("row").cast(pa.int64()).combine_chunks()
    except (FileNotFoundError, KeyError, pa.ArrowException):
        return table
    return without_rows(table, existing)


def without_rows(table: pa.Table, rows: pa.Array) -> pa.Table:
    """Return a table without the results of these input rows."""
    return table.filter(pc.invert(pc.is_in(table.column("row"), value_set=rows)))


def recover(run_dir: RunDir, lock: TaskLock, schema: pa.Schema | None = None) -> None:
    """Recover a worker's results after a crash: turn its journals into part files, delete incomplete files.

    The caller holds `lock`. `schema` is the schema of the results; None if it is not known yet. Raises
    OSError if a file cannot be written, and TaskLockLostError if another process has taken the lock.
    """
    # The previous process would have used this number for its next part file. It is read before that
    # process's journals become part files.
    next_number = run_dir.next_number()
    predecessor = lock.predecessor
    lock.verify()
    for torn_part in run_dir.parts.glob(f".part-{run_dir.task}-*{TEMPORARY}"):
        torn_part.unlink(missing_ok=True)
    # From here on, `verify` comes before each deletion, because another process may have taken the lock since
    # the last one.
    for path in run_dir.journals(predecessor.token if predecessor else None):
        if tables := list(read_journal(path)):
            make_directory(run_dir.parts)
            write_part(run_dir, number_of(path), tables, lock)
            schema = schema or tables[0].schema
        lock.verify()
        path.unlink(missing_ok=True)
    # For a run in an object store, `journals` omits the journals of all processes before the last one. These
    # files are outdated, because a later process has continued the run without their rows.
    for outdated in run_dir.task_directory.glob("journal-*"):
        lock.verify()
        outdated.unlink(missing_ok=True)
    # Without a run.json, the previous process has written no part file, so none can arrive late. An empty
    # part file without a run.json would look like a damaged run.
    if predecessor is not None and not predecessor.is_clean and run_dir.run_json.exists():
        # An empty part file needs a schema. A later call can write it, as long as `lock` names the previous
        # process.
        if schema is None:
            return
        # If the previous process only hangs, it might still publish its next part file. An empty part file
        # takes that number first.
        _block_late_part(run_dir, next_number, schema, lock)
    lock.forget_predecessor()


def _block_late_part(run_dir: RunDir, number: int, schema: pa.Schema, lock: TaskLock) -> None:
    """Write an empty part file with the number that the worker's previous process would use next.

    In an object store, a write may arrive long after its process has lost the lock. Such a late write then
    fails, because its name is taken.
    """
    make_directory(run_dir.parts)
    with (
        # If the name is taken, the late write has arrived, or a journal became this part file.
        contextlib.suppress(FileExistsError),
        whole_file(run_dir.part(number), lock.token, run_dir.store.add) as temporary,
    ):
        pq.write_table(schema.empty_table(), temporary)
