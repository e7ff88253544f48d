"""The memory of this machine: how much of it we may take, and how often the kernel killed for want of it."""

from __future__ import annotations

import re
from pathlib import Path

_NO_LIMIT = 1 << 60
"""cgroup v1 says "no limit" with a number near 2^63."""


def oom_kills() -> int | None:
    """Return how many processes of our cgroup, or else of the machine, the kernel has killed so far.

    What we start is in our cgroup. The machine's count (Linux 4.13) has the kills of its other users in it:
    it is asked where the cgroup keeps none. None where neither is there (not Linux).
    """
    for path in (*_ours("memory.events"), *_ours("memory.oom_control"), Path("/proc/vmstat")):
        found = re.search(r"^oom_kill (\d+)$", _text(path), re.MULTILINE)
        if found:
            return int(found[1])
    return None


def memory_bytes() -> int | None:
    """Return the memory that we may take, in bytes: the machine's, or our cgroup's limit if that is less."""
    return _within_limit("MemTotal")


def free_bytes() -> int | None:
    """Return what of it is free now, in bytes; a cgroup's limit counts as free."""
    return _within_limit("MemAvailable")


def _within_limit(field: str) -> int | None:
    told = re.search(rf"^{field}: +(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE)
    limits = [int(told[1]) << 10] if told else []
    for path in (*_ours("memory.max"), *_ours("memory.limit_in_bytes")):
        text = _text(path).strip()
        limits += [int(text)] if text.isdigit() and int(text) < _NO_LIMIT else []
    return min(limits, default=None)


def _ours(name: str) -> list[Path]:
    """Return where a file of our memory cgroup may lie, v2 or v1, as our namespace shows it or the host."""
    found = []
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)  # 4:memory:/slurm/job_7, or 0::/slurm/job_7
        if controllers in {"", "memory"}:
            root = Path("/sys/fs/cgroup") / controllers
            found += [root / group.lstrip("/") / name, root / name]
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
