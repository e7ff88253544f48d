"""GPUs and CPU of this machine, and the arguments and environment that a launched SGLang needs on them."""

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU_SHIM = Path(__file__).with_name("cpu_shim")
"""Directory of a substitute for the CUDA package `sgl_kernel`. On a CPU, it comes first on PYTHONPATH."""

SERVER_MODULES = Path(__file__).with_name("server_modules")
"""Directory of packages that SGLang's processes may import. It comes last on their PYTHONPATH."""
MEAN_POOLING = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "mean_pooling"}
"""Environment variable that makes SGLang import the encoders of batchrunner. Their vector is the mean over
all tokens; that of SGLang's own encoders is the vector of the first token."""

CPU_NOTE = (
    "SGLang's CPU engine is slow, and meant for trying jobs and for tests; on a machine with a GPU the run "
    "would use the GPU"
)
"""Note for the user of a run on a CPU."""

# Attention is torch's own. The number type is the only one that every CPU computes fast. The KV pool is
# small, because SGLang would otherwise allocate most of the machine's memory for it.
CPU_ARGS: dict[str, Any] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "dtype": "float32",
    "disable-overlap-schedule": True,
    # Without this argument, an idle scheduler keeps a core busy.
    "sleep-on-idle": True,
    "max-total-tokens": 20_000,
    "max-running-requests": 32,
    "context-length": 4096,
}

SMI_TIMEOUT_S = 30.0
"""Maximum seconds for `nvidia-smi`, which takes several seconds if the driver is not loaded yet."""


def has_gpu() -> bool:
    """Tell whether there is an NVIDIA or AMD GPU that CUDA_VISIBLE_DEVICES does not hide."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in {"", "-1"}:
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()


def gpus(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the GPUs that a server may use, as CUDA_VISIBLE_DEVICES names them; empty if unknown.

    `environ` has the variables of the job's `engine.env`, which override those of this process.
    """
    visible = {**os.environ, **(environ or {})}.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        if "-1" in names:
            # CUDA ignores everything from the first invalid name on.
            names = names[: names.index("-1")]
        return names
    # CUDA numbers the GPUs of a process from 0, regardless of the numbers of the device files.
    device_files = Path("/dev").glob("nvidia[0-9]*")
    return [str(number) for number, _ in enumerate(device_files)]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi reports it."""

    name: str
    memory_bytes: int


def cards() -> list[Gpu]:
    """Return all NVIDIA GPUs of the machine; empty without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    lines = [line.rpartition(", ") for line in output_of(query, SMI_TIMEOUT_S).splitlines()]
    return [Gpu(name, int(mib) << 20) for name, _, mib in lines if mib.isdigit()]


def output_of(command: list[str], timeout_s: float, environ: Mapping[str, str] | None = None) -> str:
    """Return the standard output of a program; empty if it fails or takes too long."""
    try:
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def card_name() -> str | None:
    """Return the common name of the machine's GPUs; None if they differ or are unknown."""
    names = {card.name for card in cards()}
    return names.pop() if len(names) == 1 else None


def on_cpu(device: str) -> bool:
    """Tell whether `engine.device` of a job means the CPU on this machine."""
    return device == "cpu" or (device == "auto" and not has_gpu())


def program_environment(extra: Mapping[str, str], *, cpu: bool = False) -> dict[str, str]:
    """Return the environment of a program: the variables of this process, and `extra`, which overrides them.

    With `cpu` the variables that SGLang needs on a CPU are added too.
    """
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # This variable would keep Python from writing bytecode files, without which SGLang takes twice as long to
    # start.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (environ.get("PYTHONPATH"), str(SERVER_MODULES))))
    return {**environ, **(cpu_environment(environ) if cpu else {}), **extra}


def cpu_environment(environ: dict[str, str]) -> dict[str, str]:
    """Return the variables that SGLang needs in addition to `environ` to serve on a CPU."""
    path = environ.get("PYTHONPATH")
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": f"{CPU_SHIM}{os.pathsep}{path}" if path else str(CPU_SHIM),
    }


def server_args(args: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return the arguments of a server: the defaults of a run, and the job's `args`, which override them.

    The schedule policy is `fcfs`, because rows are sent in the order in which they should be computed; `lpm`
    would change it while few requests wait. The HTTP log is off: with one line per request, it would hide the
    causes of failures.
    """
    defaults: dict[str, Any] = {
        "enable-metrics": True,
        "enable-cache-report": True,
        "schedule-policy": "fcfs",
        "log-level-http": "warning",
    }
    return {**defaults, **(CPU_ARGS if cpu else {}), **args}


_MACHINE = Path("/")


def free_bytes() -> int:
    """Return the machine's free memory in bytes."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def oom_kills(root: Path = _MACHINE) -> int | None:
    """Return how many processes the kernel has killed since boot because memory ran out.

    Return None if it is unknown, as in Linux before 4.13. `root` is the directory that contains `proc`.
    """
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)", (root / "proc/vmstat").read_text(), re.MULTILINE):
            return int(match[1])
    return None
