"""One attempt at a job, from the check of its input to the report."""

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import EXIT_STOPPED, JobError
from batchrunner.core.files import read_json
from batchrunner.dispatch.media import check_takes_media
from batchrunner.dispatch.tokenize import detokenizer_for
from batchrunner.engines.base import Engine
from batchrunner.engines.registry import make_engine, model_of
from batchrunner.engines.vector_facts import check_dimensions_of_launched, check_dimensions_of_open
from batchrunner.job.spec import Job
from batchrunner.job.tasks import TaskName
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog, attempts_in
from batchrunner.output.files import writing
from batchrunner.output.holding import hold_task
from batchrunner.output.log_upload import uploading_logs
from batchrunner.output.resume import drop_failed
from batchrunner.output.run_dir import MAIN_TASK, RunDir
from batchrunner.output.run_json import read_run_json, write_limits
from batchrunner.output.starting import engine_starting
from batchrunner.report.html.page import leave_page
from batchrunner.report.report import Report, make_report, save_report, verdict_of_done
from batchrunner.runner.attempt import Attempt, check_nobody_works, plan_attempt
from batchrunner.runner.control import Control, Sleeper
from batchrunner.runner.handover import Handover
from batchrunner.runner.prepare import check_resumes, check_same_weights, drop_copies, prepare
from batchrunner.runner.prepared_job import PreparedJob, new_task
from batchrunner.runner.progress import Display, NoDisplay
from batchrunner.runner.run import build_run, give_back

GC_THRESHOLD = 10_000
"""New objects between two searches for garbage cycles. Python's 700 means a search every few rows, through
all rows that wait to be written: a quarter of our CPU time."""


async def execute(
    job: Job,
    *,
    engine: Engine | None = None,
    info: EngineInfo | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    join: bool = False,
    display: Display | None = None,
    control: Control | None = None,
    page: bool = True,
    handover: Handover | None = None,
    opened_for: TaskName | None = None,
) -> Report:
    """Run a job to its end and return the report, which is also in report.json, and report.html (`page`).

    `engine` is an open engine, with its `info`, and the task that it was `opened_for` (None for any); without
    one the job's own is opened and closed. With `join` this task shares the rows with all others that do.
    `handover` gets every row, those that earlier attempts ended first. Raises
    BatchrunError if the run could not start or go on; finished rows are kept.
    """
    if join and fresh:
        raise JobError(
            "--fresh would discard what other tasks have done", hint="delete the directory instead"
        )
    task = new_task() if join else MAIN_TASK
    prepared = await asyncio.to_thread(prepare, job, task, fresh=fresh, keeps_copies=True)
    run_dir = prepared.run_dir
    control, display = control or Control(), display or NoDisplay()
    counts, events = RowCounts(), EventLog(run_dir.events)
    async with contextlib.AsyncExitStack() as at_last, contextlib.AsyncExitStack() as stack:
        at_last.callback(leave, prepared)
        await asyncio.to_thread(prepared.check_engine_task, opened_for)
        stack.enter_context(contextlib.closing(display))
        stack.enter_context(_rare_garbage_collection())
        sleeper = Sleeper(control)
        holding = hold_task(run_dir, sleeper.sleep)
        lock = await sleeper.run(lambda: stack.enter_context(holding))
        model = info.model if info else model_of(job.engine)
        attempt = await sleeper.run(
            lambda: plan_attempt(
                prepared, lock, model, sleeper, counts, events, fresh=fresh, retry_failed=retry_failed
            )
        )
        stack.push_async_callback(give_back, attempt.rows, lock)
        stack.enter_context(uploading_logs(run_dir))
        if not (attempt.rows.unread or fresh):
            await _give_earlier(prepared, handover)
            return _finished_before(prepared, attempt)
        if engine is None or info is None:
            await asyncio.to_thread(check_dimensions_of_launched, job)
            engine = make_engine(
                job.engine, log_dir=run_dir.log_directory, limits=job.limits,
                detokenizer=detokenizer_for(job), task=await asyncio.to_thread(lambda: prepared.model_task),
            )  # fmt: skip
            stack.push_async_callback(engine.close)
            with engine_starting(run_dir):
                info = await _open(engine, control)
        check_takes_media(job, info)
        await asyncio.to_thread(check_dimensions_of_open, job, info)
        if model is None and not fresh:
            await asyncio.to_thread(check_resumes, prepared, info.model)
        if model_of(job.engine) is None and not fresh:
            await asyncio.to_thread(check_same_weights, prepared, info.weights)
        if fresh:
            await sleeper.run(lambda: check_nobody_works(run_dir, sleeper))
            with writing(run_dir.path):
                run_dir.discard()
        elif retry_failed:  # only now: a refused attempt changes nothing
            await asyncio.to_thread(drop_failed, run_dir)
        if page:
            at_last.push_async_callback(_leave_page, run_dir, control)
        if attempt.rows.unread:
            with writing(run_dir.merged):
                run_dir.discard_merged()
        with contextlib.closing(events):
            events.open()
            await _give_earlier(prepared, handover)
            run = await build_run(
                prepared, attempt, engine, info, lock, counts, events, control, display, handover
            )
            return await run.go()


