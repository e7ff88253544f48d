"""Runs of jobs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchrunner.core.errors import JobError
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job
from batchrunner.report.report import Report
from batchrunner.runner.execute import execute
from batchrunner.runner.open_engine import OpenEngine, cancelled_once, open_portal
from batchrunner.runner.progress_calls import ProgressListener, make_displays

JobSource = Job | Mapping[str, Any] | str | Path


def run(
    job: JobSource,
    *,
    engine: OpenEngine | None = None,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    retry_failed: bool = False,
    join: bool = False,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> Report:
    """Run a job (a path, a mapping or a Job) and return its report; the results are under `output.path`.

    Also works where an event loop is running, which it blocks: prefer `arun` there. `overrides` are texts
    `a.b=c` as for `--set`. With `join` the rows are shared with all other starts that say so, as in each
    worker of a pipeline; a report counts the rows of all. `progress` shows a bar, in a notebook as a widget.
    `on_progress` is called with a Progress at most once a second and at the end, in the thread of the run.
    Raises BatchrunError; a report with exit code 3 (too many failed rows) or 1 (a deadline) is returned, not
    raised.
    """
    loaded = load_job(job, overrides=overrides, engine=_spec_of(engine))
    display = make_displays(progress=progress, on_progress=on_progress)
    return run_blocking(loaded, engine, fresh=fresh, retry_failed=retry_failed, join=join, display=display)


async def arun(
    job: JobSource,
    *,
    engine: OpenEngine | None = None,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    retry_failed: bool = False,
    join: bool = False,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> Report:
    """Do what `run` does, in the running event loop; cancelling it keeps the finished rows."""
    loaded = load_job(job, overrides=overrides, engine=_spec_of(engine))
    display = make_displays(progress=progress, on_progress=on_progress)
    start = execute if engine is None else engine.acall
    return await start(loaded, fresh=fresh, retry_failed=retry_failed, join=join, display=display)


def run_blocking(job: Job, engine: OpenEngine | None, **options: Any) -> Report:
    """Run a job, on an open engine if there is one, and wait for it; `options` are those of `execute`."""
    if engine is not None:
        return engine.call(job, **options)
    with open_portal() as portal:
        report: Report = portal.call(lambda: cancelled_once(execute(job, **options)))
        return report


def _spec_of(engine: OpenEngine | None) -> EngineSpec | None:
    if engine is not None and not isinstance(engine, OpenEngine):
        raise JobError(
            "engine", hint="give one that `open_engine` opened, or put it into the job as `engine`"
        )
    return engine.spec if engine is not None else None
