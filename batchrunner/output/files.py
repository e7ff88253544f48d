"""Atomic and durable file operations: a file is whole when it appears, and survives a power failure."""

import contextlib
import errno
import fcntl
import os
import secrets
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
"""Suffix of a file that is not whole yet. Its name also begins with a dot, so readers of Parquet skip it."""
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers of file systems without hard links: exFAT, SMB, FUSE."""


@contextlib.contextmanager
def whole_file(
    path: Path, writer: str = "", publish: Callable[[Path, Path], object] = Path.replace
) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success sync the file and publish it as `path`.

    On failure the temporary file is deleted. `writer` distinguishes the temporary names of processes that may
    write the same file at once. `publish(temporary, path)` gives the file its final name. The default
    replaces an existing file; `link_new` and `link_part` raise FileExistsError.
    """
    temporary = path.with_name(f".{path.name}{writer and '.'}{writer}{TEMPORARY}")
    temporary.unlink(missing_ok=True)  # it may be a symbolic link, or a second name of a part
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def link_new(temporary: Path, path: Path) -> None:
    """Give a file a name that no file has; raises FileExistsError where another process was faster.

    It uses a hard link, which an NFS server creates once. If the server's reply is lost and the client
    repeats the call, the number of links shows that the first call succeeded.
    """
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        if temporary.stat().st_nlink == 1:
            raise


def link_part(temporary: Path, path: Path) -> None:
    """Do the same as `link_new`, also on a file system without hard links.

    There the name is first checked and then taken. That is safe because only one task uses the name of a
    part.
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
    """Create a file unless it exists; return whether this call created it. Raises OSError.

    Exactly one of several concurrent calls returns True. `publish` raises FileExistsError for an existing
    file; see `whole_file` for it and `writer`.
    """
    try:
        with whole_file(path, writer, publish) as temporary:
            temporary.write_bytes(content)
    except FileExistsError:
        return False
    return True


_LINE_BREAKS = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}
"""Characters that JSON allows unescaped, although `str.splitlines` (and so httpx) ends a line there."""


def json_line(value: Any, default: Callable[[Any], Any] | None = None, option: int = 0) -> bytes:
    """Return a value as a line of JSON Lines with its line end, which no reader mistakes for two lines.

    `default` and `option` are those of `orjson.dumps`.
    """
    line = orjson.dumps(value, default=default, option=option | orjson.OPT_APPEND_NEWLINE)
    if not line.isascii():
        for character, escape in _LINE_BREAKS.items():
            line = line.replace(character, escape)
    return line


def write_json(
    path: Path, value: object, writer: str = "", publish: Callable[[Path, Path], object] = Path.replace
) -> None:
    """Write a JSON file atomically, see `whole_file`; raises StorageError."""
    with writing(path), whole_file(path, writer, publish) as temporary:
        temporary.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, each durably. Raises OSError."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make new and changed names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refresh_listing(directory: Path) -> None:
    """Make an NFS client list a directory anew: it may cache a listing for a minute.

    Creating a file in the directory invalidates the cache. A read-only directory is left as it is.
    """
    marker = directory / f".look-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        marker.touch()
        marker.unlink()


@contextlib.contextmanager
def one_process_at_a_time(lock: Path, *, unfinished: str) -> Iterator[None]:
    """Hold the lock of a file during the block; the kernel releases the lock of a killed process.

    The lock only saves work: two processes that both do it have the same results, and each result appears
    whole. So the wait for another process ends when its unfinished files do not grow for
    `TIMING.silent_copy`, because its machine may be suspended. `unfinished` is the pattern of these files in
    the directory of the lock. A file system without locks lets every process pass. Raises StorageError.
    """
    with writing(lock), lock.open("wb") as file:
        size, changed_at = -1, time.monotonic()
        while _is_locked_elsewhere(file) and time.monotonic() - changed_at < TIMING.silent_copy:
            time.sleep(TIMING.launch_poll)
            size_now = _bytes_of_files(lock.parent, unfinished)
            if size_now != size:
                size, changed_at = size_now, time.monotonic()
        yield


def _is_locked_elsewhere(file: IO[bytes]) -> bool:
    """Lock a file; tell whether another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    return False


def _bytes_of_files(directory: Path, pattern: str) -> int:
    """Return the total size in bytes of the files that match a pattern."""
    size = 0
    for file in directory.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # it was renamed just now
            size += file.stat().st_size
    return size


@contextlib.contextmanager
def using_run(name: str) -> Iterator[None]:
    """Turn an OSError of the block into an OutputError of the run, or StoreAwayError if its store is away."""
    try:
        yield
    except (OSError, ValueError) as failure:  # ValueError: a null byte in the path
        why = getattr(failure, "strerror", None) or failure
        raise or_away(OutputError(f"{name}: cannot be used: {why}"), failure) from None


@contextlib.contextmanager
def writing(path: Path, kind: type[BatchrunError] = StorageError) -> Iterator[None]:
    """Turn an OSError of the block, which writes `path`, into an error of this kind."""
    try:
        yield
    except OSError as failure:
        raise cannot_write(path, failure, kind) from None


def cannot_write(path: Path, failure: OSError, kind: type[BatchrunError] = StorageError) -> BatchrunError:
    """Return the error for a failed write of `path`."""
    if isinstance(failure, StoreRequestError):
        error = StorageError(
            f"{failure.filename}: cannot be written: {failure}; stored rows are kept",
            hint="run the same command again once the store accepts requests",
        )
    else:
        error = StorageError(
            f"{path}: cannot be written: {failure.strerror or failure}; rows on disk are kept",
            hint="free disk space and run the same command again",
        )
    return error if kind is StorageError else kind(error.message, hint=error.hint)


def file_to_write(name: str, label: str = "", *, force: bool = True) -> Path:
    """Return the path of a result file that the user names; raises OutputError.

    Messages begin with `label`, by default the name.

    Without `force` the file must not exist.
    """
    label = label or name
    if is_uri(name):
        raise OutputError(
            f"{label}: is a URI, but this file is written on this machine",
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
            raise OutputError(f"{label}: exists", hint="use another name, or --force to replace it")
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise OutputError(f"{label}: cannot be written: {reason}") from None
    return path
