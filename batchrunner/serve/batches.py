"""Runs batches on one engine, several at once, each as `batchrun batch` does it.

A batch is checked, waits for its turn, is sent, and its results become files. Its run is resumed after a kill
of the server, and while the engine is away. Lines that are left when it is cancelled or its time is over
end with an error that says so.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

from pyroaring import BitMap64

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.core.errors import EXIT_WRONG, BatchrunError, EngineLostError, RowRefusedError
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import Engine
from batchrunner.engines.registry import launched_model
from batchrunner.input.dataset import rows_of
from batchrunner.input.request_bodies import URL
from batchrunner.job.call import job_of_batch
from batchrunner.job.spec import Job
from batchrunner.output.merge import CANCELLED, EXPIRED, publish
from batchrunner.output.run_dir import RunDir
from batchrunner.runner.control import Control
from batchrunner.runner.foreground import TERM_DRAIN_S
from batchrunner.runner.prepare import prepare
from batchrunner.runner.progress import Display
from batchrunner.runner.run import execute
from batchrunner.serve.state import Record, State

log = logging.getLogger(__name__)

MOST_AT_ONCE = 10
"""Batches that share the engine; the others wait for the end of the oldest."""
RETRY_S = 10.0
"""Pause before a run that could not go on is resumed."""
MOST_TOLD = 100
"""Errors of a batch file that its batch names."""
_SHUTDOWN = "the server ends"
_LINE = re.compile(r"line (\d+)")


def now() -> int:
    """Return the time as OpenAI's API has it."""
    return int(time.time())


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


class BatchCounts(Display):
    """Keeps the counts of a batch, and the engine's newest state."""

    def __init__(self, batch: Record) -> None:
        """Show the run of a batch."""
        self._batch = batch
        self.sample: dict[str, Any] = {}
        """The newest `sample` event of the run."""

    def show(self, sample: dict[str, Any]) -> None:
        """Take the present state."""
        self.sample, failed = sample, sample["rows_failed"]
        self._batch["request_counts"] = {
            "total": sample["rows_total"], "completed": sample["rows_done"] - failed, "failed": failed,
        }  # fmt: skip


