"""One stream: rows as they come → an engine → the program, with nothing on disk but the engine's log."""

import asyncio
import contextlib
import functools
import logging
import time
from pathlib import Path

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import BatchrunError
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.types import PromptKind
from batchrunner.dispatch.media import check_takes_media
from batchrunner.engines.base import Engine
from batchrunner.engines.registry import make_engine
from batchrunner.engines.vector_facts import check_dimensions_of_launched, check_dimensions_of_open
from batchrunner.job.answers import plan_answers
from batchrunner.job.spec import Job
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.resume import DoneRows
from batchrunner.runner.control import Control
from batchrunner.runner.handover import GivenResults, Outlet
from batchrunner.runner.parsed_results import parsing
from batchrunner.runner.progress import Display
from batchrunner.runner.sending import Sending, build_sending, open_windows
from batchrunner.runner.stop_rules import FailureLimit
from batchrunner.runner.stream_rows import StreamRows

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
) -> None:
    """Send all rows, with prompts of a kind, and give their outcomes to `outlet`, which ends with them.

    `engine` is an open engine, with its `info`; without one the job's own is opened and closed. `functions`
    are the job's Python functions. Cancelled, it cancels the requests in flight. Raises BatchrunError where
    the engine cannot be opened or is lost, or where a limit of the job ended the stream.
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
            results = parsing(GivenResults(outlet, counter, answers), functions)
            sending = build_sending(
                job, kind, rows, DoneRows(), engine, info, windows, results, counts, events, control, display,
                answers, rows.names, began=began, functions=functions,
            )  # fmt: skip
            await _send(sending, rows, control)
        if control.reason is not None:
            raise BatchrunError(f"{control.reason}: the stream ended after {counts.done} rows")
    finally:
        rows.stop()
        outlet.end()


async def _send(sending: Sending, rows: StreamRows, control: Control) -> None:
    """Send until all rows have an outcome or the stream is to stop."""
    control.listen(functools.partial(_stop, sending, rows, control))
    dispatching = asyncio.ensure_future(sending.dispatcher.run(sending.feeder))
    polling = asyncio.ensure_future(sending.load_control.run(sending.observers))
    try:
        await asyncio.wait((dispatching, polling), return_when=asyncio.FIRST_COMPLETED)
        if not dispatching.done():
            polling.result()  # it failed: that ends the stream
        await dispatching
    finally:
        rows.stop()
        for task in (dispatching, polling):
            task.cancel()
        await asyncio.gather(dispatching, polling, return_exceptions=True)
        sending.shown.finish(time.monotonic())


def _stop(sending: Sending, rows: StreamRows, control: Control) -> None:
    """Send no row any more, once the stream is to stop."""
    if control.reason is not None:
        sending.backlog.stop()
        rows.stop()
