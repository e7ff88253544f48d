"""Stages of Ray Data pipelines, which take a dataset and return its rows with their answers."""

import asyncio
import functools
import math
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.data import ActorPoolStrategy, Dataset

from batchrunner.api import open_engine
from batchrunner.core.console import counted
from batchrunner.core.errors import BatchrunError, InputError, JobError
from batchrunner.core.types import Outcome
from batchrunner.input.templates import unknown_column
from batchrunner.job.answers import AnswerPlan, plan_answers
from batchrunner.job.call import CallOptions, LibraryCall
from batchrunner.job.engine import EngineSpec, ServerEngine
from batchrunner.job.load import EngineLike, parse_engine
from batchrunner.job.python_functions import open_functions
from batchrunner.job.spec import Job, LimitsSpec
from batchrunner.output.columns import schema_of_run, table_of
from batchrunner.runner.open_engine import OpenEngine
from batchrunner.runner.stream import MOST_ROWS, ProgramRows, RowBuffer, send_stream
from batchrunner.sglang.model_files import cards_of


def gpus_required(engine: EngineSpec, gpus_of_nodes: Sequence[float]) -> int:
    """Return the number of GPUs that an actor with this engine needs on each of its machines.

    `gpus_of_nodes` has the number of GPUs of each node of the cluster. With `device: auto`, an engine runs on
    the CPU if no node has a GPU. Raises JobError if the number cannot be known before the start, or if no
    node has so many GPUs.
    """
    if not isinstance(engine, ServerEngine):
        return 0
    largest_node = int(max(gpus_of_nodes, default=0))
    runs_on_cpu = engine.device == "cpu" or (engine.device == "auto" and not largest_node)
    if runs_on_cpu:
        return 0
    if engine.replicas == "auto":
        raise JobError(
            "engine.replicas: auto does not work on Ray: an actor gets its GPUs before replicas are counted",
            hint="give a number, or omit engine.replicas and use more actors",
        )
    args = {**engine.args, "tp-size": engine.tp} if engine.tp else engine.args
    gpus_of_engine = engine.replicas * cards_of(args)
    gpus_of_machine = math.ceil(gpus_of_engine / engine.nodes)
    if gpus_of_machine > largest_node:
        raise JobError(
            f"engine: an actor needs {counted(gpus_of_machine, 'GPU')}, but no node of the Ray cluster has "
            f"more than {largest_node}",
            hint="lower engine.tp, or add a node with enough GPUs",
        )
    return gpus_of_machine


def resource_of_nodes(resource: str) -> list[float]:
    """Return the amount of a resource, such as "GPU", on each live node of the connected Ray cluster."""
    return [node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]]


@dataclass(frozen=True, slots=True)
class StageCall:
    """The arguments of a call of `generate`, which Ray sends to each actor."""

    call: LibraryCall
    """The engine, and the options as for `batchrunner.stream`."""
    columns: list[str] | None = None
    """Columns that the rows keep; None means all columns."""
    prefix: str = ""
    """Prefix of the names of the result columns."""

    def job(self, columns: pa.Schema, directory: Path) -> Job:
        """Return the job for rows with these columns; raises JobError or InputError.

        `directory` is used for temporary files.
        """
        call = self.call
        if call.parse is not None:
            # The function of `parse` may take the row, so all columns that are kept go through the job.
            call = replace(call, columns=columns.names if self.columns is None else self.columns)
        return call.job(columns, [str(directory)], directory)

    def check(self, columns: pa.Schema) -> None:
        """Raise JobError or InputError if the call does not suit rows with these columns.

        Prompt functions in Python are not tested, because they run in the actors.
        """
        job = self.job(columns, Path("rows"))
        if job.prompt.python is None and job.prompt.rollout is None:
            # The constructor raises an error for a prompt template that does not suit the columns.
            ProgramRows(job, columns, RowBuffer())
        self.check_names(columns, plan_answers(job))

    def check_names(self, columns: pa.Schema, plan: AnswerPlan) -> None:
        """Raise InputError if a column to keep is missing, and JobError if a result column has the same name.

        `columns` are the columns of the rows, and `plan` describes the result columns.
        """
        names_to_keep = columns.names if self.columns is None else self.columns
        for name in names_to_keep:
            if name not in columns.names:
                raise unknown_column(InputError, "columns", name, columns.names)
        result_names = schema_of_run(pa.schema([]), plan).names
        prefixed_names = {f"{self.prefix}{name}" for name in result_names if name != "row"}
        if duplicates := [name for name in names_to_keep if name in prefixed_names]:
            raise JobError(
                f"the dataset has a column {duplicates[0]!r}, and so do the results",
                hint='give a prefix for the names of the results, such as prefix="answer_"',
            )


@dataclass(slots=True, eq=False)
class PendingBlock:
    """A block of rows (a batch of Ray Data) that waits for the results of its rows."""

    rows: range
    """Positions of the rows in the stream."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Results so far, in the order in which the rows ended."""
    results: Future[list[Outcome] | None] = field(default_factory=Future)
    """The results of all rows, in the order of the rows; None if the stream ends earlier."""


