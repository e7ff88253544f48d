"""Which GPUs are visible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchrunner.engines.device import gpus

if TYPE_CHECKING:
    import pytest
import subprocess
import sys

import pytest

from batchrunner.engines.device import free_bytes, memory_bytes, oom_kills
from tests.support.memory_cgroup import memory_cgroup

if TYPE_CHECKING:
    from pathlib import Path


def test_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, seen in [("", []), ("-1", []), ("2, 3", ["2", "3"]), ("0,-1,1", ["0"])]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert gpus() == seen


GB = 1 << 30
MEMINFO = f"MemTotal: {64 * GB >> 10} kB\nMemFree: 1 kB\nMemAvailable:   {40 * GB >> 10} kB\n"
V1 = "/sys/fs/cgroup/memory"
V2 = "/sys/fs/cgroup"
UNLIMITED = {"v1": "9223372036854771712", "v2": "max"}


def machine(root: Path, own_group: str, files: dict[str, str]) -> Path:
    """Write the files that a machine's kernel would show."""
    told = {"/proc/meminfo": MEMINFO, "/proc/vmstat": "oom_kill 7\n", "/proc/self/cgroup": own_group, **files}
    for name, text in told.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CASES = [
    pytest.param("", {}, 64, 40, 7, id="no cgroup"),
    pytest.param(
        "0::/\n",
        {f"{V2}/memory.max": f"{8 * GB}\n", f"{V2}/memory.current": f"{3 * GB}\n",
         f"{V2}/memory.events": "oom_kill 2\n",
         f"{V2}/memory.stat": f"anon {2 * GB}\ninactive_file {GB}\n"},
        8, 6, 2, id="v2, a container sees its own as the root",
    ),
    pytest.param(
        "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
        {f"{V2}/system.slice/slurmstepd.scope/job_7/memory.max": f"{16 * GB}\n",
         f"{V2}/system.slice/slurmstepd.scope/job_7/memory.current": f"{15 * GB}\n",
         f"{V2}/system.slice/slurmstepd.scope/job_7/memory.stat": "inactive_file 0\n",
         f"{V2}/system.slice/slurmstepd.scope/job_7/memory.events": "oom 3\noom_kill 5\n",
         f"{V2}/system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.max": "max\n",
         f"{V2}/system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.events": "oom 1\noom_kill 1\n"},
        16, 1, 1, id="v2, Slurm limits the job and counts a task's kills",
    ),
    pytest.param(
        "9:name=systemd:/\n4:memory:/slurm/uid_0/job_7/step_0/task_0\n0::/\n",
        {f"{V1}/memory.limit_in_bytes": f"{UNLIMITED['v1']}\n",
         f"{V1}/slurm/uid_0/job_7/memory.limit_in_bytes": f"{4 * GB}\n",
         f"{V1}/slurm/uid_0/job_7/memory.usage_in_bytes": f"{3 * GB}\n",
         f"{V1}/slurm/uid_0/job_7/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GB}\n",
         f"{V1}/slurm/uid_0/job_7/step_0/task_0/memory.limit_in_bytes": f"{UNLIMITED['v1']}\n",
         f"{V1}/slurm/uid_0/job_7/step_0/task_0/memory.oom_control": "under_oom 0\noom_kill 4\n"},
        4, 3, 4, id="v1, Slurm limits the job",
    ),
    pytest.param(
        "4:memory:/docker/0123abcd\n0::/../../job\n",
        {f"{V1}/memory.limit_in_bytes": f"{2 * GB}\n", f"{V1}/memory.usage_in_bytes": f"{3 * GB}\n",
         f"{V1}/memory.oom_control": "oom_kill 1\n"},
        2, 0, 1, id="v1, a container whose path is the host's; more in use than the limit",
    ),
    pytest.param("0::/\n", {f"{V2}/memory.max": "max\n"}, 64, 40, 7, id="v2, no limit and no count"),
]  # fmt: skip


@pytest.mark.parametrize(("own_group", "files", "total", "free", "kills"), CASES)
def test_memory_within_cgroups(
    tmp_path: Path, own_group: str, files: dict[str, str], total: int, free: int, kills: int
) -> None:
    """The tightest limit around us counts, ours or an outer one's; the innermost count of kills does."""
    root = machine(tmp_path, own_group, files)
    assert (memory_bytes(root), free_bytes(root), oom_kills(root)) == (total * GB, free * GB, kills)


def test_a_kernel_that_tells_nothing(tmp_path: Path) -> None:
    """Not Linux: nothing is known, and nothing fails."""
    assert (memory_bytes(tmp_path), free_bytes(tmp_path), oom_kills(tmp_path)) == (None, None, None)


def test_this_machine() -> None:
    """What the kernel killed and what we may take can be read here, whatever the cgroup's version."""
    assert (oom_kills() or 0) >= 0
    assert (memory_bytes() or 0) > 1 << 28
    assert 0 < (free_bytes() or 0) <= (memory_bytes() or 0)


def test_a_real_cgroup_around_ours() -> None:
    """A process in a group without a limit, in one with a limit, may take as much as the outer one may."""
    script = (
        "from batchrunner.engines.device import free_bytes, memory_bytes; print(memory_bytes(), free_bytes())"
    )
    with memory_cgroup(GB) as group:
        inner = group.path / "inner"
        inner.mkdir()
        try:
            command = group.command(sys.executable, "-c", script)
            command[command.index(str(group.path))] = str(inner)
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        finally:
            inner.rmdir()
    total, free = map(int, told)
    assert total == GB
    assert 0 < free < GB
