"""The command as on a machine of its own, which needs few seconds to see that another one is gone.

It has no boto3, which takes 0.2 s to find what obstore finds as well: the credentials are in variables.

`python other_machine.py NAME ARGUMENTS...`; the process has its own host name and cache. The variable
BATCHRUNNER_TEST_GONE_AFTER_S has the seconds: many where all machines live, and one may only stand still
for a while. BATCHRUNNER_TEST_CLOCK_OFF_S has the seconds that the machine's clock is ahead.
"""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast

from batchrunner.cli import main
from batchrunner.output import liveness, task_lock

GONE_AFTER_S = "BATCHRUNNER_TEST_GONE_AFTER_S"
CLOCK_OFF_S = "BATCHRUNNER_TEST_CLOCK_OFF_S"


def be_another_machine(name: str) -> None:
    """Give this process a host name, a disk for its working copies, and short waits."""
    socket.gethostname = lambda: name
    right, off_s = time.time, float(os.environ.get(CLOCK_OFF_S, "0"))
    time.time = lambda: right() + off_s
    os.environ["XDG_CACHE_HOME"] = str(Path(os.environ["XDG_CACHE_HOME"]) / name)
    gone_after_s = float(os.environ.get(GONE_AFTER_S, "3"))
    for module in (liveness, task_lock):
        vars(module)["DEAD_AFTER_S"] = gone_after_s
        vars(module)["LOOK_S"] = 0.5
    task_lock.StoreTaskLock.beat_s = 0.5
    vars(task_lock)["TRUSTED_S"] = gone_after_s / 2
    cast("dict[str, Any]", sys.modules)["boto3"] = None  # as where it is not installed


if __name__ == "__main__":
    be_another_machine(sys.argv.pop(1))
    main()
