"""A memory cgroup for a test, v1 or v2, whichever this machine lets us make."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Make a cgroup with this limit, empty again at the end; skips by name where that cannot be done."""
    for root, limit in _ROOTS:
        group = root / f"batchrunner-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / limit).write_text(str(limit_bytes))
            break
        with contextlib.suppress(OSError):
            group.rmdir()
    else:
        pytest.skip("skipped: no memory cgroup can be made here")
    try:
        yield group
    finally:
        group.rmdir()


def command_in(group: Path, *command: object) -> list[str]:
    """Return a command that runs another one in a cgroup."""
    script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    return ["sh", "-c", script, str(group), *map(str, command)]
