"""Deletes the results of a whole run (`--fresh`), or only its failed rows (`--retry-failed`).

A process that was suspended for long may lose its lock to another process, and must not delete that process's
results when it wakes up. So it verifies the lock before each deletion.

A half-deleted run must not be used, because it may list rows as done whose results are gone. So the file
`discarding` marks the run until everything is deleted. A start that finds this file continues the deletion.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrunner.core.errors import TaskHeldError
from batchrunner.output.counts import RowCounts, counts_in, with_counts
from batchrunner.output.files import create_file, using_run, whole_file, writing
from batchrunner.output.liveness import POLL_S, monitor_of, wait_until_dead
from batchrunner.output.parts import open_part
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import TaskLock, hold_task

log = logging.getLogger(__name__)

Sleep = Callable[[float], None]
"""A function that sleeps for some seconds; it may raise an exception to end the wait."""


def check_nobody_works(run_dir: RunDir, sleep: Sleep) -> None:
    """Raise TaskHeldError if another worker is running, because its results must not be deleted.

    Workers on other machines are watched all at once. The lock of a dead worker is released, so that no later
    start waits for it again. A worker that starts after this check finds the file `discarding`, and waits.
    """
    with using_run(f"output.path {run_dir.name}"):
        tasks = run_dir.other_tasks()
        monitors = {f"{run_dir.name}/tasks/{task.task}": monitor_of(task) for task in tasks}
        for monitor in monitors.values():
            monitor.poll()  # The first poll only reads `owner`.
        held_tasks = {place: monitor for place, monitor in monitors.items() if monitor.owner_content}
        wait_until_dead(held_tasks, sleep)
    for task, monitor in zip(tasks, monitors.values(), strict=True):
        if monitor.owner_content:
            # Take over the dead worker's lock and release it, which deletes the file or object `owner`.
            with hold_task(task, sleep, dead_owner=monitor.owner_content):
                pass


def discard_run(run_dir: RunDir, lock: TaskLock, sleep: Sleep) -> None:
    """Delete the files of earlier attempts. The caller holds `lock`, the lock of the main worker.

    Raises TaskHeldError if another worker is running, StorageError if a file cannot be deleted, and
    TaskLockLostError if another process has taken the lock. After an error nothing more is deleted.
    """
    with writing(run_dir.path):
        lock.verify()
        # The mark is set before the check, so that a worker which starts after the check finds it.
        create_file(run_dir.discarding, b"{}", lock.token, run_dir.store.add)
        try:
            check_nobody_works(run_dir, sleep)
        except BaseException:
            run_dir.store.remove(run_dir.discarding)  # No result was deleted, so the run can still be used.
            raise
        _discard_rest(run_dir, lock)


def _discard_rest(run_dir: RunDir, lock: TaskLock) -> None:
    """Delete the remaining files of earlier attempts, and finally the mark `discarding`."""
    run_dir.discard(before_each=lock.verify)
    lock.forget_predecessor()
    run_dir.store.remove(run_dir.discarding)


@contextlib.contextmanager
def hold_own_task(run_dir: RunDir, sleep: Sleep) -> Iterator[TaskLock]:
    """Hold this worker's lock (`hold_task`). An unfinished deletion of the run (`--fresh`) is finished first.

    Raises TaskHeldError if another process holds the lock, OutputError or StorageError if nothing can be
    written.
    """
    while True:
        _finish_discarding(run_dir, sleep)
        with hold_task(run_dir, sleep) as lock:
            # Another start may have begun to discard the run before this process got the lock. Then the lock
            # is released, and the loop finishes that discard or waits for it.
            if not run_dir.is_being_discarded():
                yield lock
                return


def _finish_discarding(run_dir: RunDir, sleep: Sleep) -> None:
    """Finish a discard whose process has died. If that process is still running, wait for it."""
    main = run_dir.of_task()
    while run_dir.is_being_discarded():
        try:
            with hold_task(main, sleep) as lock, writing(run_dir.path):
                if main.is_being_discarded():  # Another process may have finished the discard meanwhile.
                    log.warning(
                        "%s: an earlier start with --fresh was stopped: discarding the remaining files",
                        run_dir.name,
                    )
                    check_nobody_works(main, sleep)
                    _discard_rest(main, lock)
        except TaskHeldError:
            sleep(POLL_S)


def discard_failed_rows(run_dir: RunDir, lock: TaskLock) -> None:
    """Remove the failed rows from this worker's part files (Parquet files of results).

    Each file is replaced atomically. Raises ResumeError if a file is damaged, StorageError if one cannot be
    written, and TaskLockLostError if another process has taken the lock.
    """
    for path in run_dir.own_parts():
        with open_part(path) as part:
            errors = part.read(["error"]).column("error")
            if errors.null_count == len(errors):
                continue
            # The new file has no failed rows.
            counts = counts_in(part.schema_arrow)._replace(failed=RowCounts())
            rows_without_error = with_counts(part.read().filter(pc.is_null(errors)), counts)
        with writing(path), whole_file(path, publish=run_dir.store.replace) as temporary:
            pq.write_table(rows_without_error, temporary, compression="zstd")
            # The end of the block replaces the part file. Only the process with the lock may do so.
            lock.verify()
