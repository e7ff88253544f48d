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
"""Signals that stop a run. Slurm, systemd and `timeout` send them to all of its processes, but only the run
takes them: it waits for its rows in flight, which need those processes."""


class SignalWatch:
    """Tells a listener of each signal that Python handles, while it is open; for the main thread only.

    Python runs a signal's handler in the main thread, and an event loop its own between two callbacks: both
    wait for a call that blocks. The C handler writes the signal's number to a pipe at once, which a thread
    reads here. Whoever had that pipe's place before, such as the event loop, gets the numbers too.
    """

    def __init__(
        self, listener: Callable[[signal.Signals], None], caught: Collection[signal.Signals] = ()
    ) -> None:
        """Call `listener` with each signal, in another thread than the main one.

        `caught` are signals that do nothing else meanwhile; those that are ignored stay ignored.
        """
        self._listener = listener
        self._caught = caught
        self._handlers: dict[signal.Signals, signal.Handlers | object] = {}
        self._reading, self._writing, self._next = -1, -1, -1
        self._thread = threading.Thread(target=self._read, daemon=True, name="signals")

    def __enter__(self) -> Self:
        """Begin; nothing is done in another thread than the main one, where Python refuses it."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._next = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in self._caught:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, listened_to)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End, and leave everything as it was before."""
        if self._writing < 0:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._next, warn_on_full_buffer=False)
        os.close(self._writing)
        self._thread.join()
        os.close(self._reading)

    def _read(self) -> None:
        while numbers := os.read(self._reading, 64):
            with contextlib.suppress(OSError):  # there is nobody, or it is about to read what it has
                os.write(self._next, numbers)
            for number in numbers:
                self._listener(signal.Signals(number))


def listened_to(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal that a SignalWatch catches: its listener does."""


@contextlib.contextmanager
def repeating(action: Callable[[], object], every_s: float, *, thread: str) -> Iterator[None]:
    """Call `action` every `every_s` seconds during the block, in a thread of this name."""
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
    """Open a pool of threads and wait for their end, but not after a Ctrl-C: a mount may never answer."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    except BaseException as failure:
        pool.shutdown(wait=not isinstance(failure, KeyboardInterrupt), cancel_futures=True)
        raise
    pool.shutdown()
