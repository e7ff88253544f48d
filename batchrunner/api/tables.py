"""The library calls that return a table with a result for each row: generate, embed, score, rerank."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.api.runs import awaited, engine_of, run_blocking
from batchrunner.core.errors import BatchrunError, InputError, first_line
from batchrunner.core.loop_thread import STOP
from batchrunner.dispatch.checks import AnswerConditions
from batchrunner.input.dataset import Dataset
from batchrunner.input.parquet_copy import write_parquet
from batchrunner.input.render import Renderer
from batchrunner.input.tables import Data, batches_of, paths_of
from batchrunner.job.answers import plan_answers
from batchrunner.job.call import LibraryCall
from batchrunner.job.load import EngineLike
from batchrunner.job.python_functions import open_functions
from batchrunner.job.spec import InputSpec, Job, LimitsSpec, OnLength, OnRepetition
from batchrunner.job.tasks import Dtype
from batchrunner.output.columns import schema_of_run
from batchrunner.output.merge import merge
from batchrunner.output.run_dir import RunDir
from batchrunner.runner.open_engine import OpenEngine
from batchrunner.runner.prepare import with_merged_results
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
    """Run the job of a library call in a temporary directory, and return its results in input order.

    `fields` are the further arguments of the call, as fields of LibraryCall.
    """
    displays = make_displays(progress=progress, on_progress=on_progress)
    open_engine, spec = engine_of(engine)
    paths = paths_of(rows)
    call = LibraryCall(engine=spec, own_rows=paths is None, **fields)
    with tempfile.TemporaryDirectory(prefix="batchrunner-") as scratch:
        run_path = Path(scratch) / "run"
        if paths is None:
            # A run reads its input from files, so rows in memory are written to a file first.
            input_file = Path(scratch) / "input.parquet"
            try:
                write_parquet(batches_of(rows, _unless_stopped), input_file)
            except pa.ArrowException as failure:
                raise InputError(f"rows: cannot be written as Parquet: {first_line(failure)}") from None
            paths = [str(input_file)]
        input_spec = InputSpec(path=paths)
        # If a path is the run directory of an earlier run, its merged results are the input.
        files = with_merged_results(input_spec.path)
        dataset = Dataset(input_spec, copies=RunDir(run_path).copies, paths=files)
        job = call.job(dataset.schema, paths, run_path)
        if not dataset.total_rows:
            return _no_results(job, dataset)
        report = run_blocking(job, open_engine, displays=displays)
        if report.rows_left:
            raise BatchrunError(
                f"{report.reason}: {report.rows_left:,} of {report.rows_total:,} rows were not sent"
            )
        merged = merge(run_path)
        return pa.concat_tables(pq.read_table(file) for file in sorted(merged.path.glob("*.parquet")))


def _unless_stopped(rows: T) -> T:
    """Return the rows unchanged; raise CancelledError if the library call has been cancelled."""
    if (stop := STOP.get()) is not None and stop.done():
        raise CancelledError
    return rows


def _no_results(job: Job, dataset: Dataset) -> pa.Table:
    """Check the job of an input without rows, and return an empty table with the columns of the results.

    An input without rows is not an error, because pipelines produce empty inputs.
    """
    functions = open_functions(job)
    with closing(functions) if functions else nullcontext():
        plan = plan_answers(job, functions)
        renderer = Renderer(job, dataset, plan, functions)
        # The constructor raises JobError for a faulty `accept`.
        AnswerConditions(job, plan, dataset.schema.names)
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
    on_repetition: OnRepetition = "auto",
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Send every row and return the results as a pyarrow Table in input order.

    `rows` are texts (the column `text`) or mappings, in any iterable; a table or data frame of pyarrow,
    pandas, polars, duckdb or anything with Arrow's C interface; a LazyFrame of polars; a dataset of pyarrow
    or Hugging Face; or the path of a file, a directory or a glob. Iterators, datasets and (with polars 2)
    LazyFrames are read in bounded memory; the results must fit in memory.

    `prompt` is the user template, the `prompt` part of a job, or a function of a row; by default the only
    text column. `rollout`, instead of `prompt`, is an asynchronous function for multi-turn rollouts. `parse`
    is a function that turns an answer into columns. `engine` is an open engine, the `engine` part of a job, a
    model (a server is started), an address or a list of addresses, or "simulated". `columns` are copied to
    the results. `answers` are `output.columns` of a job; `sampling`, `accept`, `on_length`, `on_repetition`
    and `limits` are the parts of a job with these names. `progress` and `on_progress` are as for `run`.

    The table has one row for each input row; a failed row has an `error`. Raises BatchrunError, and
    exceptions of an iterator in `rows`.
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
        on_repetition=on_repetition,
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
    """Embed every row; return a pyarrow Table in input order.

    Example: `embed(["a cat", "a dog"], engine="BAAI/bge-small-en-v1.5").column("embedding")`.

    `prompt` is a template, the column with the text, the `prompt` part of a job, or a function that returns a
    text or token ids. `dtype`, `normalize` and `dimensions` are those of a job's `output`. The other
    arguments are as for `generate`; an open engine needs `open_engine(…, task="embed")`. The vector of a
    failed row is null.
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
    """Score labels or choices as continuations of every row; return a pyarrow Table in input order.

    Example: `score(["Is the sky blue? Answer:"], labels=[" yes", " no"], engine="Qwen/Qwen3-8B")`.

    Give either `labels` or `choices`. `labels` are single tokens, by text or id. `choices` are texts for all
    rows, or the name of a column with a list for each row. With labels, the column `scores` has their
    probabilities, which `softmax` normalizes over the labels. With choices, it has their log likelihoods,
    which the columns `scores_per_token` and `scores_per_byte` divide by length. The other arguments are as
    for `embed`.
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
    """Score the relevance of documents to the query of every row; return a pyarrow Table in input order.

    Example: `rerank(rows, prompt="{{ query }}", documents="documents", engine="BAAI/bge-reranker-base")`.

    `prompt` is the template of the query, or its column; `documents` is the column with a text or a list of
    texts. The column `scores` has a list in the order of the documents. The other arguments are as for
    `embed`.
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
