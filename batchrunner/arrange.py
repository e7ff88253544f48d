"""The order within a window of rows: equal ones once, leaders before followers, the longest before the end.

Rows come as the plan has them and are looked at some thousand at a time. A row that shares its beginning with
another waits until `lead` tokens of prefill have been sent behind that; meanwhile others go. Pure: no clock,
no engine.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from batchrunner.families import find_families
from batchrunner.prefixes import prefix_of
from batchrunner.records import Outcome
from batchrunner.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from batchrunner.lead import Lead, LeadChange
    from batchrunner.lengths import Lengths
    from batchrunner.records import Completion, Request

WINDOW_ROWS, WINDOW_BYTES = 2048, 32 << 20
"""What is looked at together: rows, and the bytes of their prompts."""
LAST_ROWS = 8192
"""The last so many are looked at together: the longest go first, so that none is left over at the end."""
MOST_HELD = WINDOW_ROWS // 2
"""Rows that wait for their beginning from one window to the next."""
KIND_BYTES = 256
"""Rows that begin with the same ones are of one kind."""
GONE_ROWS, GONE_BYTES = 32, 8 << 20
"""Of the rows that were sent, what is remembered to find that a window goes on with their beginnings."""
FAMILY_SHARE = 0.25
"""A beginning that more than this share of a cache's part of the window has is computed for each cache."""


class Primer(NamedTuple):
    """A row whose beginning is to be computed before any other row goes.

    At the start, where the engine is empty, one prefill pass takes many rows: it would compute the same
    beginning for each of them.
    """

    work: Work
    round: int
    """Primers of a later round share beginnings with those before."""
    everywhere: bool
    """Whether those that follow it are not of its family: then each cache needs the beginning."""


