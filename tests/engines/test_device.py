"""Which GPUs are visible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchrunner.engines.device import gpus

if TYPE_CHECKING:
    import pytest

import pytest

from batchrunner.engines.device import free_bytes, memory_bytes, oom_kills

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
        {f"{V2}/memory.max": f"{8 * GB}\n",
         f"{V2}/memory.events": "oom_kill 2\n"},
        8, 8, 2, id="v2, a container sees its own as the root",
    ),
    pytest.param(
        "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
        {f"{V2}/system.slice/slurmstepd.scope/job_7/memory.max": f"{16 * GB}\n",
         f"{V2}/system.slice/slurmstepd.scope/job_7/memory.events": "oom 3\noom_kill 5\n",
         f"{V2}/system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.max": "max\n",
         f"{V2}/system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.events": "oom 1\noom_kill 1\n"},
        16, 16, 1, id="v2, Slurm limits the job and counts a task's kills",
    ),
    pytest.param(
        "9:name=systemd:/\n4:memory:/slurm/uid_0/job_7/step_0/task_0\n0::/\n",
        {f"{V1}/memory.limit_in_bytes": f"{UNLIMITED['v1']}\n",
         f"{V1}/slurm/uid_0/job_7/memory.limit_in_bytes": f"{4 * GB}\n",
         f"{V1}/slurm/uid_0/job_7/step_0/task_0/memory.limit_in_bytes": f"{UNLIMITED['v1']}\n",
         f"{V1}/slurm/uid_0/job_7/step_0/task_0/memory.oom_control": "under_oom 0\noom_kill 4\n"},
        4, 4, 4, id="v1, Slurm limits the job",
    ),
    pytest.param(
        "4:memory:/docker/0123abcd\n0::/../../job\n",
        {f"{V1}/memory.limit_in_bytes": f"{2 * GB}\n",
         f"{V1}/memory.oom_control": "oom_kill 1\n"},
        2, 2, 1, id="v1, a container whose path is the host's",
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
