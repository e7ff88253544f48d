"""The library calls `run` and `arun`, and `open_engine`, which keeps an engine open for several runs."""

import functools
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from batchrunner.core.errors import JobError
from batchrunner.core.loop_thread import LoopThread, call_in_thread
from batchrunner.engines.registry import make_engine
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import EngineLike, load_job, parse_engine
from batchrunner.job.spec import Job, LimitsSpec
from batchrunner.job.tasks import GENERATE, TASKS, TaskName
from batchrunner.output.files import write_json, writing
from batchrunner.report.report import Report
from batchrunner.runner.open_engine import OpenEngine
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
    """Open an engine that serves several runs, one after another or side by side.

    Example: `with open_engine({"kind": "server", "model": name}) as engine: run(job, engine=engine)`.

    `engine` is as for `generate`; `task` is the task of all jobs that run on the engine. `log_dir` gets the
    logs of started servers; by default, it is a temporary directory that is kept after an error. `share` is
    the path of a `.json` file to write: other processes that pass this path as `engine` use the engine, too.
    Raises JobError or EngineStartError.
    """
    if task != GENERATE and task not in TASKS:
        raise JobError(f"unknown task {task!r}", hint=f"give one of {', '.join((GENERATE, *TASKS))}")
    spec = parse_engine(engine)
    if share is not None and (spec.kind == "simulated" or Path(share).suffix != ".json"):
        raise JobError(
            f"the engine cannot be shared as {share}",
            hint="give a path that ends in .json, and an engine that is not simulated",
        )
    with _log_directory(log_dir) as logs, LoopThread() as loop:
        limits = LimitsSpec(request_timeout=request_timeout_s)
        backend = loop.call(functools.partial(make_engine, spec, log_dir=logs, limits=limits, task=task))
        try:
            info = loop.call(backend.open)
            with _shared(backend, share):
                yield OpenEngine(loop=loop, spec=spec, engine=backend, info=info, task=task)
        finally:
            # Runs that have not ended are cancelled first, because they still use the engine.
            loop.cancel_all()
            loop.call(backend.close)


@contextmanager
def _log_directory(path: str | Path | None) -> Iterator[Path]:
    """Yield the directory `path` for logs.

    If it is None, yield a temporary directory, which is deleted afterwards unless the block raises.
    """
    if path is not None:
        yield Path(path).expanduser()
        return
    temporary = Path(tempfile.mkdtemp(prefix="batchrunner-"))
    # If the block raises, the directory stays, because the message of the exception may name a log file.
    yield temporary
    shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _shared(engine: Any, share: str | Path | None) -> Iterator[None]:
    """Let other processes use an engine through the file `share` until the block ends.

    The API key is in a second file beside `share`, which only this user can read. If `share` is None, nothing
    is written.
    """
    if share is None:
        yield
        return
    path = Path(share).expanduser().absolute()
    key = path.with_suffix(".key")
    with ExitStack() as files:
        files.callback(key.unlink, missing_ok=True)
        files.callback(path.unlink, missing_ok=True)
        with writing(path):
            # An old file is removed first, because `touch` would keep its mode.
            key.unlink(missing_ok=True)
            key.touch(0o600)
            key.write_text(engine.api_key or "")
            write_json(path, {"kind": "attach", "urls": [*engine.replicas], "api_key_file": str(key)})
        yield


def engine_of(engine: OpenEngine | EngineLike | None) -> tuple[OpenEngine | None, EngineSpec]:
    """Return the engine if it is open, else None; and the engine's specification."""
    if isinstance(engine, OpenEngine):
        return engine, engine.spec
    return None, parse_engine(engine)


JobSource = Job | Mapping[str, Any] | str | Path
"""A job as `run` takes it: a Job, a mapping with the keys of a job file, or the path of a job file."""


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

    In a program with an event loop use `arun`, because this call blocks the loop. `overrides` are texts such
    as `sampling.temperature=0`, which change fields of the job. `rollout` is the function for
    `prompt.rollout`. With `join`, all processes that run the job share its rows, and the report counts the
    rows of all of them. `progress` shows a bar. `on_progress`, a plain function, is called with a Progress at
    most once a second, in the thread of the run.

    Raises BatchrunError. Too many failed rows or a missed deadline raise nothing: see the exit code of the
    report (3 or 1).
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    loaded = load_job(job, overrides=overrides, engine=_spec_of(engine), rollout=rollout)
    displays = make_displays(progress=progress, on_progress=on_progress)
    return run_blocking(loaded, engine, fresh=fresh, retry_failed=retry_failed, join=join, displays=displays)


def awaited(blocking: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the asynchronous form of a blocking call, for programs with an event loop."""

    @functools.wraps(blocking)
    async def call(*args: P.args, **options: P.kwargs) -> T:
        return await call_in_thread(blocking, *args, **options)

    call.__name__ = f"a{blocking.__name__}"
    call.__doc__ = (
        f"Run `{blocking.__name__}` in a thread. Cancelling this coroutine cancels the requests in flight."
    )
    return call


arun = awaited(run)


def run_blocking(job: Job, engine: OpenEngine | None, **options: Any) -> Report:
    """Run a job and return its report; `options` are passed to `execute`.

    The job runs on the open engine `engine`. If it is None, an engine is opened for this run.
    """
    if engine is not None:
        return engine.start_run(job, **options).wait()
    with LoopThread() as loop:
        return loop.call(functools.partial(execute, job, **options))


def _spec_of(engine: OpenEngine | None) -> EngineSpec | None:
    """Return the specification of an open engine; None if `engine` is None.

    Raises JobError if `engine` is anything else.
    """
    if engine is None:
        return None
    if not isinstance(engine, OpenEngine):
        raise JobError(
            "engine: not an open engine",
            hint="give the result of `open_engine`, or describe the engine in the job under `engine`",
        )
    return engine.spec
