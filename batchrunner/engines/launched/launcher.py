"""Runs a server that dies with its owner process, and hides its API key from other users of the machine.

This script imports nothing from the package, so that any Python >= 3.9 can run it as
`OTHER_PYTHON launcher.py`, with a pipe as standard input. The first line of the pipe is a JSON object:

    {"module": "sglang.launch_server", "argv": ["--port", "30000"], "log": "engine-server.log", "key": "..."}

`key` may be empty. With `copy`, the arguments of `local_copy`, the server loads a copy of its model from this
machine's disk. `ranks` tells whether srun has started this script on several machines, which share the pipe.

The owner keeps the pipe open for as long as the server is to run. When the owner closes the pipe, or is
killed, this script kills the server and all processes that the server has started. The script ends with the
server's exit status, or 128 + signal if a signal ended the server.

Slurm, systemd and `timeout` send the signals that stop a run (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) to all
processes of the run. This script, the server and its processes ignore these signals, because the run still
waits for its rows in flight, and then closes the pipe.

The server is a fork of this process that runs the module in place. So the key reaches `sys.argv` without
being in any argument vector or environment. Processes that the server starts with `multiprocessing` get the
key through the pipe of that module. SGLang writes its arguments to the log, which only the owner can read.
"""

from __future__ import annotations

import sys

# Python puts the folder of a script first in `sys.path`. Remove it before anything else is imported, so that
# no file in it hides a module of the server.
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
"""Seconds between two checks for ended processes."""
KILL_S = 10.0
"""Maximum seconds to wait until all killed processes have ended."""
SKIPPED_FOLDERS = (".", "checkpoint-", "original")
"""Prefixes of the names of subfolders that SGLang does not read, so they are not copied with a model."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run; see `batchrunner.core.processes`."""

# From <linux/prctl.h>.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    """Call prctl(2). Without prctl, the server is stopped only by the end of the pipe."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def read_config(descriptor: int) -> dict[str, Any]:
    """Return the configuration in the first line of a pipe; leave the rest of the pipe unread."""
    line = bytearray()
    while not line.endswith(b"\n"):
        # A larger read could take bytes of the rest of the pipe.
        byte = os.read(descriptor, 1)
        if not byte:
            raise SystemExit("launcher: standard input ended before the configuration")
        line += byte
    config: dict[str, Any] = json.loads(line)
    return config


def config_of_rank(config: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the configuration for one of several machines, which has its own log and port."""
    argv = [*config["argv"], "--node-rank", str(rank)]
    log = Path(config["log"])
    # Only rank 0 listens at the server's port and writes to the server's own log.
    if rank:
        log = log.with_name(f"{log.stem}-node{rank}{log.suffix}")
        log.parent.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        argv += ["--port", str(port)]
    return {**config, "argv": argv, "log": str(log)}


def local_copy(source: str, cache: str, name: str) -> str:
    """Copy a model's directory into `cache`, once for all servers; return the path of the copy.

    A model that has changed gets a new copy. If servers start at the same time, one copies and the others
    wait. The path exists only once the copy is complete. `cache` may contain environment variables. Raises
    SystemExit with a reason.
    """
    cache = os.path.expandvars(cache)
    error_prefix = f"copy of the model: error: engine.cache_dir {cache}"
    if "$" in cache:
        raise SystemExit(f"{error_prefix}: an environment variable in the path is not set on this machine")
    try:
        files = files_of(source)
        files_hash = hashlib.sha256(repr((source, files)).encode()).hexdigest()
        copy = Path(cache, files_hash[:12], name)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.with_name(f"{name}.lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Another server may have made the copy while this server waited for the lock.
                if not copy.exists():
                    copy_files(source, files, copy)
    except OSError as failure:
        raise SystemExit(f"{error_prefix}: cannot copy {source}: {failure}") from None
    return str(copy)


def files_of(source: str) -> dict[str, tuple[int, int]]:
    """Return the size (bytes) and modification time (ns) of each file below a directory, by path."""
    files = {}
    for directory, folders, names in os.walk(source, followlinks=True):
        # `os.walk` visits only the folders that stay in this list, in their order.
        folders[:] = sorted(folder for folder in folders if not folder.startswith(SKIPPED_FOLDERS))
        for file in sorted(Path(directory, name) for name in names):
            stat = file.stat()
            files[str(file.relative_to(source))] = stat.st_size, stat.st_mtime_ns
    return files


def copy_files(source: str, files: dict[str, tuple[int, int]], copy: Path) -> None:
    """Copy the `files` of the directory `source` to the new directory `copy`; raises OSError.

    If an earlier copy was killed, it is continued. A file that changes during the copy is an error.
    """
    unfinished = copy.with_name(f"{copy.name}.part")
    copied_files = files_of(str(unfinished))
    sizes_to_copy = {}
    for file, (size, _) in files.items():
        copied_size, _ = copied_files.get(file, (None, 0))
        # A file that was copied only in part is smaller.
        if copied_size != size:
            sizes_to_copy[file] = size
    bytes_to_copy = sum(sizes_to_copy.values())
    free_bytes = shutil.disk_usage(copy.parent).free
    amount = f"{bytes_to_copy / 2**30:.1f} GiB"
    if bytes_to_copy > free_bytes:
        raise OSError(f"the copy needs {amount}, but only {free_bytes / 2**30:.1f} GiB are free")
    print(f"copying {source} ({amount}) to {copy}", flush=True)  # noqa: T201 - into the log
    try:
        for file in sizes_to_copy:
            (unfinished / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(source, file), unfinished / file)
            with (unfinished / file).open("rb") as stream:
                os.fsync(stream.fileno())
        if files_of(source) != files:
            raise OSError("the model changed while it was copied")  # noqa: TRY301
        unfinished.rename(copy)
    except OSError:
        # After a failure, such as a full disk, the unfinished copy is removed, because it may be what fills
        # the disk.
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def descendants(root: int) -> list[int]:
    """Return the process IDs of all living descendants of a process, from /proc."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        # The fields are "pid (name) state parent …". The name may contain anything, even ")".
        try:
            state, parent, *_ = file.read_bytes().rpartition(b")")[2].split()
        except OSError:
            # The process ended after the listing of /proc.
            continue
        # Skip zombies (state Z) and dead processes (X).
        if state not in b"ZX":
            children.setdefault(int(parent), []).append(int(file.parent.name))
    tree = [root]
    # `tree` grows during the loop, so that grandchildren are found too.
    for pid in tree:
        tree += children.get(pid, [])
    return tree[1:]


