"""Streams: rows of a program through an engine, whose outcomes the program gets as they end."""

import asyncio
import contextlib
import functools
import logging
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import BatchrunError, InputError, ResumeError
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.types import PromptKind
from batchrunner.dispatch.media import check_takes_media
from batchrunner.engines.base import Engine
from batchrunner.engines.registry import make_engine
from batchrunner.engines.vector_facts import check_dimensions_of_launched, check_dimensions_of_open
from batchrunner.input.dataset import Dataset
from batchrunner.input.live_rows import LiveRenderer
from batchrunner.input.parquet_copy import write_rows
from batchrunner.input.tables import batches_of, rows_known
from batchrunner.job.answers import plan_answers
from batchrunner.job.call import LibraryCall
from batchrunner.job.python_functions import open_functions
from batchrunner.job.spec import Job
from batchrunner.output.columns import RunSchema
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.files import make_directory, writing
from batchrunner.output.resume import DoneRows
from batchrunner.output.run_dir import RunDir
from batchrunner.runner.control import Control, FailureLimit
from batchrunner.runner.open_engine import EngineLoop, open_portal
from batchrunner.runner.progress import Display
from batchrunner.runner.results import Handover, OutcomeSink, Outlet
from batchrunner.runner.rows import (
    FailedRow,
    FileRows,
    LiveRows,
    RowBuffer,
    StreamRows,
    make_reader,
    take_batches,
)
from batchrunner.runner.run import execute
from batchrunner.runner.sending import build_sending, open_windows

log = logging.getLogger(__name__)


async def send_stream(
    job: Job,
    kind: PromptKind | None,
    rows: StreamRows,
    outlet: Outlet,
    display: Display,
    log_directory: Path,
    *,
    engine: Engine | None = None,
    info: EngineInfo | None = None,
    functions: HookPool | None = None,
    schema: RunSchema | None = None,
) -> None:
    """Send all rows, with prompts of a kind, and give their outcomes to `outlet`, which ends with them.

    `engine` is an open engine, with its `info`; without one the job's own is opened and closed. `functions`
    are the job's Python functions; `schema` says which vectors fit. Cancelled, it cancels the requests in
    flight. Raises BatchrunError where the engine cannot be opened or is lost, or where a limit of the job
    ended the stream.
    """
    control, counts, events = Control(), RowCounts(), EventLog(log_directory / "events.jsonl")
    try:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(contextlib.closing(display))
            if engine is None or info is None:
                await asyncio.to_thread(check_dimensions_of_launched, job)
                engine = make_engine(job.engine, log_dir=log_directory, limits=job.limits, task=job.task)
                stack.push_async_callback(engine.close)
                info = await engine.open()
            check_takes_media(job, info)
            await asyncio.to_thread(check_dimensions_of_open, job, info)
            for note in info.notes:
                log.info("%s", note)
            stack.enter_context(contextlib.closing(events))
            events.open()
            began = time.monotonic()
            windows = await open_windows(job, engine, info, unsent=rows.unread, now=began)
            counter = FailureLimit(counts, control, windows.slots, job.limits.abort_failed_share)
            answers = plan_answers(job, functions)
            results = OutcomeSink(answers, counter, outlet=outlet, functions=functions, schema=schema)
            sending = build_sending(
                job, kind, rows, DoneRows(), engine, info, windows, results, counts, events, control, display,
                answers, rows.names, began=began, functions=functions,
            )  # fmt: skip
            try:
                await sending.send(control)
            finally:
                sending.shown.finish(time.monotonic())
        if control.reason is not None:
            raise BatchrunError(f"{control.reason}: the stream ended after {counts.done} rows")
    finally:
        rows.stop()
        outlet.end()


COMPARED_ROWS = 1024
"""Rows that are read at once to compare the rows of two starts."""


StreamSource: TypeAlias = tuple[Job, PromptKind | None, StreamRows, HookPool | None]
"""The job of a stream, the kind of its prompts, its rows, and its Python functions."""