def leave(prepared: PreparedJob) -> None:
    """Close what is open, and delete what no later start needs: copies of the input, and of a joined run."""
    prepared.close()
    drop_copies(prepared.run_dir, is_done=read_json(prepared.run_dir.report_json).get("rows_left") == 0)
    if prepared.joins and not prepared.run_dir.journals():
        prepared.run_dir.store.discard_copy(prepared.run_dir.task)


async def _give_earlier(prepared: PreparedJob, handover: Handover | None) -> None:
    if handover is not None:
        await handover.put_earlier(prepared.run_dir, prepared.columns)


@contextlib.contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Collect garbage cycles less often; a second run in the same process leaves the setting as it is."""
    before = gc.get_threshold()
    if not 0 < before[0] < GC_THRESHOLD:
        yield
        return
    gc.set_threshold(GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _finished_before(prepared: PreparedJob, attempt: Attempt) -> Report:
    """Make the report of an attempt that found nothing to do."""
    report = make_report(prepared.run_dir, attempt.done, attempt.rows.total, RowCounts())
    exit_code, reason = verdict_of_done(report, prepared.job.limits.max_failed_rows)
    if report.rows_left > attempt.rows_of_others:
        exit_code = EXIT_STOPPED
        reason = "rows are left that no living task holds: run the same command again"
    elif report.rows_left:
        reason = "nothing is free: other tasks do the rest"
    else:
        drop_copies(prepared.run_dir, is_done=True)
        write_limits(prepared.run_dir, prepared.job)
    starts, wall_s = attempts_in(prepared.run_dir.events)
    old = read_run_json(prepared.run_dir) or {}
    engine = old.get("engine", {})
    report = replace(
        report, exit_code=exit_code, reason=reason, starts=starts, wall_s_all_starts=round(wall_s, 3),
        engine=engine, simulated=bool(engine.get("simulated")), versions=old.get("versions", {}),
    )  # fmt: skip
    if not prepared.joins:
        last = read_json(prepared.run_dir.report_json)  # it says more than these zeros
        verdict = {"exit_code": exit_code, "reason": reason}
        if not last:
            report.save(prepared.run_dir)
        elif not (report.rows_left or verdict.items() <= last.items()):  # by other limits
            save_report(prepared.run_dir, {**last, **verdict})
    return report


async def _leave_page(run_dir: RunDir, control: Control) -> None:
    """Write report.html once the engine is closed: a GPU is not held for it."""
    # a refused attempt leaves no run.json; and in a stop at once a SIGKILL may be near
    if run_dir.run_json.exists() and not control.at_once:
        await asyncio.to_thread(leave_page, run_dir)


async def _open(engine: Engine, control: Control) -> EngineInfo:
    """Open the engine; a stop while it loads ends the wait."""
    opening = asyncio.ensure_future(engine.open())
    asked = asyncio.Event()
    control.listen(asked.set)
    stopped = asyncio.ensure_future(asked.wait())
    try:
        await asyncio.wait({opening, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            return opening.result()
        raise control.interrupted("while the engine was starting")
    finally:
        opening.cancel()
        stopped.cancel()
        await asyncio.gather(opening, stopped, return_exceptions=True)
