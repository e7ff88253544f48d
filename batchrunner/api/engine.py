"""An engine that stays open for several runs."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from batchrunner.core.errors import JobError
from batchrunner.engines.registry import make_engine
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import EngineLike, parse_engine
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import GENERATE, TASKS, TaskName
from batchrunner.runner.open_engine import OpenEngine, open_portal


@contextmanager
def open_engine(
    engine: EngineLike,
    *,
    log_dir: str | Path | None = None,
    request_timeout_s: float = 3600.0,
    task: TaskName = GENERATE,
) -> Iterator[OpenEngine]:
    """Open an engine that serves several runs in turn.

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