class ServerTree:
    """The processes of a server: reaps those that end, and kills all of them when the server is stopped."""

    def __init__(self, server: int) -> None:
        """`server` is the ID of the server's first process."""
        self.server = server
        self.status: int | None = None
        """The server's exit status; None while it runs."""

    def reap(self) -> None:
        """Reap all ended processes; orphans of the server have become children of this process."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.server:
                    was_killed = os.WIFSIGNALED(status)
                    self.status = 128 + os.WTERMSIG(status) if was_killed else os.WEXITSTATUS(status)

    def serve(self, lifeline: int) -> None:
        """Wait until the server ends, or until the owner closes the pipe `lifeline`."""
        while self.status is None:
            is_readable = bool(select.select([lifeline], [], [], POLL_S)[0])
            # A readable pipe without a byte is closed.
            if is_readable and not os.read(lifeline, 1):
                return
            self.reap()

    def stop(self) -> int:
        """Kill all processes; return the server's exit status."""
        deadline = time.monotonic() + KILL_S
        while self.kill_all() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.reap()
        self.reap()
        return 128 + signal.SIGKILL if self.status is None else self.status

    def kill_all(self) -> bool:
        """Send SIGKILL to all processes of the tree; return False if none was alive any more."""
        # Without /proc the descendants are unknown, but the server's process group is known.
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.server, signal.SIGKILL)
        alive = descendants(os.getpid())
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return bool(alive)


def run_server(config: dict[str, Any], parent: int, log: int) -> None:
    """Become the server: start a session, write to the log, run the module in this process.

    `parent` is the ID of the launcher's process, `log` the file descriptor of the log.
    """
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent died before the call of prctl, the kernel will send no signal.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # The resource tracker of `multiprocessing` unblocks signals when it starts, so it must start before they
    # are blocked.
    ensure_running()
    # Child processes inherit the signal mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # Child processes inherit this variable, so that their log lines appear at once.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if config.get("copy"):
        argv = config["argv"]
        argv[argv.index("--model-path") + 1] = local_copy(**config["copy"])
    key = ["--api-key", config["key"]] if config["key"] else []
    sys.argv = [config["module"], *config["argv"], *key]
    # This runs the module like `python -m`, so that `multiprocessing` finds `__main__` by the module's name.
    runpy.run_module(config["module"], run_name="__main__", alter_sys=True)


def main() -> int:
    """Read the configuration, fork the server, watch it; return its exit status."""
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    config = read_config(0)
    if config.get("ranks"):
        config = config_of_rank(config, int(os.environ["SLURM_PROCID"]))
    log = os.open(config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    # Orphaned processes of the server become children of this process.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
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
