"""Threads and signals of this process."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run.

Slurm, systemd and `timeout` send a signal to all processes of a run. Child processes ignore these signals,
because the run still needs them for rows in flight.
"""


class SignalWatch:
    """Passes each signal to a listener at once, even while the main thread blocks.

    Python runs signal handlers in the main thread, and an event loop runs its own between two callbacks. Both
    wait while a call blocks. But Python's C handler writes the signal's number to a pipe at once
    (`signal.set_wakeup_fd`). A thread of this class reads the pipe. It copies the numbers to the pipe that
    was set before, such as that of an event loop.
    """

    def __init__(
        self,
        listener: Callable[[signal.Signals], None],
        caught: Collection[signal.Signals] = (),
        *,
        requests: Collection[signal.Signals] = (),
    ) -> None:
        """Prepare to call `listener` with each signal, in a separate thread.

        During the `with` block, signals in `caught` have no other effect. Signals that were ignored before
        stay ignored, except those in `requests`, which ask the process to do something.
        """
        self._listener = listener
        self._caught = caught
        self._requests = requests
        self._handlers: dict[signal.Signals, signal.Handlers | object] = {}
        self._read_end, self._write_end, self._previous_pipe = -1, -1, -1
        self._thread = threading.Thread(target=self._read, daemon=True, name="signals")

    def __enter__(self) -> Self:
        """Start listening. Outside of the main thread, where Python sets no handlers, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous_pipe = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        # The default action of the signal may be to end the process, so an empty handler replaces it. If the
        # program that started this process ignores the signal, it stays ignored.
        for number in self._caught:
            if number in self._requests or signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, ignore_signal)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening, and restore the earlier handlers."""
        if self._write_end < 0:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_pipe, warn_on_full_buffer=False)
        os.close(self._write_end)  # `_read` returns at the end of the pipe, which ends the thread.
        self._thread.join()
        os.close(self._read_end)

    def _read(self) -> None:
        """Pass on each signal until `__exit__` closes the write end of the pipe."""
        while numbers := os.read(self._read_end, 64):
            # The write fails if no other pipe was set, or if it is full. A full pipe wakes its reader anyway.
            with contextlib.suppress(OSError):
                os.write(self._previous_pipe, numbers)
            for number in numbers:
                self._listener(signal.Signals(number))


def ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Do nothing. This handler is set for a signal that a SignalWatch passes to its listener."""


@contextlib.contextmanager
def repeating(action: Callable[[], object], every_s: float, *, thread: str) -> Iterator[None]:
    """Call `action` every `every_s` seconds during the `with` block, in a thread with the name `thread`."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            action()

    repeater = threading.Thread(target=repeat, name=thread, daemon=True)
    repeater.start()
    try:
        yield
    finally:
        is_over.set()
        repeater.join()


@contextlib.contextmanager
def thread_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads, and wait for their end after the block.

    After a Ctrl-C there is no wait, because a thread may hang on a network mount that never answers.
    """
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    except BaseException as failure:
        pool.shutdown(wait=not isinstance(failure, KeyboardInterrupt), cancel_futures=True)
        raise
    pool.shutdown()
