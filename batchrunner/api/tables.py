"""Tables of answers: generate, embed, score and rerank for all rows."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.api.runs import awaited, engine_of, run_blocking
from batchrunner.core.errors import BatchrunError, InputError
from batchrunner.dispatch.checks import AnswerConditions
from batchrunner.input.dataset import Dataset
from batchrunner.input.parquet_copy import first_line, write_parquet
from batchrunner.input.render import Renderer
from batchrunner.input.tables import Data, batches_of, paths_of
from batchrunner.job.answers import plan_answers
from batchrunner.job.call import LibraryCall
from batchrunner.job.load import EngineLike
from batchrunner.job.python_functions import open_functions
from batchrunner.job.spec import InputSpec, Job, LimitsSpec, OnLength
from batchrunner.job.tasks import Dtype
from batchrunner.output.columns import schema_of_run
from batchrunner.output.merge import merge
from batchrunner.output.run_dir import RunDir
from batchrunner.runner.earlier_results import with_merged_results
from batchrunner.runner.open_engine import STOP, OpenEngine
from batchrunner.runner.progress import ProgressListener, make_displays

T = TypeVar("T")


def results_of(
    rows: Data,
    engine: OpenEngine | EngineLike | None,
    *,
    progress: bool,
    on_progress: ProgressListener | None,
    **fields: Any,
) -> pa.Table:
    """Run the job of a call and return its results, which stay nowhere else; `fields` are its arguments."""
    displays = make_displays(progress=progress, on_progress=on_progress)
    opened, spec = engine_of(engine)
    paths = paths_of(rows)
    call = LibraryCall(engine=spec, own_rows=paths is None, **fields)
    with tempfile.TemporaryDirectory(prefix="batchrunner-") as scratch:
        source, out = Path(scratch) / "input.parquet", Path(scratch) / "run"
        if paths is None:
            try:
                write_parquet(batches_of(rows, _unless_stopped), source)
            except pa.ArrowException as failure:
                raise InputError(f"rows: cannot be written as Parquet: {first_line(failure)}") from None
        spec_of_rows = InputSpec(path=paths or str(source))
        files = with_merged_results(spec_of_rows.path)
        dataset = Dataset(spec_of_rows, copies=RunDir(out).copies, paths=files)
        job = call.job(dataset.schema, paths or [str(source)], out)
        if not dataset.total_rows:
            return _no_results(job, dataset)
        report = run_blocking(job, opened, displays=displays)
        if report.rows_left:
            raise BatchrunError(
                f"{report.reason}: {report.rows_left:,} of {report.rows_total:,} rows were not sent"
            )
        merged = merge(out)
        return pa.concat_tables(pq.read_table(file) for file in sorted(merged.path.glob("*.parquet")))


def _unless_stopped(rows: T) -> T:
    """Return a row or a batch of them; raises CancelledError where the call was cancelled meanwhile."""
    if (stop := STOP.get()) is not None and stop.done():
        raise CancelledError
    return rows


def _no_results(job: Job, dataset: Dataset) -> pa.Table:
    """Return the results of an input without rows, which pipelines have; the job is checked."""
    functions = open_functions(job)
    with closing(functions) if functions else nullcontext():
        plan = plan_answers(job, functions)
        renderer = Renderer(job, dataset, plan, functions)
        AnswerConditions(job, plan, dataset.schema.names)  # raises what is wrong with the checks
    return schema_of_run(renderer.carried_schema, plan).empty_table()


def generate(
    rows: Data,
    *,
    prompt: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    rollout: str | Callable[..., Any] | None = None,
    parse: str | Callable[..., Any] | None = None,
    engine: OpenEngine | EngineLike | None = None,
    sampling: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
    answers: Sequence[str] = (),
    accept: Mapping[str, Any] | None = None,
    on_length: OnLength | None = None,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Send every row and return the results as a pyarrow Table in input order.

    `rows` are texts (the column `text`) or mappings, in any iterable; a table or data frame of pyarrow,
    pandas, polars, duckdb or anything with Arrow's C interface; a data set of pyarrow or Hugging Face; the
    path of a file, a directory or a glob. Iterators and data sets are read in bounded memory; the results are
    in memory.

    `prompt` is the user template, the `prompt` part of a job, or a function of a row; by default the only
    text column. `rollout` in its place is an asynchronous function that asks several times. `parse` is a
    function that makes columns of an answer. `engine` is an open engine, the `engine` part of a job, a model
    (a server is started), an address or a list of addresses, or "simulated". `columns` are carried along.
    `answers` are `output.columns` of a job; `sampling`, `accept`, `on_length` and `limits` are those of a
    job. `progress` and `on_progress` are as for `run`.

    The table has a row for each of the input; a failed one has an `error`. Raises BatchrunError, and what an
    iterator of `rows` raises.
    """
    return results_of(
        rows,
        engine,
        progress=progress,
        on_progress=on_progress,
        prompt=prompt,
        columns=columns,
        limits=limits,
        rollout=rollout,
        parse=parse,
        sampling=sampling,
        answers=answers,
        accept=accept,
        on_length=on_length,
    )


