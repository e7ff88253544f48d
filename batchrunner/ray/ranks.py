"""Runs a command on every machine of a placement group at once, as `srun` does on Slurm.

`python ranks.py GROUP COMMAND…` runs the command on this machine, the first one of the group, and in an actor
on each of the other machines. These processes are called ranks, and SLURM_PROCID has the number of each. Each
rank gets the first line of standard input. All ranks end when one of them ends, or when standard input
closes.
"""

import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def start(
    command: Sequence[str], environ: Mapping[str, str], rank: int, first_line: bytes
) -> subprocess.Popen[bytes]:
    """Start the command as one of the ranks, with this first line of standard input."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, env={**environ, "SLURM_PROCID": str(rank)}, bufsize=0
    )
    assert process.stdin is not None
    process.stdin.write(first_line)
    return process


class Rank:
    """An actor that runs the command on one machine; the command ends with the actor."""

    def run(self, command: Sequence[str], environ: Mapping[str, str], rank: int, first_line: bytes) -> int:
        """Run the command and return its exit status."""
        gpus = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
        return start(command, {**environ, **gpus}, rank, first_line).wait()


def main() -> int:
    """Run all ranks until one ends or standard input closes; return the exit status of the first to end."""
    group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(sys.argv[1])))
    command, first_line = sys.argv[2:], sys.stdin.buffer.readline()
    ray.init(logging_level=logging.ERROR, log_to_driver=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the run handles them, and closes standard input here
    other_ranks = []
    for rank, place in enumerate(group.bundle_specs[1:], 1):
        actor = ray.remote(Rank).options(
            num_cpus=place["CPU"],
            num_gpus=place.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        )
        other_ranks.append(actor.remote().run.remote(command, dict(os.environ), rank, first_line))
    first_rank = start(command, os.environ, 0, first_line)
    try:
        while first_rank.poll() is None:
            ready, _ = ray.wait(other_ranks, timeout=0)
            if ready:
                return ray.get(ready[0]) or 1
            if select.select([sys.stdin], [], [], 0.2)[0]:
                break
        return first_rank.returncode or 0
    finally:
        first_rank.communicate()


if __name__ == "__main__":
    sys.exit(main())
