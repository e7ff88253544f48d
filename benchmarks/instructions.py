"""Counts the instructions of commands in user space: unlike seconds they do not hang on other programs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Tool = Literal["perf", "callgrind"]
TIMEOUT_S = 1800.0


def perf_counts() -> bool:
    """Tell whether the processor's counters can be read here: many virtual machines have none."""
    try:
        return _perf(["true"]) > 0
    except (OSError, ValueError):
        return False


def count(command: Sequence[str], tool: Tool) -> int:
    """Run a command that ends well, and return its instructions; callgrind takes 50 times as long."""
    return _perf(command) if tool == "perf" else _callgrind(command)


def _perf(command: Sequence[str]) -> int:
    with tempfile.NamedTemporaryFile("r") as out:
        perf = ["perf", "stat", "-x", ",", "-e", "instructions:u", "-o", out.name, "--"]
        subprocess.run([*perf, *command], check=True, capture_output=True, timeout=TIMEOUT_S)
        lines = [line for line in out.read().splitlines() if "instructions" in line]
    return int(lines[0].partition(",")[0])


def _callgrind(command: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={scratch}/out.%p"]
        subprocess.run(
            [*valgrind, f"--log-file={log}", *command], check=True, capture_output=True, timeout=TIMEOUT_S
        )
        counted = re.findall(r"Collected : (\d+)", log.read_text())
    return int(counted[-1])
