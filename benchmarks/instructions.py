"""Counts the instructions of commands in user space: unlike seconds they do not hang on other programs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

Tool = Literal["perf", "callgrind"]
TIMEOUT_S = 1800.0


class Counted(NamedTuple):
    """What a command cost, and what it printed."""

    instructions: int
    output: str


def perf_counts() -> bool:
    """Tell whether the processor's counters can be read here: many virtual machines have none."""
    try:
        return _perf(["true"]).instructions > 0
    except (OSError, ValueError):
        return False


def count(command: Sequence[str], tool: Tool) -> Counted:
    """Run a command that ends well, and count its instructions; callgrind takes 50 times as long."""
    return _perf(command) if tool == "perf" else _callgrind(command)


def _perf(command: Sequence[str]) -> Counted:
    with tempfile.NamedTemporaryFile("r") as out:
        perf = ["perf", "stat", "-x", ",", "-e", "instructions:u", "-o", out.name, "--"]
        done = _run([*perf, *command])
        lines = [line for line in out.read().splitlines() if "instructions" in line]
    return Counted(int(lines[0].partition(",")[0]), done)


def _callgrind(command: Sequence[str]) -> Counted:
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={scratch}/out.%p"]
        done = _run([*valgrind, f"--log-file={log}", *command])
        counted = re.findall(r"Collected : (\d+)", log.read_text())
    return Counted(int(counted[-1]), done)


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
