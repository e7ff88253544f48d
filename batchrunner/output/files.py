"""Atomic file operations: a file is complete when it appears, and survives a power failure."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import orjson

from batchrunner.core.errors import BatchrunError, OutputError, StorageError, StoreRequestError, or_away
from batchrunner.core.files import is_uri
from batchrunner.core.timing import TIMING
from batchrunner.job.fields import user_path

TEMPORARY = ".tmp"
"""Suffix of an incomplete file's name.

The name also begins with a dot, so that readers of Parquet directories skip the file.
"""
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers of file systems without hard links: exFAT, SMB, FUSE."""
YOUNG_S = 60.0
"""Age in seconds below which a scratch directory is not deleted; its process may be about to lock it."""


@contextlib.contextmanager
def whole_file(
    path: Path, writer: str = "", publish: Callable[[Path, Path], object] = Path.replace
) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success sync the file and publish it as `path`.

    On failure the temporary file is deleted. `writer` distinguishes the temporary files of processes that may
    write the same file at once. `publish(temporary, path)` gives the file its final name. By default it
    replaces an existing file; `link_new` and `link_part` raise FileExistsError instead.
    """
    temporary = path.with_name(f".{path.name}{writer and '.'}{writer}{TEMPORARY}")
    # An old temporary file may be a hard link to a published file, which a write would change. So it is
    # deleted first.
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def link_new(temporary: Path, path: Path) -> None:
    """Give a file the new name `path`. Raises FileExistsError if another process has taken the name.

    The name is a hard link, which an NFS server creates for only one of several clients. If the server's
    reply is lost, the client repeats the call, which then fails although the link exists. The number of the
    file's links shows that.
    """
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        if temporary.stat().st_nlink == 1:
            raise


def link_part(temporary: Path, path: Path) -> None:
    """Do the same as `link_new`, but also on a file system without hard links.

    Without hard links, the name is checked and then taken in two steps. For a part file (a Parquet file of
    results) this is safe, because only one worker uses its name.
    """
    try:
        link_new(temporary, path)
    except OSError as failure:
        if failure.errno not in NO_HARD_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.replace(path)


def create_file(
    path: Path, content: bytes, writer: str, publish: Callable[[Path, Path], object] = link_new
) -> bool:
    """Create a file unless it exists; return whether this call created it.

    Only one of several concurrent calls returns True. `writer` and `publish` are explained in `whole_file`;
    `publish` must raise FileExistsError for an existing file. Raises OSError if the file cannot be written.
    """
    try:
        with whole_file(path, writer, publish) as temporary:
            temporary.write_bytes(content)
    except FileExistsError:
        return False
    return True


_LINE_BREAKS = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}
"""JSON escapes, by UTF-8 bytes, of characters at which some readers end a line.

JSON allows these characters unescaped, but `str.splitlines` (and so httpx) splits there.
"""


def json_line(value: Any, default: Callable[[Any], Any] | None = None, option: int = 0) -> bytes:
    """Return a value as a line of JSON Lines, with its line end.

    Characters at which some readers end a line are escaped. `default` and `option` are passed to
    `orjson.dumps`.
    """
    line = orjson.dumps(value, default=default, option=option | orjson.OPT_APPEND_NEWLINE)
    if not line.isascii():
        for character, escape in _LINE_BREAKS.items():
            line = line.replace(character, escape)
    return line


def write_json(
    path: Path, value: object, writer: str = "", publish: Callable[[Path, Path], object] = Path.replace
) -> None:
    """Write a JSON file atomically, as `whole_file` does. Raises StorageError if it cannot be written."""
    with writing(path), whole_file(path, writer, publish) as temporary:
        temporary.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, and sync them to disk.

    Raises OSError if a directory cannot be created.
    """
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power failure. Raises OSError if the disk fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refresh_listing(directory: Path) -> None:
    """Make an NFS client read a directory's names from the server again, by creating a file in it.

    Otherwise the client may show names from a cache that is up to a minute old. A read-only directory is left
    alone.
    """
    marker = directory / f".look-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        marker.touch()
        marker.unlink()


