"""Runs of jobs."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from batchrunner.core.errors import JobError
from batchrunner.engines.registry import make_engine
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import EngineLike, load_job, parse_engine
from batchrunner.job.spec import Job, LimitsSpec
from batchrunner.job.tasks import GENERATE, TASKS, TaskName
from batchrunner.report.report import Report
from batchrunner.runner.open_engine import OpenEngine, cancelled_once, open_portal
from batchrunner.runner.progress import ProgressListener, make_displays
from batchrunner.runner.run import execute


@contextmanager
def open_engine(
    engine: EngineLike,
    *,
    log_dir: str | Path | None = None,
    request_timeout_s: float = 3600.0,
    task: TaskName = GENERATE,
) -> Iterator[OpenEngine]:
    """Open an engine that serves several runs, in turn or at once.

    Example: `with open_engine({"kind": "server", "model": name}) as engine: run(job, engine=engine)`.

    `engine` is as in a job file, or a short form as for `generate`. A launched server logs into `log_dir`
    (default: a new temporary directory, which stays after an error only; see `info.log`). It takes jobs of
    this `task` only: a server that is launched has a model for it. Raises JobError or EngineStartError.
    """
    if task != GENERATE and task not in TASKS:
        raise JobError(f"task {task!r}", hint=f"give one of {', '.join((GENERATE, *TASKS))}")
    spec = parse_engine(engine)
    with _directory(log_dir) as logs, open_portal() as portal:
        limits = LimitsSpec(request_timeout=request_timeout_s)
        made = make_engine(spec, log_dir=logs, limits=limits, task=task)
        try:
            opened = OpenEngine(portal, spec, made, portal.call(made.open), task)
            with closing(opened.loop):
                yield opened
        finally:
            portal.call(made.close)


@contextmanager
def _directory(given: str | Path | None) -> Iterator[Path]:
    """Give this directory, or a new one, which is deleted unless an error sends people to a log in it."""
    path = Path(tempfile.mkdtemp(prefix="batchrunner-") if given is None else given).expanduser()
    yield path
    if given is None:
        shutil.rmtree(path, ignore_errors=True)


def engine_of(engine: OpenEngine | EngineLike | None) -> tuple[OpenEngine | None, EngineSpec]:
    """Return the engine of a call, if it is an open one, and its description."""
    return (engine, engine.spec) if isinstance(engine, OpenEngine) else (None, parse_engine(engine))


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
    displays = make_displays(progress=progress, on_progress=on_progress)
    return run_blocking(loaded, engine, fresh=fresh, retry_failed=retry_failed, join=join, displays=displays)


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
    displays = make_displays(progress=progress, on_progress=on_progress)
    options: dict[str, Any] = {"fresh": fresh, "retry_failed": retry_failed, "join": join}
    options["displays"] = displays
    if engine is not None:
        return await engine.start(loaded, **options).wait_async()
    return await execute(loaded, **options)


def run_blocking(job: Job, engine: OpenEngine | None, **options: Any) -> Report:
    """Run a job, on an open engine if there is one, and wait for it; `options` are those of `execute`."""
    if engine is not None:
        return engine.start(job, **options).wait()
    with open_portal() as portal:
        report: Report = portal.call(lambda: cancelled_once(execute(job, **options)))
        return report


def _spec_of(engine: OpenEngine | None) -> EngineSpec | None:
    if engine is not None and not isinstance(engine, OpenEngine):
        raise JobError(
            "engine", hint="give one that `open_engine` opened, or put it into the job as `engine`"
        )
    return engine.spec if engine is not None else None
