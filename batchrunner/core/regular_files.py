"""Files that are read whole; a pipe is refused before it is opened, since that would wait for ever."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

SPECIAL = "is a pipe, a socket or a device, and no file"
"""What is wrong with a path that is neither a file nor a directory."""
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def is_special(path: Path) -> bool:
    """Tell whether a path is a device, a pipe or a socket; raises OSError, but not where nothing is there."""
    try:
        kind = path.stat().st_mode
    except OSError as failure:
        if failure.errno in _NOTHING_THERE:
            return False
        raise
    return not stat.S_ISREG(kind) and not stat.S_ISDIR(kind)


def read_regular(path: Path) -> bytes:
    """Return the content of a file; raises OSError, also for a pipe, a socket or a device."""
    if is_special(path):
        raise OSError(errno.EINVAL, SPECIAL, str(path))
    return path.read_bytes()
