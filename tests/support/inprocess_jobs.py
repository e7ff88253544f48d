"""Does jobs on one in-process engine: `python -m tests.support.inprocess_jobs JOB OVERRIDE… -- JOB …`.

The engine is that of the first job, opened for its task. A program would open one for each task
(`open_engine`); a start takes many seconds, and a test of several tasks needs one only.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from batchrunner.engines.registry import make_engine
from batchrunner.job.load import load_job
from batchrunner.runner.execute import execute

if TYPE_CHECKING:
    from batchrunner.job.spec import Job


async def _go(jobs: list[Job]) -> int:
    first = jobs[0]
    engine = make_engine(first.engine, log_dir=Path(first.output.path), limits=first.limits, task=first.task)
    try:
        info = await engine.open()
        return max([(await execute(job, engine=engine, info=info)).exit_code for job in jobs])
    finally:
        await engine.close()


if __name__ == "__main__":
    given = [[*some] for is_end, some in groupby(sys.argv[1:], lambda word: word == "--") if not is_end]
    sys.exit(asyncio.run(_go([load_job(path, overrides=overrides) for path, *overrides in given])))
