"""The order within a window of rows: equal ones once, leaders before followers, the longest before the end.

Rows come as the plan has them and are looked at some thousand at a time. Pure: no clock, no engine.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from batchrunner.core.types import Outcome
from batchrunner.dispatch.pending_row import PendingRow
from batchrunner.dispatch.prefix_order.pacing import FollowerRelease
from batchrunner.dispatch.prefix_order.prefix_tree import find_prefix_groups
from batchrunner.input.prefixes import prefix_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from batchrunner.core.types import Completion, Request
    from batchrunner.dispatch.prefix_order.distance import DistanceChange, ReuseDistance
    from batchrunner.dispatch.prefix_order.lengths import OutputLengths

WINDOW_ROWS, WINDOW_BYTES = 2048, 32 << 20
"""What is looked at together: rows, and the bytes of their prompts."""
LAST_ROWS = 8192
"""The last so many are looked at together: the longest go first, so that none is left over at the end."""
SHARED_ROWS = 512
"""Looked at together, of rows that other tasks could do: what one holds others cannot take."""
PIECE_ROWS = 256
"""Rows that are given away together."""
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

    work: PendingRow
    round: int
    """Primers of a later round share beginnings with those before."""
    everywhere: bool
    """Whether those that follow it are not of its family: then each cache needs the beginning."""


class Reorderer:
    """Puts rows in order as they come from the plan."""

    def __init__(
        self, lead: ReuseDistance | None, lengths: OutputLengths | None, *, dedupe: bool, caches: int = 1
    ) -> None:
        """Without a `lead` beginnings do not matter; without `lengths` rows go as they come.

        Each of the engine's schedulers has one of the `caches`.
        """
        self._lead = lead
        self._lengths = lengths
        self._dedupe = dedupe
        self.caches = caches
        self._window: list[PendingRow] = []
        self._window_bytes = 0
        self._gone: deque[PendingRow] = deque(maxlen=GONE_ROWS)
        self._pace = FollowerRelease(lead)
        self._began = False

    @property
    def held(self) -> int:
        """Rows that came and have not been sent."""
        return len(self._window) + len(self._pace)

    def sharing(self) -> dict[str, Any]:
        """Return what came of it, as report.json has it."""
        return self._lead.as_dict() if self._lead is not None else {}

    def saw(self, work: PendingRow, completion: Completion) -> DistanceChange | None:
        """Learn from an answer; return how that changed the distance between leaders and followers."""
        if self._lengths is not None:
            self._lengths.saw(work, sum(tokens or 0 for tokens in completion.completion_tokens))
        return self._lead.saw(work, completion) if self._lead is not None else None

    def arrange(
        self,
        batches: Iterable[list[Request | Outcome]],
        unread: Callable[[], int],
        *,
        is_shared: bool = False,
    ) -> Iterator[list[PendingRow | Primer | Outcome]]:
        """Return the rows of the plan as they are to be sent; an empty batch: those before it should go.

        `unread` counts the rows that are still to come, which other tasks could do if they are shared.
        """
        for batch in batches:
            outcomes: list[PendingRow | Primer | Outcome] = []
            for item in batch:
                if isinstance(item, Outcome):
                    outcomes.append(item)
                else:
                    self._take(item)
            if outcomes:
                yield outcomes
            if not batch or self._is_full(unread(), is_shared=is_shared):
                yield from self._arranged(last=not batch)
        yield from self._arranged(last=True)

    def _take(self, request: Request) -> None:
        work = PendingRow(request)
        prefix = prefix_of(request)
        work.size = len(prefix)  # what is read ahead is bounded by it, in any order
        if self._lead is not None or self._lengths is not None or self._dedupe:
            work.prefix, work.kind = prefix, crc32(prefix[:KIND_BYTES])
        self._window.append(work)
        self._window_bytes += work.size

    def _is_full(self, unread: int, *, is_shared: bool) -> bool:
        if self._lead is None and self._lengths is None and not self._dedupe:
            return True
        is_end = unread <= LAST_ROWS and self._lengths is not None
        most = SHARED_ROWS if is_shared else WINDOW_ROWS + LAST_ROWS if is_end else WINDOW_ROWS
        return (len(self._window) >= most and unread > 0) or self._window_bytes >= WINDOW_BYTES

    def _arranged(self, *, last: bool) -> Iterator[list[PendingRow | Primer | Outcome]]:
        """Put the rows of the window in order, and return those that should go by now, piece by piece.

        So what is learnt from the first answers is known for the others.
        """
        window, self._window, self._window_bytes = self._window, [], 0
        if self._dedupe:
            window = _without_twins(window)
        if self._lead is not None:
            self._relate(window)
        if last and self._lengths is not None:
            _find_longest(window, self._lengths)
        leaders = [work for work in window if work.parent is None]
        leaders.sort(key=lambda work: -work.longest)
        self._pace.add(leaders)
        if self._lead is not None:
            self._gone.extend(work for work in leaders if work.size <= GONE_BYTES // GONE_ROWS)
        while piece := self._piece(last=last):
            yield piece

    def _piece(self, *, last: bool) -> list[PendingRow | Primer | Outcome]:
        works: list[PendingRow] = []
        primers: dict[PendingRow, Primer] = {}
        while len(works) < PIECE_ROWS and (turn := self._pace.take(last=last)):
            works.append(turn.work)
            if turn.is_early and not self._began:
                self._prime(turn.work, primers)
        self._began = self._began or bool(works)
        for work in works:
            if work not in self._gone:
                work.prefix = b""
        return [*primers.values(), *works]

    def _relate(self, window: list[PendingRow]) -> None:
        """Find out which row goes before which, those that were sent of late included."""
        gone = list(self._gone)
        rows = [*gone, *window]
        places = find_prefix_groups([work.prefix for work in rows], len(gone))
        for index, place in sorted(places.items()):  # as they came: neighbours in sorted order would go in
            if index < len(gone):  # one pass, and compute again the little more that they have in common
                continue
            work, parent = rows[index], rows[place.parent]
            work.parent, work.shared = parent, place.shared
            parent.children.append(work)
        for parent in gone:
            self._pace.follow(parent)
        if self.caches > 1:
            most = max(1, FAMILY_SHARE * len(window) / self.caches)
            common = {rows[index] for index, place in places.items() if place.rows > most}
            for work in window:
                _settle(work, common)

    def _prime(self, work: PendingRow, primers: dict[PendingRow, Primer]) -> None:
        """Have the beginning of a row's parent computed, if that is among the first that the engine gets."""
        assert self._lead is not None
        assert work.parent is not None
        parent = work.parent
        if parent.clock - parent.new_tokens <= self._lead.tokens:
            turn = primers[parent.parent].round + 1 if parent.parent in primers else 0
            known = primers.get(parent, Primer(parent, turn, everywhere=self.caches == 1))
            primers[parent] = known._replace(everywhere=known.everywhere or work.family is not parent.family)


def _find_longest(window: Iterable[PendingRow], lengths: OutputLengths) -> None:
    """Find out how long the outputs will be: a row with a long one behind it has to go early too."""
    for work in window:
        longest = lengths.expected(work)
        ahead: PendingRow | None = work
        while ahead is not None and ahead.longest < longest:
            ahead.longest, ahead = longest, ahead.parent


def _without_twins(window: list[PendingRow]) -> list[PendingRow]:
    """Return the rows with those that are sure to get the same answer under the first of them."""
    first: dict[tuple[bytes, str], PendingRow] = {}
    kept = []
    for work in window:
        twin = work
        if work.request.sampling.get("temperature") == 0:
            twin = first.setdefault((work.prefix, repr(work.request.sampling)), work)
        if twin is not work and twin.request[1:] == work.request[1:]:  # all but where they come from
            twin.twins.append(work.request.ref)
        else:
            kept.append(work)
    return kept


def _settle(work: PendingRow, common: set[PendingRow]) -> PendingRow:
    """Find out with whom a row should stay: `common` follow a beginning which most rows have."""
    if work.family is None:
        parent = work.parent
        work.family = work if parent is None or work in common else _settle(parent, common)
    return work.family
