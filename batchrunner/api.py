"""batchrunner as a library: blocking calls, their async counterparts, and an engine for several runs."""

import asyncio
import functools
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from batchrunner.core.errors import BatchrunError, InputError, JobError
from batchrunner.core.standard_streams import open_missing_descriptors
from batchrunner.core.types import EngineInfo
from batchrunner.engines.base import Engine
from batchrunner.engines.registry import make_engine
from batchrunner.input.dataset import Dataset
from batchrunner.input.render import Renderer
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import load_job, parse_engine
from batchrunner.job.spec import Job, LimitsSpec
from batchrunner.output.columns import result_schema
from batchrunner.output.files import writing
from batchrunner.output.merge import merge
from batchrunner.report.report import Report
from batchrunner.runner.execute import execute
from batchrunner.runner.shard import new_join_task

JobSource = Job | Mapping[str, Any] | str | Path


class SupportsArrow(Protocol):
    """A table of another library, by Arrow's PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export the table."""


class OpenEngine:
    """An engine that is ready and serves run after run; made by `open_engine`.

    It lives on an event loop of its own, in a thread, so that runs from any thread or loop can use it.
    `spec` is the `engine` part of a job that it was made from; `info` is what the engine reports of itself.
    """

    def __init__(self, portal: BlockingPortal, spec: EngineSpec, engine: Engine, info: EngineInfo) -> None:
        self._portal = portal
        self._engine = engine
        self.spec = spec
        self.info = info

    def call(self, job: Job, **options: Any) -> Report:
        """Run a job on this engine and wait; an interrupt ends the run, whose finished rows are kept."""
        running, ended = self._start(job, options)
        try:
            return running.result()
        except KeyboardInterrupt:
            running.cancel()
            ended.result()
            raise

    async def acall(self, job: Job, **options: Any) -> Report:
        """Run a job on this engine; cancelling it ends the run, whose finished rows are kept."""
        running, ended = self._start(job, options)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            await asyncio.wrap_future(ended)
            raise

    def _start(self, job: Job, options: dict[str, Any]) -> tuple[Future[Report], Future[None]]:
        """Start a run; return its result, which can be cancelled, and its end, which comes later then."""
        ended: Future[None] = Future()

        async def to_its_end() -> Report:
            try:
                return await _execute(job, engine=self._engine, info=self.info, **options)
            finally:
                ended.set_result(None)

        try:
            return self._portal.start_task_soon(to_its_end), ended
        except RuntimeError:
            raise BatchrunError("the engine is closed: use it within its `with open_engine(…)`") from None


@contextmanager
def open_engine(
    engine: Mapping[str, Any] | EngineSpec,
    *,
    log_dir: str | Path | None = None,
    request_timeout_s: float = 3600.0,
) -> Iterator[OpenEngine]:
    """Open an engine that serves several runs in turn.

    Example: `with open_engine({"kind": "server", "model": name}) as engine: run(job, engine=engine)`.

    `engine` is as in a job file. A launched server logs into `log_dir` (default: a new temporary directory,
    which stays after an error only; see `info.log`). Raises JobError or EngineStartError.
    """
    spec = parse_engine(engine)
    with _directory(log_dir) as logs, _portal() as portal:
        made = make_engine(spec, log_dir=logs, limits=LimitsSpec(request_timeout=request_timeout_s))
        try:
            yield OpenEngine(portal, spec, made, portal.call(made.open))
        finally:
            portal.call(made.close)


@contextmanager
def _directory(given: str | Path | None) -> Iterator[Path]:
    """Give this directory, or a new one, which is deleted unless an error sends people to a log in it."""
    path = Path(tempfile.mkdtemp(prefix="batchrunner-") if given is None else given).expanduser()
    yield path
    if given is None:
        shutil.rmtree(path, ignore_errors=True)


def run(
    job: JobSource,
    *,
    engine: OpenEngine | None = None,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    retry_failed: bool = False,
    join: bool = False,
) -> Report:
    """Run a job (a path, a mapping or a Job) and return its report; the results are under `output.path`.

    Also works where an event loop is running, which it blocks: prefer `arun` there. `overrides` are texts
    `a.b=c` as for `--set`. With `join` the rows are shared with all other starts that say so, as in each
    worker of a pipeline; a report counts the rows of all. Raises BatchrunError; a report with exit code 3
    (too many failed rows) or 1 (a deadline) is returned, not raised.
    """
    loaded = load_job(job, overrides=overrides, engine=_spec_of(engine))
    part = new_join_task() if join else None
    return _run(loaded, engine, fresh=fresh, retry_failed=retry_failed, part=part)


async def arun(
    job: JobSource,
    *,
    engine: OpenEngine | None = None,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    retry_failed: bool = False,
    join: bool = False,
) -> Report:
    """Do what `run` does, in the running event loop; cancelling it keeps the finished rows."""
    loaded = load_job(job, overrides=overrides, engine=_spec_of(engine))
    part = new_join_task() if join else None
    if engine is not None:
        return await engine.acall(loaded, fresh=fresh, retry_failed=retry_failed, part=part)
    return await execute(loaded, fresh=fresh, retry_failed=retry_failed, part=part)


