"""The processes of a real engine that a run has started, however they rename themselves."""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.conftest import eventually

START_S = 1800
"""Seconds in which an engine starts, or a job of a test ends, on the slowest machine that runs the tests."""
_MARK = "BATCHRUNNER_TEST_MARK"


def marked(environ: Mapping[str, str], mark: Path) -> dict[str, str]:
    """Return an environment by which `processes_of` finds what is started with it."""
    return {**environ, _MARK: str(mark)}


def processes_of(mark: Path) -> list[int]:
    """Return the processes that run in a marked environment, but those that wrote their names over it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def descendants_of(pid: int) -> list[int]:
    """Return what a process has started, and only that, by the kernel's own lists of children."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants_of(child)]
    return found


def command_line(pid: int) -> str:
    """Return the words of a process's command; empty where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def deaf_to(pid: int) -> set[signal.Signals]:
    """Return the signals that a process blocks or ignores."""
    fields = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    mask = int(fields["SigBlk"], 16) | int(fields["SigIgn"], 16)
    return {number for number in signal.Signals if mask >> (number - 1) & 1}


def scheduler_of(runner: subprocess.Popen[str]) -> int:
    """Return the scheduler of a runner's engine once there is one."""
    found: list[int] = []

    def find() -> list[int]:
        found[:] = [pid for pid in descendants_of(runner.pid) if "sglang::scheduler" in command_line(pid)]
        return found

    wait_while_it_runs(runner, find)
    return found[0]


def wait_while_it_runs(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    """Return when the condition holds, which the process is to bring about."""

    def holds() -> object:
        assert process.poll() is None, f"it has ended with {process.poll()}"
        return condition()

    eventually(holds, START_S, every_s=0.02)
