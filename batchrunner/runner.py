"""One run from start to end: the only place where the parts are put together."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import platform
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from batchrunner.checkpoint import (
    FORMAT,
    Done,
    check_same_run,
    drop_failed,
    fingerprint,
    read_parts,
    read_run_json,
)
from batchrunner.dataset import Dataset
from batchrunner.engines.registry import make_engine, model_of
from batchrunner.errors import BatchrunError, ResumeError, StorageError
from batchrunner.events import EventLog, earlier_wall_s
from batchrunner.feedback import watch, write_sample
from batchrunner.gate import Gate
from batchrunner.plan import selected_rows
from batchrunner.progress import Rates, Silent, Snapshot
from batchrunner.prompt import Renderer
from batchrunner.report import (
    EXIT_DONE,
    EXIT_FAILED_ROWS,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    Report,
    tolerated,
)
from batchrunner.sink import Sink, result_schema
from batchrunner.storage import RunDir, write_json
from batchrunner.submit import Patience, Submitter
from batchrunner.tally import Tally
from batchrunner.window import initial_window

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyroaring import BitMap64

    from batchrunner.engines.base import Engine
    from batchrunner.job import Job
    from batchrunner.progress import Display
    from batchrunner.records import EngineInfo, Outcome, Request, Signals

log = logging.getLogger(__name__)

LEAST_ROWS_TO_ABORT = 100
"""`abort_failed_share` looks at a run once so many rows have ended."""


GC_THRESHOLD = 10_000
"""New objects between two searches for garbage cycles; Python's 700 is a search every few rows, through all
rows that wait to be written: a quarter of our CPU time."""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage cycles less often; a second run in the same process finds it done and leaves it."""
    before = gc.get_threshold()
    if not 0 < before[0] < GC_THRESHOLD:
        yield
        return
    gc.set_threshold(GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Control:
    """How a run is stopped from outside: first gently, then at once. May be used before the run begins."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.exit_code = EXIT_STOPPED
        self.at_once = False
        self._changed: list[asyncio.Event] = []

    def drain(self, reason: str, exit_code: int = EXIT_STOPPED) -> None:
        """Send no row any more, let those in flight end; a second call changes nothing."""
        if self.reason is None:
            self.reason, self.exit_code = reason, exit_code
        self._notify()

    def stop(self, reason: str, exit_code: int = EXIT_TERMINATED) -> None:
        """End at once; rows in flight are done again at the next start."""
        self.drain(reason, exit_code)
        self.at_once = True
        self._notify()

    def changed(self) -> asyncio.Event:
        """Return an event that is set at every call."""
        event = asyncio.Event()
        if self.reason is not None:
            event.set()
        self._changed.append(event)
        return event

    def _notify(self) -> None:
        for event in self._changed:
            event.set()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job whose input, templates and output were checked; nothing has been sent or written."""

    job: Job
    dataset: Dataset
    renderer: Renderer
    run_dir: RunDir

    def batches(self, rows: BitMap64) -> Iterator[list[Request | Outcome]]:
        """Read and render these rows, a bounded batch at a time."""
        for batch in self.dataset.read(rows, self.renderer.columns):
            yield self.renderer.render(batch)

    def selected(self) -> BitMap64:
        """Return the rows that the job is about."""
        return selected_rows(self.dataset, self.renderer.predicate, self.job.input.limit)


def prepare(job: Job) -> Prepared:
    """Check everything that can be checked without an engine.

    Raises JobError, InputError or OutputError, each one clear line.
    """
    dataset = Dataset(job.input.path)
    renderer = Renderer(dataset, job.input, job.prompt, job.sampling)
    run_dir = RunDir(job.output.path)
    run_dir.check_writable()
    return Prepared(job, dataset, renderer, run_dir)


def find_done(prepared: Prepared, model: str | None, *, without_failed: bool = False) -> Done:
    """Read what earlier starts did; `model` None leaves the model out of the comparison.

    Raises ResumeError where the output path holds another run, or parts of nobody knows what.
    """
    run_dir = prepared.run_dir
    old = read_run_json(run_dir)
    if old is None:
        if any(run_dir.parts.glob("part-*.parquet")):
            raise ResumeError(
                f"{run_dir.path} has parts but no run.json: take another output.path, or --fresh"
            )
        return Done()
    new = fingerprint(prepared.job, prepared.dataset, model or "")
    check_same_run(old["fingerprint"], new, run_dir.path, model_known=model is not None)
    return read_parts(run_dir.parts, without_failed=without_failed)


async def execute(
    job: Job,
    *,
    engine: Engine | None = None,
    info: EngineInfo | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    display: Display | None = None,
    control: Control | None = None,
) -> Report:
    """Run a job to its end and return the report, which is also in report.json.

    `engine` is an open engine to use, with its `info`; without one the job's own is opened and closed.
    Raises BatchrunError where the run could not start or not go on; finished rows are kept.
    """
    prepared = await asyncio.to_thread(prepare, job)
    control, display = control or Control(), display or Silent()
    with prepared.run_dir.claimed(), contextlib.closing(display), rare_collections():
        model = info.model if info else model_of(job.engine)
        done = Done()
        if not fresh:
            done = await asyncio.to_thread(find_done, prepared, model, without_failed=retry_failed)
        todo = await asyncio.to_thread(prepared.selected)
        total = len(todo)
        todo -= done.rows
        async with contextlib.AsyncExitStack() as stack:
            if engine is None or info is None:
                engine = make_engine(
                    job.engine, log_dir=prepared.run_dir.path, request_timeout_s=job.limits.request_timeout
                )
                stack.push_async_callback(engine.close)
                if todo or fresh:
                    info = await _open(engine, control)
            if info is None:  # nothing to do and nobody to ask
                return _finished_before(prepared, done, total)
            if model is None and not fresh:
                await asyncio.to_thread(find_done, prepared, info.model)
            if fresh:
                prepared.run_dir.discard()
            elif retry_failed:  # only now: a start that was refused changes nothing
                await asyncio.to_thread(drop_failed, prepared.run_dir.parts)
            return await _Run(prepared, engine, info, done, todo, total, display, control).go()


async def _open(engine: Engine, control: Control) -> EngineInfo | None:
    """Open the engine; a stop while it loads ends the wait."""
    opening, stopped = asyncio.ensure_future(engine.open()), asyncio.ensure_future(control.changed().wait())
    try:
        await asyncio.wait({opening, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            return opening.result()
        interrupted = BatchrunError(f"{control.reason} while the engine was starting")
        interrupted.exit_code = control.exit_code
        raise interrupted
    finally:
        opening.cancel()
        stopped.cancel()
        await asyncio.gather(opening, stopped, return_exceptions=True)


class _Run:
    """The state of one start."""

    def __init__(
        self,
        prepared: Prepared,
        engine: Engine,
        info: EngineInfo,
        done: Done,
        todo: BitMap64,
        total: int,
        display: Display,
        control: Control,
    ) -> None:
        self._prepared, self._engine, self._info = prepared, engine, info
        self._done, self._todo, self._total = done, todo, total
        self._display, self._control = display, control
        job = prepared.job
        self._job = job
        window, why = initial_window(job.window, info, job.sampling.max_new_tokens)
        self._gate = Gate(window)
        self._why_window = why
        self._tally = Tally()
        self._began = time.monotonic()
        self._rates = Rates(self._began)
        patience = Patience(job.limits.max_attempts, job.limits.engine_wait)
        self._submitter = Submitter(engine, self._gate, patience, self._deliver)

    async def go(self) -> Report:
        run_dir = self._prepared.run_dir
        run_dir.path.mkdir(parents=True, exist_ok=True)
        self._earlier_starts, self._earlier_s = earlier_wall_s(run_dir.events)
        self._events = EventLog(run_dir.events)
        try:
            self._write_run_json()
            self._sink = self._make_sink()
            for note in self._info.notes:
                log.info("%s", note)
            log.info(
                "%d rows to do, %d done before; %s", len(self._todo), len(self._done.rows), self._why_window
            )
            self._events.write(
                "start", rows_total=self._total, rows_done=len(self._done.rows), engine=asdict(self._info),
                window=self._gate.window, reason=self._why_window,
            )  # fmt: skip
            return await self._send_all()
        finally:
            self._events.close()

    async def _send_all(self) -> Report:
        failure: BatchrunError | None = None
        sending = asyncio.ensure_future(self._submitter.run(self._prepared.batches(self._todo)))
        watching = asyncio.ensure_future(
            watch(self._engine, self._snapshot, self._display, self._events, self._check_limits)
        )
        obeying = asyncio.ensure_future(self._obey(sending))
        tasks: tuple[asyncio.Future[None], ...] = (sending, watching, obeying)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():  # watching or obeying broke: that ends the run
                for broken in (watching, obeying):
                    if broken.done():
                        broken.result()
            await sending
        except BatchrunError as error:
            failure = error
        except asyncio.CancelledError:
            if not self._control.at_once:
                self._control.stop("cancelled")
                raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            try:
                await self._sink.close()
            except BatchrunError as error:
                failure = failure or error
            report = self._finish(failure)
        if failure is not None:
            raise failure
        return report

    async def _obey(self, sending: asyncio.Future[None]) -> None:
        changed = self._control.changed()
        while not sending.done():
            waiting = asyncio.ensure_future(changed.wait())
            either: list[asyncio.Future[Any]] = [waiting, sending]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            changed.clear()
            if self._control.reason is not None:
                self._submitter.stop()
            if self._control.at_once:
                sending.cancel()

    async def _deliver(self, outcome: Outcome) -> None:
        # counted first: the row is in a part even if a stop comes while we wait for the disk
        self._tally.add(outcome)
        await self._sink.put(outcome)
        failed = self._tally.failed
        if outcome.completion is None and self._tally.done >= LEAST_ROWS_TO_ABORT:
            share = failed / self._tally.done
            if share > self._job.limits.abort_failed_share:
                self._control.drain(f"{share:.0%} of the rows failed (limits.abort_failed_share)")

    def _check_limits(self) -> None:
        deadline = self._job.limits.deadline
        if deadline is not None and time.monotonic() - self._began > deadline:
            self._control.drain("the deadline passed (limits.deadline)")

    def _snapshot(self, signals: Sequence[Signals]) -> Snapshot:
        rows_s, tokens_s = self._rates.update(time.monotonic(), self._tally.done, self._tally.output_tokens)
        return Snapshot(
            rows_total=self._total,
            rows_done=len(self._done.rows) + self._tally.done,
            rows_failed=self._done.failed + self._tally.failed,
            rows_per_s=rows_s,
            output_tokens_per_s=tokens_s,
            window=self._gate.window,
            in_flight=self._gate.in_flight,
            resting=self._submitter.resting,
            signals=tuple(signals),
            simulated=self._info.simulated,
        )

    def _write_run_json(self) -> None:
        prepared = self._prepared
        new = fingerprint(prepared.job, prepared.dataset, self._info.model)
        write_json(
            prepared.run_dir.run_json,
            {
                "format": FORMAT,
                "job": _without_secrets(prepared.job),
                "fingerprint": new.as_dict(),
                "rows_total": self._total,
                "engine": asdict(self._info),
                "versions": versions(self._info),
            },
        )

    def _make_sink(self) -> Sink:
        metadata = {"batchrunner": versions(self._info)["batchrunner"] or "", "model": self._info.model}
        if self._info.simulated:
            metadata["simulated"] = "true"
        samples = self._job.sampling.n
        schema = result_schema(self._prepared.renderer.carried_schema, samples=samples, metadata=metadata)
        return Sink(
            self._prepared.run_dir.parts, schema, part_rows=self._job.output.part_rows, samples=samples
        )

    def _finish(self, failure: BatchrunError | None) -> Report:
        wall_s = time.monotonic() - self._began
        report = _make_report(self._prepared, self._done, self._total, self._tally)
        exit_code, reason = self._verdict(report, failure)
        report = replace(
            report,
            exit_code=exit_code,
            reason=reason,
            wall_s=round(wall_s, 3),
            wall_s_all_starts=round(self._earlier_s + wall_s, 3),
            starts=self._earlier_starts + 1,
            output_tokens_per_s=round(self._tally.output_tokens / wall_s, 1),
            rows_per_s=round(self._tally.done / wall_s, 2),
            engine=asdict(self._info),
            window=self._gate.window,
            simulated=self._info.simulated,
            versions=versions(self._info),
        )
        last = self._snapshot(())
        self._display.show(last)
        with contextlib.suppress(StorageError):  # a full disk: the rows matter, and they are safe
            write_sample(self._events, last)
            self._events.write("end", exit_code=exit_code, reason=reason)
            report.save(self._prepared.run_dir.report_json)
        return report

    def _verdict(self, report: Report, failure: BatchrunError | None) -> tuple[int, str]:
        if failure is not None:
            return failure.exit_code, str(failure)
        if report.rows_left:
            return self._control.exit_code, self._control.reason or "stopped"
        return verdict_of_done(report, self._job)


def _without_secrets(job: Job) -> dict[str, Any]:
    """Return the job as run.json keeps it: what `engine.env` holds (tokens, often) is nobody's business."""
    spec = job.model_dump(mode="json", exclude_unset=True)
    if "env" in spec["engine"]:
        spec["engine"]["env"] = dict.fromkeys(spec["engine"]["env"], "***")
    return spec


def verdict_of_done(report: Report, job: Job) -> tuple[int, str]:
    """Return exit code and reason of a run without rows left."""
    if report.rows_failed > tolerated(job.limits.max_failed_rows, report.rows_total):
        return EXIT_FAILED_ROWS, "done, but more rows failed than limits.max_failed_rows tolerates"
    return EXIT_DONE, "done"


def _finished_before(prepared: Prepared, done: Done, total: int) -> Report:
    """Make the report of a start that found nothing to do."""
    report = _make_report(prepared, done, total, Tally())
    exit_code, reason = verdict_of_done(report, prepared.job)
    starts, wall_s = earlier_wall_s(prepared.run_dir.events)
    old = read_run_json(prepared.run_dir) or {}
    engine = old.get("engine", {})
    report = replace(
        report, exit_code=exit_code, reason=reason, starts=starts, wall_s_all_starts=round(wall_s, 3),
        engine=engine, simulated=bool(engine.get("simulated")), versions=old.get("versions", {}),
    )  # fmt: skip
    report.save(prepared.run_dir.report_json)
    return report


def _make_report(prepared: Prepared, done: Done, total: int, tally: Tally) -> Report:
    failures = done.failures.merged(tally.failures)
    return Report(
        path=str(prepared.run_dir.path),
        exit_code=EXIT_DONE,
        reason="",
        rows_total=total,
        rows_ok=len(done.rows) - done.failed + tally.ok,
        rows_failed=done.failed + tally.failed,
        rows_resumed=len(done.rows),
        wall_s=0.0,
        wall_s_all_starts=0.0,
        starts=1,
        output_tokens=tally.output_tokens,
        output_tokens_all_starts=done.output_tokens + tally.output_tokens,
        output_tokens_per_s=0.0,
        rows_per_s=0.0,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        retries=tally.retries,
        finish_reasons=dict(tally.finish_reasons),
        failures=failures.summary(),
    )


def versions(info: EngineInfo) -> dict[str, str | None]:
    """Return what a result was made with."""
    found: dict[str, str | None] = {"python": platform.python_version(), "engine": info.version}
    for name in ("batchrunner", "pyarrow", "aiohttp"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree
            found[name] = None
    return found
