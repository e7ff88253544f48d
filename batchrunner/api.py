"""batchrunner as a library: blocking calls, their async counterparts, and an engine for several runs."""

import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.errors import BatchrunError, JobError
from batchrunner.dispatch.checks.checker import AnswerChecker
from batchrunner.engines.registry import make_engine
from batchrunner.input.dataset import Dataset
from batchrunner.input.parquet_copy import about_rows, write_parquet
from batchrunner.input.render import Renderer
from batchrunner.input.tables import Data, Row, default_prompt, paths_of
from batchrunner.job.answers import plan_answers
from batchrunner.job.call import job_of_call, job_of_task
from batchrunner.job.check import OnLength
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import EngineLike, load_job, parse_engine
from batchrunner.job.python_functions import open_functions
from batchrunner.job.spec import Job, LimitsSpec
from batchrunner.job.tasks.embed import Dtype
from batchrunner.job.tasks.table import GENERATE, TASKS, TaskName
from batchrunner.output.columns import schema_of_run
from batchrunner.output.merge import merge
from batchrunner.report.report import Report
from batchrunner.runner.execute import execute
from batchrunner.runner.open_engine import OpenEngine, cancelled_once, open_portal
from batchrunner.runner.progress import Display
from batchrunner.runner.progress_calls import ProgressListener, make_displays
from batchrunner.runner.shard import new_join_task
from batchrunner.runner.stream_call import JobMaker, StreamCall

JobSource = Job | Mapping[str, Any] | str | Path


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
    part = new_join_task() if join else None
    display = make_displays(progress=progress, on_progress=on_progress)
    return _run(loaded, engine, fresh=fresh, retry_failed=retry_failed, part=part, display=display)


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
    part = new_join_task() if join else None
    display = make_displays(progress=progress, on_progress=on_progress)
    start = execute if engine is None else engine.acall
    return await start(loaded, fresh=fresh, retry_failed=retry_failed, part=part, display=display)


