"""Run a server so that it cannot outlive the process that asked for it, nor show its API key to others.

This script imports nothing of the package: any Python >= 3.9 runs it as `OTHER_PYTHON launcher.py`,
with a pipe as standard input. The first line of the pipe is one JSON object:

    {"module": "sglang.launch_server", "argv": ["--port", "30000"], "log": "engine-server.log", "key": "..."}

`key` may be empty. With `copy` the server loads a copy of its model on this machine's disk. With `ranks` srun
has started this script on several machines, which have one pipe. The pipe then stays open for as long as the
server is to run: the end of the pipe, by a close or a SIGKILL of its owner, kills the server and all that it
started. The script ends with the server's exit status, 128 + signal
where a signal ended it.

The signals that stop a run (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) often reach all processes of the run: Slurm,
systemd and `timeout` send them so. Neither this script nor the server takes them, nor what the server
starts: the run still waits for its rows in flight, and then closes the pipe.

The server is a fork of this process which runs the module in place, so that the key reaches
`sys.argv` without ever being in an argument vector or an environment. Processes that the
server starts with `multiprocessing` get it through the pipe that method uses. The log, where SGLang writes
its arguments, is readable by its owner alone.
"""

from __future__ import annotations

import sys

# A script's own folder comes first in `sys.path`: remove it before anything else is imported, so
# that no file of it hides a module of the server's with the same name.
if sys.path and __file__.startswith(sys.path[0] + "/"):
    del sys.path[0]

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import time
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Any

POLL_S = 0.1
KILL_S = 10.0
NO_MODEL = (".", "checkpoint-", "original")
"""What folders beside a model's files begin with that SGLang reads nothing from: they are not copied."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run; see `batchrunner.core.processes`."""

# From <linux/prctl.h>.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    """Call prctl(2). Without it (not Linux) only the end of the pipe stops the server."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def read_config(descriptor: int) -> dict[str, Any]:
    """Read the first line of `descriptor`, byte by byte, so that nothing after it is read."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise SystemExit("launcher: standard input ended before the configuration")
        line += byte
    config: dict[str, Any] = json.loads(line)
    return config


def of_rank(config: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the configuration of one of several machines; each has a log and a port of its own."""
    argv, log = [*config["argv"], "--node-rank", str(rank)], Path(config["log"])
    if rank:
        log = log.with_name(f"{log.stem}-node{rank}{log.suffix}")
        log.parent.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            argv += ["--port", str(free.getsockname()[1])]
    return {**config, "argv": argv, "log": str(log)}


