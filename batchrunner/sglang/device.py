"""The device of a launched engine, and the arguments and environment that SGLang needs on it."""

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU_SHIM = Path(__file__).with_name("cpu_shim")
"""A stand-in for the package `sgl_kernel`, which needs CUDA; first on the engine's PYTHONPATH on a CPU."""

SERVER_MODULES = Path(__file__).with_name("server_modules")
"""Packages for SGLang's processes, last on the engine's PYTHONPATH."""
MEAN_POOLING = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "mean_pooling"}
"""Environment of an engine that pools vectors by their mean; SGLang's encoders take the first token."""

CPU_NOTE = (
    "SGLang's CPU engine: for trying jobs and for tests, slow by nature; a GPU is used where there is one"
)

# Dense models on torch's own attention, in the one number type that every CPU computes fast.
# The pool is small because SGLang would take most of the machine's memory for it.
CPU_ARGS: dict[str, Any] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "dtype": "float32",
    "disable-overlap-schedule": True,
    "sleep-on-idle": True,  # else an idle scheduler spins a whole core
    "max-total-tokens": 20_000,
    "max-running-requests": 32,
    "context-length": 4096,
}

SMI_TIMEOUT_S = 30.0
"""Seconds; `nvidia-smi` takes several where the driver is not kept loaded."""


def has_gpu() -> bool:
    """Tell whether there is an NVIDIA or AMD GPU that CUDA_VISIBLE_DEVICES does not hide."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in {"", "-1"}:
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()


def gpus(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them; empty if not known.

    `environ` is the process's environment beyond our own, a job's `engine.env`.
    """
    visible = {**os.environ, **(environ or {})}.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return names[: names.index("-1")] if "-1" in names else names  # CUDA stops at the first bad one
    # numbered from 0 by CUDA, whichever of the machine's devices these are
    return [str(n) for n in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, by nvidia-smi."""

    name: str
    memory_bytes: int


def cards() -> list[Gpu]:
    """Return all NVIDIA GPUs of the machine, by nvidia-smi; empty without it."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    lines = [line.rpartition(", ") for line in output_of(query, SMI_TIMEOUT_S).splitlines()]
    return [Gpu(name, int(mib) << 20) for name, _, mib in lines if mib.isdigit()]


def output_of(command: list[str], timeout_s: float, environ: Mapping[str, str] | None = None) -> str:
    """Return the output of a program; empty if it fails or takes too long."""
    try:
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def card_name() -> str | None:
    """Return the name of the machine's GPUs; None where they differ or are unknown."""
    names = {card.name for card in cards()}
    return names.pop() if len(names) == 1 else None


def on_cpu(device: str) -> bool:
    """Tell whether a job's `engine.device` means the CPU on this machine."""
    return device == "cpu" or (device == "auto" and not has_gpu())


def program_environment(variables: Mapping[str, str], *, cpu: bool = False) -> dict[str, str]:
    """Return the environment of a launched program: ours, the CPU's needs, and its own variables."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without its bytecode SGLang starts twice as slowly
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (environ.get("PYTHONPATH"), str(SERVER_MODULES))))
    return {**environ, **(cpu_environment(environ) if cpu else {}), **variables}


def cpu_environment(environ: dict[str, str]) -> dict[str, str]:
    """Return the environment variables with which SGLang serves on a CPU."""
    path = environ.get("PYTHONPATH")
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": f"{CPU_SHIM}{os.pathsep}{path}" if path else str(CPU_SHIM),
    }


def server_args(args: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return the job's arguments over our defaults: metrics and cache report on, and the CPU's needs.

    The schedule policy is `fcfs` because rows are sent in the order in which they should be computed, which
    `lpm` would change while few wait. The HTTP log is off because a line per request would hide the causes
    of failures.
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
    """Return how many processes of the machine the kernel has killed so far; None where it does not tell.

    `root` holds `proc` (Linux 4.13).
    """
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)", (root / "proc/vmstat").read_text(), re.MULTILINE):
            return int(match[1])
    return None
