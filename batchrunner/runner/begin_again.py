"""What comes before several tasks share a run: it is discarded, or its failed rows are planned again."""

from __future__ import annotations

from contextlib import closing

from batchrunner.job.spec import Job
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.files import writing
from batchrunner.output.holding import hold_task
from batchrunner.runner.attempt import check_nobody_works
from batchrunner.runner.cluster.join import join
from batchrunner.runner.control import Control, Sleeper
from batchrunner.runner.execute import leave
from batchrunner.runner.prepare import prepare
from batchrunner.runner.prepared_job import new_task


def discard_run(job: Job) -> None:
    """Discard what earlier attempts wrote, once the job is known to be right; raises BatchrunError."""
    with closing(prepare(job, fresh=True)) as prepared, hold_task(prepared.run_dir):
        check_nobody_works(prepared.run_dir, Sleeper(Control()))
        with writing(prepared.run_dir.path):
            prepared.run_dir.discard()


def plan_failed_rows(job: Job) -> None:
    """Plan the failed rows again, as the first of several tasks; raises BatchrunError."""
    prepared = prepare(job, new_task())
    try:
        with hold_task(prepared.run_dir):
            events = EventLog(prepared.run_dir.events)
            rows, *_ = join(prepared, Sleeper(Control()), RowCounts(), events, retry_failed=True)
            rows.stop()
            rows.give_back()
    finally:
        leave(prepared)