class BlockOutlet:
    """Collects the results of rows by block (a batch of Ray Data). `open_block` is thread-safe."""

    def __init__(self) -> None:
        self._blocks: deque[PendingBlock] = deque()
        """Pending blocks, in the order of their rows."""
        self._lock = threading.Lock()
        self._rows = 0
        """Number of rows in all blocks so far."""
        self._is_closed = False

    def open_block(self, rows: int) -> PendingBlock:
        """Add a block of `rows` rows to the stream, and return it."""
        with self._lock:
            block = PendingBlock(range(self._rows, self._rows + rows))
            # A future that runs cannot be cancelled by the caller that waits for it. `put` or `end` completes
            # it.
            block.results.set_running_or_notify_cancel()
            self._rows += rows
            if self._is_closed:
                # The stream has ended, so no results follow.
                block.results.set_result(None)
            else:
                self._blocks.append(block)
            return block

    async def put(self, outcome: Outcome) -> None:
        """Add the result of a row to its block."""
        with self._lock:
            # Blocks are in the order of their rows, so the row is in the first block that ends after it.
            block = next(block for block in self._blocks if outcome.ref.row < block.rows.stop)
            block.outcomes.append(outcome)
            if len(block.outcomes) == len(block.rows):
                self._blocks.remove(block)
                in_order = sorted(block.outcomes, key=lambda outcome: outcome.ref.row)
                block.results.set_result(in_order)

    def check(self) -> None:
        """Do nothing. Other outlets raise the error of a failed write here; this outlet writes nothing."""

    def end(self) -> None:
        """End the stream: complete all pending blocks with None."""
        with self._lock:
            self._is_closed = True
            while self._blocks:
                self._blocks.pop().results.set_result(None)


class BlockStream:
    """An endless stream that sends the rows of tables to an engine, and returns each table with its answers.

    All methods except `close` are called in one event loop, which is not that of the engine.
    """

    def __init__(self, stage: StageCall, engine: OpenEngine, columns: pa.Schema) -> None:
        """Start a stream for rows with these columns; raises JobError or InputError. Blocks the thread."""
        self._stage = stage
        self._turn_to_feed = asyncio.Lock()
        """Held by the call that feeds its rows. Calls get it in their order."""
        self._feeding = threading.Lock()
        """Held by the thread that feeds rows. The thread of a cancelled call still does so."""
        self._buffer = RowBuffer()
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchrunner-")))
            job = stage.job(columns, scratch)
            functions = open_functions(job)
            if functions is not None:
                stack.enter_context(closing(functions))
            rows = ProgramRows(job, columns, self._buffer, functions=functions)
            self._plan = rows.plan
            self._schema = schema_of_run(pa.schema([]), self._plan)
            stage.check_names(columns, self._plan)
            self._outlet = BlockOutlet()
            work = functools.partial(send_stream, rows, self._outlet, (), scratch)
            self._sending = engine.start(work)
            # From here on, `close` ends the functions' processes and deletes the directory.
            self._stack = stack.pop_all()

    async def answer(self, block: pa.Table) -> pa.Table:
        """Send the rows of a block, and return the rows with their answers in the same order.

        Several calls may wait at once. Their rows are sent in the order of the calls, without a pause between
        blocks. Raises BatchrunError if the stream ends because the engine is lost or too many rows fail.
        """
        if not block.num_rows:
            return self._with_answers(block, [])
        async with self._turn_to_feed:
            pending = await asyncio.to_thread(self._feed, block)
        outcomes = await asyncio.wrap_future(pending.results)
        if outcomes is None:
            # This call raises the error that has ended the stream.
            await self._sending.wait_async()
            raise BatchrunError("the stream ended before all its rows were finished")
        return await asyncio.to_thread(self._with_answers, block, outcomes)

    def close(self) -> None:
        """End the stream and cancel its requests in flight. Blocks the thread."""
        self._buffer.stop()
        self._sending.cancel_and_wait()
        self._stack.close()

    def _feed(self, block: pa.Table) -> PendingBlock:
        """Pass the rows of a block to the stream, and return the pending block.

        Blocks until the stream has room for the rows, or has ended.
        """
        with self._feeding:
            pending = self._outlet.open_block(block.num_rows)
            for batch in block.to_batches(max_chunksize=MOST_ROWS):
                if not self._buffer.put(batch):
                    # The stream has ended, so it takes no more rows.
                    break
            return pending

    def _with_answers(self, block: pa.Table, outcomes: list[Outcome]) -> pa.Table:
        """Return the rows of a block, with the columns of their answers added."""
        answers = table_of(outcomes, self._schema, self._plan) if outcomes else self._schema.empty_table()
        table = block if self._stage.columns is None else block.select(self._stage.columns)
        if answers.num_rows > block.num_rows:
            # A rollout may return several results for a row, so the row is repeated for each of them. `row`
            # counts over all blocks of the stream, so the block's first row is subtracted.
            rows = answers.column("row")
            table = table.take(pc.subtract(rows, pc.min(rows)))
        for name in answers.column_names:
            if name != "row":
                table = table.append_column(f"{self._stage.prefix}{name}", answers.column(name))
        return table


