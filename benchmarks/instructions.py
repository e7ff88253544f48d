"""Counts the instructions of commands in user space: unlike seconds they do not hang on other programs."""

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

TIMEOUT_S = 1800.0
CALLGRIND = "BENCH_CALLGRIND"
"""Variable that a command has under that tool."""


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """In a command: what callgrind is to count. The imports before it would take it most of the time."""
    by_callgrind = CALLGRIND in os.environ
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


def count(command: Sequence[str]) -> int:
    """Run a command that ends well, and count its instructions.

    By perf where the processor's counters can be read, which many virtual machines have not; else by
    callgrind, which takes 50 times as long, and counts those of the command's `counted` block.
    """
    with contextlib.suppress(OSError, ValueError, subprocess.CalledProcessError):
        if _by_perf(["true"]):
            return _by_perf(command)
    return _by_callgrind(command)


def _by_perf(command: Sequence[str]) -> int:
    with tempfile.NamedTemporaryFile("r") as out:
        _run(["perf", "stat", "-x", ",", "-e", "instructions:u", "-o", out.name, "--", *command])
        lines = [line for line in out.read().splitlines() if "instructions" in line]
    return int(lines[0].partition(",")[0])


def _by_callgrind(command: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--vgdb-poll=500"]
        files = [f"--callgrind-out-file={scratch}/out.%p", f"--log-file={log}"]
        _run([*valgrind, *files, *command], {**os.environ, CALLGRIND: "1"})
        counted = re.findall(r"Collected : (\d+)", log.read_text())
    return int(counted[-1])


def _run(command: Sequence[str], environ: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S, env=environ)
