"""The process in which rollouts run."""

import subprocess
import sys
import tempfile
import time

from batchrunner.core.rollout_worker import STEP_BYTES, running_step, step_memory

LOOP = """
import asyncio, sys
from batchrunner.core import rollout_worker as worker
async def steps():
    worker._CURRENT.set(7)
    while True:
        await asyncio.sleep(0)
memory = worker.step_memory(int(sys.argv[1]))
with asyncio.Runner(loop_factory=lambda: worker._Loop(memory)) as runner:
    runner.run(steps())
"""


def test_a_step_is_read_while_it_is_written() -> None:
    """A step and its start time are read together, so that no process is killed that is not blocked."""
    with tempfile.TemporaryFile() as file:
        file.truncate(STEP_BYTES)
        step = step_memory(file.fileno())
        seen = set[int]()
        began = time.monotonic()
        command = [sys.executable, "-c", LOOP, str(file.fileno())]
        with subprocess.Popen(command, pass_fds=[file.fileno()]) as process:
            try:
                reads = 0
                while process.poll() is None and (reads < 200_000 or seen != {0, 7}):
                    for _ in range(1000):
                        number, since = running_step(step)
                        seen.add(number)
                        assert not number or since >= began
                    reads += 1000
            finally:
                process.kill()
        assert seen == {0, 7}
