"""Ends the rendering of a row that never ends: a template may hold loops, recursion and filters that do not.

A thread looks at all threads that render. In one that has used too much CPU time for a row it raises an
exception. CPU time does not pass while the machine is busy with other programs, or while the process is
stopped.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from batchrunner.core.errors import RowRefusedError

LIMIT_S = 5.0
"""CPU time in which a row is rendered, in seconds, unless the job says otherwise: thousands of times what the
longest prompts take."""
_LOOK_S = 0.2
"""Pause between two looks at the threads, in seconds."""
_IDLE_LOOKS = 50
"""Looks at which no thread renders before the watch rests."""


class RenderTooLongError(BaseException):
    """Raised in a thread whose rendering takes too long; no template and no filter catches it."""


class _Rendering:
    """One row that a thread renders."""

    __slots__ = ("began_s", "clock", "firing", "limit_s", "over")

    def __init__(self, limit_s: float) -> None:
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        self.limit_s = limit_s
        self.began_s: float | None = None
        """CPU time of the thread when the watch first saw this row."""
        self.over = False
        """Whether the row is rendered."""
        self.firing = False
        """Whether the exception is about to be raised, or was."""


class _Watch:
    """The thread that looks at all others that render."""

    def __init__(self) -> None:
        self._renderings: dict[int, _Rendering] = {}
        self._wanted = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def is_looking(self) -> bool:
        """Tell whether this thread is looked at already."""
        return threading.get_ident() in self._renderings

    def begin(self, rendering: _Rendering) -> None:
        """Look at this thread from now on."""
        self._renderings[threading.get_ident()] = rendering
        if not self._wanted.is_set():
            self._wanted.set()
        if self._thread is None or not self._thread.is_alive():  # also in a process that was forked
            with self._starting:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._look, name="render-limit", daemon=True)
                    self._thread.start()

    def end(self) -> None:
        """Look at this thread no more."""
        self._renderings.pop(threading.get_ident(), None)

    def _look(self) -> None:
        idle = 0
        while True:
            self._wanted.wait()
            time.sleep(_LOOK_S)
            for thread, rendering in list(self._renderings.items()):
                self._look_at(thread, rendering)
            idle = 0 if self._renderings else idle + 1
            if idle > _IDLE_LOOKS:
                self._wanted.clear()
                if self._renderings:  # it began since the last look
                    self._wanted.set()

    def _look_at(self, thread: int, rendering: _Rendering) -> None:
        try:
            used_s = time.clock_gettime(rendering.clock)
        except OSError:  # the thread has ended
            return
        if rendering.began_s is None:
            rendering.began_s = used_s
        if used_s - rendering.began_s < rendering.limit_s or rendering.firing:
            return
        # The other thread sets `over` and then reads `firing`: one of the two sees what the other did.
        rendering.firing = True
        if rendering.over:
            rendering.firing = False
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(RenderTooLongError)
            )


_WATCH = _Watch()


class RenderLimit:
    """Renders rows in a limited CPU time each; `what` names another work on a row, for the error."""

    def __init__(self, seconds: float = LIMIT_S, what: str = "rendering") -> None:
        self._seconds = seconds
        self._what = what

    def call(self, render: Callable[..., Any], *args: Any) -> Any:
        """Return what `render` returns; raises RowRefusedError where it takes too long.

        Within another call it counts for that one. One call into C cannot be interrupted: `made_sizes.py`
        refuses those of templates that would take long.
        """
        if _WATCH.is_looking():
            return render(*args)
        rendering = _Rendering(self._seconds)
        _WATCH.begin(rendering)
        try:
            try:
                found = render(*args)
            except RenderTooLongError:
                raise
            except BaseException:
                _end(rendering)
                raise
            _end(rendering)
        except RenderTooLongError:
            raise RowRefusedError(
                f"{self._what} took more than {self._seconds:g} s of CPU time (limits.render)"
            ) from None
        finally:
            _WATCH.end()
        return found


def _end(rendering: _Rendering) -> None:
    """End a rendering; if its exception is on the way, wait for it here: nowhere else may it come up."""
    rendering.over = True
    while rendering.firing:
        time.sleep(0)