class EngineWorker:
    """The callable of a Ray Data actor: returns batches of rows with their answers.

    Ray Data creates an instance in each actor, and calls it in an event loop. Several calls at the same time
    keep the engine busy between two batches.
    """

    def __init__(self, stage: StageCall) -> None:
        """Open the engine, which may take minutes to load its model; raises EngineStartError."""
        self._stage = stage
        self._stack = ExitStack()
        self._stream: BlockStream | None = None
        self._opening = asyncio.Lock()
        """Held by the call that starts the stream; concurrent calls wait for it."""
        call = stage.call
        limits = LimitsSpec.model_validate(call.limits or {})
        opening = open_engine(call.engine, request_timeout_s=limits.request_timeout, task=call.task)
        self._engine: OpenEngine = self._stack.enter_context(opening)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the rows of a batch with their answers; raises BatchrunError."""
        async with self._opening:
            # The first call starts the stream for all calls.
            stream = self._stream
            if stream is None:
                stream = self._stream = await asyncio.to_thread(
                    BlockStream, self._stage, self._engine, batch.schema
                )
        try:
            return await stream.answer(batch)
        except BatchrunError:
            await self._discard(stream)
            raise

    def __del__(self) -> None:
        """Close the stream and the engine. When an actor ends, Ray Data only drops this object."""
        if self._stream is not None:
            self._stream.close()
        self._stack.close()

    async def _discard(self, stream: BlockStream) -> None:
        """Close a failed stream. A pipeline that ignores failed blocks goes on with a new stream."""
        # Several calls may fail because of the same stream; only the first call closes it.
        if self._stream is stream:
            self._stream = None
            await asyncio.to_thread(stream.close)


BATCH_ROWS = 256
"""Default number of rows in a batch for an actor."""
TASKS = 8
"""Default number of concurrent Ray tasks of an actor. Each task has up to four batches in progress (Ray
Data's RAY_DATA_DEFAULT_ASYNC_BATCH_UDF_MAX_CONCURRENCY)."""


def generate(
    ds: Dataset,
    *,
    engine: EngineLike,
    columns: Sequence[str] | None = None,
    prefix: str = "",
    replicas: int | tuple[int, int] = 1,
    batch_size: int = BATCH_ROWS,
    tasks: int = TASKS,
    num_cpus: float = 1,
    **options: Unpack[CallOptions],
) -> Dataset:
    """Return the dataset with an answer for every row, as a stage of its pipeline.

    Example: `batchrunner.ray.generate(ds, prompt="Describe {{ text }}", engine="Qwen/Qwen3-8B", replicas=4)`

    `options` and `engine` are as for `batchrunner.stream`, except that `engine` cannot be an open engine.
    Rows keep `columns` (by default all), and get the columns of a result row except `row`, with `prefix`
    before their names. `replicas` is the number of actors, or a pair of its lower and upper limit. Each actor
    opens the engine on as many GPUs as the engine needs, and on `num_cpus` cores. It runs `tasks` Ray tasks
    at once, with batches of `batch_size` rows.

    Failed rows have an `error`. An actor that dies is replaced, and its unfinished rows are sent again.
    Errors that can be found before the first row raise JobError or InputError.
    """
    if not isinstance(ds, Dataset):
        raise JobError(
            f"ds is not a dataset of Ray Data (got {type(ds).__name__})",
            hint="make one with ray.data.from_arrow, from_pandas, from_items or read_parquet",
        )
    if isinstance(engine, OpenEngine):
        raise JobError(
            "engine: an open engine cannot move to an actor of Ray", hint="give its model or its address"
        )
    call = LibraryCall(engine=parse_engine(engine), own_rows=True, **options)
    if getattr(call.engine, "nodes", 1) > 1:
        raise JobError(
            "engine.nodes: an actor of Ray Data runs on one machine", hint="run the job with `batchrun ray`"
        )
    min_actors, max_actors = (replicas, replicas) if isinstance(replicas, int) else replicas
    stage = StageCall(call, columns=None if columns is None else list(columns), prefix=prefix)
    # The schema is None if Ray would have to read data to find it.
    schema = getattr(ds.schema(fetch_if_missing=False), "base_schema", None)
    if isinstance(schema, pa.Schema):
        stage.check(schema)
    elif call.prompt is not None:
        # The columns are not known yet, so only the options are checked. If the call has no prompt, a column
        # is the prompt, so nothing can be checked yet.
        call.job(pa.schema([]), ["rows"], Path("rows"))
    is_rollout = call.rollout is not None or (isinstance(call.prompt, Mapping) and "rollout" in call.prompt)
    compute = ActorPoolStrategy(
        min_size=min_actors,
        max_size=max_actors,
        initial_size=min_actors,
        max_concurrent_calls_per_actor=tasks,
    )
    return ds.map_batches(
        EngineWorker,
        fn_constructor_args=(stage,),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=compute,
        num_cpus=num_cpus,
        num_gpus=gpus_required(call.engine, resource_of_nodes("GPU")),
        # A rollout may return several results for a row.
        udf_modifying_row_count=is_rollout,
    )
