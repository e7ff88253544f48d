"""A memory cgroup for a test, v1 or v2, whichever this machine lets us make."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class MemoryCgroup:
    """Where its files are."""

    path: Path
    limit: str
    usage: str
    events: str

    @property
    def kills(self) -> int:
        """Processes that the kernel killed in it for want of memory."""
        found = re.search(r"^oom_kill (\d+)$", (self.path / self.events).read_text(), re.MULTILINE)
        assert found
        return int(found[1])

    def set_limit(self, limit_bytes: int) -> None:
        (self.path / self.limit).write_text(str(limit_bytes))

    def squeeze(self, room_bytes: int) -> bool:
        """Leave so much more than the least in use until now; tell whether the kernel has killed.

        To be called often. The limit never grows: it would follow what is in use.
        """
        limit = int((self.path / self.usage).read_text()) + room_bytes
        if limit < int((self.path / self.limit).read_text()):
            with contextlib.suppress(OSError):  # v1 refuses a limit below what is in use by then
                self.set_limit(limit)
        return self.kills > 0

    def command(self, *command: object) -> list[str]:
        """Return a command that runs another one in it."""
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["sh", "-c", script, str(self.path), *map(str, command)]


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """Make a cgroup with this limit, empty again at the end; skips by name where that cannot be done."""
    name = f"batchrunner-test-{os.getpid()}"
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
    v2 = ("memory.max", "memory.current", "memory.events")
    for root, files in (("/sys/fs/cgroup/memory", v1), ("/sys/fs/cgroup", v2)):
        group = MemoryCgroup(Path(root) / name, *files)
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
        group.path.rmdir()
