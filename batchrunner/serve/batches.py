"""Runs batches on one engine, several at once, each as `batchrun batch` does it.

A batch is checked, waits for its turn, is sent, and its results become files. Its run is resumed after a kill
of the server, and while the engine is away. Lines that are left when it is cancelled or its time is over
end with an error that says so.
"""

import asyncio
import contextlib
import itertools
import logging
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.core.errors import BatchrunError, EngineLostError, InputError, RowRefusedError
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import Engine
from batchrunner.engines.registry import launched_model
from batchrunner.input.batch_lines import request_lines
from batchrunner.input.request_bodies import URL
from batchrunner.input.text_files import BOM
from batchrunner.job.call import job_of_batch
from batchrunner.job.spec import Job
from batchrunner.output.batch_results import CANCELLED, EXPIRED, publish
from batchrunner.output.run_dir import RunDir
from batchrunner.runner.control import Control
from batchrunner.runner.foreground import TERM_DRAIN_S
from batchrunner.runner.prepare import prepare
from batchrunner.runner.progress import Progress, ProgressCalls
from batchrunner.runner.run import execute
from batchrunner.runner.shared_engine import SharedEngine
from batchrunner.serve.state import BATCHES, FILES, Record, State, now

log = logging.getLogger(__name__)

MOST_AT_ONCE = 10
"""Batches that share the engine; the others wait for the end of the oldest."""
RETRY_S = 5.0
"""Pause before a run that could not go on is resumed."""
EARLY = {EXPIRED: "expired", CANCELLED: "cancelled"}
"""States of a batch that ends before all its lines are answered, by the reason."""
_SHUTDOWN = "the server ends"
_LINE = re.compile(r"lines? (\d+)")


class NoEngine(Engine):
    """Ends each request with the same error: those that a batch leaves when it ends early."""

    def __init__(self, why: str) -> None:
        """Take the error."""
        self._why = why

    async def open(self) -> EngineInfo:
        """Refuse to open."""
        raise NotImplementedError

    async def close(self) -> None:
        """Do nothing."""

    async def generate(self, request: Request, route: str) -> Completion:  # noqa: ARG002 - all are refused
        """Refuse a request."""
        raise RowRefusedError(self._why)

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return no load."""
        return ()


def counts_of(total: int, failed: int = 0, ok: int = 0) -> Record:
    """Return the counts of a batch's lines."""
    return {"total": total, "completed": ok, "failed": failed}


