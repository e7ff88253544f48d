"""Bridge between threads and event loops: a thread can run work on a loop, and a loop in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from threading import Lock, Thread
from typing import Any, Generic, Self, TypeVar

import uvloop

from batchrunner.core.console import open_missing_descriptors
from batchrunner.core.errors import BatchrunError

T = TypeVar("T")
_CLOSED = "the engine is closed: use it within its `with open_engine(…)`"
STOP: ContextVar[Future[None] | None] = ContextVar("STOP", default=None)
"""Future of the blocking call in this context, done when the call's caller is cancelled.

Work that the call has started on an event loop is then cancelled too. It is None outside of `call_in_thread`.
"""


class LoopWork(Generic[T]):
    """A coroutine that runs on the event loop of another thread.

    It is cancelled at most once: a cancelled run still writes its finished rows, and a second cancellation
    would interrupt that.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Start the coroutine that `work` returns; raise RuntimeError if the loop is closed."""
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self._is_cancelled = False
        self.result: Future[T] = Future()
        """Future with the coroutine's result.

        Its exception is a BatchrunError if the coroutine was cancelled.
        """
        self.result.set_running_or_notify_cancel()  # A running future cannot be cancelled.
        loop.call_soon_threadsafe(self._begin, work)
        # STOP is set in a thread that works for a coroutine of the program, and done when that is cancelled.
        if (stop := STOP.get()) is not None:
            stop.add_done_callback(lambda _: self.cancel())

    def cancel(self) -> None:
        """Cancel the coroutine unless it has ended. Thread-safe; does not wait."""
        if not self.result.done():
            with contextlib.suppress(RuntimeError):  # The loop was closed after the coroutine had ended.
                self._loop.call_soon_threadsafe(self._cancel)

    def wait(self) -> T:
        """Wait for the coroutine and return its result; a Ctrl-C cancels the coroutine.

        Raises BatchrunError if the coroutine was cancelled, for example because the engine was closed.
        """
        try:
            return self.result.result()
        except KeyboardInterrupt:
            self.cancel_and_wait()
            raise

    async def wait_async(self) -> T:
        """Wait for the coroutine and return its result; cancelling this call cancels the coroutine.

        Raises BatchrunError if the coroutine was cancelled, for example because the engine was closed.
        """
        try:
            return await asyncio.wrap_future(self.result)
        except asyncio.CancelledError:
            await self.cancel_and_wait_async()
            raise

    def cancel_and_wait(self) -> None:
        """Cancel the coroutine unless it has ended, and wait for its end. Blocks."""
        self.cancel()
        self.result.exception()

    async def cancel_and_wait_async(self) -> None:
        """Cancel the coroutine unless it has ended, and wait for its end."""
        self.cancel()
        await asyncio.gather(asyncio.wrap_future(self.result), return_exceptions=True)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Start the coroutine. Called in the thread of the loop."""

        # `work` is called inside of the task, so that its exceptions also reach `result`.
        async def run() -> T:
            return await work()

        self._task = self._loop.create_task(run())
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        """Set `result` to the result or the error of the task that has ended."""
        if task.cancelled():
            self.result.set_exception(BatchrunError(_CLOSED))
        elif (failure := task.exception()) is not None:
            self.result.set_exception(failure)
        else:
            self.result.set_result(task.result())


class LoopThread:
    """An event loop that runs in a separate thread for the duration of a `with` block."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = Thread(target=self._run, name="batchrunner loop")
        self._lock = Lock()
        self._works: set[LoopWork[Any]] = set()
        self._is_closed = False

    def __enter__(self) -> Self:
        """Start the thread."""
        open_missing_descriptors()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel all work, wait for its end, and end the thread."""
        # Cancelled work may start more work here to clean up, so the loop is still open.
        self.cancel_all()
        with self._lock:
            self._is_closed = True
        self.cancel_all()  # Other threads may have started work during the first `cancel_all`.
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> LoopWork[T]:
        """Start a coroutine on the loop; raise BatchrunError if the `with` block has ended."""
        with self._lock:
            if self._is_closed:
                raise BatchrunError(_CLOSED)
            loop_work = LoopWork(self._loop, work)
            self._works.add(loop_work)
        loop_work.result.add_done_callback(lambda _: self._works.discard(loop_work))
        return loop_work

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop and return its result. Blocks."""
        return self.start(work).wait()

    def cancel_all(self) -> None:
        """Cancel all work, such as streams that a program left open, and wait for its end."""
        for work in list(self._works):
            work.cancel_and_wait()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


async def call_in_thread(blocking: Callable[..., T], *args: Any, **options: Any) -> T:
    """Run a blocking call in a separate thread and return its result.

    If this coroutine is cancelled, the work that the call has started on an event loop is cancelled too.
    """
    stop: Future[None] = Future()
    context = copy_context()
    context.run(STOP.set, stop)
    work = functools.partial(context.run, blocking, *args, **options)
    # The call may last for hours, so it must not occupy a thread of the program's default executor.
    thread = ThreadPoolExecutor(1, "batchrunner call")
    call = asyncio.get_running_loop().run_in_executor(thread, work)
    try:
        # A thread cannot be cancelled. `shield` keeps `call`, which ends by itself once STOP is done.
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        stop.set_result(None)
        # Wait for the end of the call, and drop its error.
        await asyncio.gather(call, return_exceptions=True)
        raise
    finally:
        thread.shutdown(wait=False)
