"""Holds the lock of a task while a process works on it, with a thread that writes the heartbeat."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from batchrunner.core.errors import OutputError
from batchrunner.output.files import make_directory
from batchrunner.output.run_dir import RunDir
from batchrunner.output.store_lock import StoreTaskLock
from batchrunner.output.task_holder import this_process
from batchrunner.output.task_lock import TaskLock


@contextlib.contextmanager
def hold_task(
    run_dir: RunDir,
    sleep: Callable[[float], None] = time.sleep,
    *,
    directory: Path | None = None,
    dead_owner: bytes | None = None,
) -> Iterator[TaskLock]:
    """Hold the lock of `directory`, the task's own by default, with a thread that writes the heartbeat.

    `sleep` is called between polls of a holder on another machine; it may raise to end the wait.
    `dead_owner` is as for `TaskLock.acquire`.
    Raises TaskHeldError where a running process holds the lock, OutputError where nothing can be written.
    Directories that were created for the lock and stayed empty are deleted at the end.
    """
    directory = directory or run_dir.task_directory
    created = [p for p in (directory, *directory.parents) if not p.exists()]
    me = this_process()
    objects = run_dir.store.objects
    lock = (
        TaskLock(directory, me, sleep=sleep)
        if objects is None
        else StoreTaskLock(objects, directory, run_dir.path, me, sleep=sleep)
    )
    try:
        make_directory(directory)
        lock.acquire(dead_owner)
        _bring_what_was_written(run_dir, directory, lock)
    except (OSError, ValueError) as failure:  # ValueError: a null byte in the path
        why = getattr(failure, "strerror", None) or failure
        raise OutputError(f"output.path {run_dir.name}: cannot be written: {why}") from None
    ended = threading.Event()
    beating = threading.Thread(target=_keep_beating, args=(lock, ended), name="heartbeat", daemon=True)
    beating.start()
    try:
        yield lock
    finally:
        ended.set()
        beating.join()
        lock.release()
        for path in created:
            with contextlib.suppress(OSError):  # it holds files
                path.rmdir()


def _bring_what_was_written(run_dir: RunDir, directory: Path, lock: TaskLock) -> None:
    """Bring the results of a task here: the holder before may have written since the run was opened."""
    if directory == run_dir.task_directory:
        try:
            run_dir.store.bring_results([run_dir.task])
        except OSError:
            lock.release()
            raise


def _keep_beating(lock: TaskLock, ended: threading.Event) -> None:
    while not ended.wait(lock.beat_s):
        with contextlib.suppress(OSError):  # a full disk still overwrites these few bytes in place
            lock.beat()
