"""Expected output lengths: what the job allows, and what rows with the same template have had. Pure."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from zlib import crc32

from batchrunner.core.types import Completion, Outcome, Request
from batchrunner.dispatch.distance import DistanceChange, ReuseDistance
from batchrunner.dispatch.pacing import FollowerRelease
from batchrunner.dispatch.pending_row import PendingRow, RowSource
from batchrunner.dispatch.prefix_tree import find_leaders
from batchrunner.input.prefixes import prompt_bytes

MOST_TEMPLATES = 1024
"""Templates whose averages are kept."""
FEWEST_ROWS = 8
"""Rows that an average needs before it is used."""


class OutputLengths:
    """A running average of the output tokens of each template's rows."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int]] = {}  # rows and tokens

    def record(self, row: PendingRow, tokens: int) -> None:
        """Add the output tokens of an answered row."""
        rows, sum_ = self._sums.get(row.template, (0, 0))
        if rows or len(self._sums) < MOST_TEMPLATES:
            self._sums[row.template] = rows + 1, sum_ + tokens

    def expected(self, row: PendingRow) -> float:
        """Return the output tokens that a row is expected to have, `max_new_tokens` at most."""
        most = row.request.sampling["max_new_tokens"]
        if row.request.sampling.get("ignore_eos"):
            return float(most)
        rows, tokens = self._sums.get(row.template, (0, 0))
        return min(most, tokens / rows) if rows >= FEWEST_ROWS else float(most)


WINDOW_ROWS, WINDOW_BYTES = 2048, 32 << 20
"""Rows that are ordered together, and the bytes of their prompts."""
LAST_ROWS = 8192
"""Last rows of the input that are ordered together: the longest go first, so that none is left at the end."""
SHARED_ROWS = 512
"""Rows that are ordered together if other tasks could do them: what one task holds the others cannot take."""
PIECE_ROWS = 256
"""Rows that are handed on together."""
TEMPLATE_BYTES = 256
"""Bytes at the start of a prompt by which templates are distinguished."""
SENT_ROWS, SENT_BYTES = 32, 8 << 20
"""Sent rows that later rows may still follow, and the bytes of their prompts."""
COMMON_SHARE = 0.25
"""Share of a replica's rows in the window above which a prefix is computed on every replica."""


class PrimeTask(NamedTuple):
    """A prefix to compute before any other row goes.

    An empty engine admits many rows in its first prefill pass, and would compute the prefix for each of them.
    """

    row: PendingRow
    round: int
    """Tasks of a later round have prefixes that begin with those of earlier rounds."""
    on_every_replica: bool


