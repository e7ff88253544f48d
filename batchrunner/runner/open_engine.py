"""An engine that serves several runs on an event loop of its own, and how runs are started on such a loop."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from batchrunner.core.console import open_missing_descriptors
from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import BatchrunError, JobError
from batchrunner.engines.base import Engine
from batchrunner.job.engine import EngineSpec
from batchrunner.job.spec import Job
from batchrunner.job.tasks import GENERATE, TaskName
from batchrunner.report.report import Report
from batchrunner.runner.run import execute
from batchrunner.runner.shared_engine import SharedEngine

T = TypeVar("T")
_CLOSED = "the engine is closed: use it within its `with open_engine(…)`"
STOP: ContextVar[Future[None] | None] = ContextVar("STOP", default=None)
"""Ends when a blocking call, in whose thread it is set, is to stop: what the call started is cancelled."""


class PortalWork(Generic[T]):
    """Work on an event loop in another thread: if it is cancelled, then once, and its end is waited for."""

    def __init__(self, portal: BlockingPortal, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Start it; raises RuntimeError where the loop has ended."""
        self.ended: Future[None] = Future()
        """Has a result once the work has ended, also by being cancelled."""
        self._running: Future[T] = portal.start_task_soon(self._to_its_end, work)
        if (stop := STOP.get()) is not None:
            stop.add_done_callback(lambda _: self._running.cancel())

    def wait(self) -> T:
        """Wait and return the result; an interrupt cancels the work.

        Raises BatchrunError where the engine was closed meanwhile.
        """
        try:
            return self._running.result()
        except CancelledError:
            self.ended.result()
            raise BatchrunError(_CLOSED) from None
        except KeyboardInterrupt:
            self.cancel_blocking()
            raise

    async def wait_async(self) -> T:
        """Wait and return the result; cancelling this cancels the work.

        Raises BatchrunError where the engine was closed meanwhile.
        """
        task = asyncio.current_task()
        try:
            return await asyncio.wrap_future(self._running)
        except asyncio.CancelledError:
            await self._end()
            if task and not task.cancelling():  # it was the work that somebody cancelled
                raise BatchrunError(_CLOSED) from None
            raise

    def cancel_blocking(self) -> None:
        """Cancel the work, unless it has ended, and wait for its end. Blocks."""
        self._running.cancel()
        self.ended.result()

    async def cancel(self) -> None:
        """Cancel the work, unless it has ended, and wait for its end."""
        self._running.cancel()
        await self._end()

    async def _end(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self.ended))

    async def _to_its_end(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await cancelled_once(work())
        finally:
            self.ended.set_result(None)


async def cancelled_once(work: Coroutine[Any, Any, T]) -> T:
    """Do work in a portal, whose cancellation comes again at every await.

    A run that is cancelled writes its finished rows, for which it has to wait: it is cancelled once only.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.cancel()
        with CancelScope(shield=True):
            await asyncio.wait([running])
        raise


@dataclass(slots=True)
class EngineLoop:
    """The event loop on which a stream is sent: that of an open engine, or a new one."""

    _portal: BlockingPortal
    _engine: SharedEngine | None = None
    _started: set[PortalWork[Any]] = field(default_factory=set)
    """Work that has not ended."""

    def start(self, work: Callable[..., Coroutine[Any, Any, T]]) -> PortalWork[T]:
        """Start work, with the open engine as `engine`; it ends when the engine is closed.

        Raises BatchrunError if the engine is closed.
        """
        try:
            started = PortalWork(self._portal, functools.partial(work, engine=self._engine))
        except RuntimeError:
            raise BatchrunError(_CLOSED) from None
        self._started.add(started)
        started.ended.add_done_callback(lambda _: self._started.discard(started))
        return started

    async def ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop and return its result; cancelling this cancels it.

        Raises BatchrunError if the engine is closed.
        """
        try:
            answer = self._portal.start_task_soon(question)
        except RuntimeError:
            raise BatchrunError(_CLOSED) from None
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """End all that was started: a stream that the program left, a run in another thread. Blocks."""
        for work in list(self._started):
            work.cancel_blocking()


class OpenEngine:
    """An engine that is ready and serves run after run; made by `open_engine`.

    It lives on an event loop of its own, in a thread, so that runs from any thread or loop can use it.
    `spec` is the `engine` part of a job that it was made from; `info` is what the engine reports of itself.
    """

    def __init__(
        self,
        portal: BlockingPortal,
        spec: EngineSpec,
        engine: Engine,
        info: EngineInfo,
        task: TaskName = GENERATE,
    ) -> None:
        self.task = task
        """Task of a job that it was opened for."""
        self.spec = spec
        self.info = info
        self.loop = EngineLoop(portal, SharedEngine(engine, info))
        """The loop on which it lives."""

    def start(self, job: Job, **options: Any) -> PortalWork[Report]:
        """Start a run of a job on this engine; `options` are those of `execute`.

        Raises JobError for a job of another task. The requests of a batch file say theirs themselves.
        """
        if not job.prompt.is_batch:
            self.refuse_other_task(job.task)
        return self.loop.start(functools.partial(execute, job, **options))

    def refuse_other_task(self, task: TaskName) -> None:
        """Raise JobError for a task that it was not opened for; a simulated engine does them all."""
        if task != self.task and not self.info.simulated:
            raise JobError(
                f"engine: it was opened for task {self.task}, and the job's is {task}",
                hint=f'open it with open_engine(…, task="{task}")',
            )


@contextmanager
def open_portal() -> Iterator[BlockingPortal]:
    """Start an event loop in a thread of its own; an interrupt in the caller cancels what runs there."""
    open_missing_descriptors()
    with start_blocking_portal("asyncio", backend_options={"use_uvloop": True}) as portal:
        yield portal