def local_copy(source: str, cache: str, name: str) -> str:
    """Return a copy of a model's directory in `cache`, made once for all servers that have this cache.

    A model that has changed gets another one. Who comes while it is copied waits; a copy is there whole, or
    not at all. Ends this process, saying why, where it cannot be made. `cache` may have variables in it.
    """
    cache = os.path.expandvars(cache)
    failed = f"copy of the model: error: engine.cache_dir {cache}"
    if "$" in cache:
        raise SystemExit(f"{failed}: a variable in it is not set on this machine")
    try:
        files = files_of(source)
        state = hashlib.sha256(repr((source, files)).encode()).hexdigest()
        whole = Path(cache, state[:12], name)
        if not whole.exists():
            whole.parent.mkdir(parents=True, exist_ok=True)
            with whole.with_name(f"{name}.lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not whole.exists():
                    copy_files(source, files, whole)
    except OSError as failure:
        raise SystemExit(f"{failed}: no copy of {source}: {failure}") from None
    return str(whole)


def files_of(source: str) -> dict[str, tuple[int, int]]:
    """Return the files of a model's directory by their paths there, with size and time of change."""
    found = {}
    for directory, folders, names in os.walk(source, followlinks=True):
        folders[:] = sorted(each for each in folders if not each.startswith(NO_MODEL))
        for file in sorted(Path(directory, each) for each in names):
            stat = file.stat()
            found[str(file.relative_to(source))] = stat.st_size, stat.st_mtime_ns
    return found


def copy_files(source: str, files: dict[str, tuple[int, int]], whole: Path) -> None:
    """Copy these files of a model's directory to a new one; raises OSError, also where they change."""
    part = whole.with_name(f"{whole.name}.part")
    there = files_of(str(part))  # of one that was killed
    left = {file: size for file, (size, _) in files.items() if there.get(file, (-1,))[0] != size}
    needed, free = sum(left.values()), shutil.disk_usage(whole.parent).free
    told = f"{needed / 2**30:.1f} GiB"
    if needed > free:
        raise OSError(f"it takes {told}, and {free / 2**30:.1f} GiB are free")
    print(f"copying {source} ({told}) to {whole}", flush=True)  # noqa: T201 - into the log
    try:
        for file in left:
            (part / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(source, file), part / file)
            with (part / file).open("rb") as copied:
                os.fsync(copied.fileno())
        if files_of(source) != files:
            raise OSError("it changed while it was copied")  # noqa: TRY301
        part.rename(whole)
    except OSError:  # also where the disk is full
        shutil.rmtree(part, ignore_errors=True)
        raise


def descendants(root: int) -> list[int]:
    """Return the living descendants of a process, by /proc."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:  # pid (name) state parent …, and the name may hold anything
            state, parent, *_ = file.read_bytes().rpartition(b")")[2].split()
        except OSError:  # it ended between the listing and the reading
            continue
        if state not in b"ZX":
            children.setdefault(int(parent), []).append(int(file.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


class ServerTree:
    """The server's processes: what ended is collected, and all are killed at the end."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.status: int | None = None
        """The server's exit status; None while it runs."""

    def reap(self) -> None:
        """Collect every process that ended: orphans of the tree become this process's children."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.server:
                    signalled = os.WIFSIGNALED(status)
                    self.status = 128 + os.WTERMSIG(status) if signalled else os.WEXITSTATUS(status)

    def serve(self, lifeline: int) -> None:
        """Return when the server ends, or `lifeline` does."""
        while self.status is None:
            if select.select([lifeline], [], [], POLL_S)[0] and not os.read(lifeline, 1):
                return
            self.reap()

    def stop(self) -> int:
        """Kill all that runs; return the exit status."""
        deadline = time.monotonic() + KILL_S
        while self.kill_all() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.reap()
        self.reap()
        return 128 + signal.SIGKILL if self.status is None else self.status

    def kill_all(self) -> bool:
        """Send SIGKILL to the whole tree; return False once nothing of it lives."""
        if self.status is None:  # where there is no /proc, its group is what can be reached
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.server, signal.SIGKILL)
        alive = descendants(os.getpid())
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return bool(alive)


def run_server(config: dict[str, Any], parent: int, log: int) -> None:
    """Become the server: start a session, write to the log, run the module in this process."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above: no signal will come
        os._exit(128 + signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    ensure_running()  # the first start of this helper of `multiprocessing` would unblock signals again
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # what it starts begins with them blocked
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # for the processes it starts
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if config.get("copy"):
        argv = config["argv"]
        argv[argv.index("--model-path") + 1] = local_copy(**config["copy"])
    key = ["--api-key", config["key"]] if config["key"] else []
    sys.argv = [config["module"], *config["argv"], *key]
    # As `python -m` would: `multiprocessing` finds `__main__` by the module's name again.
    runpy.run_module(config["module"], run_name="__main__", alter_sys=True)


def main() -> int:
    """Read the configuration, fork the server, watch it; return its exit status."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    config = read_config(0)
    if config.get("ranks"):
        config = of_rank(config, int(os.environ["SLURM_PROCID"]))
    log = os.open(config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the server orphans stays within reach
    parent = os.getpid()
    server = os.fork()
    if server == 0:
        run_server(config, parent, log)
        return 0
    tree = ServerTree(server)
    tree.serve(lifeline=0)
    return tree.stop()


if __name__ == "__main__":
    sys.exit(main())
