"""The process of a Ray cluster that does a share of a job, as `batchrun JOB --join` does."""

from batchrunner.job.spec import Job
from batchrunner.ray.shared_path import SharedPath
from batchrunner.report.report import Report
from batchrunner.runner.control import Control
from batchrunner.runner.foreground import log_to_stderr
from batchrunner.runner.run import execute


class JobWorker:
    """An actor that takes leases of a run until none is left. Ray calls it in one event loop."""

    def __init__(self) -> None:
        self._control = Control()

    async def run(self, job: Job, shared: SharedPath, *, quiet: bool) -> Report:
        """Do rows until none is free, and return the report; raises BatchrunError."""
        log_to_stderr(quiet=quiet)
        shared.enter()
        return await execute(job, join=True, control=self._control)

    async def stop(self, reason: str, exit_code: int) -> None:
        """Send no more rows; those in flight end."""
        self._control.drain(reason, exit_code)
