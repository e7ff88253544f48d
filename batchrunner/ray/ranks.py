"""Start a program on each machine of a placement group, together: what `srun` is for Slurm.

`python ranks.py GROUP COMMAND…` runs the command here, in the group's first place, and by an actor in each of
the others. All are told the first line of its standard input, and end with it; SLURM_PROCID numbers them.
Where one of them ends, all do.
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
    command: Sequence[str], environ: Mapping[str, str], rank: int, first: bytes
) -> subprocess.Popen[bytes]:
    """Start the command as one of the ranks, which is told this first line."""
    started = subprocess.Popen(
        command, stdin=subprocess.PIPE, env={**environ, "SLURM_PROCID": str(rank)}, bufsize=0
    )
    assert started.stdin is not None
    started.stdin.write(first)
    return started


class Rank:
    """An actor that runs the command on one machine; it ends with the actor."""

    def run(self, command: Sequence[str], environ: Mapping[str, str], rank: int, first: bytes) -> int:
        """Return the command's exit status."""
        own = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
        return start(command, {**environ, **own}, rank, first).wait()


def main() -> int:
    """Run all ranks until one ends or standard input does; return the exit status of that one."""
    group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(sys.argv[1])))
    command, first = sys.argv[2:], sys.stdin.buffer.readline()
    ray.init(logging_level=logging.ERROR, log_to_driver=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the run judges them, and closes our standard input
    ended = []
    for rank, place in enumerate(group.bundle_specs[1:], 1):
        actor = ray.remote(Rank).options(
            num_cpus=place["CPU"],
            num_gpus=place.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        )
        ended.append(actor.remote().run.remote(command, dict(os.environ), rank, first))
    here = start(command, os.environ, 0, first)
    try:
        while here.poll() is None:
            done, _ = ray.wait(ended, timeout=0)
            if done:
                return ray.get(done[0]) or 1
            if select.select([sys.stdin], [], [], 0.2)[0]:
                break
        return here.returncode or 0
    finally:
        here.communicate()


if __name__ == "__main__":
    sys.exit(main())
