"""An engine that serves several runs on an event loop of its own, and how runs are started on such a loop."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from batchrunner.core.errors import BatchrunError
from batchrunner.core.standard_streams import open_missing_descriptors
from batchrunner.core.types import EngineInfo
from batchrunner.engines.base import Engine
from batchrunner.job.engine import EngineSpec
from batchrunner.job.spec import Job
from batchrunner.report.report import Report
from batchrunner.runner.execute import execute


class OpenEngine:
    """An engine that is ready and serves run after run; made by `open_engine`.

    It lives on an event loop of its own, in a thread, so that runs from any thread or loop can use it.
    `spec` is the `engine` part of a job that it was made from; `info` is what the engine reports of itself.
    """

    def __init__(self, portal: BlockingPortal, spec: EngineSpec, engine: Engine, info: EngineInfo) -> None:
        self._portal = portal
        self._engine = engine
        self.spec = spec
        self.info = info

    def call(self, job: Job, **options: Any) -> Report:
        """Run a job on this engine and wait; an interrupt ends the run, whose finished rows are kept."""
        running, ended = self._start(job, options)
        try:
            return running.result()
        except KeyboardInterrupt:
            running.cancel()
            ended.result()
            raise

    async def acall(self, job: Job, **options: Any) -> Report:
        """Run a job on this engine; cancelling it ends the run, whose finished rows are kept."""
        running, ended = self._start(job, options)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            await asyncio.wrap_future(ended)
            raise

    def _start(self, job: Job, options: dict[str, Any]) -> tuple[Future[Report], Future[None]]:
        """Start a run; return its result, which can be cancelled, and its end, which comes later then."""
        ended: Future[None] = Future()

        async def to_its_end() -> Report:
            try:
                return await execute_in_portal(job, engine=self._engine, info=self.info, **options)
            finally:
                ended.set_result(None)

        try:
            return self._portal.start_task_soon(to_its_end), ended
        except RuntimeError:
            raise BatchrunError("the engine is closed: use it within its `with open_engine(…)`") from None


async def execute_in_portal(job: Job, **options: Any) -> Report:
    """Do what `execute` does in a portal, whose cancellation comes again at every await.

    A run that is cancelled writes its finished rows, for which it has to wait: it is cancelled once only.
    """
    running = asyncio.ensure_future(execute(job, **options))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.cancel()
        with CancelScope(shield=True):
            await asyncio.wait([running])
        raise


@contextmanager
def open_portal() -> Iterator[BlockingPortal]:
    """Start an event loop in a thread of its own; an interrupt in the caller cancels what runs there."""
    open_missing_descriptors()
    with start_blocking_portal("asyncio", backend_options={"use_uvloop": True}) as portal:
        yield portal
