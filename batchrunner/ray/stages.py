"""The stages of a Ray Data pipeline: a data set in, the same rows with their answers out."""

import asyncio
import functools
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
from batchrunner.engines.model_files import cards_of
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


def gpus_asked(engine: EngineSpec, on_nodes: Sequence[float]) -> int:
    """Return the GPUs that an actor asks for on each of its machines; `on_nodes` are those of all nodes.

    With `device: auto` an engine runs on the CPU where no node has a GPU. Raises JobError where the number
    is not known before the start, or no node has as many.
    """
    if not isinstance(engine, ServerEngine):
        return 0
    most = int(max(on_nodes, default=0))
    if engine.device == "cpu" or (engine.device == "auto" and not most):
        return 0
    if engine.replicas == "auto":
        raise JobError(
            "engine.replicas: auto: Ray gives an actor its GPUs before the replicas are counted",
            hint="give a number, or leave it out and take more actors",
        )
    asked = engine.replicas * cards_of({**engine.args, "tp-size": engine.tp} if engine.tp else engine.args)
    asked = -(-asked // engine.nodes)  # those of one machine
    if asked > most:
        raise JobError(
            f"engine: it takes {counted(asked, 'GPU')}, and no node of the Ray cluster has more than {most}",
            hint="set engine.tp to fewer, or add a node with as many",
        )
    return asked


def of_nodes(resource: str) -> list[float]:
    """Return how much each node has of a resource, in the cluster that this process is connected to."""
    return [node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]]


@dataclass(frozen=True, slots=True)
class StageCall:
    """A call of the library for the rows of a data set, and what becomes of their columns."""

    call: LibraryCall
    columns: list[str] | None = None
    """Columns that the rows keep; None for all."""
    prefix: str = ""
    """What the names of the result columns begin with."""

    def job(self, columns: pa.Schema, directory: Path) -> Job:
        """Return the job on rows of these columns; raises JobError or InputError."""
        call = self.call
        if call.parse is not None:  # the function may ask for the row
            call = replace(call, columns=columns.names if self.columns is None else self.columns)
        return call.job(columns, [str(directory)], directory)

    def check(self, columns: pa.Schema) -> None:
        """Raise JobError or InputError where the call does not fit rows of these columns.

        What takes a Python function is not tried: that runs where the rows are.
        """
        job = self.job(columns, Path("rows"))
        if job.prompt.python is None and job.prompt.rollout is None:
            ProgramRows(job, columns, RowBuffer())
        self.check_names(columns, plan_answers(job))

    def check_names(self, columns: pa.Schema, plan: AnswerPlan) -> None:
        """Raise JobError where a column that the rows keep is missing, or has the name of one of the results.

        `plan` tells the columns of the results.
        """
        kept = columns.names if self.columns is None else self.columns
        for name in kept:
            if name not in columns.names:
                raise unknown_column(InputError, "columns", name, columns.names)
        names = schema_of_run(pa.schema([]), plan).names
        results = {f"{self.prefix}{name}" for name in names if name != "row"}
        if both := [name for name in kept if name in results]:
            raise JobError(
                f"the data set has a column {both[0]!r}, and so do the results",
                hint='give a prefix for the names of the results, such as prefix="answer_"',
            )


@dataclass(slots=True, eq=False)
class SentBlock:
    """Rows that are sent together; done when each has an outcome."""

    rows: range
    """Their ordinals in the stream."""
    outcomes: list[Outcome] = field(default_factory=list)
    done: Future[list[Outcome] | None] = field(default_factory=Future)
    """Becomes the outcomes in the order of the rows; None if the stream ends before."""


