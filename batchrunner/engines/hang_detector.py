"""Whether a server hangs: it has rows, and does nothing for longer than they can explain. Pure.

What counts as doing something is a forward pass or an answer, not a reply to a poll: SGLang's HTTP side goes
on telling the last load of a scheduler that stands still. How long is too long is learned from the server
itself: a multiple of its longest silence so far, and never less than `limits.hang`. It is given several
times as long while little has been seen of it (kernels are compiled when they are first needed), and twice as
long when it did nothing at all since it last hung: if it was only slow, it shall come to its end now.

SGLang has a watchdog of its own (`--watchdog-timeout`, 300 s), which ends a server whose forward pass takes
longer. It stays as it is: it does not see a process that is stopped, a scheduler that waits for ever between
two passes, or a tokenizer or detokenizer that hangs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchrunner.core.types import SchedulerLoad

TIMES_LONGEST = 5.0
"""A silence so many times as long as the longest that ended by itself is a hang."""
WARM_UP = 5.0
"""Until a server has worked for this multiple of `limits.hang`, it is given as much: with the default 300 s,
what SGLang's own watchdog gives a forward pass."""
STALL = 0.25
"""Of a silence that is a hang: from here on a server that can be spared gets no more rows."""
LONGEST_LOOK_S = 5.0
"""Of the time between two looks, no more counts: if nobody looked, nobody knows."""


class Hang(NamedTuple):
    """A silence that is too long."""

    silent_s: float
    why: str
    """A sentence."""


@dataclass(slots=True)
class Pulse:
    """How long something has been silent while it had work."""

    shortest_s: float
    """`limits.hang`."""
    _work: object = None
    _looked_at: float | None = None
    _silent_s: float = 0.0
    _worked_s: float = 0.0
    _longest_s: float = 0.0
    _in_vain: bool = False

    @property
    def limit_s(self) -> float:
        """The longest silence that is borne now, in seconds."""
        warm_up_s = WARM_UP * self.shortest_s
        least_s = self.shortest_s if self._worked_s >= warm_up_s else warm_up_s
        return max(least_s, TIMES_LONGEST * self._longest_s) * (2 if self._in_vain else 1)

    @property
    def stalls(self) -> bool:
        """Whether it is on its way to a hang."""
        return self._silent_s > STALL * self.limit_s

    def look(self, now: float, work: object, *, busy: bool) -> Hang | None:
        """Take what is seen now; return the silence when it is a hang, and begin to count anew.

        `work` differs from the last look's if something was done in between; `busy` is whether it has any.
        """
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now
        if work != self._work or not busy:
            if busy:
                self._longest_s = max(self._longest_s, self._silent_s)
                self._worked_s += self._silent_s + passed_s
                self._in_vain = False
            self._work, self._silent_s = work, 0.0
            return None
        self._silent_s += passed_s
        if self._silent_s <= self.limit_s:
            return None
        before = f"at most {self._longest_s:.3g} s before" if self._worked_s else "and never anything before"
        hang = Hang(self._silent_s, f"did nothing for {self._silent_s:.3g} s with rows in flight ({before})")
        self._silent_s, self._in_vain = 0.0, True
        return hang

    def restarted(self) -> None:
        """Forget a silence that a new start has ended."""
        self._silent_s = 0.0


@dataclass(slots=True)
class HangDetector:
    """The pulse of one server, and of each of its schedulers where it has several (DP ranks)."""

    shortest_s: float
    """`limits.hang`."""
    alone: bool = True
    """Whether all rows in flight are this server's: behind a gateway only its load tells whether any are."""
    _server: Pulse = field(init=False)
    _schedulers: dict[str, Pulse] = field(default_factory=dict)
    _marks: dict[str, object] = field(default_factory=dict)
    _loaded: bool = False

    def __post_init__(self) -> None:
        """Begin with a server of which nothing is known."""
        self._server = Pulse(self.shortest_s)

    def look(
        self, now: float, signals: Sequence[SchedulerLoad], *, in_flight: int, answers: int = 0
    ) -> Hang | None:
        """Take a poll of the server (empty where it failed); return its silence when that is a hang.

        `in_flight` are the rows that may be there, `answers` those that have come back from there so far. A
        server that never told its load cannot be judged: its answers alone say nothing of a long row.
        """
        told = marks(signals)
        self._marks |= told
        if signals:
            self._loaded = any(signal.has_work for signal in signals)
        if not self._marks:
            return None
        busy = in_flight > 0 and (self.alone or self._loaded or not signals)
        hang = self._server.look(now, (answers, *self._marks.values()), busy=busy)
        for signal in signals if len(signals) > 1 else ():
            pulse = self._schedulers.setdefault(signal.scheduler, Pulse(self.shortest_s))
            hang = pulse.look(now, told[signal.scheduler], busy=in_flight > 0 and signal.has_work) or hang
        return hang

    @property
    def stalls(self) -> bool:
        """Whether the server, or one of its schedulers, is on its way to a hang."""
        return any(pulse.stalls for pulse in (self._server, *self._schedulers.values()))

    def restarted(self) -> None:
        """Forget the silence, not what was learned: the server has been started again."""
        for pulse in (self._server, *self._schedulers.values()):
            pulse.restarted()


def marks(signals: Iterable[SchedulerLoad]) -> dict[str, object]:
    """Return of each scheduler what a forward pass changes; arrivals change its queue, a clock its times."""
    return {s.scheduler: (s.running, s.used_tokens, s.token_usage, s.work) for s in signals}
