"""Runs of jobs."""

import asyncio
import functools
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from batchrunner.core.errors import JobError
from batchrunner.engines.registry import make_engine
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import EngineLike, load_job, parse_engine
from batchrunner.job.spec import Job, LimitsSpec
from batchrunner.job.tasks import GENERATE, TASKS, TaskName
from batchrunner.output.files import write_json, writing
from batchrunner.report.report import Report
from batchrunner.runner.open_engine import STOP, OpenEngine, PortalWork, open_portal
from batchrunner.runner.progress import ProgressListener, make_displays
from batchrunner.runner.run import execute

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def open_engine(
    engine: EngineLike,
    *,
    log_dir: str | Path | None = None,
    request_timeout_s: float = 3600.0,
    task: TaskName = GENERATE,
    share: str | Path | None = None,
) -> Iterator[OpenEngine]:
    """Open an engine that serves several runs, in turn or at once.

    Example: `with open_engine({"kind": "server", "model": name}) as engine: run(job, engine=engine)`.

    `engine` is as for `generate`, `task` what its jobs do. A server logs into `log_dir`; by default a
    temporary directory, which stays after an error. Other processes may use the engine meanwhile by the file
    `share`, which ends with `.json`: its path is their `engine`. Raises JobError or EngineStartError.
    """
    if task != GENERATE and task not in TASKS:
        raise JobError(f"task {task!r}", hint=f"give one of {', '.join((GENERATE, *TASKS))}")
    spec = parse_engine(engine)
    if share is not None and (spec.kind == "simulated" or Path(share).suffix != ".json"):
        raise JobError(f"share {share}", hint="give a file .json, and an engine that is not simulated")
    with _directory(log_dir) as logs, open_portal() as portal:
        limits = LimitsSpec(request_timeout=request_timeout_s)
        made = make_engine(spec, log_dir=logs, limits=limits, task=task)
        try:
            opened = OpenEngine(portal, spec, made, portal.call(made.open), task)
            with closing(opened.loop), _shared(made, share):
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


@contextmanager
def _shared(engine: Any, share: str | Path | None) -> Iterator[None]:
    """Let other processes use an engine by a file. Beside it is one with its key, for this user alone."""
    if share is None:
        yield
        return
    path = Path(share).expanduser().absolute()
    key = path.with_suffix(".key")
    with ExitStack() as files:
        files.callback(key.unlink, missing_ok=True)
        files.callback(path.unlink, missing_ok=True)
        with writing(path):
            key.unlink(missing_ok=True)
            key.touch(0o600)
            key.write_text(engine.api_key or "")
            write_json(path, {"kind": "attach", "urls": [*engine.replicas], "api_key_file": str(key)})
        yield


def engine_of(engine: OpenEngine | EngineLike | None) -> tuple[OpenEngine | None, EngineSpec]:
    """Return the engine of a call, if it is an open one, and its description."""
    return (engine, engine.spec) if isinstance(engine, OpenEngine) else (None, parse_engine(engine))


JobSource = Job | Mapping[str, Any] | str | Path


def run(
    job: JobSource,
    *,
    engine: OpenEngine | None = None,
    rollout: Callable[..., Any] | None = None,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    retry_failed: bool = False,
    join: bool = False,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> Report:
    """Run a job (a path, a mapping or a Job) and return its report; the results are under `output.path`.

    In a program with an event loop use `arun`: this call blocks it. `overrides` are texts `a.b=c`, as for
    `--set`. `rollout` is the function of `prompt.rollout`. With `join` all starts that say so share the rows,
    and the report counts the rows of all. `progress` shows a bar. `on_progress`, a plain function, is called
    with a Progress at most once a second, in the thread of the run.

    Raises BatchrunError. A report with exit code 3 (too many failed rows) or 1 (a deadline) is returned.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    loaded = load_job(job, overrides=overrides, engine=_spec_of(engine), rollout=rollout)
    displays = make_displays(progress=progress, on_progress=on_progress)
    return run_blocking(loaded, engine, fresh=fresh, retry_failed=retry_failed, join=join, displays=displays)


def awaited(blocking: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a call of the library for programs with an event loop, which goes on meanwhile."""

    @functools.wraps(blocking)
    async def call(*args: P.args, **options: P.kwargs) -> T:
        stop: Future[None] = Future()
        context = copy_context()
        context.run(STOP.set, stop)
        work = functools.partial(context.run, blocking, *args, **options)
        thread = ThreadPoolExecutor(1, "batchrunner call")  # not one of the program's own, which are few
        running = asyncio.get_running_loop().run_in_executor(thread, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stop.set_result(None)
            await asyncio.gather(running, return_exceptions=True)
            raise
        finally:
            thread.shutdown(wait=False)

    call.__name__ = f"a{blocking.__name__}"
    call.__doc__ = f"Do what `{blocking.__name__}` does, in a thread; cancelling it ends its requests."
    return call


arun = awaited(run)


def run_blocking(job: Job, engine: OpenEngine | None, **options: Any) -> Report:
    """Run a job, on an open engine if there is one, and wait for it; `options` are those of `execute`."""
    if engine is not None:
        return engine.start(job, **options).wait()
    with open_portal() as portal:
        return PortalWork(portal, functools.partial(execute, job, **options)).wait()


def _spec_of(engine: OpenEngine | None) -> EngineSpec | None:
    if engine is not None and not isinstance(engine, OpenEngine):
        raise JobError(
            "engine", hint="give one that `open_engine` opened, or put it into the job as `engine`"
        )
    return engine.spec if engine is not None else None