class Reorderer:
    """Puts rows in order as they come from their source."""

    def __init__(
        self,
        distance: ReuseDistance | None,
        lengths: OutputLengths | None,
        *,
        dedupe: bool,
        caches: int = 1,
        by_length: bool = False,
    ) -> None:
        """Without a `distance` prefixes do not matter; without `lengths` long outputs do not.

        With `by_length` the longest prompts of the window go first: rows of about one length share a pass.
        `caches` is the number of prefix caches: each of the engine's schedulers has one.
        """
        self._distance = distance
        self._lengths = lengths
        self._dedupe = dedupe
        self._by_length = by_length
        self.caches = caches
        self._window: list[PendingRow] = []
        self._window_bytes = 0
        self._sent: deque[PendingRow] = deque(maxlen=SENT_ROWS)
        self._release = FollowerRelease(distance)
        self._began = False

    @property
    def held(self) -> int:
        """Rows that came and were not handed on yet."""
        return len(self._window) + len(self._release)

    def sharing(self) -> dict[str, Any]:
        """Return what report.json has under `sharing`."""
        return self._distance.as_dict() if self._distance is not None else {}

    def record(self, row: PendingRow, completion: Completion, output_tokens: int) -> DistanceChange | None:
        """Learn from an answer with so many tokens; return how that changed the reuse distance."""
        if self._lengths is not None:
            self._lengths.record(row, output_tokens)
        return self._distance.record(row, completion) if self._distance is not None else None

    def reorder(self, source: RowSource) -> Iterator[list[PendingRow | PrimeTask | Outcome]]:
        """Read a source and yield its rows as they are to be sent; outcomes in it are yielded at once."""
        for batch in source.batches():
            outcomes: list[PendingRow | PrimeTask | Outcome] = []
            for item in batch:
                if isinstance(item, Outcome):
                    outcomes.append(item)
                else:
                    self._add(item)
            if outcomes:
                yield outcomes
            if not batch or self._is_full(source.unread, is_shared=source.is_shared):
                yield from self._ordered(last=not batch)
        yield from self._ordered(last=True)

    def _add(self, request: Request) -> None:
        row = PendingRow(request)
        prefix = prompt_bytes(request)
        row.prompt_bytes = len(prefix)  # bounds the read-ahead, in any order
        if self._distance is not None or self._lengths is not None or self._dedupe:
            row.prefix, row.template = prefix, crc32(prefix[:TEMPLATE_BYTES])
        self._window.append(row)
        self._window_bytes += row.memory_bytes

    def _is_full(self, unread: int, *, is_shared: bool) -> bool:
        if self._distance is None and self._lengths is None and not (self._dedupe or self._by_length):
            return True
        is_end = unread <= LAST_ROWS and self._lengths is not None
        most = SHARED_ROWS if is_shared else WINDOW_ROWS + LAST_ROWS if is_end else WINDOW_ROWS
        return (len(self._window) >= most and unread > 0) or self._window_bytes >= WINDOW_BYTES

    def _ordered(self, *, last: bool) -> Iterator[list[PendingRow | PrimeTask | Outcome]]:
        """Order the rows of the window and yield, piece by piece, those that may be sent by now.

        What the first answers tell is known before the later pieces are made.
        """
        window, self._window, self._window_bytes = self._window, [], 0
        if self._dedupe:
            window = _without_duplicates(window)
        if self._distance is not None:
            self._find_leaders(window)
        if last and self._lengths is not None:
            _find_longest_outputs(window, self._lengths)
        leaders = [row for row in window if row.leader is None]
        if self._by_length:
            leaders.sort(key=lambda row: -row.prompt_bytes)
        else:
            leaders.sort(key=lambda row: -row.longest_output)
        self._release.add(leaders)
        if self._distance is not None:
            self._sent.extend(row for row in leaders if row.memory_bytes <= SENT_BYTES // SENT_ROWS)
        while piece := self._piece(last=last):
            yield piece

    def _piece(self, *, last: bool) -> list[PendingRow | PrimeTask | Outcome]:
        rows: list[PendingRow] = []
        primes: dict[PendingRow, PrimeTask] = {}
        while len(rows) < PIECE_ROWS and (released := self._release.take(last=last)):
            rows.append(released.row)
            if released.is_early and not self._began:
                self._prime_leader_of(released.row, primes)
        self._began = self._began or bool(rows)
        sent = set(self._sent)
        for row in rows:
            if row not in sent:
                row.prefix = b""
        return [*primes.values(), *rows]

    def _find_leaders(self, window: list[PendingRow]) -> None:
        """Find the leader of each row of the window; sent rows may lead too."""
        sent = list(self._sent)
        rows = [*sent, *window]
        places = find_leaders([row.prefix for row in rows], len(sent))
        # in the order in which they came: neighbours in sorted order would be admitted in one pass, and
        # compute again the little more that they share
        for index, place in sorted(places.items()):
            if index < len(sent):
                continue
            row, leader = rows[index], rows[place.leader]
            row.leader, row.shared_bytes = leader, place.shared_bytes
            leader.followers.append(row)
        for leader in sent:
            self._release.hold_followers(leader)
        if self.caches > 1:
            most = max(1, COMMON_SHARE * len(window) / self.caches)
            common = {rows[index] for index, place in places.items() if place.group_rows > most}
            for row in window:
                _find_group(row, common)
            groups = {row.group for row in window if row.group is not row}
            for row in window:
                if row.group is row and row not in groups:  # alone in it: any route will do
                    row.group = None

    def _prime_leader_of(self, row: PendingRow, primes: dict[PendingRow, PrimeTask]) -> None:
        """Have the prefix of a row's leader computed first, if it is among the first that the engine gets."""
        assert self._distance is not None
        assert row.leader is not None
        leader = row.leader
        if leader.sent_clock - leader.new_tokens <= self._distance.tokens:
            round_ = primes[leader.leader].round + 1 if leader.leader in primes else 0
            known = primes.get(leader, PrimeTask(leader, round_, on_every_replica=self.caches == 1))
            everywhere = known.on_every_replica or row.group is None or row.group is not leader.group
            primes[leader] = known._replace(on_every_replica=everywhere)


def _find_longest_outputs(window: Iterable[PendingRow], lengths: OutputLengths) -> None:
    """Estimate output lengths; a leader counts as long as its longest follower, which waits for it."""
    for row in window:
        longest = lengths.expected(row)
        ahead: PendingRow | None = row
        while ahead is not None and ahead.longest_output < longest:
            ahead.longest_output, ahead = longest, ahead.leader


def _without_duplicates(window: list[PendingRow]) -> list[PendingRow]:
    """Return the rows without duplicates, which are added to the first row that is like them.

    Only rows at temperature 0, or of a task without decoding, are sure to get the same answer.
    """
    first: dict[tuple[bytes, str, str], PendingRow] = {}
    kept = []
    sampling, text = None, ""
    for row in window:
        original = row
        if row.request.task is not None or row.request.sampling.get("temperature") == 0:
            if row.request.sampling is not sampling:  # nearly always all rows have the same one
                sampling, text = row.request.sampling, repr(row.request.sampling)
            read = repr(row.request.row) if row.request.row else ""
            original = first.setdefault((row.prefix, text, read), row)
        if original is not row and original.request[1:] == row.request[1:]:  # all but their ordinals
            original.duplicates.append(row.request.ref)
        else:
            kept.append(row)
    return kept


def _find_group(row: PendingRow, common: set[PendingRow]) -> PendingRow:
    """Set and return the first row of a row's prefix group; a prefix in `common` makes no group."""
    if row.group is None:
        leader = row.leader
        row.group = row if leader is None or row in common else _find_group(leader, common)
    return row.group
