"""Runs the command of a server on every machine of a Ray placement group at once, like `srun` on Slurm.

`python ranks.py GROUP COMMAND…` runs the command on this machine, the first one of the group, and in an actor
on each of the other machines. These processes are called ranks. As with `srun`, the environment variable
SLURM_PROCID has the number of the rank, and each rank gets the first line of standard input, which configures
the server. All ranks end when one of them ends, or when standard input closes.
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


def start_rank(
    command: Sequence[str], environ: Mapping[str, str], *, rank: int, first_line: bytes
) -> subprocess.Popen[bytes]:
    """Start the command as the rank with this number, and write `first_line` to its standard input."""
    # The pipe is unbuffered, so the command gets `first_line` at once. The pipe stays open, because its end
    # would end the command.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, env={**environ, "SLURM_PROCID": str(rank)}, bufsize=0
    )
    assert process.stdin is not None
    process.stdin.write(first_line)
    return process


class Rank:
    """An actor that runs the command on one machine. The command ends when the actor closes its pipe."""

    def run(self, command: Sequence[str], environ: Mapping[str, str], rank: int, first_line: bytes) -> int:
        """Run the command as the rank with this number and return its exit status.

        `environ` is the environment of the first rank, except that Ray chooses the GPUs of each machine.
        """
        gpus = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
        return start_rank(command, {**environ, **gpus}, rank=rank, first_line=first_line).wait()


def main() -> int:
    """Run the server's command on all machines (ranks) until one of them ends or standard input closes.

    Return the exit status of the rank that ends first.
    """
    group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(sys.argv[1])))
    command, first_line = sys.argv[2:], sys.stdin.buffer.readline()
    ray.init(logging_level=logging.ERROR, log_to_driver=False)
    # The run gets these signals too. It finishes its rows, and then closes the standard input of this
    # process, which must live until then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # Bundle 0 of the group is this machine, which runs rank 0.
    other_ranks = []
    for rank, resources in enumerate(group.bundle_specs[1:], start=1):
        actor = ray.remote(Rank).options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        )
        other_ranks.append(actor.remote().run.remote(command, dict(os.environ), rank, first_line))
    first_rank = start_rank(command, os.environ, rank=0, first_line=first_line)
    try:
        while first_rank.poll() is None:
            ended_ranks, _ = ray.wait(other_ranks, timeout=0)
            if ended_ranks:
                # A server cannot go on without one of its ranks, so even the clean end of a rank is a
                # failure.
                return ray.get(ended_ranks[0]) or 1
            if select.select([sys.stdin], [], [], 0.2)[0]:
                # The run has closed standard input.
                break
        return first_rank.returncode or 0
    finally:
        # `communicate` closes the standard input of the first rank, so the rank ends.
        first_rank.communicate()


if __name__ == "__main__":
    sys.exit(main())
