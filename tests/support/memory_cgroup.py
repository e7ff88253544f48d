"""A memory cgroup for a test, v1 or v2, whichever this machine lets us make."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class MemoryCgroup:
    """Where its files are."""

    path: Path
    limit: str

    def set_limit(self, limit_bytes: int) -> None:
        (self.path / self.limit).write_text(str(limit_bytes))

    def command(self, *command: object) -> list[str]:
        """Return a command that runs another one in it."""
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["sh", "-c", script, str(self.path), *map(str, command)]


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """Make a cgroup with this limit, empty again at the end; skips by name where that cannot be done."""
    name = f"batchrunner-test-{os.getpid()}"
    places = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}
    for root, limit in places.items():
        group = MemoryCgroup(Path(root) / name, limit)
        with contextlib.suppress(OSError):
            group.path.mkdir()
            group.set_limit(limit_bytes)
            break
        with contextlib.suppress(OSError):
            group.path.rmdir()
    else:
        pytest.skip("skipped: no memory cgroup can be made here")
    try:
        yield group
    finally:
        _remove(group.path)


def _remove(path: Path) -> None:
    """Remove a cgroup; those that were killed in it leave when the kernel has freed their memory."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.1)
    raise AssertionError(f"{path}: still has {(path / 'cgroup.procs').read_text().split()}")
