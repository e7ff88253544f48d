"""Hang detection: a server hangs if it makes no progress for longer than its rows can explain.

Progress is a forward pass or an answer. A reply to a poll is not progress, because SGLang's HTTP process
keeps reporting the last load of a scheduler that stands still. A silence is a time without progress. It is a
hang if it is longer than `limits.hang`, and longer than a multiple of the server's longest silence so far. A
server that was just started may be silent for several times as long, because kernels are compiled when they
are first needed.

SGLang has its own watchdog (`--watchdog-timeout`, 300 s), which ends a server whose forward pass takes
longer. The run leaves the watchdog on. The watchdog cannot see a suspended process, a scheduler that waits
for ever between two passes, or a hanging tokenizer or detokenizer.

The module does no I/O and reads no clock: the caller passes all times.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from batchrunner.core.engine_info import SchedulerLoad

TIMES_LONGEST = 5.0
"""Factor: a time without progress is a hang only if it exceeds this multiple of the longest earlier one that
ended by itself."""
WARM_UP = 5.0
"""A new server warms up until it has worked for this multiple of `limits.hang` (300 s by default, like
SGLang's watchdog). Until then, only a longer time without progress is a hang."""
LONGEST_GAP_S = 5.0
"""Maximum seconds between two polls that count as silence. Nobody knows what the server did in a longer
gap."""


class Hang(NamedTuple):
    """A silence of a server that is too long."""

    silent_s: float
    """Seconds without progress."""
    why: str
    """Reason, in words that follow the server's name in a message."""


class SilenceTimer:
    """Measures how long a server, or one of its schedulers, has been silent while it had work."""

    def __init__(self, least_s: float) -> None:
        """Start without history. A silence of up to `least_s` seconds (`limits.hang`) is never a hang."""
        self._least_s = least_s
        self._progress: object = None
        self._polled_at: float | None = None
        self._silent_s = 0.0
        """Seconds since the last progress, while there was work."""
        self._worked_s = 0.0
        """Seconds in which the server had work and made progress."""
        self._longest_s = 0.0
        """Seconds of the longest silence that ended with progress."""

    def poll(self, now: float, progress: object, *, busy: bool) -> Hang | None:
        """Record a poll at the time `now`, in seconds; return a Hang if the silence is too long.

        `progress` is any value that changes whenever work is done. `busy` says whether there is work.
        """
        passed_s = 0.0 if self._polled_at is None else min(now - self._polled_at, LONGEST_GAP_S)
        self._polled_at = now
        if progress != self._progress or not busy:
            # The silence has ended. A server without work is not silent, so only time with work counts.
            if busy:
                self._longest_s = max(self._longest_s, self._silent_s)
                self._worked_s += self._silent_s + passed_s
            self._progress, self._silent_s = progress, 0.0
            return None
        self._silent_s += passed_s
        # A server compiles kernels at first. So until it has worked for `warm_up_s` in all, a silence of up
        # to `warm_up_s` is no hang.
        warm_up_s = WARM_UP * self._least_s
        least_s = self._least_s if self._worked_s >= warm_up_s else warm_up_s
        if self._silent_s <= max(least_s, TIMES_LONGEST * self._longest_s):
            return None
        history = (
            f"never before for more than {self._longest_s:.3g} s"
            if self._worked_s
            else "no progress since its start"
        )
        return Hang(self._silent_s, f"did nothing for {self._silent_s:.3g} s with rows in flight ({history})")


class HangDetector:
    """Silence timers of a server, and of each of its schedulers if there are several (DP ranks)."""

    def __init__(self, least_s: float) -> None:
        """`least_s` is `limits.hang`, in seconds."""
        self._least_s = least_s
        self._timers: dict[str, SilenceTimer] = {}
        """Timers by the name of the scheduler; "" is the timer of the whole server."""
        self._progress: dict[str, object] = {}
        """Last progress of each scheduler, by its name."""

    def poll(
        self, now: float, loads: Sequence[SchedulerLoad], *, in_flight: int, answers: int = 0
    ) -> Hang | None:
        """Record a poll of the server; return the silence if the server, or one of its schedulers, hangs.

        `loads` is empty if the poll failed. `in_flight` is the number of requests that the server may have,
        `answers` the number of answers so far. A server that has never reported a load is not judged, because
        it may be busy with long rows. After a hang, the server's history starts anew.
        """
        progress = progress_of(loads)
        self._progress |= progress
        if not self._progress:
            return None
        # The timer "" is that of the whole server, for which an answer is progress too.
        hang = self._timer("").poll(now, (answers, *self._progress.values()), busy=in_flight > 0)
        # One of several schedulers may hang while the others make progress.
        if len(loads) > 1:
            for load in loads:
                busy = in_flight > 0 and load.has_work
                hang = self._timer(load.scheduler).poll(now, progress[load.scheduler], busy=busy) or hang
        if hang:
            self.restarted()
        return hang

    def restarted(self) -> None:
        """Forget the history of the server, because the server was restarted or will be."""
        self._timers.clear()

    def _timer(self, scheduler: str) -> SilenceTimer:
        return self._timers.setdefault(scheduler, SilenceTimer(self._least_s))


def progress_of(loads: Iterable[SchedulerLoad]) -> dict[str, object]:
    """Return, for each scheduler, the values of its load that only a forward pass changes.

    The queue length is left out, because arriving requests change it too; so is the time of the load sample.
    A gateway reports only the tokens of its workers; the other values are estimates from the rows in flight,
    and are left out.
    """
    progress: dict[str, object] = {}
    for load in loads:
        if load.source == "gateway":
            progress[load.scheduler] = load.used_tokens
        else:
            progress[load.scheduler] = (load.running, load.used_tokens, load.token_usage, load.work)
    return progress