class Arranger:
    """Puts rows in order as they come from the plan."""

    def __init__(self, lead: Lead | None, lengths: Lengths | None, *, dedupe: bool, caches: int = 1) -> None:
        """Without a `lead` beginnings do not matter; without `lengths` rows go as they come.

        Each of the engine's schedulers has one of the `caches`.
        """
        self._lead = lead
        self._lengths = lengths
        self._dedupe = dedupe
        self.caches = caches
        self._window: list[Work] = []
        self._window_bytes = 0
        self._gone: deque[Work] = deque(maxlen=GONE_ROWS)
        self._due: list[tuple[float, int, Work]] = []  # a heap: when by the clock, which was first, who
        self._ready: list[tuple[int, int, Work]] = []  # a heap of those whose time has come
        self._serial = count()
        self._clock = 0.0  # tokens of prefill that were sent
        self._sent_at: dict[Work, float] = {}  # by the clock, of those in `_gone` and in this window
        self._began = False

    @property
    def held(self) -> int:
        """Rows that came and have not been sent."""
        return len(self._window) + len(self._due)

    def saw(self, work: Work, completion: Completion) -> LeadChange | None:
        """Learn from an answer; return how that changed the distance between leaders and followers."""
        if self._lengths is not None:
            self._lengths.saw(work, sum(tokens or 0 for tokens in completion.completion_tokens))
        return self._lead.saw(work, completion) if self._lead is not None else None

    def arrange(
        self, batches: Iterable[list[Request | Outcome]], unread: Callable[[], int]
    ) -> Iterator[list[Work | Primer | Outcome]]:
        """Return the rows of the plan as they are to be sent; an empty batch says that more may take long.

        `unread` counts the rows that are still to come.
        """
        for batch in batches:
            outcomes: list[Work | Primer | Outcome] = []
            for item in batch:
                if isinstance(item, Outcome):
                    outcomes.append(item)
                else:
                    self._take(item)
            if outcomes:
                yield outcomes
            if not batch or self._is_full(unread()):
                yield self._arranged(last=not batch)
        yield self._arranged(last=True)

    def _take(self, request: Request) -> None:
        work = Work(request)
        if self._lead is not None or self._lengths is not None or self._dedupe:
            work.prefix = prefix_of(request)
            work.size, work.kind = len(work.prefix), crc32(work.prefix[:KIND_BYTES])
        self._window.append(work)
        self._window_bytes += work.size

    def _is_full(self, unread: int) -> bool:
        if self._lead is None and self._lengths is None and not self._dedupe:
            return True
        is_end = unread <= LAST_ROWS and self._lengths is not None
        most = WINDOW_ROWS + LAST_ROWS if is_end else WINDOW_ROWS
        return (len(self._window) >= most and unread > 0) or self._window_bytes >= WINDOW_BYTES

    def _arranged(self, *, last: bool) -> list[Work | Primer | Outcome]:
        window, self._window, self._window_bytes = self._window, [], 0
        if self._dedupe:
            window = _without_twins(window)
        if self._lead is not None:
            self._relate(window)
        leaders = [work for work in window if work.parent is None]
        if last and self._lengths is not None:
            leaders.sort(key=self._lengths.expected, reverse=True)
        works, primers = self._in_turn(leaders, last=last)
        self._began = True
        return [*primers, *works]

    def _relate(self, window: list[Work]) -> None:
        """Find out which row goes before which, those that were sent of late included."""
        gone = list(self._gone)
        rows = [*gone, *window]
        places = find_families([work.prefix for work in rows], len(gone))
        for index, place in places.items():
            if index < len(gone):
                continue
            work, parent = rows[index], rows[place.parent]
            work.parent, work.shared = parent, place.shared
            parent.children.append(work)
        for parent in gone:
            self._release(parent, self._sent_at[parent])
        if self.caches > 1:
            most = max(1, FAMILY_SHARE * len(window) / self.caches)
            common = {rows[index] for index, place in places.items() if place.rows > most}
            for work in window:
                _settle(work, common)

    def _release(self, parent: Work, sent_at: float) -> None:
        """Have a row's followers go when the distance is there: first those that others follow."""
        assert self._lead is not None
        for child in sorted(parent.children, key=lambda child: not child.children):
            heapq.heappush(self._due, (sent_at + self._lead.tokens, next(self._serial), child))
        parent.children = []

    def _in_turn(self, leaders: list[Work], *, last: bool) -> tuple[list[Work], list[Primer]]:
        """Send those that are due, else the next leader; where there is none, those that are due soonest.

        Of those that are due the one with the longest beginning goes. Below a common one many fall due
        together, and have followers in turn: in the order of their times all of them would go first, and what
        they brought in would be evicted before their followers came.
        """
        works: list[Work] = []
        primers: dict[Work, Primer] = {}
        waiting = deque(leaders)
        while True:
            while self._due and self._due[0][0] <= self._clock:
                _, serial, work = heapq.heappop(self._due)
                heapq.heappush(self._ready, (-work.shared, serial, work))
            if self._ready:
                work = heapq.heappop(self._ready)[2]
            elif waiting:
                work = waiting.popleft()
            elif self._due and (last or len(self._due) > MOST_HELD):
                work = heapq.heappop(self._due)[2]
                self._prime(work, primers)
            else:
                break
            self._send(work)
            works.append(work)
        self._remember(leaders, works)
        return works, [*primers.values()]

    def _prime(self, work: Work, primers: dict[Work, Primer]) -> None:
        """Have the beginning of a row's parent computed, if that is among the first that the engine gets."""
        assert self._lead is not None
        assert work.parent is not None
        parent = work.parent
        if not self._began and self._sent_at[parent] <= self._lead.tokens:
            turn = primers[parent.parent].round + 1 if parent.parent in primers else 0
            known = primers.get(parent, Primer(parent, turn, everywhere=self.caches == 1))
            primers[parent] = known._replace(everywhere=known.everywhere or work.family is not parent.family)

    def _send(self, work: Work) -> None:
        if self._lead is None:
            return
        self._clock += (work.size - work.shared) / self._lead.bytes_a_token
        self._sent_at[work] = self._clock
        self._release(work, self._clock)

    def _remember(self, leaders: list[Work], sent: list[Work]) -> None:
        """Keep some of those that lead: the next window may go on with their beginnings."""
        if self._lead is not None:
            self._gone.extend(work for work in leaders if work.size <= GONE_BYTES // GONE_ROWS)
        for work in set(sent).difference(self._gone):
            work.prefix = b""
        self._sent_at = {work: self._sent_at[work] for work in self._gone}


def _without_twins(window: list[Work]) -> list[Work]:
    """Return the rows with equal ones under the first of them."""
    first: dict[bytes, list[Work]] = {}
    kept = []
    for work in window:
        alike = first.setdefault(work.prefix, [])
        twin = next((other for other in alike if _are_twins(work.request, other.request)), None)
        if twin is None:
            alike.append(work)
            kept.append(work)
        else:
            twin.twins.append(work.request.ref)
    return kept


def _are_twins(one: Request, other: Request) -> bool:
    """Tell whether two rows are sure to get the same answer: all but where they come from is the same."""
    return one.sampling.get("temperature") == 0 and one[1:] == other[1:]


def _settle(work: Work, common: set[Work]) -> Work:
    """Find out with whom a row should stay: `common` follow a beginning which most rows have."""
    if work.family is None:
        parent = work.parent
        work.family = work if parent is None or work in common else _settle(parent, common)
    return work.family