def generate(
    rows: pa.Table | Iterable[Mapping[str, Any]] | SupportsArrow,
    *,
    prompt: str | Mapping[str, Any],
    engine: OpenEngine | Mapping[str, Any] | EngineSpec,
    sampling: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
    limits: Mapping[str, Any] | LimitsSpec | None = None,
) -> pa.Table:
    """Send every row of a table and return the results as a table in input order.

    `rows` is a table (pyarrow's, or any that speaks Arrow's C interface, as those of pandas and polars do)
    or an iterable of mappings; `prompt` is the user template or the `prompt` part of a
    job; `columns` are carried into the result, whose other columns are those of a result row (`row`,
    `output`, `finish_reason`, …, `error`). Failed rows have an `error`; the table always has as many rows
    as the input. Raises BatchrunError.
    """
    table = _table_of(rows)
    with tempfile.TemporaryDirectory(prefix="batchrunner-") as scratch:
        source, out = Path(scratch) / "input.parquet", Path(scratch) / "run"
        _write(table, source)
        spec = engine.spec if isinstance(engine, OpenEngine) else parse_engine(engine)
        job = load_job(
            {
                "input": {"path": str(source), "columns": list(columns)},
                "prompt": {"user": prompt} if isinstance(prompt, str) else prompt,
                "sampling": sampling or {},
                "output": {"path": str(out)},
                "engine": spec.model_dump(exclude_unset=True),
                "limits": limits.model_dump(exclude_unset=True)
                if isinstance(limits, LimitsSpec)
                else limits or {},
            },
            environ={},
        )
        if not table.num_rows:
            return _no_results(job)
        report = _run(job, engine if isinstance(engine, OpenEngine) else None, page=False)
        if report.rows_left:
            raise BatchrunError(
                f"{report.reason}: {report.rows_left} of {report.rows_total} rows were not sent"
            )
        merged = merge(out)
        return pa.concat_tables(pq.read_table(file) for file in sorted(merged.glob("*.parquet")))


def _run(job: Job, engine: OpenEngine | None, **options: Any) -> Report:
    if engine is not None:
        return engine.call(job, **options)
    with _portal() as portal:
        report: Report = portal.call(functools.partial(_execute, job, **options))
        return report


def _spec_of(engine: OpenEngine | None) -> EngineSpec | None:
    if engine is not None and not isinstance(engine, OpenEngine):
        raise JobError("engine: give one that `open_engine` opened, or put it into the job as `engine`")
    return engine.spec if engine is not None else None


def _table_of(rows: object) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    wanted = "rows: give a table (pyarrow, pandas, polars) or an iterable of mappings"
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise InputError(f"{wanted} (got {type(rows).__name__})")
    try:
        return pa.table(rows) if hasattr(rows, "__arrow_c_stream__") else _table_of_rows(rows, wanted)
    except InputError:
        raise
    except Exception as failure:  # noqa: BLE001 - values of any kind: a number over 64 bits, for example
        raise InputError(f"rows: cannot be made a table: {type(failure).__name__}: {failure}") from None


def _table_of_rows(rows: Iterable[object], wanted: str) -> pa.Table:
    listed: list[Mapping[str, Any]] = []
    for row in rows:
        if not isinstance(row, Mapping):
            raise InputError(f"{wanted} (got a row of type {type(row).__name__})")
        listed.append(row)
    names = dict.fromkeys(chain.from_iterable(listed))  # a row may have more than the first one
    if listed and not names:
        raise InputError(f"{wanted} (got {len(listed)} rows without a column: give each one at least)")
    return pa.table({name: [row.get(name) for row in listed] for name in names})


def _write(table: pa.Table, path: Path) -> None:
    try:
        with writing(path):
            pq.write_table(table, path)
    except pa.ArrowException as failure:  # a type that Parquet has not
        raise InputError(f"rows: cannot be written as Parquet: {failure}") from None


def _no_results(job: Job) -> pa.Table:
    """Return the results of an input without rows, which pipelines have; the job is checked."""
    carried = Renderer(
        Dataset(job.input.path, types=job.input.types), job.input, job.prompt, job.sampling
    ).carried_schema
    return result_schema(carried, samples=job.sampling.n, metadata={}).empty_table()


async def _execute(job: Job, **options: Any) -> Report:
    """Do what `execute` does in a portal, whose cancellation comes again at every await.

    A run that is cancelled writes its finished rows, for which it has to wait: it is cancelled once only.
    """
    running = asyncio.ensure_future(execute(job, **options))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.cancel()
        with CancelScope(shield=True):
            await asyncio.wait([running])
        raise


@contextmanager
def _portal() -> Iterator[BlockingPortal]:
    """Start an event loop in a thread of its own; an interrupt in the caller cancels what runs there."""
    open_missing_descriptors()
    with start_blocking_portal("asyncio", backend_options={"use_uvloop": True}) as portal:
        yield portal
