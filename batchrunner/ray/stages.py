"""The stages of a Ray Data pipeline: a data set in, the same rows with their answers out."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from batchrunner.core.errors import JobError
from batchrunner.engines.model_files import check_model
from batchrunner.engines.registry import launched_model
from batchrunner.job.call import GenerateCall, LibraryCall, Prompt, TaskCall
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import EngineLike, parse_engine
from batchrunner.job.spec import LimitsSpec, OnLength
from batchrunner.job.tasks import Dtype
from batchrunner.ray.engine_worker import EngineWorker
from batchrunner.ray.gpus import gpus_asked, gpus_of_nodes, is_this_machine_alone
from batchrunner.ray.stage_call import StageCall
from batchrunner.runner.open_engine import OpenEngine

BATCH_ROWS = 256
"""Rows that are given to an actor together, unless a call says otherwise."""
TASKS = 8
"""Ray tasks that an actor works at together, unless a call says otherwise. Each has up to four batches in
work (Ray Data's RAY_DATA_DEFAULT_ASYNC_BATCH_UDF_MAX_CONCURRENCY)."""


def generate(
    ds: Dataset,
    *,
    prompt: Prompt | None = None,
    engine: EngineLike,
    sampling: Mapping[str, Any] | None = None,
    parse: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    columns: Sequence[str] | None = None,
    answers: Sequence[str] = (),
    explode: bool = False,
    check: Mapping[str, Any] | None = None,
    on_length: OnLength | None = None,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    prefix: str = "",
    replicas: int | tuple[int, int] = 1,
    batch_size: int = BATCH_ROWS,
    tasks: int = TASKS,
    num_cpus: float = 1,
) -> Dataset:
    """Return the data set with an answer to every row: a stage that Ray Data runs with the others.

    Example: `batchrunner.ray.generate(ds, prompt="Describe {{ text }}", engine="Qwen/Qwen3-8B", replicas=4)`

    `prompt`, `sampling`, `parse`, `answers`, `explode`, `check`, `on_length` and `limits` are those of
    `batchrunner.generate`; so is `engine`, but it cannot be an open one. Rows keep all columns, or those that
    `columns` names, and get those of a result row but `row`, whose names begin with `prefix`.

    `replicas` is the number of actors, or the least and the most. Each opens the engine and has the GPUs that
    it takes, and `num_cpus` cores. It works at `tasks` tasks at once, each of `batch_size` rows at least
    where there are as many, and sends the rows of the next while the last rows of the one before run.

    Failed rows have an `error`. An actor that dies is replaced, and what it had not finished is done again.
    Raises JobError or InputError for what can be seen before the first row.
    """
    call = GenerateCall(
        engine=_engine_of(engine),
        prompt=prompt,
        columns=(),
        limits=limits,
        parse=parse,
        sampling=sampling,
        answers=answers,
        explode=explode,
        check=check,
        on_length=on_length,
        own_rows=True,
    )
    return _stage(ds, call, columns, prefix, replicas, batch_size, tasks, num_cpus)


def embed(
    ds: Dataset,
    *,
    prompt: Prompt | None = None,
    engine: EngineLike,
    columns: Sequence[str] | None = None,
    dtype: Dtype = "float32",
    normalize: bool = False,
    dimensions: int | None = None,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    prefix: str = "",
    replicas: int | tuple[int, int] = 1,
    batch_size: int = BATCH_ROWS,
    tasks: int = TASKS,
    num_cpus: float = 1,
) -> Dataset:
    """Return the data set with a vector for every row, in the column `embedding` as a list of numbers.

    Example: `batchrunner.ray.embed(ds, engine="BAAI/bge-small-en-v1.5")`.

    The arguments are those of `batchrunner.embed` and of `generate` here.
    """
    fields = {"dtype": dtype, "normalize": normalize, "dimensions": dimensions}
    call = TaskCall(
        task="embed", engine=_engine_of(engine), prompt=prompt, columns=(), limits=limits, fields=fields
    )
    return _stage(ds, call, columns, prefix, replicas, batch_size, tasks, num_cpus)


def score(
    ds: Dataset,
    *,
    labels: Sequence[str | int] | None = None,
    choices: str | Sequence[str] | None = None,
    prompt: Prompt | None = None,
    engine: EngineLike,
    columns: Sequence[str] | None = None,
    softmax: bool = False,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    prefix: str = "",
    replicas: int | tuple[int, int] = 1,
    batch_size: int = BATCH_ROWS,
    tasks: int = TASKS,
    num_cpus: float = 1,
) -> Dataset:
    """Return the data set with the scores of labels or choices for every row, in the column `scores`.

    Example: `batchrunner.ray.score(ds, labels=[" yes", " no"], engine="Qwen/Qwen3-8B")`.

    The arguments are those of `batchrunner.score` and of `generate` here.
    """
    given = choices if choices is None or isinstance(choices, str) else list(choices)
    call = TaskCall(
        task="score",
        engine=_engine_of(engine),
        prompt=prompt,
        columns=(),
        limits=limits,
        items={} if given is None else {"choices": given},
        fields={"softmax": softmax},
        labels=labels,
    )
    return _stage(ds, call, columns, prefix, replicas, batch_size, tasks, num_cpus)


def rerank(
    ds: Dataset,
    *,
    documents: str,
    prompt: str | Mapping[str, Any] | None = None,
    engine: EngineLike,
    columns: Sequence[str] | None = None,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    prefix: str = "",
    replicas: int | tuple[int, int] = 1,
    batch_size: int = BATCH_ROWS,
    tasks: int = TASKS,
    num_cpus: float = 1,
) -> Dataset:
    """Return the data set with the relevance of every row's documents to its query, in the column `scores`.

    Example: `batchrunner.ray.rerank(ds, prompt="{{ query }}", documents="documents", engine=name)`.

    The arguments are those of `batchrunner.rerank` and of `generate` here.
    """
    items = {"documents": documents}
    call = TaskCall(
        task="rerank", engine=_engine_of(engine), prompt=prompt, columns=(), limits=limits, items=items
    )
    return _stage(ds, call, columns, prefix, replicas, batch_size, tasks, num_cpus)


def _engine_of(engine: EngineLike) -> EngineSpec:
    if isinstance(engine, OpenEngine):
        raise JobError("engine: an open engine cannot move to an actor", hint="give what it was opened from")
    return parse_engine(engine)


def _stage(
    ds: Dataset,
    call: LibraryCall,
    columns: Sequence[str] | None,
    prefix: str,
    replicas: int | tuple[int, int],
    batch_size: int,
    tasks: int,
    num_cpus: float,
) -> Dataset:
    """Add the stage to a data set, after a look at what is known already."""
    if not isinstance(ds, Dataset):
        raise JobError(
            f"ds is no data set of Ray Data (got {type(ds).__name__})",
            hint="make one with ray.data.from_arrow, from_pandas, from_items or read_parquet",
        )
    for name, number in (("batch_size", batch_size), ("tasks", tasks)):
        if not isinstance(number, int) or number < 1:
            raise JobError(f"{name}: {number!r}", hint="give a number from 1 on")
    if not isinstance(num_cpus, (int, float)) or not 0 <= num_cpus < math.inf:
        raise JobError(f"num_cpus: {num_cpus!r}", hint="give the cores of an actor, a number from 0 on")
    if not isinstance(prefix, str):
        raise JobError(f"prefix: {prefix!r}", hint='give a text, such as prefix="answer_"')
    if isinstance(columns, str):
        raise JobError("columns", hint=f"give a list of names, such as [{columns!r}]")
    least, most = _sizes(replicas)
    stage = StageCall(call, None if columns is None else list(columns), prefix)
    known = getattr(ds.schema(fetch_if_missing=False), "base_schema", None)
    if isinstance(known, pa.Schema):
        stage.check(known)
    elif call.prompt is not None:
        call.job(pa.schema([]), ["rows"], Path("rows"))
    model = launched_model(call.engine)
    if model is not None and is_this_machine_alone():
        check_model(model)  # else it may be on the nodes that have no driver
    compute = ActorPoolStrategy(
        min_size=least, max_size=most, initial_size=least, max_concurrent_calls_per_actor=tasks
    )
    return ds.map_batches(
        EngineWorker,
        fn_constructor_args=(stage,),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=compute,
        num_cpus=num_cpus,
        num_gpus=gpus_asked(call.engine, gpus_of_nodes()),
        udf_modifying_row_count=isinstance(call, GenerateCall) and call.explode,
    )


def _sizes(replicas: int | tuple[int, int]) -> tuple[int, int]:
    """Return the least and the most actors; raises JobError."""
    sizes: object = (replicas, replicas) if isinstance(replicas, int) else replicas
    match sizes:
        case (int(least), int(most)) if 1 <= least <= most:
            return least, most
    raise JobError(f"replicas: {replicas!r}", hint="give a number from 1 on, or (least, most)")
