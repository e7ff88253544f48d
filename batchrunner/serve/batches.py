"""Runs the batches of `batchrun serve` on one engine, each as `batchrun batch` runs a file.

Batches of different owners run at the same time, and share the engine according to the owners' weights.

A batch is validated, waits for its turn, and is run. Its results become files. After a kill, the next start
of the server resumes it. If an engine that the server did not start is lost, the batch resumes when the
engine is back. When a batch is cancelled or expires, each unanswered line gets an error that says so.
"""

import asyncio
import contextlib
import logging
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchrunner.core.errors import BatchrunError, EngineLostError, InputError
from batchrunner.engines.registry import launched_model
from batchrunner.input.batch_lines import BatchFileError, request_lines
from batchrunner.input.compression import HEAD_BYTES, codec_of, decompressed
from batchrunner.input.text_files import skip_bom
from batchrunner.input.text_lines import read_lines
from batchrunner.job.call import CUSTOM_ID, job_of_batch
from batchrunner.job.spec import Job
from batchrunner.output.batch_results import CANCELLED, EXPIRED, publish
from batchrunner.output.events import last_sample
from batchrunner.output.run_dir import RunDir
from batchrunner.output.samples import RunSample
from batchrunner.runner.control import Control
from batchrunner.runner.foreground import TERM_DRAIN_S
from batchrunner.runner.prepare import prepare
from batchrunner.runner.progress import Display
from batchrunner.runner.run import execute
from batchrunner.runner.shared_engine import SharedEngine
from batchrunner.serve.activity import Activity
from batchrunner.serve.api_errors import RATE_LIMIT
from batchrunner.serve.owners import Owners
from batchrunner.serve.state import BATCHES, FILES, OWNER, Record, State, now

log = logging.getLogger(__name__)

MOST_RUNNING = 10
"""Maximum number of batches that run on the engine at once. Several owners divide this number among them."""
MOST_RUNNING_OF_OWNER = 2
"""Number of batches that each owner may always run at once, even if all owners together then exceed
MOST_RUNNING. The owner's further batches wait."""
RETRY_S = 5.0
"""Seconds before an interrupted run resumes."""
EARLY_STATUS = {EXPIRED: "expired", CANCELLED: "cancelled"}
"""Final status of a batch that ended before all its lines were answered, keyed by the reason."""
_SHUTDOWN = "the server is shutting down"
_LINE_NUMBER = re.compile(r"lines? (\d+)")


def request_counts(*, total: int, completed: int = 0, failed: int = 0) -> Record:
    """Return the field `request_counts` of a batch, as OpenAI's API has it."""
    return {"total": total, "completed": completed, "failed": failed}


def _counts_in(sample: RunSample) -> Record:
    return request_counts(
        total=sample.rows_total,
        completed=sample.rows_done - sample.rows_failed,
        failed=sample.rows_failed,
    )


class BatchDisplay(Display):
    """Publishes the state of a running batch: its counts of requests, and the server's activity."""

    def __init__(self, batch: Record, activity: Activity) -> None:
        self._batch, self._activity = batch, activity

    def show(self, sample: RunSample) -> None:
        """Publish the present state of the run."""
        self._batch["request_counts"] = _counts_in(sample)
        self._activity.update(self._batch["id"], sample, time.time())

    def close(self) -> None:
        """Remove the ended run from the server's activity."""
        self._activity.end(self._batch["id"])


class TooManyRequestsError(InputError):
    """A batch would exceed the owner's limit of queued requests."""


