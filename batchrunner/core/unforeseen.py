"""What the command leaves of an error that nobody foresaw: one line, and a file with the traceback."""

import os
import tempfile
import traceback
from datetime import UTC, datetime
from pathlib import Path

from batchrunner.core.errors import BatchrunError
from batchrunner.core.open_files import RAISE_LIMIT, too_many_files
from batchrunner.core.versions import SOURCE_TREE, installed_version


def unforeseen(failure: BaseException) -> BatchrunError:
    """Write the traceback of an error to a new file; return the error for the user, which says where.

    The limit on open files, which may end a command anywhere, is named without one.
    """
    if limit := too_many_files(failure):
        return BatchrunError(limit, hint=RAISE_LIMIT)
    what = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
    try:
        path = _write(failure)
    except OSError as lost:
        last = traceback.extract_tb(failure.__traceback__)[-1:]
        at = f" at {Path(last[0].filename).name}:{last[0].lineno}" if last else ""
        return BatchrunError(
            f"unforeseen error{at}: {what}: its traceback cannot be written ({lost.strerror or lost})"
        )
    return BatchrunError(
        f"unforeseen error: {what}: its traceback is in {path}",
        hint="report it with that file; what is on disk is kept, run the same command again",
    )


def _write(failure: BaseException) -> Path:
    """Write the traceback to a file of the user's temporary directory that only the user can read."""
    descriptor, name = tempfile.mkstemp(
        prefix=f"batchrun-error-{datetime.now(UTC):%Y%m%d-%H%M%S}-", suffix=".txt"
    )
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"batchrunner {installed_version('batchrunner') or SOURCE_TREE}\n")
        file.writelines(traceback.format_exception(failure))
    return Path(name)