class Batches:
    """The batches of a server that have not ended."""

    def __init__(
        self, state: State, engine: Engine, info: EngineInfo, options: dict[str, Any], server: Control
    ) -> None:
        """Run batches on an open engine; `options` are those of `job_of_batch`, `server` stops the server."""
        self._server = server
        self._state, self._engine, self.info, self._options = state, engine, info, options
        self._at_work: dict[str, tuple[Control, asyncio.Task[None]]] = {}
        self.counts: dict[str, BatchCounts] = {}
        """What is known of each run that is under way."""
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
        await self._state.save(batch, status="cancelling", cancelling_at=now())

    async def end(self) -> None:
        """Stop sending; requests in flight have 15 s. The next start goes on."""
        for control, _ in self._at_work.values():
            control.drain(_SHUTDOWN)
        tasks = [task for _, task in self._at_work.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=TERM_DRAIN_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _to_its_end(self, batch: Record, control: Control) -> None:
        left_s = batch["expires_at"] - time.time()
        expiry = asyncio.get_running_loop().call_later(left_s, control.stop, EXPIRED)
        if batch["status"] == "cancelling":
            control.stop(CANCELLED)
        try:
            while why := await self._try(batch, control):
                log.warning("%s goes on in %g s: %s", batch["id"], RETRY_S, why)
                await asyncio.sleep(RETRY_S)
        finally:
            expiry.cancel()
            del self._at_work[batch["id"]]
            self.counts.pop(batch["id"], None)

    async def _try(self, batch: Record, control: Control) -> str | None:
        """Do what is left of a batch; return why it could not go on, for now."""
        try:
            await self._do(batch, control)
        except BatchrunError as failure:
            if isinstance(failure, EngineLostError) and launched_model(self._job(batch).engine):
                self.lost = failure
                self._server.drain("the engine is lost")
                return None
            if failure.exit_code != EXIT_WRONG:
                return str(failure)
            log.warning("%s failed: %s", batch["id"], failure)
            await self._fail(batch, [self._error(batch, "invalid_request", str(failure))])
        except Exception:
            log.exception("%s failed", batch["id"])
            await self._fail(batch, [self._error(batch, "server_error", "see the server's log")])
        return None

    async def _do(self, batch: Record, control: Control) -> None:
        if batch["in_progress_at"] is None:
            async with self._one:
                errors = await asyncio.to_thread(self._check, batch)
            if errors:
                await self._fail(batch, errors)
                self._state.drop_run(batch["id"])
                return
            state = batch["status"] if control.reason == CANCELLED else "in_progress"
            await self._state.save(batch, status=state, in_progress_at=now())
        counts = self.counts[batch["id"]] = BatchCounts(batch)
        try:
            await self._send(batch, control, counts)
        except BatchrunError:
            if control.reason is None:
                raise
        if control.reason == _SHUTDOWN:
            return
        if control.reason is not None:
            rest = NoEngine(control.reason)
            await execute(self._job(batch), engine=rest, info=self.info, displays=[counts])
        if control.reason != CANCELLED:
            await self._state.save(batch, status="finalizing", finalizing_at=now())
        async with self._one:
            await self._publish(batch)
        state = {EXPIRED: "expired", CANCELLED: "cancelled"}.get(control.reason or "", "completed")
        await self._state.save(batch, **{"status": state, f"{state}_at": now()})
        await asyncio.to_thread(self._state.drop_run, batch["id"])

    async def _send(self, batch: Record, control: Control, counts: BatchCounts) -> None:
        """Run a batch in its turn, until all lines are done or it is stopped; raises BatchrunError."""
        await control.wait_for(self._turns.acquire(), "before its turn")
        try:
            report = await execute(
                self._job(batch), engine=self._engine, info=self.info, displays=[counts], control=control
            )
        finally:
            self._turns.release()
        if report.rows_left:
            raise BatchrunError(report.reason)

    def _job(self, batch: Record) -> Job:
        content, run = self._state.content_of(batch["input_file_id"]), self._state.run_of(batch["id"])
        return job_of_batch(str(content), str(run), **self._options)

    def _check(self, batch: Record) -> list[Record]:
        """Return why a file is no batch file for the batch's endpoint; a bad line fails by itself."""
        errors = []
        try:
            with contextlib.closing(prepare(self._job(batch), keeps_copies=True)) as prepared:
                rows = prepared.dataset.total_rows
                batch["request_counts"] = {"total": rows, "completed": 0, "failed": 0}
                for read in prepared.dataset.read(BitMap64(range(rows)), [URL]):
                    for number, row in zip(read.rows, rows_of(read, [URL]), strict=True):
                        if not isinstance(row, str) and row[URL] != batch["endpoint"]:
                            told = f"line {number + 1}: its url is not that of the batch, {batch['endpoint']}"
                            errors.append(self._error(batch, "mismatched_url", told, "url"))
                    if len(errors) >= MOST_TOLD:
                        break
        except BatchrunError as failure:
            if failure.exit_code != EXIT_WRONG:
                raise
            errors = [self._error(batch, "invalid_file", failure.message)]
        return errors[:MOST_TOLD]

    def _error(self, batch: Record, code: str, told: str, param: str | None = None) -> Record:
        """Return an error of a batch, which names no path."""
        told = told.replace(str(self._state.content_of(batch["input_file_id"])), batch["input_file_id"])
        found = _LINE.search(told)
        return {"code": code, "message": told, "param": param, "line": int(found[1]) if found else None}

    async def _fail(self, batch: Record, errors: list[Record]) -> None:
        told = {"object": "list", "data": errors}
        await self._state.save(batch, status="failed", failed_at=now(), errors=told)

    async def _publish(self, batch: Record) -> None:
        """Make files of the results and of the lines that failed, with the same names after any kill."""
        names = {key: f"{batch['id'].replace('batch_', 'file-')}-{key}" for key in ("output", "error")}
        output, error = map(self._state.content_of, names.values())
        run = RunDir(self._state.run_of(batch["id"]))
        if not await asyncio.to_thread(publish, run, output, error):
            raise BatchrunError("lines are missing in its results")
        for key, file in names.items():
            if self._state.content_of(file).stat().st_size:
                await self._state.add_file(file, f"{batch['id']}_{key}.jsonl", "batch_output")
                batch[f"{key}_file_id"] = file
            else:
                self._state.content_of(file).unlink()