def embed(
    rows: Data,
    *,
    prompt: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    engine: OpenEngine | EngineLike | None = None,
    columns: Sequence[str] = (),
    dtype: Dtype = "float32",
    normalize: bool = False,
    dimensions: int | None = None,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Make a vector of every row; return a pyarrow Table in input order.

    Example: `embed(["a cat", "a dog"], engine="BAAI/bge-small-en-v1.5").column("embedding")`.

    `prompt` is a template, the column with the text, the `prompt` part of a job, or a function that returns a
    text or token ids. `dtype`, `normalize` and `dimensions` are those of a job's `output`. All else is as for
    `generate`; an open engine is one of `open_engine(…, task="embed")`. The vector is null where a row has an
    `error`.
    """
    return results_of(
        rows,
        engine,
        progress=progress,
        on_progress=on_progress,
        task="embed",
        prompt=prompt,
        columns=columns,
        limits=limits,
        task_options={"dtype": dtype, "normalize": normalize, "dimensions": dimensions},
    )


def score(
    rows: Data,
    *,
    labels: Sequence[str | int] | None = None,
    choices: str | Sequence[str] | None = None,
    prompt: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    engine: OpenEngine | EngineLike | None = None,
    columns: Sequence[str] = (),
    softmax: bool = False,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Tell how probable labels or choices are after every row; return a pyarrow Table in input order.

    Example: `score(["Is the sky blue? Answer:"], labels=[" yes", " no"], engine="Qwen/Qwen3-8B")`.

    Give `labels`, single tokens by text or id, or `choices`, texts for all rows or the column with a list for
    each. The column `scores` has probabilities of the labels (with `softmax` among the labels), or log
    likelihoods of the choices, which `scores_per_token` and `scores_per_byte` divide by length. All else is
    as for `embed`.
    """
    return results_of(
        rows,
        engine,
        progress=progress,
        on_progress=on_progress,
        task="score",
        prompt=prompt,
        columns=columns,
        limits=limits,
        task_options={"labels": labels, "choices": choices, "softmax": softmax},
    )


def rerank(
    rows: Data,
    *,
    documents: str,
    prompt: str | Mapping[str, Any] | None = None,
    engine: OpenEngine | EngineLike | None = None,
    columns: Sequence[str] = (),
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Tell how relevant documents are to the query of every row; return a pyarrow Table in input order.

    Example: `rerank(rows, prompt="{{ query }}", documents="documents", engine="BAAI/bge-reranker-base")`.

    `prompt` is the template of the query, or its column; `documents` the column with a list of texts, or one.
    The column `scores` has a list in the order of the documents. All else is as for `embed`.
    """
    return results_of(
        rows,
        engine,
        progress=progress,
        on_progress=on_progress,
        task="rerank",
        prompt=prompt,
        columns=columns,
        limits=limits,
        task_options={"documents": documents},
    )


agenerate, aembed = awaited(generate), awaited(embed)
ascore, arerank = awaited(score), awaited(rerank)