@contextlib.contextmanager
def one_process_at_a_time(lock: Path, *, unfinished: str) -> Iterator[None]:
    """Hold the lock of a file during the block; the kernel releases the lock of a killed process.

    The lock only saves work: two processes may run the block at once, because each result appears when it is
    complete. So the wait for another process ends if its unfinished files have not grown for
    `TIMING.silent_copy` seconds. Its machine may be suspended. `unfinished` is the pattern of these files'
    names, in the directory of the lock. On a file system without locks nobody waits. Raises StorageError if
    the lock's file cannot be created, and in place of an OSError of the block.
    """
    with writing(lock), lock.open("wb") as file:
        last_size, grew_at = -1, time.monotonic()
        while _is_locked_elsewhere(file) and time.monotonic() - grew_at < TIMING.silent_copy:
            time.sleep(TIMING.launch_poll)
            size = _bytes_of_files(lock.parent, unfinished)
            if size != last_size:
                last_size, grew_at = size, time.monotonic()
        yield


def scratch_directory(prefix: str, parent: Path | None = None) -> tuple[Path, Callable[[], None]]:
    """Create a temporary directory whose name begins with `prefix`; return it with a function to delete it.

    It is created in `parent`, by default the system's directory of temporary files. The process locks its
    directory, and the kernel releases the lock if the process is killed. Directories without a lock are
    therefore left from killed processes, and are deleted. Raises OSError if none can be created.
    """
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        # The directory belongs to another user or to a running process, or is gone.
        with contextlib.suppress(OSError):
            # The process of a younger directory may not have locked it yet.
            if time.time() - path.stat().st_mtime > YOUNG_S:
                _delete_if_abandoned(path)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):  # Without locks in the file system, directories stay.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def delete() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)

    return directory, delete


def _delete_if_abandoned(directory: Path) -> None:
    """Delete a scratch directory. Raises OSError if its process holds the lock, or if it cannot be opened."""
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


def _is_locked_elsewhere(file: IO[bytes]) -> bool:
    """Try to lock a file; return True if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # The file system has no locks.
        return False
    return False


def _bytes_of_files(directory: Path, pattern: str) -> int:
    """Return the total size in bytes of the files that match a pattern."""
    size = 0
    for file in directory.glob(pattern):
        # The process that writes the file may have renamed it since the listing.
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


@contextlib.contextmanager
def using_run(name: str) -> Iterator[None]:
    """Convert an OSError of the block to an OutputError that names the run.

    If the run's object store may be back soon, the error is StoreAwayError, and callers can try again later.
    """
    try:
        yield
    except (OSError, ValueError) as failure:  # A null byte in a path raises ValueError.
        why = getattr(failure, "strerror", None) or failure
        raise or_away(OutputError(f"{name}: cannot be used: {why}"), failure) from None


@contextlib.contextmanager
def writing(path: Path, kind: type[BatchrunError] = StorageError) -> Iterator[None]:
    """Convert an OSError of the block, which writes `path`, to an error of class `kind`."""
    try:
        yield
    except OSError as failure:
        raise cannot_write(path, failure, kind) from None


def cannot_write(path: Path, failure: OSError, kind: type[BatchrunError] = StorageError) -> BatchrunError:
    """Return an error of class `kind` for a failed write of `path`."""
    if isinstance(failure, StoreRequestError):
        return kind(
            f"{failure.filename}: cannot be written: {failure}; stored rows are kept",
            hint="run the same command again once the store accepts requests",
        )
    return kind(
        f"{path}: cannot be written: {failure.strerror or failure}; rows on disk are kept",
        hint=_how_to_write(failure),
    )


def _how_to_write(failure: OSError) -> str:
    """Return the hint for a failed write."""
    if failure.errno in {errno.ENOSPC, errno.EDQUOT}:
        remedy = "free disk space"
    elif failure.errno == errno.ENOMEM:
        remedy = "free memory"
    else:
        remedy = "make sure that this place can be written"
    return f"{remedy} and run the same command again"


def file_to_write(name: str, label: str = "", *, force: bool = True) -> Path:
    """Return the path of a file that the user wants results in. Raises OutputError if it cannot be written.

    Without `force` the file must not exist. Messages begin with `label`, by default the name.
    """
    label = label or name
    if is_uri(name):
        raise OutputError(
            f"{label}: is a URI, but this file can only be written to a local path",
            hint="give a path, then copy the file to the store",
        )
    try:
        path = Path(user_path(name))
        if path.is_dir():
            raise OutputError(f"{label}: is a directory", hint="give a file")
        if path.exists() and not path.is_file():
            raise OutputError(f"{label}: is a device or a pipe", hint="give a file")
        if not path.parent.is_dir():
            raise OutputError(f"{label}: there is no directory {path.parent}", hint="create it first")
        if path.exists() and not force:
            raise OutputError(f"{label}: already exists", hint="use another name, or --force to replace it")
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise OutputError(f"{label}: cannot be written: {reason}") from None
    return path
