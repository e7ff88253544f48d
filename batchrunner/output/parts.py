"""Parts: Parquet files of finished rows, whole when they appear and readable at any moment."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrunner.core.errors import ResumeError
from batchrunner.output.check_counts import with_checks_of
from batchrunner.output.files import TEMPORARY, make_directory, sync_directory, whole_file
from batchrunner.output.journal import read_journal
from batchrunner.output.run_dir import RunDir, number_of
from batchrunner.output.task_lock import TaskLock

log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_part(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a part for reading; raises ResumeError where it is damaged, FileNotFoundError where it is gone."""
    try:
        with pq.ParquetFile(path) as part:
            yield part
    except FileNotFoundError:
        raise
    except (OSError, KeyError, pa.ArrowException) as failure:  # KeyError: a column is missing
        reason = str(failure).strip().partition("\n")[0]
        raise ResumeError(
            f"{path}: is damaged", hint=f"move it away, and its rows will be done again ({reason})"
        ) from None


def write_part(run_dir: RunDir, first: int, tables: Sequence[pa.Table], lock: TaskLock) -> int:
    """Write rows in input order as a part, under the first free number from `first` on; return the number.

    An existing part is kept, and rows that it holds are not written again: it may be missing in a stale
    listing, or come from a try of this call that failed after writing it. Raises OSError or
    TaskLockLostError, and then leaves no file behind.
    """
    # those from before the length of vectors was known lack their column
    rows = pa.concat_tables(tables, promote_options="default").sort_by("row")
    table = with_checks_of(rows, tables)
    for number in count(first):
        path = run_dir.part(number)
        try:
            with whole_file(path, lock.token, run_dir.store.add) as temporary:
                pq.write_table(table, temporary, compression="zstd", row_group_size=1 << 17)
                lock.verify()
            break
        except FileExistsError:
            table = _without(table, path)
            if not table.num_rows:
                sync_directory(path.parent)  # the earlier try may have failed here
                break
            log.warning("%s: was written by another attempt: it is kept, and the next number is used", path)
    return number


def _without(table: pa.Table, path: Path) -> pa.Table:
    """Return the rows that a part does not hold; an unreadable or deleted part holds none."""
    try:
        with pq.ParquetFile(path) as part:
            existing = part.read(["row"]).column("row").cast(pa.int64()).combine_chunks()
    except (FileNotFoundError, KeyError, pa.ArrowException):
        return table
    return table.filter(pc.invert(pc.is_in(table.column("row"), value_set=existing)))


def recover(run_dir: RunDir, lock: TaskLock, schema: pa.Schema | None = None) -> None:
    """Finish what an interrupted attempt of this task left: delete torn parts, turn journals into parts.

    The caller holds `lock`, the lock of the task; `schema` is that of results, where it is known. Raises
    OSError or TaskLockLostError.
    """
    next_number = 1 + max(map(number_of, run_dir.own_parts()), default=-1)
    for torn in run_dir.parts.glob(f".part-{run_dir.task}-*{TEMPORARY}"):
        torn.unlink(missing_ok=True)
    for path in run_dir.journals():
        if tables := list(read_journal(path)):
            make_directory(run_dir.parts)
            write_part(run_dir, number_of(path), tables, lock)
            schema = schema or tables[0].schema
        run_dir.store.remove(path)
    # without a run.json the holder before wrote no part, and a part alone would be taken for a strange run
    if lock.replaced_unclean and schema is not None and run_dir.run_json.exists():
        _take_name(run_dir, next_number, schema, lock)
        lock.replaced_unclean = False
    lock.note_recovered()


def _take_name(run_dir: RunDir, number: int, schema: pa.Schema, lock: TaskLock) -> None:
    """Give a part of no rows the name that the holder before may still be writing: so that write fails.

    In an object store a write may arrive long after its process lost the task.
    """
    make_directory(run_dir.parts)
    with (
        contextlib.suppress(FileExistsError),  # it arrived before, and is here now; or the journal's rows did
        whole_file(run_dir.part(number), lock.token, run_dir.store.add) as temporary,
    ):
        pq.write_table(schema.empty_table(), temporary)
