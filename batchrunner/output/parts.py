"""Part files and journals.

A part file is a complete Parquet file of finished rows; a journal holds newer rows.

Rows are appended to a journal and synced to the disk long before their part file is written. A frame of a
journal consists of three little-endian 32-bit numbers (the payload's size in bytes, its CRC-32, its number of
rows) and the payload, an Arrow IPC stream with its own schema. A write that a crash or a full disk interrupts
leaves a torn last frame, at which readers stop.
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
    """Writer of a new journal. Each method may raise OSError, and may be called again after that."""

    def __init__(self, path: Path) -> None:
        """Create the journal. A file that an earlier failed call left at `path` is overwritten."""
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        self._end = 0  # The size in bytes of the tables that are completely on disk.
        try:
            sync_directory(path.parent)
        except OSError:
            os.close(self._file)
            raise

    def append(self, table: pa.Table) -> None:
        """Append rows. They survive a power failure once this method has returned."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        payload = sink.getvalue()
        frame = memoryview(_HEADER.pack(payload.size, zlib.crc32(payload), table.num_rows) + payload)
        written = 0
        # The frame is written right after the complete frames, so it overwrites an incomplete frame that a
        # failed call has left.
        while written < len(frame):
            written += os.pwrite(self._file, frame[written:], self._end + written)
        os.fsync(self._file)
        self._end += len(frame)

    def close(self) -> None:
        """Close the file, which stays on disk."""
        os.close(self._file)


def read_journal(path: Path) -> Iterator[pa.Table]:
    """Yield the tables that were appended to a journal, up to the first that is torn or damaged.

    Raises FileNotFoundError if the journal has been deleted, for example because it became a part file.
    """
    with path.open("rb") as file:
        remaining = path.stat().st_size
        while remaining >= _HEADER.size:
            size, checksum, _ = _HEADER.unpack(file.read(_HEADER.size))
            remaining -= _HEADER.size + size
            # After a power failure, a file may end in zeros that no process wrote. So a size of 0 means the
            # end.
            if size == 0 or remaining < 0 or zlib.crc32(payload := file.read(size)) != checksum:
                return
            with pa.ipc.open_stream(payload) as reader:
                yield reader.read_all()


@contextlib.contextmanager
def open_part(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a part file for reading.

    Raises FileNotFoundError for a missing part file, StorageError for one that the disk cannot read, and
    ResumeError for a damaged one.
    """
    try:
        with pq.ParquetFile(path) as part:
            yield part
    except FileNotFoundError:
        raise
    except (OSError, KeyError, pa.ArrowException) as failure:  # A missing column raises KeyError.
        # Only the failure of a system call has an error number. Other errors are about the content of the
        # file.
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
    """Write rows in input order as a part file; return its number.

    The number is the first free number from `first_number` on. If a part file with a number exists, it is
    kept, and the rows in it are not written again. If it has all remaining rows, nothing is written, and its
    number is returned. The caller may not know of such a part file for two reasons: its listing was stale, or
    an earlier try of this call failed after it had written the part file. Raises OSError if the file cannot
    be written, and TaskLockLostError if another process has taken the lock. No file is left behind then.
    """
    remaining = [*tables]
    for number in count(first_number):
        path = run_dir.part(number)
        try:
            with whole_file(path, lock.token, run_dir.store.add) as temporary:
                counts = sum_of([counts_in(table.schema) for table in remaining])
                rows = with_counts(pa.concat_tables(remaining).sort_by("row"), counts)
                pq.write_table(rows, temporary, compression="zstd", row_group_size=1 << 17)
                # The end of this block publishes the file, which only the process with the lock may do.
                lock.verify()
            break
        except FileExistsError:
            remaining = [rows for table in remaining if (rows := _without(table, path)).num_rows]
            if not remaining:
                # An earlier try may have written this part file, but failed before it synced the directory.
                sync_directory(path.parent)
                break
            log.warning(
                "%s: was written by another attempt: the file is kept, and the next number is used", path
            )
    return number


def _without(table: pa.Table, path: Path) -> pa.Table:
    """Return the rows of a table that are not in a part file.

    If the part file is damaged or missing, return all rows.
    """
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
    """Recover the task after an interrupted attempt: delete torn part files, turn journals into part files.

    The caller holds `lock`, the lock of the task. `schema` is the schema of the results, or None if it is not
    known yet. Raises OSError if a file cannot be written, TaskLockLostError if another process has taken the
    lock.
    """
    # The predecessor would have given this number to its next part file. The number is read before journals
    # of the predecessor become part files.
    next_number = run_dir.next_number()
    predecessor = lock.predecessor
    lock.verify()
    for torn_part in run_dir.parts.glob(f".part-{run_dir.task}-*{TEMPORARY}"):
        torn_part.unlink(missing_ok=True)
    # `verify` precedes each deletion, because a task that was lost meanwhile belongs to another process.
    for path in run_dir.journals(predecessor.token if predecessor else None):
        if tables := list(read_journal(path)):
            make_directory(run_dir.parts)
            write_part(run_dir, number_of(path), tables, lock)
            schema = schema or tables[0].schema
        lock.verify()
        path.unlink(missing_ok=True)
    # In an object store, journals of holders before the predecessor may be left. Their rows were done again.
    for outdated in run_dir.task_directory.glob("journal-*"):
        lock.verify()
        outdated.unlink(missing_ok=True)
    # Without a run.json, the predecessor has written no part file, so none can arrive late. An empty part
    # file without a run.json would look like a damaged run.
    if predecessor is not None and not predecessor.is_clean and run_dir.run_json.exists():
        # An empty part file needs a schema. As long as `lock` names the predecessor, a later call can write
        # it.
        if schema is None:
            return
        # A predecessor that still hangs could publish its next part file late, so an empty part file takes
        # that number.
        _block_late_part(run_dir, next_number, schema, lock)
    lock.forget_predecessor()


def _block_late_part(run_dir: RunDir, number: int, schema: pa.Schema, lock: TaskLock) -> None:
    """Write an empty part file with the number that the task's previous holder would use next.

    In an object store, a write may arrive long after its process has lost the task. Because the name is
    taken, such a late write fails.
    """
    make_directory(run_dir.parts)
    with (
        # If the name is taken already, the late write has arrived, or a journal became this part file.
        contextlib.suppress(FileExistsError),
        whole_file(run_dir.part(number), lock.token, run_dir.store.add) as temporary,
    ):
        pq.write_table(schema.empty_table(), temporary)