class Batches:
    """The batches of a server that have not ended."""

    def __init__(self, state: State, engine: SharedEngine, options: dict[str, Any], server: Control) -> None:
        """Run batches on an open engine; `options` are those of `job_of_batch`, `server` stops the server."""
        self._server = server
        self._state, self._engine, self._options = state, engine, options
        self.info = engine.info
        self._at_work: dict[str, tuple[Control, asyncio.Task[None]]] = {}
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._one = asyncio.Lock()
        """Held where files are read or written whole: memory is for one."""
        self.lost: EngineLostError | None = None
        """Why the engine that the server started will not be up again."""

    def start(self, batch: Record) -> None:
        """Begin, or go on with, a batch."""
        control = Control()
        self._at_work[batch["id"]] = control, asyncio.create_task(self._to_its_end(batch, control))

    async def cancel(self, batch: Record) -> None:
        """Cancel a batch; its requests in flight end at once."""
        self._at_work[batch["id"]][0].stop(CANCELLED)
        await self._state.save(BATCHES, batch, status="cancelling", cancelling_at=now())

    async def end(self) -> None:
        """Stop sending; requests in flight have 15 s. The next start goes on."""
        for control, _ in self._at_work.values():
            control.drain(_SHUTDOWN)
        ends = asyncio.gather(*(task for _, task in self._at_work.values()), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ends, TERM_DRAIN_S)

    async def _to_its_end(self, batch: Record, control: Control) -> None:
        """Do what is left of a batch, again after a pause where that could not go on."""
        expiry = asyncio.get_running_loop().call_later(
            batch["expires_at"] - time.time(), control.stop, EXPIRED
        )
        if batch["status"] == "cancelling":
            control.stop(CANCELLED)
        while True:
            try:
                await self._do(batch, control)
                break
            except Exception as failure:
                if isinstance(failure, EngineLostError) and launched_model(self._job(batch).engine):
                    self.lost = failure
                    self._server.drain("the engine is lost")
                    break
                unknown = not isinstance(failure, BatchrunError)
                log.warning("%s goes on in %g s: %s", batch["id"], RETRY_S, failure, exc_info=unknown)
            await asyncio.sleep(RETRY_S)
        expiry.cancel()
        del self._at_work[batch["id"]]

    async def _do(self, batch: Record, control: Control) -> None:
        """Do what is left of a batch; raises BatchrunError where it cannot go on for now."""
        try:
            if batch["in_progress_at"] is None:
                async with self._one:
                    await asyncio.to_thread(self._check, batch)
                state = batch["status"] if control.reason == CANCELLED else "in_progress"
                await self._state.save(BATCHES, batch, status=state, in_progress_at=now())
            try:
                await control.wait_for(self._turns.acquire(), "before its turn")
                try:
                    await self._execute(batch, engine=self._engine, control=control)
                finally:
                    self._turns.release()
            except BatchrunError:
                if control.reason is None:
                    raise
            if control.reason == _SHUTDOWN:
                return
            if control.reason is not None:
                info = replace(self.info, model=batch["model"], yields=None)  # it has no users
                await self._execute(batch, engine=SharedEngine(NoEngine(control.reason), info))
            if control.reason != CANCELLED:
                await self._state.save(BATCHES, batch, status="finalizing", finalizing_at=now())
            async with self._one:
                await self._publish(batch)
            state = EARLY.get(control.reason or "", "completed")
        except InputError as failure:
            if batch["in_progress_at"]:
                raise
            line = _LINE.search(failure.message)
            error = {
                "code": "invalid_file", "message": failure.message, "param": None,
                "line": line and int(line[1]),
            }  # fmt: skip
            state, batch["errors"] = "failed", {"object": "list", "data": [error]}
        await self._state.save(BATCHES, batch, **{"status": state, f"{state}_at": now()})
        run = self._state.place_of(BATCHES, batch["id"])
        await asyncio.to_thread(shutil.rmtree, run, ignore_errors=True)

    async def _execute(self, batch: Record, **options: Any) -> None:
        """Run a batch; raises BatchrunError, also where lines are left."""

        def count(state: Progress) -> None:
            failed = state.rows_failed
            batch["request_counts"] = counts_of(state.rows_total or 0, failed, state.rows_done - failed)

        report = await execute(self._job(batch), displays=[ProgressCalls(count)], **options)
        batch["request_counts"] = counts_of(report.rows_total, report.rows_failed, report.rows_ok)
        if report.rows_left:
            raise BatchrunError(report.reason)

    def _job(self, batch: Record) -> Job:
        """Return the job of a batch, with the server's engine."""
        content = self._state.place_of(FILES, batch["input_file_id"])
        return job_of_batch(str(content), str(self._state.place_of(BATCHES, batch["id"])), **self._options)

    def _check(self, batch: Record) -> None:
        """Raise InputError where a file is no batch file for the batch's endpoint; a bad line fails alone."""
        with contextlib.closing(prepare(self._job(batch), keeps_copies=True)) as prepared:
            batch["request_counts"] = counts_of(prepared.dataset.total_rows)
        place = self._state.place_of(FILES, batch["input_file_id"])
        with place.open("rb") as content:
            lines = itertools.chain([content.readline().removeprefix(BOM)], content)
            for number, request, problem, _ in request_lines(lines, place.name):
                if problem is None and request[URL] != batch["endpoint"]:
                    raise InputError(f"line {number}: its url is not that of the batch")

    async def _publish(self, batch: Record) -> None:
        """Make files of the results and of the lines that failed, with the same names after any kill."""
        names = {key: f"{batch['id'].replace('batch_', 'file-')}-{key}" for key in ("output", "error")}
        places = [self._state.place_of(FILES, name) for name in names.values()]
        run = RunDir(self._state.place_of(BATCHES, batch["id"]))
        batch["usage"] = await asyncio.to_thread(publish, run, *places)
        if batch["usage"] is None:
            raise BatchrunError("lines are missing in its results")
        for (key, name), place in zip(names.items(), places, strict=True):
            if place.stat().st_size:
                await self._state.add_file(
                    name, f"{batch['id']}_{key}.jsonl", "batch_output", batch["output_expires_after"]
                )
                batch[f"{key}_file_id"] = name
            else:
                place.unlink()