class Batches:
    """Runs the unfinished batches of a server on its engine."""

    def __init__(
        self,
        *,
        state: State,
        engine: SharedEngine,
        options: dict[str, Any],
        server: Control,
        owners: Owners,
    ) -> None:
        """Run batches on an open engine.

        `options` are the arguments of `job_of_batch` that all batches share. `server` is used to stop the
        HTTP server if it started the engine and the engine is lost. The unfinished batches of an earlier
        process get the counts of requests that their runs logged last.
        """
        self._server = server
        self._state = state
        self._engine = engine
        self.info = engine.info
        self._options = options
        self._running: dict[str, tuple[Control, asyncio.Task[None]]] = {}
        """What stops each unfinished batch, and its asyncio task, by ID of the batch."""
        self.activity = Activity()
        self._owners = owners
        self._turns = defaultdict[str, asyncio.Semaphore](self._new_turns)
        """Semaphore of each owner, which limits the owner's running batches."""
        self._whole_file = asyncio.Lock()
        """Held while the whole file of a batch is validated or its results are written. Both take much
        memory, so only one batch at a time does it."""
        self._whole_file_of = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """Lock of each owner. A batch holds it while it waits for `_whole_file`, so only one batch of each
        owner waits. Thus the owners get `_whole_file` in turn, however many batches they have."""
        self.lost: EngineLostError | None = None
        """The error with which an engine that the server started was lost; None while it works."""
        # A record is written only when the status changes, so its counts of requests are old. The event log
        # of the run has newer ones.
        for batch in state.unfinished_batches():
            sample = last_sample(RunDir(state.path_of(BATCHES, batch["id"])).events)
            if sample is not None:
                batch["request_counts"] = _counts_in(sample)

    def start(self, batch: Record) -> None:
        """Start or resume a batch."""
        control = Control()
        task = asyncio.create_task(self._run_to_end(batch, control))
        self._running[batch["id"]] = control, task

    async def cancel(self, batch: Record) -> None:
        """Cancel a batch and its requests in flight."""
        control, _ = self._running[batch["id"]]
        # If the disk is full, the call fails, and the batch must go on.
        await self._state.save(BATCHES, batch, status="cancelling", cancelling_at=now())
        control.stop(CANCELLED)

    async def engine_answers(self) -> bool:
        """Tell whether a server of the engine answers now."""
        return await self._engine.engine.answers()

    async def drain(self) -> None:
        """Stop sending, and wait up to 15 s for the requests in flight.

        The next start of the server resumes the batches.
        """
        for control, _ in self._running.values():
            control.drain(_SHUTDOWN)
        # An error of one batch must not end the wait for the others.
        ends = asyncio.gather(*(task for _, task in self._running.values()), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ends, TERM_DRAIN_S)

    def _new_turns(self) -> asyncio.Semaphore:
        """Return the semaphore of an owner who has had no batch yet."""
        # SIGHUP may change the number of owners.
        return asyncio.Semaphore(max(MOST_RUNNING_OF_OWNER, MOST_RUNNING // len(self._owners.names)))

    async def _run_to_end(self, batch: Record, control: Control) -> None:
        """Run a batch until it has a final status; resume it after a pause when it is interrupted."""
        seconds_left = batch["expires_at"] - time.time()
        expiry = asyncio.get_running_loop().call_later(seconds_left, control.stop, EXPIRED)
        if batch["status"] == "cancelling":
            # An earlier start of the server had begun to cancel the batch.
            control.stop(CANCELLED)
        while True:
            try:
                await self._run(batch, control)
                break
            except Exception as failure:
                # An engine that the server started itself does not come back, so the server ends.
                if isinstance(failure, EngineLostError) and launched_model(self._job(batch).engine):
                    self.lost = failure
                    self._server.drain("the engine is lost")
                    break
                is_unforeseen = not isinstance(failure, BatchrunError)
                log.warning(
                    "%s: %s; it resumes in %g s", batch["id"], failure, RETRY_S, exc_info=is_unforeseen
                )
            await asyncio.sleep(RETRY_S)
        expiry.cancel()
        del self._running[batch["id"]]

    async def _run(self, batch: Record, control: Control) -> None:
        """Take a batch from its current status to a final one; raises BatchrunError if it is interrupted."""
        try:
            if batch["in_progress_at"] is None:
                # Validation takes much memory, so it is done for one file at a time. The owner's lock comes
                # first, so that the owners take turns.
                async with self._whole_file_of[_owner_of(batch)], self._whole_file:
                    unfinished = self._state.unfinished_batches(_owner_of(batch))
                    other_batches = [each for each in unfinished if each is not batch]
                    await asyncio.to_thread(self._validate, batch, other_batches)
                await self._state.save(BATCHES, batch, status="in_progress", in_progress_at=now())
            await self._answer_lines(batch, control)
        except InputError as failure:
            if batch["in_progress_at"]:
                # The file has passed validation, so the batch does not fail. `_run_to_end` resumes it after a
                # pause.
                raise
            path = self._state.path_of(FILES, batch["input_file_id"])
            errors = {"object": "list", "data": _errors_of(failure, path)}
            await self._finish(batch, "failed", errors=errors)
            return
        if control.reason == _SHUTDOWN:
            # The next start of the server resumes the batch.
            return
        # A cancelled batch keeps the status `cancelling` until it gets its final one.
        if control.reason != CANCELLED:
            await self._state.save(BATCHES, batch, status="finalizing", finalizing_at=now())
        reason = control.reason if control.reason in EARLY_STATUS else None
        # Writing the results takes much memory too, so it is done for one batch at a time.
        async with self._whole_file_of[_owner_of(batch)], self._whole_file:
            results = await self._publish(batch, reason)
        await self._finish(batch, EARLY_STATUS[reason] if reason else "completed", **results)

    async def _answer_lines(self, batch: Record, control: Control) -> None:
        """Wait for the batch's turn, then run it until all lines are answered or `control` stops it."""
        turns = self._turns[_owner_of(batch)]
        try:
            await control.wait_for(turns.acquire(), "before its turn")
            try:
                await self._execute(batch, control)
            finally:
                turns.release()
        except BatchrunError:
            if control.reason is None:
                # Without a stop by `control`, this is a real error.
                raise

    async def _execute(self, batch: Record, control: Control) -> None:
        """Run the job of a batch; raises BatchrunError if it fails or lines remain without a result."""
        report = await execute(
            self._job(batch),
            displays=[BatchDisplay(batch, self.activity)],
            engine=self._engine,
            control=control,
            account=self._owners.account_of(_owner_of(batch)),
            # IDs sort by age. After a restart, an old batch may be ready later than a new one.
            rank=batch["id"],
        )
        # The report has exact counts. Those of the last progress may be a second old.
        batch["request_counts"] = request_counts(
            total=report.rows_total, completed=report.rows_ok, failed=report.rows_failed
        )
        if report.rows_left:
            raise BatchrunError(report.reason)

    async def _finish(self, batch: Record, status: str, **changes: Any) -> None:
        """Store the final status and other `changes` of a batch, and delete its run."""
        await self._state.save(BATCHES, batch, **{"status": status, f"{status}_at": now(), **changes})
        run = self._state.path_of(BATCHES, batch["id"])
        await asyncio.to_thread(shutil.rmtree, run, ignore_errors=True)

    def _job(self, batch: Record) -> Job:
        """Return the job of a batch on the server's engine."""
        requests = self._state.path_of(FILES, batch["input_file_id"])
        run = self._state.path_of(BATCHES, batch["id"])
        return job_of_batch(str(requests), str(run), endpoint=batch["endpoint"], **self._options)

    def _validate(self, batch: Record, other_batches: Sequence[Record]) -> None:
        """Raise InputError if the file has no requests.

        Raises BatchFileError for unusable custom_ids and for other endpoints than the batch's, and
        TooManyRequestsError if the owner has too many requests, together with its `other_batches`. With any
        other fault, only the line itself fails. The number of requests is stored in the batch's record.
        """
        with contextlib.closing(prepare(self._job(batch), keeps_copies=True)) as prepared:
            total = prepared.dataset.total_rows
        excess = self._owners.excess_of_queue(_owner_of(batch), other_batches, new=total)
        if excess is not None:
            raise TooManyRequestsError(excess)
        batch["request_counts"] = request_counts(total=total)

    def _lines(self, batch: Record) -> Iterator[tuple[int, Mapping[str, Any], str | None]]:
        """Yield each line of a batch's file: its number, its request, and its fault (None if it has none)."""
        path = self._state.path_of(FILES, batch["input_file_id"])
        with pa.OSFile(str(path)) as file:
            # The file is stored without its ending, so its first bytes tell the compression.
            codec = codec_of(file.read(HEAD_BYTES), None)
            file.seek(0)
            source = decompressed(file, codec)
            skip_bom(source)
            for number, request, problem, _ in request_lines(read_lines(source), path.name):
                yield number, request, problem and f"{path.name}: line {number}: {problem}"

    async def _publish(self, batch: Record, reason: str | None) -> Record:
        """Write the files of answered and failed lines; return the changes of the batch's record.

        The files are named by the batch's ID, so after a kill the next try replaces them. If the batch ended
        early, `reason` says why, and is the error of each unanswered line.
        """
        names = {kind: f"{batch['id'].replace('batch_', 'file-')}-{kind}" for kind in ("output", "error")}
        output, error = (self._state.path_of(FILES, name) for name in names.values())
        # If the batch ended early: all its lines, each with the error that it gets if it has no answer.
        errors_if_unanswered = None
        if reason is not None:
            lines = self._lines(batch)
            errors_if_unanswered = (
                (request.get(CUSTOM_ID), problem or reason) for _, request, problem in lines
            )
        run = RunDir(self._state.path_of(BATCHES, batch["id"]))
        published = await asyncio.to_thread(publish, run, output, error, unanswered=errors_if_unanswered)
        if published is None:
            raise BatchrunError("results of some lines are missing")
        counts = request_counts(
            total=published.completed + published.failed,
            completed=published.completed,
            failed=published.failed,
        )
        changes: Record = {"usage": published.usage, "request_counts": counts}
        for (kind, name), path in zip(names.items(), (output, error), strict=True):
            if path.stat().st_size:
                await self._state.add_file(
                    name,
                    owner=_owner_of(batch),
                    filename=f"{batch['id']}_{kind}.jsonl",
                    purpose="batch_output",
                    expires_after=batch["output_expires_after"],
                )
                changes[f"{kind}_file_id"] = name
            else:
                path.unlink()
        return changes


def _owner_of(batch: Record) -> str:
    """Return the name of a batch's owner; empty on a server with one owner."""
    return str(batch.get(OWNER, ""))


def _errors_of(failure: InputError, path: Path) -> list[Record]:
    """Return the errors of a batch whose file cannot be run, with the numbers of the wrong lines.

    They name the file, but not its `path` on the server.
    """
    if isinstance(failure, BatchFileError):
        return [_error(code, problem, line=line) for line, code, problem in failure.line_faults]
    code = RATE_LIMIT if isinstance(failure, TooManyRequestsError) else "invalid_file"
    # Other errors name the line only in their text.
    line = _LINE_NUMBER.search(failure.message)
    return [_error(code, failure.message.replace(str(path), path.name), line=line and int(line[1]))]


def _error(code: str, message: str, *, line: int | None) -> Record:
    return {"code": code, "message": message, "param": None, "line": line}
