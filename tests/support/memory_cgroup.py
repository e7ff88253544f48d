"""A memory cgroup for a test, v1 or v2, whichever this machine lets us make."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


ROOM_BYTES = 64 << 20
"""Memory that is left when it begins to run out."""
_EATER = """
import re, sys
events, before = sys.argv[1], int(sys.argv[2])
eaten = []
while int(re.search(r"^oom_kill (\\d+)$", open(events).read(), re.M)[1]) == before:
    eaten.append(b"x" * (2 << 20))
"""


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

    def run_out(self, victim: int) -> None:
        """Let memory run out, whatever its processes do: the kernel kills the victim before all others."""
        before = int((self.path / self.limit).read_text())
        Path(f"/proc/{victim}/oom_score_adj").write_text("1000")
        self.set_limit(int((self.path / self.usage).read_text()) + ROOM_BYTES)
        eater = self.command(sys.executable, "-c", _EATER, self.path / self.events, self.kills)
        try:
            subprocess.run(eater, check=True, timeout=PATIENCE_S)
        finally:
            self.set_limit(before)

    def command(self, *command: object) -> list[str]:
        """Return a command that runs another one in it."""
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["sh", "-c", script, str(self.path), *map(str, command)]


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """Make a cgroup with this limit, empty again at the end; skips by name where that cannot be done."""
    with memory_cgroup_if_possible(limit_bytes) as group:
        require_cgroup(group)
        assert group is not None
        yield group


def require_cgroup(group: MemoryCgroup | None) -> None:
    """Skip, by name, what needs a cgroup where none could be made."""
    if group is None:
        pytest.skip("skipped: no memory cgroup can be made here")


@contextlib.contextmanager
def memory_cgroup_if_possible(limit_bytes: int) -> Iterator[MemoryCgroup | None]:
    """Make a cgroup with this limit, empty again at the end; None where that cannot be done."""
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
        yield None
        return
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
