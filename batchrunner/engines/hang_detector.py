"""The hang detector: a server hangs if it has rows and does nothing for longer than they can explain. Pure.

Progress is a forward pass or an answer, not a reply to a poll: SGLang's HTTP process goes on reporting the
last load of a scheduler that stands still. The longest silence allowed is learned from the server: a multiple
of its longest silence so far, and never less than `limits.hang`. It is several times as long while the server
is new, or was restarted: kernels are compiled when they are first needed.

SGLang has a watchdog of its own (`--watchdog-timeout`, 300 s), which ends a server whose forward pass takes
longer. It stays on. It does not see a process that is stopped, a scheduler that waits for ever between two
passes, or a tokenizer or detokenizer that hangs.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from batchrunner.core.engine_info import SchedulerLoad

TIMES_LONGEST = 5.0
"""A silence that is this many times as long as the longest one that ended by itself is a hang."""
WARM_UP = 5.0
"""Multiple of `limits.hang` that a server must have worked before `limits.hang` itself is the limit; until
then the limit is this multiple too. With the default of 60 s it is 300 s, as SGLang's own watchdog."""
LONGEST_GAP_S = 5.0
"""Most seconds that count between two polls: nobody knows what a server did while nobody polled it."""


class Hang(NamedTuple):
    """A silence that is too long."""

    silent_s: float
    why: str
    """A sentence without its subject, which is the server's name."""


class SilenceTimer:
    """Measures how long a server, or one of its schedulers, has been silent while it had work."""

    def __init__(self, least_s: float) -> None:
        """Never call a silence a hang that is shorter than `least_s`, which is `limits.hang`."""
        self._least_s = least_s
        self._progress: object = None
        self._polled_at: float | None = None
        self._silent_s = 0.0
        self._worked_s = 0.0
        self._longest_s = 0.0

    def poll(self, now: float, progress: object, *, busy: bool) -> Hang | None:
        """Record a poll; return the silence if it is a hang.

        `progress` differs from the last poll's if something was done in between. `busy` is whether there is
        work.
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
        before = f"at most {self._longest_s:.3g} s before" if self._worked_s else "and never anything before"
        return Hang(self._silent_s, f"did nothing for {self._silent_s:.3g} s with rows in flight ({before})")


class HangDetector:
    """A silence timer for one server, and one for each of its schedulers if it has several (DP ranks)."""

    def __init__(self, least_s: float) -> None:
        """Take `limits.hang`."""
        self._least_s = least_s
        self._timers: dict[str, SilenceTimer] = {}
        self._progress: dict[str, object] = {}

    def poll(
        self, now: float, loads: Sequence[SchedulerLoad], *, in_flight: int, answers: int = 0
    ) -> Hang | None:
        """Record a poll of the server, empty if it failed; return the silence if it is a hang.

        `in_flight` counts the rows that may be there, `answers` those that have come back so far. A server
        that never reported its load is not judged: without answers it may be busy with long rows. After a
        hang the server counts as new.
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
        """Forget the server's work so far: it was started again."""
        self._timers.clear()

    def _timer(self, scheduler: str) -> SilenceTimer:
        return self._timers.setdefault(scheduler, SilenceTimer(self._least_s))


def progress_of(loads: Iterable[SchedulerLoad]) -> dict[str, object]:
    """Return, by scheduler, the part of a load that only a forward pass changes.

    Its queue is left out, which arrivals change, and the time at which it was read.
    """
    return {s.scheduler: (s.running, s.used_tokens, s.token_usage, s.work) for s in loads}
