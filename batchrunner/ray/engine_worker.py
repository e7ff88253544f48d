"""What an actor of Ray Data holds: an open engine, and a stream of rows through it."""

import asyncio
from contextlib import ExitStack

import pyarrow as pa

from batchrunner.api import open_engine
from batchrunner.core.errors import BatchrunError
from batchrunner.job.spec import LimitsSpec
from batchrunner.ray.blocks import BlockStream
from batchrunner.ray.stage_call import StageCall
from batchrunner.runner.open_engine import OpenEngine


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
        opening = open_engine(call.call.engine, request_timeout_s=limits.request_timeout, task=call.task)
        self._engine: OpenEngine = self._stack.enter_context(opening)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the rows with their answers; raises BatchrunError."""
        async with self._opening:
            stream = self._stream
            if stream is None:
                stream = self._stream = await asyncio.to_thread(
                    BlockStream, self._call, self._engine.loop, batch.schema
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
