"""Counts the instructions of commands in user space: unlike seconds they do not hang on other programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Tool = Literal["perf", "callgrind"]
TIMEOUT_S = 1800.0
COUNTED_BY = "BENCH_COUNTED_BY"
"""Variable that tells a command which tool it runs under."""


class Counted(NamedTuple):
    """What a command cost, and what it printed."""

    instructions: int
    output: str


def tool_here() -> Tool | None:
    """Return what can count here: perf where the processor's counters can be read, which many virtual
    machines have not; else callgrind, where it is installed.
    """
    try:
        if _perf(["true"]).instructions > 0:
            return "perf"
    except (OSError, ValueError, subprocess.CalledProcessError):
        pass
    return "callgrind" if shutil.which("callgrind_control") else None


@contextmanager
def counted() -> Iterator[None]:
    """In a command: what callgrind is to count. The imports before it would take it most of the time."""
    by_callgrind = os.environ.get(COUNTED_BY) == "callgrind"
    if by_callgrind:
        _tell_callgrind("--instr=on")
    yield
    if by_callgrind:
        _tell_callgrind("--instr=off")


def _tell_callgrind(what: str) -> None:
    telling = subprocess.Popen(["callgrind_control", what, str(os.getpid())], stdout=subprocess.DEVNULL)
    while telling.poll() is None:  # valgrind listens only while this process does something, which counts
        time.sleep(0.002)
    assert telling.returncode == 0


def count(command: Sequence[str], tool: Tool) -> Counted:
    """Run a command that ends well, and count its instructions: with callgrind those of its `counted` block.

    That takes 50 times as long.
    """
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
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--vgdb-poll=500"]
        files = [f"--callgrind-out-file={scratch}/out.%p", f"--log-file={log}"]
        done = _run([*valgrind, *files, *command], {**os.environ, COUNTED_BY: "callgrind"})
        counted = re.findall(r"Collected : (\d+)", log.read_text())
    return Counted(int(counted[-1]), done)


def _run(command: Sequence[str], environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ)
    return done.stdout
