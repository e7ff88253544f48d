"""A real Slurm on loopback: munged, slurmctld and four nodes, as processes of the test that needs them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.engines.http.connections import free_port
from tests.conftest import eventually
from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
NODES = ("n1", "n2")
LOSSY_NODES = ("n3", "n4")
"""The nodes of a partition of its own, one of which a test kills."""

# The timeouts bear a machine that stands still for some seconds. cred_expire: a requeued job waits for so
# long and 1 s. NoInAddrAny: else the daemons listen to the network.
_CONF = """\
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={base}/munge.sock,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={port}
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU,CR_LLN
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=15
KillWait=30
GresTypes=gpu
MessageTimeout=60
{nodes}
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=10 State=UP
PartitionName=lossy Nodes=n[3-4] MaxTime=10 State=UP
"""


def require_slurm() -> None:
    """Skip, by name, what needs a Slurm of its own where that cannot be; under CI it fails."""
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    why = f"missing: {', '.join(missing)} (.ci/run installs Slurm)" if missing else ""
    if not why and os.geteuid() != 0:
        why = "a Slurm of its own needs root"
    if why and os.environ.get("CI"):
        pytest.fail(why)
    if why:
        pytest.skip(why)


class SlurmCluster:
    """Four nodes that say they have 16 CPUs; `base` holds everything that it writes."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.conf = base / "slurm.conf"
        self._environ = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are idle."""
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=16 "
            "RealMemory=4000 Gres=gpu:2"
            for node in (*NODES, *LOSSY_NODES)
        ]
        self.conf.write_text(
            _CONF.format(host=host, base=self.base, port=free_port(), nodes="\n".join(nodes))
        )
        (self.base / "state").mkdir()
        for number in range(2):  # devices that do nothing, for Slurm to give out
            os.mknod(self.base / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (self.base / "gres.conf").write_text(f"Name=gpu File={self.base}/gpu[0-1]\n")
        key = self.base / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        files = [
            f"--{name}={self.base}/munge.{end}"
            for name, end in {
                "key-file": "key",
                "socket": "sock",
                "pid-file": "pid",
                "log-file": "log",
                "seed-file": "seed",
            }.items()
        ]
        self._daemon("munged", "munged", "-F", *files)
        eventually(lambda: self._works("munge", "-S", f"{self.base}/munge.sock", "-n"))
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        eventually(lambda: self._works("scontrol", "ping"))
        for node in (*NODES, *LOSSY_NODES):
            self.start_node(node)
        eventually(lambda: all(self.node_state(node) == "idle" for node in (*NODES, *LOSSY_NODES)))

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        self._daemon(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """SIGKILL to a node's slurmd; what it runs goes on."""
        self._daemons[node].kill()
        self._daemons.pop(node).wait()

    def node_state(self, node: str) -> str:
        """Return a node's state as sinfo has it."""
        return self.call("sinfo", "-h", "-N", "-n", node, "-o", "%T").strip()

    def call(self, *command: str, given: str = "") -> str:
        """Run one of Slurm's commands, which is given this as its input; return its output."""
        return subprocess.run(
            command,
            input=given,
            env=self._environ,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        ).stdout

    def jobs(self) -> dict[str, str]:
        """Return the state of all jobs that have not ended, by their IDs (`7_2`: task 2 of array 7)."""
        lines = self.call("squeue", "-h", "-r", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for what Slurm does, which takes its time: a dead node is found out after half a minute."""
        eventually(condition, patience_s=2 * PATIENCE_S, every_s=0.2)

    def stop(self) -> None:
        """End everything: jobs, what is left of them, and the daemons."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.call("scancel", "-u", "root", "--signal=KILL", "--full")
            self.call("scancel", "-u", "root")
            self.wait_until(lambda: not self.jobs())
        for name in reversed(list(self._daemons)):
            self._daemons[name].terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """Return the processes that belong to this cluster: they have its configuration's name."""
        mine = f"SLURM_CONF={self.conf}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mine in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found

    def _daemon(self, name: str, *command: str) -> None:
        with (self.base / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _works(self, *command: str) -> bool:
        done: Any = subprocess.run(
            command, env=self._environ, capture_output=True, check=False, timeout=PATIENCE_S
        )
        return bool(done.returncode == 0)


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Have a Slurm for a while; this process's own Slurm commands mean it."""
    base = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's own directories are too deep for a socket
    base.chmod(0o755)  # munge wants all to reach its socket
    cluster = SlurmCluster(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.conf))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
            shutil.rmtree(base, ignore_errors=True)
