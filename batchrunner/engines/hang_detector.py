"""Hang detection: a server hangs if it makes no progress for longer than its rows can explain. Pure.

Progress is a forward pass or an answer. A reply to a poll is none: SGLang's HTTP process keeps reporting the
last load of a scheduler that stands still. The longest silence allowed is learned from the server: a multiple
of its longest silence so far, and never less than `limits.hang`. It is several times as long for a server
that was just started, because kernels are compiled when they are first needed.

SGLang has its own watchdog (`--watchdog-timeout`, 300 s), which ends a server whose forward pass takes
longer. It stays on. It cannot see a suspended process, a scheduler that waits for ever between two passes, or
a hanging tokenizer or detokenizer.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from batchrunner.core.engine_info import SchedulerLoad

TIMES_LONGEST = 5.0
"""A silence is a hang only if it is longer than this multiple of the longest silence that ended by itself."""
WARM_UP = 5.0
"""Until a server has worked for this multiple of `limits.hang`, only a silence longer than this multiple is a
hang: 300 s by default, the same as SGLang's watchdog. From then on `limits.hang` itself is the limit."""
LONGEST_GAP_S = 5.0
"""Maximum seconds between two polls that count as silence. Nobody knows what a server did while it was not
polled."""


class Hang(NamedTuple):
    """A silence that is too long."""

    silent_s: float
    why: str
    """A clause that follows the server's name."""


class SilenceTimer:
    """Measures how long a server, or one of its schedulers, has been silent while it had work."""

    def __init__(self, least_s: float) -> None:
        """Start without history. A silence shorter than `least_s` (`limits.hang`) is never a hang."""
        self._least_s = least_s
        self._progress: object = None
        self._polled_at: float | None = None
        self._silent_s = 0.0
        self._worked_s = 0.0
        self._longest_s = 0.0

    def poll(self, now: float, progress: object, *, busy: bool) -> Hang | None:
        """Record a poll; return the silence if it is a hang.

        `progress` is any value that differs from the last poll's if work was done in between. `busy` says
        whether there is work.
        """
        passed_s = 0.0 if self._polled_at is None else min(now - self._polled_at, LONGEST_GAP_S)
        self._polled_at = now
        if progress != self._progress or not busy:
            if busy:
                self._longest_s = max(self._longest_s, self._silent_s)
                self._worked_s += self._silent_s + passed_s
            self._progress, self._silent_s = progress, 0.0
            return None
        self._silent_s += passed_s
        warm_up_s = WARM_UP * self._least_s
        least_s = self._least_s if self._worked_s >= warm_up_s else warm_up_s
        if self._silent_s <= max(least_s, TIMES_LONGEST * self._longest_s):
            return None
        history = (
            f"at most {self._longest_s:.3g} s before" if self._worked_s else "no progress since its start"
        )
        return Hang(self._silent_s, f"did nothing for {self._silent_s:.3g} s with rows in flight ({history})")


class HangDetector:
    """Silence timers of a server and, if it has several (DP ranks), of each scheduler."""

    def __init__(self, least_s: float) -> None:
        """`least_s` is `limits.hang`."""
        self._least_s = least_s
        self._timers: dict[str, SilenceTimer] = {}
        self._progress: dict[str, object] = {}

    def poll(
        self, now: float, loads: Sequence[SchedulerLoad], *, in_flight: int, answers: int = 0
    ) -> Hang | None:
        """Record a poll of the server, with no loads if it failed; return the silence if it is a hang.

        `in_flight` is the number of rows that the server may have, `answers` the number of answers so far. A
        server that never reported a load is not judged, as it may be busy with long rows. After a hang the
        server counts as new.
        """
        progress = progress_of(loads)
        self._progress |= progress
        if not self._progress:
            return None
        hang = self._timer("").poll(now, (answers, *self._progress.values()), busy=in_flight > 0)
        for load in loads if len(loads) > 1 else ():
            busy = in_flight > 0 and load.has_work
            hang = self._timer(load.scheduler).poll(now, progress[load.scheduler], busy=busy) or hang
        if hang:
            self.restarted()
        return hang

    def restarted(self) -> None:
        """Forget the server's work before its restart."""
        self._timers.clear()

    def _timer(self, scheduler: str) -> SilenceTimer:
        return self._timers.setdefault(scheduler, SilenceTimer(self._least_s))


def progress_of(loads: Iterable[SchedulerLoad]) -> dict[str, object]:
    """Return the values of each scheduler's load that only a forward pass changes.

    The queue is not among them, because arrivals change it, nor the time of the load sample. A gateway's
    worker reports its tokens, and all other values are estimated from the rows in flight.
    """
    return {
        load.scheduler: load.used_tokens
        if load.source == "gateway"
        else (load.running, load.used_tokens, load.token_usage, load.work)
        for load in loads
    }
