"""What is said where a process has as many files open as it may."""

import errno
import os
import resource

LOOP_FILES = 10
"""Files that an event loop opens when it begins, at most."""
RAISE_LIMIT = "raise the limit, such as with `ulimit -n 1024`, and run the same command again"


def too_many_files(failure: BaseException) -> str | None:
    """Return what is wrong if an error comes from the limit on open files; else None.

    Errors that were raised while another one was handled count as that one.
    """
    at: BaseException | None = failure
    seen: set[int] = set()  # the chain may be a circle
    while at is not None and id(at) not in seen:
        if isinstance(at, OSError) and at.errno == errno.EMFILE:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"too many open files: this process may open {most}"
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return None


def need_files_of_loop() -> None:
    """Raise OSError where an event loop could not open its files: one that begins in part is not undone."""
    opened: list[int] = []
    try:
        while len(opened) < LOOP_FILES:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in opened:
            os.close(descriptor)