class StreamCall:
    """A call of `stream` under way, in the program's event loop."""

    def __init__(
        self,
        data: object,
        paths: list[str] | None,
        call: LibraryCall,
        loop: EngineLoop | None,
        display: Display,
    ) -> None:
        """Take the arguments; `paths` are the files that the data names, `loop` is that of an open engine."""
        self._data = data
        self._paths = paths
        self._call = call
        self._loop = loop
        self._display = display

    async def in_memory(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield rows as they end; nothing stays on disk."""
        async with contextlib.AsyncExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchrunner-")))
            buffer = RowBuffer()
            if self._paths:
                source = await asyncio.to_thread(self._open_files, self._paths, scratch)
            else:
                reader = make_reader(self._data, buffer)
                reader.start()
                stack.push_async_callback(reader.close)
                source = await asyncio.to_thread(self._open_iterator, buffer, scratch)
            if source is not None:
                job, kind, rows, functions = source
                if functions is not None:
                    stack.callback(functions.close)
                handover = Handover()
                loop = await self._open_loop(stack)
                running = loop.start_stream(
                    functools.partial(
                        send_stream, job, kind, rows, handover, self._display, scratch, functions=functions
                    )
                )
                stack.push_async_callback(loop.end_stream, running)
                while taken := await loop.ask(handover.take):
                    for row in taken:
                        yield row
                await running.wait_async()
            if buffer.failure is not None:
                raise buffer.failure

    async def in_run_directory(self, output: Path) -> AsyncGenerator[dict[str, Any]]:
        """Yield rows as they end, and store them in a run directory; rows of earlier starts come first."""
        async with contextlib.AsyncExitStack() as stack:
            paths = self._paths or [await self._keep_rows(output, stack)]
            dataset = await asyncio.to_thread(Dataset, paths, RunDir(output).path.resolve())
            job = self._call.job(dataset.schema, paths, output)
            if not dataset.total_rows:
                return
            handover = Handover()
            loop = await self._open_loop(stack)
            running = loop.start_stream(functools.partial(_execute_and_give, job, handover, self._display))
            stack.push_async_callback(loop.end_stream, running)
            while taken := await loop.ask(handover.take):
                for row in taken:
                    yield row
            await running.wait_async()

    async def _open_loop(self, stack: contextlib.AsyncExitStack) -> EngineLoop:
        if self._loop is not None:
            return self._loop
        opening = open_portal()  # its end waits for threads: not in the program's event loop
        portal = await asyncio.to_thread(opening.__enter__)
        stack.push_async_callback(asyncio.to_thread, opening.__exit__, None, None, None)
        return EngineLoop(portal, None, None)

    def _open_files(self, paths: list[str], scratch: Path) -> StreamSource | None:
        """Return the rows of files; None where they have none."""
        dataset = Dataset(paths, copies=scratch / "copies")
        job = self._call.job(dataset.schema, paths, scratch)
        problems = (pa.field(name, pa.string()) for name in dataset.problems)
        renderer, functions = _open_renderer(job, pa.schema([*dataset.schema, *problems]), dataset)
        if not dataset.total_rows:
            _close(functions)
            return None
        return job, renderer.kind, FileRows(renderer, dataset), functions

    def _open_iterator(self, buffer: RowBuffer, scratch: Path) -> StreamSource | None:
        """Wait for the first rows of an iterator, which say what columns there are; None without rows."""
        first, known = take_batches(buffer, 0), None
        while first and known is None:
            known = next((piece for piece in first if not isinstance(piece, FailedRow)), None)
            if known is None:
                assert isinstance(first[0], FailedRow)
                raise InputError(first[0].error)
            if not known.num_rows:  # a table's columns, before its first rows
                first = take_batches(buffer, 0)
        if known is None:
            return None
        job = self._call.job(known.schema, [str(scratch)], scratch)
        renderer, functions = _open_renderer(job, known.schema)
        if first is None:
            _close(functions)
            return None
        return job, renderer.kind, LiveRows(renderer, buffer, first, rows_known(self._data)), functions

    async def _keep_rows(self, output: Path, stack: contextlib.AsyncExitStack) -> str:
        """Write the rows into the run directory, from where every start reads them; return their path.

        Raises ResumeError where an earlier start had other rows.
        """
        run_dir = RunDir(output)
        run_dir.check_writable()
        with writing(run_dir.given):
            make_directory(run_dir.given.parent)
        data = self._data
        if isinstance(data, AsyncIterable):
            buffer = RowBuffer()
            reader = make_reader(data, buffer)
            reader.start()
            stack.push_async_callback(reader.close)
            data = _rows_in(buffer)
        with tempfile.TemporaryDirectory(prefix="given-", dir=run_dir.given.parent) as scratch:
            new = Path(scratch) / run_dir.given.name
            await asyncio.to_thread(write_rows, batches_of(data), new)
            if not run_dir.given.exists():
                with writing(run_dir.given):
                    new.replace(run_dir.given)
            elif not await asyncio.to_thread(_are_equal, run_dir.given, new):
                raise ResumeError(
                    f"{run_dir.path} holds another run: it began with other rows",
                    hint="give the same rows, or take another output",
                    mark=";",
                )
        return str(run_dir.given)


def _open_renderer(
    job: Job, columns: pa.Schema, files: Dataset | None = None
) -> tuple[LiveRenderer, HookPool | None]:
    """Return the renderer of a job on these columns, which `files` have, and the job's Python functions."""
    functions = open_functions(job)
    try:
        return LiveRenderer(job, columns, functions, files), functions
    except BaseException:
        _close(functions)
        raise


def _close(functions: HookPool | None) -> None:
    if functions is not None:
        functions.close()


def _rows_in(buffer: RowBuffer) -> Iterator[dict[str, Any]]:
    """Yield the rows of a buffer one by one, and raise what the program's iterator raised."""
    while (taken := buffer.take()) is not None:
        assert isinstance(taken, list)
        yield from taken
    if buffer.failure is not None:
        raise buffer.failure


def _are_equal(one: Path, other: Path) -> bool:
    """Tell whether two Parquet files have the same rows; raises nothing where one cannot be read."""
    with (
        contextlib.suppress(OSError, pa.ArrowException),
        pq.ParquetFile(one) as old,
        pq.ParquetFile(other) as new,
    ):
        if not old.schema_arrow.equals(new.schema_arrow) or old.metadata.num_rows != new.metadata.num_rows:
            return False
        batches = zip_longest(old.iter_batches(COMPARED_ROWS), new.iter_batches(COMPARED_ROWS))
        return all(a is not None and b is not None and a.equals(b) for a, b in batches)
    return False


async def _execute_and_give(
    job: Job, handover: Handover, display: Display, *, engine: Engine | None, info: EngineInfo | None
) -> None:
    """Run a job and give its rows to `handover`; raises BatchrunError, also where rows were not sent."""
    try:
        report = await execute(job, engine=engine, info=info, display=display, handover=handover)
    finally:
        handover.end()
    if report.rows_left:
        raise BatchrunError(f"{report.reason}: {report.rows_left} of {report.rows_total} rows were not sent")
