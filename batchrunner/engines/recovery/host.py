"""The machine's memory: how much a run may take, and how many processes the kernel killed for lack of it."""

import re
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60
"""Bytes; cgroup v1 writes a number near 2^63 for "no limit"."""
_MACHINE = Path("/")


def oom_kills(root: Path = _MACHINE) -> int | None:
    """Return how many processes of our cgroup, or else of the machine, the kernel has killed so far.

    The programs that we start are in our cgroup. The machine's count (Linux 4.13) includes other users, so
    it is used only where the cgroup has none. None where neither is there (not Linux). `root` holds `proc`
    and `sys`, here and below.
    """
    files = [group / name for group in _groups(root) for name in ("memory.events", "memory.oom_control")]
    for path in (*files, root / "proc/vmstat"):
        found = _number(path, "oom_kill")
        if found is not None:
            return found
    return None


def memory_bytes(root: Path = _MACHINE) -> int | None:
    """Return the memory that we may take, in bytes: the machine's, or the limit of a cgroup."""
    return min((*_meminfo(root, "MemTotal"), *_limits(root).values()), default=None)


def free_bytes(root: Path = _MACHINE) -> int | None:
    """Return how much of that memory is free now, in bytes; cached pages of files count as free."""
    left = [limit - _used(group) for group, limit in _limits(root).items()]
    return max(0, min(free)) if (free := (*_meminfo(root, "MemAvailable"), *left)) else None


def _limits(root: Path) -> dict[Path, int]:
    """Return the limits of our memory cgroup and its parents: Slurm limits the job, not the step in it."""
    found = {}
    for group in _groups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(group / name).strip()
            if text.isdigit() and int(text) < _NO_LIMIT:
                found[group] = int(text)
    return found


def _used(group: Path) -> int:
    used = int(_text(group / "memory.current") or _text(group / "memory.usage_in_bytes") or 0)
    stat = group / "memory.stat"
    cached = _number(stat, "total_inactive_file")  # in v1 `inactive_file` leaves out the cgroups below
    return used - ((_number(stat, "inactive_file") if cached is None else cached) or 0)


def _groups(root: Path) -> list[Path]:
    """Return the directories of our memory cgroup and its parents, v2 or v1, innermost first."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)  # 4:memory:/slurm/job_7, or 0::/slurm/job_7
        if controllers in {"", "memory"}:
            top = root / "sys/fs/cgroup" / controllers
            inner = PurePosixPath(name.lstrip("/"))
            # a namespace that hides the cgroup's own name shows `..` in its place
            found += [top / group for group in (inner, *inner.parents) if ".." not in group.parts]
    return found


def _meminfo(root: Path, name: str) -> list[int]:
    found = re.search(rf"^{name}: +(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return [int(found[1]) << 10] if found else []


def _number(path: Path, name: str) -> int | None:
    found = re.search(rf"^{name} (\d+)$", _text(path), re.MULTILINE)
    return int(found[1]) if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