class BlockOutlet:
    """Takes the outcomes of a stream and sorts them into their blocks. `add` is thread-safe."""

    def __init__(self) -> None:
        self._blocks: deque[SentBlock] = deque()  # in the order of their rows
        self._lock = threading.Lock()
        self._rows = 0
        self._ended = False

    def add(self, rows: int) -> SentBlock:
        """Return a new block of the next rows."""
        with self._lock:
            block = SentBlock(range(self._rows, self._rows + rows))
            block.done.set_running_or_notify_cancel()  # who waits may be cancelled, and this cannot
            self._rows += rows
            if self._ended:
                block.done.set_result(None)
            else:
                self._blocks.append(block)
            return block

    async def put(self, outcome: Outcome) -> None:
        """Take the outcome of a row."""
        with self._lock:
            block = next(block for block in self._blocks if outcome.ref.row < block.rows.stop)
            block.outcomes.append(outcome)
            if len(block.outcomes) == len(block.rows):
                self._blocks.remove(block)
                block.done.set_result(sorted(block.outcomes, key=lambda each: each.ref.row))

    def check(self) -> None:
        """Do nothing: nothing is written."""

    def end(self) -> None:
        """Give up the blocks that are not done: no more outcomes come."""
        with self._lock:
            self._ended = True
            while self._blocks:
                self._blocks.pop().done.set_result(None)


class BlockStream:
    """One endless stream of rows to an engine, which answers tables in tables of the same rows.

    All methods but `close` are called in one event loop, which is not that of the engine.
    """

    def __init__(self, call: StageCall, engine: OpenEngine, columns: pa.Schema) -> None:
        """Begin with rows of these columns; raises JobError or InputError. Blocks."""
        self._call = call
        self._order = asyncio.Lock()  # first come, first sent
        self._feeding = threading.Lock()  # a call that is cancelled still feeds
        self._buffer = RowBuffer()
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchrunner-")))
            job = call.job(columns, scratch)
            functions = open_functions(job)
            if functions is not None:
                stack.enter_context(closing(functions))
            rows = ProgramRows(job, columns, self._buffer, functions=functions)
            self._plan = rows.plan
            self._schema = schema_of_run(pa.schema([]), self._plan)
            call.check_names(columns, self._plan)
            self._outlet = BlockOutlet()
            work = functools.partial(send_stream, rows, self._outlet, (), scratch)
            self._running = engine.start(work)
            self._stack = stack.pop_all()

    async def answer(self, block: pa.Table) -> pa.Table:
        """Send the rows of a block and return them with their answers, in the same order.

        Several calls may wait at once: their rows are sent in the order of the calls, without a pause between
        blocks. Raises BatchrunError where the stream ends: the engine is lost, or too many rows fail.
        """
        if not block.num_rows:
            return self._with_answers(block, [])
        async with self._order:
            sent = await asyncio.to_thread(self._feed, block)
        outcomes = await asyncio.wrap_future(sent.done)
        if outcomes is None:
            await self._running.wait_async()
            raise BatchrunError("the stream ended before its rows did")
        return await asyncio.to_thread(self._with_answers, block, outcomes)

    def close(self) -> None:
        """End the stream, whose requests in flight are cancelled. Blocks."""
        self._buffer.stop()
        self._running.cancel_and_wait()
        self._stack.close()

    def _feed(self, block: pa.Table) -> SentBlock:
        """Add the rows of a block as there is room; stops where none are wanted any more. Blocks."""
        with self._feeding:
            sent = self._outlet.add(block.num_rows)
            for batch in block.to_batches(max_chunksize=MOST_ROWS):
                if not self._buffer.put(batch):
                    break
            return sent

    def _with_answers(self, block: pa.Table, outcomes: list[Outcome]) -> pa.Table:
        """Return the rows of a block beside their answers."""
        answers = table_of(outcomes, self._schema, self._plan) if outcomes else self._schema.empty_table()
        kept = block if self._call.columns is None else block.select(self._call.columns)
        if answers.num_rows > block.num_rows:  # several of a rollout
            rows = answers.column("row")
            kept = kept.take(pc.subtract(rows, pc.min(rows)))
        for name in answers.column_names:
            if name != "row":
                kept = kept.append_column(f"{self._call.prefix}{name}", answers.column(name))
        return kept