def generate(
    rows: Data,
    *,
    prompt: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    parse: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    engine: OpenEngine | EngineLike,
    sampling: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
    answers: Sequence[str] = (),
    explode: bool = False,
    check: Mapping[str, Any] | None = None,
    on_length: OnLength | None = None,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Send every row and return the results as a pyarrow Table in input order.

    `rows` are texts (which become the column `text`), mappings, or a mix, as a list or any iterable; a table
    or data frame (of pyarrow, pandas, polars or duckdb, or any other that speaks Arrow's C interface); a data
    set of pyarrow or Hugging Face; or the path of a file, a directory or a glob. An iterator or a data set is
    read in bounded memory; the results are in memory.

    `prompt` is the user template, the `prompt` part of a job, or a function that makes the prompt of a row;
    without it the only text column is the prompt. `parse` is a function that makes columns of an answer, or
    the `parse` part of a job. Functions run in processes of their own. `engine` is an open engine, the
    `engine` part of a job, a model's name or directory (a server is started), the address of a server or a
    list of addresses, or "simulated". `columns` are carried into the result, whose other columns are those
    of a result row (`row`, `output`, `finish_reason`, …, `error`), and those of `answers` (`output.columns`
    of a job, such as "logprobs"). With `explode` each output of a row is a row, where `sampling` has `n`.
    `check` and `on_length` are those of a job: which answers are good.
    `progress` and `on_progress` are as for `run`.

    Failed rows have an `error`; the table always has as many rows as the input. Raises BatchrunError, and
    what an iterator of `rows` raises.
    """
    display = make_displays(progress=progress, on_progress=on_progress)
    opened, spec = _engine_of(engine)

    def make_job(schema: pa.Schema, paths: list[str], output: Path) -> Job:
        return job_of_call(
            paths,
            default_prompt(schema) if prompt is None else prompt,
            parse,
            sampling,
            columns,
            limits,
            output=output,
            engine=spec,
            answers=answers,
            explode=explode,
            check=check,
            on_length=on_length,
            own_rows=paths_of(rows) is None,
        )

    return _results_of(rows, make_job, opened, display)


def embed(
    rows: Data,
    *,
    prompt: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    engine: OpenEngine | EngineLike,
    columns: Sequence[str] = (),
    dtype: Dtype = "float32",
    normalize: bool = False,
    dimensions: int | None = None,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Make a vector of every row and return the results as a pyarrow Table in input order.

    Example: `embed(["a cat", "a dog"], engine="BAAI/bge-small-en-v1.5").column("embedding")`.

    The arguments are as for `generate`; an open engine is one of `open_engine(…, task="embed")`. `prompt` is
    the template of a text, or the column with it, the `prompt` part of a job, or a function that makes the
    text or the token ids of a row. `dtype`, `normalize` and `dimensions` are those of a job's `output`.

    The column `embedding` has lists of one fixed size; it is null where a row has an `error`. Raises
    BatchrunError, and what an iterator of `rows` raises.
    """
    display = make_displays(progress=progress, on_progress=on_progress)
    fields = {"dtype": dtype, "normalize": normalize, "dimensions": dimensions}
    return _results_of_task("embed", rows, prompt, engine, columns, limits, display, fields=fields)


def score(
    rows: Data,
    *,
    labels: Sequence[str | int] | None = None,
    choices: str | Sequence[str] | None = None,
    prompt: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    engine: OpenEngine | EngineLike,
    columns: Sequence[str] = (),
    softmax: bool = False,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Tell how probable labels or choices are after every row, as a pyarrow Table in input order.

    Example: `score(["Is the sky blue? Answer:"], labels=[" yes", " no"], engine="Qwen/Qwen3-8B")`.

    The arguments are as for `generate`; an open engine is one of `open_engine(…, task="score")`. `prompt` is
    the template of a text, or the column with it, the `prompt` part of a job, or a function that makes the
    text or the token ids of a row. Give either `labels`, single tokens by their texts or ids, or `choices`, a
    list of texts for all rows or the column with a list for each.

    The column `scores` has a list for each row: probabilities of the labels among all tokens, or with
    `softmax` among the labels; or log likelihoods of the choices, which `scores_per_token` and
    `scores_per_byte` have divided by their lengths. It is null where a row has an `error`. Raises
    BatchrunError, and what an iterator of `rows` raises.
    """
    display = make_displays(progress=progress, on_progress=on_progress)
    given = choices if choices is None or isinstance(choices, str) else list(choices)
    return _results_of_task(
        "score",
        rows,
        prompt,
        engine,
        columns,
        limits,
        display,
        fields={"softmax": softmax},
        labels=labels,
        items={} if given is None else {"choices": given},
    )


def rerank(
    rows: Data,
    *,
    documents: str,
    prompt: str | Mapping[str, Any] | None = None,
    engine: OpenEngine | EngineLike,
    columns: Sequence[str] = (),
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Tell how relevant the documents of every row are to its query, as a pyarrow Table in input order.

    Example: `rerank(rows, prompt="{{ query }}", documents="documents", engine="BAAI/bge-reranker-base")`.

    The arguments are as for `generate`; an open engine is one of `open_engine(…, task="rerank")`. `prompt` is
    the template of the query, or the column with it; `documents` is the column with a list of texts, or one.

    The column `scores` has a list for each row, in the order of its documents; it is null where a row has an
    `error`. Raises BatchrunError, and what an iterator of `rows` raises.
    """
    display = make_displays(progress=progress, on_progress=on_progress)
    items = {"documents": documents}
    return _results_of_task("rerank", rows, prompt, engine, columns, limits, display, items=items)


def _results_of_task(
    task: TaskName,
    rows: Data,
    prompt: str | Mapping[str, Any] | Callable[..., Any] | None,
    engine: OpenEngine | EngineLike,
    columns: Sequence[str],
    limits: Mapping[str, Any] | LimitsSpec | None,
    display: Display,
    *,
    fields: Mapping[str, Any] | None = None,
    **own: Any,
) -> pa.Table:
    """Do a task without decoding; `fields` are those of `output`, the rest is as for `job_of_task`."""
    opened, spec = _engine_of(engine)

    def make_job(schema: pa.Schema, paths: list[str], output: Path) -> Job:
        template = default_prompt(schema) if prompt is None else prompt
        part = {"path": str(output), **(fields or {})}
        return job_of_task(task, paths, template, columns, limits, output=part, engine=spec, **own)

    return _results_of(rows, make_job, opened, display)


def _engine_of(engine: OpenEngine | EngineLike) -> tuple[OpenEngine | None, EngineSpec]:
    """Return the engine of a call, if it is an open one, and its description."""
    return (engine, engine.spec) if isinstance(engine, OpenEngine) else (None, parse_engine(engine))


def _results_of(rows: Data, make_job: JobMaker, opened: OpenEngine | None, display: Display) -> pa.Table:
    """Run the job of a call and return its results, which stay nowhere else."""
    with _rows_and_run() as (source, out):
        paths = paths_of(rows)
        if paths is None:
            write_parquet(rows, source)
        dataset = Dataset(paths or str(source))
        job = make_job(dataset.schema, paths or [str(source)], out)
        if not dataset.total_rows:
            return _no_results(job, dataset)
        report = _run(job, opened, page=False, display=display)
        if report.rows_left:
            raise BatchrunError(
                f"{report.reason}: {report.rows_left} of {report.rows_total} rows were not sent"
            )
        merged = merge(out)
        return pa.concat_tables(pq.read_table(file) for file in sorted(merged.glob("*.parquet")))


def stream(
    rows: Data | AsyncIterable[Row],
    *,
    prompt: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    parse: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    engine: OpenEngine | EngineLike,
    sampling: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
    answers: Sequence[str] = (),
    explode: bool = False,
    check: Mapping[str, Any] | None = None,
    on_length: OnLength | None = None,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    output: str | Path | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> AsyncGenerator[dict[str, Any], None]:
    """Send rows as they come and yield each as it ends, as a dict with the columns of a result row.

    Example: `async for row in batchrunner.stream(texts, engine="Qwen/Qwen3-8B"): print(row["output"])`.

    The arguments are those of `generate`; `rows` may also be an asynchronous iterator. An iterator is read a
    few thousand rows ahead, and not while the program is behind; it may be endless. It is read in a thread,
    an asynchronous one in the running event loop. The columns are those of its first rows. Rows come in the
    order in which they end; `row` is the position in the input. Failed rows have an `error`.

    Without `output` nothing stays on disk. With it the rows are also stored in a run directory of that path,
    before the first is sent: the same call resumes, and first yields what earlier starts did.

    Leaving the loop, closing the generator or cancelling the task ends the requests in flight and closes the
    engine, unless it is an open one. Raises BatchrunError, and what an iterator of `rows` raises, after the
    rows that it gave.
    """
    opened, spec = _engine_of(engine)
    if opened is not None:
        opened.refuse_other_task(GENERATE)

    def make_job(schema: pa.Schema, paths: list[str], output: Path) -> Job:
        template = default_prompt(schema) if prompt is None else prompt
        return job_of_call(
            paths,
            template,
            parse,
            sampling,
            columns,
            limits,
            output=output,
            engine=spec,
            answers=answers,
            explode=explode,
            check=check,
            on_length=on_length,
            own_rows=files is None,
        )

    files = paths_of(rows)
    display = make_displays(progress=progress, on_progress=on_progress)
    call = StreamCall(rows, files, make_job, opened.loop if opened else None, display)
    return call.in_memory() if output is None else call.in_run_directory(Path(output))


@contextmanager
def _rows_and_run() -> Iterator[tuple[Path, Path]]:
    """Give the paths of a file for the rows of a call and of its run directory, which are deleted."""
    with tempfile.TemporaryDirectory(prefix="batchrunner-") as scratch:
        source = Path(scratch) / "input.parquet"
        with about_rows(source):
            yield source, Path(scratch) / "run"


def _run(job: Job, engine: OpenEngine | None, **options: Any) -> Report:
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


def _no_results(job: Job, dataset: Dataset) -> pa.Table:
    """Return the results of an input without rows, which pipelines have; the job is checked."""
    functions = open_functions(job)
    with closing(functions) if functions else nullcontext():
        renderer = Renderer(
            dataset, job.input, job.prompt, job.sampling, functions=functions, task=job.forward
        )
        plan = plan_answers(job, functions=functions)
        AnswerChecker(job, plan, dataset.schema.names)  # raises what is wrong with the checks
    return schema_of_run(renderer.carried_schema, plan, {}, job.output.dimensions or 0).empty_table()