class EngineWorker:
    """Answers batches of rows; several calls at once keep the engine busy from one batch to the next.

    Ray Data makes one in each actor, and calls it in an event loop.
    """

    def __init__(self, call: StageCall) -> None:
        """Open the engine, which takes as long as a model is loaded; raises EngineStartError."""
        self._call = call
        self._stack = ExitStack()
        self._stream: BlockStream | None = None
        self._opening = asyncio.Lock()
        limits = LimitsSpec.model_validate(call.call.limits or {})
        opening = open_engine(call.call.engine, request_timeout_s=limits.request_timeout, task=call.call.task)
        self._engine: OpenEngine = self._stack.enter_context(opening)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the rows with their answers; raises BatchrunError."""
        async with self._opening:
            stream = self._stream
            if stream is None:
                stream = self._stream = await asyncio.to_thread(
                    BlockStream, self._call, self._engine, batch.schema
                )
        try:
            return await stream.answer(batch)
        except BatchrunError:
            await self._leave(stream)
            raise

    def __del__(self) -> None:
        """End the stream and the engine; Ray Data lets go of this object at the end of an actor."""
        if self._stream is not None:
            self._stream.close()
        self._stack.close()

    async def _leave(self, stream: BlockStream) -> None:
        """Close a stream that failed: a pipeline that goes on without its blocks begins another one."""
        if self._stream is stream:
            self._stream = None
            await asyncio.to_thread(stream.close)


BATCH_ROWS = 256
"""Rows that are given to an actor together, unless a call says otherwise."""
TASKS = 8
"""Ray tasks that an actor works at together, unless a call says otherwise. Each has up to four batches in
work (Ray Data's RAY_DATA_DEFAULT_ASYNC_BATCH_UDF_MAX_CONCURRENCY)."""


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
    """Return the data set with an answer to every row: a stage that Ray Data runs with the others.

    Example: `batchrunner.ray.generate(ds, prompt="Describe {{ text }}", engine="Qwen/Qwen3-8B", replicas=4)`

    `options` are those of `batchrunner.stream`; so is `engine`, but it cannot be an open one. Rows keep
    `columns`, by default all, and get those of a result row but `row`, whose names begin with `prefix`. Of
    `replicas` actors, or the least and the most of them, each opens the engine and has the GPUs that it takes
    and `num_cpus` cores. It works at so many `tasks` of Ray together, in batches of `batch_size` rows.

    Failed rows have an `error`. An actor that dies is replaced, and what it had not finished is done again.
    Raises JobError or InputError for what can be seen before the first row.
    """
    if not isinstance(ds, Dataset):
        raise JobError(
            f"ds is no data set of Ray Data (got {type(ds).__name__})",
            hint="make one with ray.data.from_arrow, from_pandas, from_items or read_parquet",
        )
    if isinstance(engine, OpenEngine):
        raise JobError("engine: an open engine cannot move to an actor", hint="give what it was opened from")
    call = LibraryCall(engine=parse_engine(engine), own_rows=True, **options)
    if getattr(call.engine, "nodes", 1) > 1:
        raise JobError("engine.nodes: an actor of Ray Data is on one machine", hint="do it by `batchrun ray`")
    least, most = (replicas, replicas) if isinstance(replicas, int) else replicas
    stage = StageCall(call, None if columns is None else list(columns), prefix)
    known = getattr(ds.schema(fetch_if_missing=False), "base_schema", None)
    if isinstance(known, pa.Schema):
        stage.check(known)
    elif call.prompt is not None:
        call.job(pa.schema([]), ["rows"], Path("rows"))
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
        num_gpus=gpus_asked(call.engine, of_nodes("GPU")),
        udf_modifying_row_count=call.rollout is not None
        or (isinstance(call.prompt, Mapping) and "rollout" in call.prompt),
    )
