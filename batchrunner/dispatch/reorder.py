"""The order of sending: leaders first, followers when their prefix is cached, long outputs early. Pure.

A tree of the prompts' prefixes says which row each row follows. The reuse distance, in prefill tokens, says
how far a row is sent ahead of its followers.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.types import Completion, Outcome, Request
from batchrunner.dispatch.queue import PendingRow, PrefixGroup, RowSource
from batchrunner.input.prompt_bytes import RequestDigests, common_length, is_repeatable, prompt_bytes

LEAST_SHARED_BYTES = 256
"""Length of the shortest prefix that is worth an order: about 64 tokens."""
LEAST_NODE_BYTES = 64
"""Length that a node's prefix must have beyond that of the node above; a few bytes are shared by chance."""


class TreePlace(NamedTuple):
    """The leader of a row, and the prefix that they share."""

    leader: int
    """Index of the row that goes first."""
    shared_bytes: int
    group_rows: int
    """Number of rows that begin with this prefix."""


class _Branch(NamedTuple):
    """Rows with a common prefix; `leader` is the index of the one that goes first."""

    leader: int
    rows: int


def find_leaders(prefixes: Sequence[bytes], sent: int = 0) -> dict[int, TreePlace]:
    """Return the place of each row that follows another one; the first `sent` rows were sent before."""
    order = sorted(range(len(prefixes)), key=prefixes.__getitem__)
    depths = [_depth(prefixes[first], prefixes[second]) for first, second in pairwise(order)]
    if not any(depths):
        return {}
    tree = _Tree(prefixes, sent)
    for index, depth in zip(order, [*depths, 0], strict=True):
        tree.add(index, depth)
    return tree.places


def _depth(first: bytes, second: bytes) -> int:
    if first[:LEAST_SHARED_BYTES] != second[:LEAST_SHARED_BYTES]:  # most rows
        return 0
    shared = common_length(first, second)
    return shared if shared >= LEAST_SHARED_BYTES else 0


class _Tree:
    """The nodes between the root and the row that was added last; nodes left of them are closed."""

    def __init__(self, prefixes: Sequence[bytes], sent: int) -> None:
        self._prefixes = prefixes
        self._sent = sent
        self._open: list[tuple[int, list[_Branch]]] = [(0, [])]  # depth in bytes, and the branches below
        self.places: dict[int, TreePlace] = {}

    def add(self, index: int, depth: int) -> None:
        """Add the next row in sorted order, which shares `depth` bytes with the one after it."""
        below = [_Branch(index, 1)]
        while self._open[-1][0] > depth:
            node_depth, branches = self._open.pop()
            below = [*branches, *below]
            if node_depth - max(depth, self._open[-1][0]) >= LEAST_NODE_BYTES:
                below = [self._close(node_depth, below)]
        if self._open[-1][0] < depth:
            self._open.append((depth, []))
        self._open[-1][1].extend(below)

    def _close(self, depth: int, branches: list[_Branch]) -> _Branch:
        leader = max(branches, key=self._rank).leader
        rows = sum(branch.rows for branch in branches)
        for branch in branches:
            if branch.leader != leader:
                self.places[branch.leader] = TreePlace(leader, depth, rows)
        return _Branch(leader, rows)

    def _rank(self, branch: _Branch) -> tuple[bool, int, int]:
        return branch.leader < self._sent, branch.rows, len(self._prefixes[branch.leader])


class OrderedRow(PendingRow, eq=False):
    """A pending row, and its place in the order.

    A row *follows* another one, its `leader`, where both begin with the same bytes: the engine computes the
    shared prefix with the leader, and the follower finds it in the prefix cache.
    """

    prefix: bytes = b""
    """The prompt as bytes (`input.prompt_bytes`); dropped once no later row is compared with it."""
    template: int = 0
    """CRC-32 of the prompt's first 256 bytes: rows with the same template or system prompt share it."""
    leader: OrderedRow | None = None
    shared_bytes: int = 0
    """Length of the prefix that the row shares with its leader."""
    followers: list[OrderedRow] = msgspec.field(default_factory=list)
    new_tokens: float = 0.0
    """Prompt tokens (estimated) that the engine computes if the shared prefix is cached."""
    sent_clock: float = 0.0
    """Sum of `new_tokens` over all rows sent so far, this one included."""
    used_clock: float = 0.0
    """Value of this sum when the row or one of its followers was last sent."""
    longest_output: float = 0.0
    """Expected output tokens of the row or of its longest follower; 0 where lengths do not matter."""


PASS_TOKENS = 8192
"""Prefill tokens of one pass, for an engine that does not say: SGLang's chunk on GPUs of 80 GB."""
PASSES = 1.1
"""Initial reuse distance in prefill passes: above 1 because token counts are estimated."""
POOL_SHARE, MOST_POOL_SHARE = 0.15, 0.3
"""Largest initial and largest later distance, as a share of the KV pool. What was used within the largest is
still cached."""
LEAST_PASSES = 1 / 8
"""Smallest distance, in prefill passes."""
MOST_BYTES_A_TOKEN = 6
"""Bytes of a prompt token before the first answer: high, as too short a distance costs more than too long."""
FOLLOWERS_A_CHECK = 32
"""Answered followers between two corrections."""
NEARER, WIDER = 0.7, 1.5
"""Factors of a correction."""
MISS_SHARE = 0.1
"""Share of followers without their prefix in the cache above which the distance is corrected."""
LEAST_EXPECTED_TOKENS = 64
"""Shared prefix, in tokens, below which a follower is not counted."""


@dataclass(frozen=True, slots=True)
class DistanceChange:
    """A correction of the distance, in tokens, and its reason."""

    old: int
    new: int
    reason: str


class ReuseDistance:
    """The distance in prefill tokens, over all schedulers."""

    def __init__(self, info: EngineInfo, schedulers: int) -> None:
        """`schedulers` is their number: they share the rows and the engine's KV pool."""
        pass_tokens = info.prefill_tokens or PASS_TOKENS
        pool = info.max_total_tokens / schedulers if info.max_total_tokens else pass_tokens / POOL_SHARE
        self._schedulers = schedulers
        self._pass_tokens = pass_tokens
        self._knows_scheduler = schedulers <= len(info.routes)
        self._least = LEAST_PASSES * pass_tokens
        self._most = max(MOST_POOL_SHARE * pool, self._least)
        self._first = pass_tokens * PASSES
        self._tokens = max(self._least, min(self._first, POOL_SHARE * pool))
        self._bytes, self._bytes_tokens = 0, 0
        self._followers, self._missed, self._evicted = 0, 0, 0
        self._last_miss_share, self._mean_miss_share = 0.0, 0.0
        self._clock, self._changed_at = 0.0, 0.0  # prefill tokens sent: until now, until the last change
        self._factor = WIDER
        self._expected_tokens, self._found_tokens = 0.0, 0.0

    @property
    def tokens(self) -> int:
        """Prefill tokens between a row and its followers."""
        return round(self._tokens * self._schedulers)

    @property
    def has_room(self) -> bool:
        """Whether a prefix outlives even three distances: the KV pool is that much larger."""
        return 3 * self._tokens <= self._most

    @property
    def bytes_a_token(self) -> float:
        """Bytes of a prompt token, on average over the answers so far."""
        return self._bytes / self._bytes_tokens if self._bytes_tokens else MOST_BYTES_A_TOKEN

    def mark_sent(self, row: OrderedRow) -> None:
        """Advance the clock by the prompt tokens of a row that goes to the dispatch queue now."""
        row.new_tokens = (row.prompt_bytes - row.shared_bytes) / self.bytes_a_token
        self._clock += row.new_tokens
        row.sent_clock = row.used_clock = self._clock
        if row.leader is not None:
            row.leader.used_clock = self._clock

    def is_reached(self, leader: OrderedRow) -> bool:
        """Tell whether a sent row is far enough ahead of its followers."""
        in_pass = leader.new_tokens % self._pass_tokens
        return self._clock - leader.sent_clock >= (self._tokens - in_pass) * self._schedulers

    def keeps(self, clock: float, more_bytes: int = 0) -> bool:
        """Tell whether a prefix last used at a clock stays cached while so many bytes of prompts are sent."""
        ahead = self._clock - clock + more_bytes / self.bytes_a_token
        return ahead <= self._most * self._schedulers

    def is_first_pass(self, row: OrderedRow) -> bool:
        """Tell whether a row may be in the first prefill pass, of all that an empty engine admits."""
        return row.sent_clock <= self._first * self._schedulers

    def record(self, row: OrderedRow, completion: Completion) -> DistanceChange | None:
        """Record the cached tokens of an answer; return the correction, if it makes one."""
        if not completion.prompt_tokens or not row.prompt_bytes:
            return None
        self._bytes += row.prompt_bytes
        self._bytes_tokens += completion.prompt_tokens
        leader, cached = row.leader, completion.cached_tokens
        if leader is None or cached is None:
            return None
        expected = row.shared_bytes * completion.prompt_tokens / row.prompt_bytes
        if expected < LEAST_EXPECTED_TOKENS:
            return None
        self._expected_tokens += expected
        self._found_tokens += min(expected, cached)
        if not self._knows_scheduler or leader.route != row.route or row.sent_clock < self._changed_at:
            return None  # the prefix may be in another cache, or the row went with another distance
        self._followers += 1
        if cached < expected / 2:
            self._missed += 1
            self._evicted += leader.prefix_ready_at < row.sent_at
        return self._correct() if self._followers >= FOLLOWERS_A_CHECK else None

    def as_dict(self) -> dict[str, int]:
        """Return `sharing` of report.json: shared prompt tokens, those found in the cache, the distance."""
        return {
            "expected_tokens": round(self._expected_tokens),
            "found_tokens": round(self._found_tokens),
            "lead_tokens": self.tokens,
        }

    def _correct(self) -> DistanceChange | None:
        """Change the distance if too many followers did not find their prefix in the cache.

        The last check and the mean over the checks at this distance must both say so, since the misses of one
        check may be chance; the last check has half the weight in the mean. The prefix was evicted if it had
        been computed before they were sent, or if they were more than a pass behind: then the distance
        shrinks. Otherwise the reason is unknown: the last kind of change is tried again, and reversed if it
        made matters worse.
        """
        rows, missed, evicted, old = self._followers, self._missed, self._evicted, self.tokens
        self._followers = self._missed = self._evicted = 0
        share, before = missed / rows, self._last_miss_share
        self._last_miss_share = share
        self._mean_miss_share += (share - self._mean_miss_share) / 2
        if min(share, self._mean_miss_share) <= MISS_SHARE:
            return None
        if 2 * evicted > missed or self._tokens >= self._first:
            self._factor = NEARER
        elif share > before > MISS_SHARE:
            self._factor = NEARER if self._factor == WIDER else WIDER
        self._tokens = max(self._least, min(self._most, self._tokens * self._factor))
        self._changed_at, self._mean_miss_share = self._clock, 0.0
        reason = f"{missed} of {rows} followers did not find their prefix in the cache"
        return DistanceChange(old, self.tokens, reason) if self.tokens != old else None


MOST_HELD_ROWS, MOST_HELD_BYTES = 1024, 32 << 20
"""Followers held back while more rows can come, and the bytes of their prompts."""
BEHIND = 1 << 60
"""Place behind all followers that lead no other row."""


class FollowerRelease:
    """Rows not sent yet: leaders in order, and followers until their leader is far enough ahead."""

    def __init__(self, distance: ReuseDistance | None) -> None:
        """Without a `distance` all rows go as they come."""
        self._distance = distance
        self._leaders: deque[OrderedRow] = deque()
        self._leaders_bytes = 0
        # heaps: leader's clock, serial, place among those that are due, follower; and the last three of these
        self._held: list[tuple[float, int, int, OrderedRow]] = []
        self._held_bytes = 0
        self._due: list[tuple[int, int, OrderedRow]] = []
        self._serial = count()

    def __len__(self) -> int:
        """Count the rows that were not sent yet."""
        return len(self._leaders) + len(self._held) + len(self._due)

    def add(self, leaders: Iterable[OrderedRow]) -> None:
        """Add rows that follow no other; their followers come with them."""
        for row in leaders:
            self._leaders.append(row)
            self._leaders_bytes += row.prompt_bytes

    def hold_followers(self, leader: OrderedRow) -> None:
        """Hold back the followers of a sent row: those that lead others go first, then long prefixes."""
        if not leader.followers:
            return
        leader.followers.sort(key=lambda row: (not row.followers, -row.shared_bytes, -row.longest_output))
        for turn, row in enumerate(leader.followers):
            place = BEHIND - row.shared_bytes if row.followers else turn
            heapq.heappush(self._held, (leader.sent_clock, next(self._serial), place, row))
            self._held_bytes += row.memory_bytes
        leader.followers = []

    def take(self, *, last: bool) -> OrderedRow | None:
        """Take the next row; None if all should wait longer. With `last` no more rows come, so none waits.

        Among the due followers, those that lead no other row go first, one of each leader in turn: so each
        prefix is used again before it is evicted, however many rows share it. Then the follower with the
        longest shared prefix goes, as its own followers will use that. In the order of their due times, all
        followers of a common prefix would go at once, and evict each other's prefixes. If the next leader is
        so long that it would evict a prefix before its use, the followers of that prefix go early.
        """
        if self._held:
            self._find_due()
        crowded = self._held and not self._due and self._is_crowded()
        if self._leaders and not crowded and (not self._due or (last and self._is_near_end())):
            row = self._leaders.popleft()
            self._leaders_bytes -= row.prompt_bytes
        elif self._due:
            row = heapq.heappop(self._due)[-1]
        elif self._held and (last or crowded or self._holds_most()):
            row = self._next_held()[-1]
        else:
            return None
        if self._distance is not None:
            self._distance.mark_sent(row)
            self.hold_followers(row)
        return row

    def _holds_most(self) -> bool:
        return len(self._held) > MOST_HELD_ROWS or self._held_bytes > MOST_HELD_BYTES

    def _next_held(self) -> tuple[int, int, OrderedRow]:
        _, serial, place, row = heapq.heappop(self._held)
        self._held_bytes -= row.memory_bytes
        return place, serial, row

    def _is_crowded(self) -> bool:
        """Tell whether the next leader would evict the prefix that was sent first and is still needed."""
        if self._distance is None or not self._leaders:
            return False
        return not self._distance.keeps(self._held[0][0], self._leaders[0].prompt_bytes)

    def _is_near_end(self) -> bool:
        """Tell whether the last leaders should go now, so that other rows can go between them and followers.

        Followers then wait up to three distances. So it is false if a prefix would be evicted by then.
        """
        if self._distance is None or not self._distance.has_room:
            return False
        return self._leaders_bytes / self._distance.bytes_a_token <= 2 * self._distance.tokens

    def _find_due(self) -> None:
        while self._held and self._distance is not None:
            leader = self._held[0][-1].leader
            assert leader is not None
            if not self._distance.is_reached(leader):
                return
            heapq.heappush(self._due, self._next_held())


MOST_TEMPLATES = 1024
"""Templates whose averages are kept."""
FEWEST_ROWS = 8
"""Rows that an average needs before it is used."""


class OutputLengths:
    """A running average of the output tokens of each template's rows."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int]] = {}  # rows and tokens

    def record(self, row: OrderedRow, tokens: int) -> None:
        """Add the output tokens of an answered row."""
        rows, sum_ = self._sums.get(row.template, (0, 0))
        if rows or len(self._sums) < MOST_TEMPLATES:
            self._sums[row.template] = rows + 1, sum_ + tokens

    def expected(self, row: OrderedRow) -> float:
        """Return the output tokens that a row is expected to have, `max_new_tokens` at most."""
        limit = row.request.sampling["max_new_tokens"]
        if row.request.sampling.get("ignore_eos"):
            return float(limit)
        rows, tokens = self._sums.get(row.template, (0, 0))
        return min(limit, tokens / rows) if rows >= FEWEST_ROWS else float(limit)


WINDOW_ROWS, WINDOW_BYTES = 2048, 32 << 20
"""Rows that are ordered together, and the bytes of their prompts."""
LAST_ROWS = 8192
"""Last rows of the input, ordered together: the longest go first, so that the run does not end with them."""
SHARED_ROWS = 512
"""Rows that are ordered together in a joined run: rows that one worker holds, the others cannot take."""
PIECE_ROWS, PIECE_BYTES = 256, 64 << 20
"""Rows that are handed on together, and the bytes, about, that they take when they are tokenised and their
files are read."""
IDS_BYTES = 16
"""Bytes that the token ids of a byte of a prompt take."""
TEMPLATE_BYTES = 256
"""Bytes at the start of a prompt by which templates are distinguished."""
SENT_ROWS, SENT_BYTES = 32, 8 << 20
"""Sent rows that later rows may still follow, and the bytes of their prompts."""
COMMON_SHARE = 0.25
"""Share of a replica's rows in the window above which a prefix is computed on every replica."""


class PrimeTask(NamedTuple):
    """A prefix to compute before any other row goes.

    An empty engine admits many rows in its first prefill pass, and would compute the prefix for each of them.
    So priming saves up to one pass a start, which matters to short runs. In virtual time (an 8B model), 500
    few-shot rows compute 20,534 prompt tokens with priming and 27,733 without. 200 nested rows compute 7,877
    in rounds, 14,877 in a single round, and 17,867 without priming.
    """

    row: OrderedRow
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
        self._window: list[OrderedRow] = []
        self._window_bytes = 0
        self._sent: deque[OrderedRow] = deque(maxlen=SENT_ROWS)
        self._release = FollowerRelease(distance)
        self._digests = RequestDigests()
        self._began = False

    @property
    def held(self) -> int:
        """Rows that came and were not handed on yet."""
        return len(self._window) + len(self._release)

    def sharing(self) -> dict[str, Any]:
        """Return `sharing` of report.json; empty without a distance."""
        return self._distance.as_dict() if self._distance is not None else {}

    def record(self, row: PendingRow, completion: Completion) -> DistanceChange | None:
        """Learn from an answer; return how that changed the reuse distance."""
        if not isinstance(row, OrderedRow):  # a request of a rollout, which takes no part in the order
            return None
        if self._lengths is not None:
            self._lengths.record(row, completion.output_tokens)
        return self._distance.record(row, completion) if self._distance is not None else None

    def reorder(self, source: RowSource) -> Iterator[list[OrderedRow | PrimeTask | Outcome]]:
        """Read a source and yield its rows as they are to be sent; outcomes in it are yielded at once."""
        for batch in source.batches():
            outcomes: list[OrderedRow | PrimeTask | Outcome] = []
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
        row = OrderedRow(request)
        prefix = prompt_bytes(request)
        row.prompt_bytes = len(prefix)  # bounds the read-ahead, in any order
        self._digests.write(request, prefix)
        if self._distance is not None or self._lengths is not None or self._dedupe:
            row.prefix, row.template = prefix, crc32(prefix[:TEMPLATE_BYTES])
        self._window.append(row)
        self._window_bytes += row.memory_bytes

    def _is_full(self, unread: int, *, is_shared: bool) -> bool:
        if self._distance is None and self._lengths is None and not (self._dedupe or self._by_length):
            return True
        limit = WINDOW_ROWS
        if is_shared:
            limit = SHARED_ROWS
        elif unread <= LAST_ROWS and self._lengths is not None:
            limit += LAST_ROWS
        return (len(self._window) >= limit and unread > 0) or self._window_bytes >= WINDOW_BYTES

    def _ordered(self, *, last: bool) -> Iterator[list[OrderedRow | PrimeTask | Outcome]]:
        """Order the rows of the window and yield, piece by piece, those that may be sent by now.

        Later pieces use the distance and output lengths that the first answers have shown.
        """
        window, self._window, self._window_bytes = self._window, [], 0
        if self._dedupe:
            window = self._without_duplicates(window)
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

    def _piece(self, *, last: bool) -> list[OrderedRow | PrimeTask | Outcome]:
        rows: list[OrderedRow] = []
        primes: dict[OrderedRow, PrimeTask] = {}
        size = 0
        while len(rows) < PIECE_ROWS and size < PIECE_BYTES and (row := self._release.take(last=last)):
            rows.append(row)
            size += IDS_BYTES * row.prompt_bytes + sum(file.expected_size for file in row.request.media)
            if not self._began:
                self._prime_leader_of(row, primes)
        self._began = self._began or bool(rows)
        leaders = set(self._sent)
        for row in rows:
            if row not in leaders:
                row.prefix = b""
        return [*primes.values(), *rows]

    def _find_leaders(self, window: list[OrderedRow]) -> None:
        """Find the leader of each row of the window; sent rows that are still cached may lead too."""
        sent_rows = [
            row for row in self._sent if self._distance is None or self._distance.keeps(row.used_clock)
        ]
        rows = [*sent_rows, *window]
        places = find_leaders([row.prefix for row in rows], len(sent_rows))
        # in the order in which they came: neighbours in sorted order would be admitted in one pass, and
        # compute again the little more that they share
        for index, place in sorted(places.items()):
            if index < len(sent_rows):
                continue
            row, leader = rows[index], rows[place.leader]
            row.leader, row.shared_bytes = leader, place.shared_bytes
            leader.followers.append(row)
        for leader in sent_rows:
            self._release.hold_followers(leader)
        if self.caches > 1:
            limit = max(1, COMMON_SHARE * len(window) / self.caches)
            common = {rows[index] for index, place in places.items() if place.group_rows > limit}
            rows_of = Counter(_find_group(row, common) for row in window)
            for group, count in rows_of.items():
                first = group.first
                assert isinstance(first, OrderedRow)
                if count == 1 and first.sent_clock == 0:  # alone in it: any route will do
                    first.group = None
                elif group.home is None:
                    group.to_come += count

    def _without_duplicates(self, window: list[OrderedRow]) -> list[OrderedRow]:
        """Return the rows without duplicates, which are added to the first row that is like them."""
        first: dict[bytes, OrderedRow] = {}
        originals = []
        for row in window:
            original = row
            if is_repeatable(row.request):
                original = first.setdefault(self._digests.of(row.request, row.prefix), row)
            if original is not row and original.request[1:] == row.request[1:]:  # all but their ordinals
                original.duplicates.append(row.request.ref)
            else:
                originals.append(row)
        return originals

    def _prime_leader_of(self, row: OrderedRow, primes: dict[OrderedRow, PrimeTask]) -> None:
        """Have the prefix of a row's leader computed first, if both may be in the engine's first pass."""
        leader, distance = row.leader, self._distance
        if leader and distance and distance.is_first_pass(row) and leader.request.kind != "body":
            round_ = primes[leader.leader].round + 1 if leader.leader in primes else 0
            task = primes.get(leader, PrimeTask(leader, round_, on_every_replica=self.caches == 1))
            everywhere = task.on_every_replica or row.group is None or row.group is not leader.group
            primes[leader] = task._replace(on_every_replica=everywhere)


def _find_longest_outputs(window: Iterable[OrderedRow], lengths: OutputLengths) -> None:
    """Estimate output lengths; a leader counts as long as its longest follower, which waits for it."""
    for row in window:
        longest = lengths.expected(row)
        ahead: OrderedRow | None = row
        while ahead is not None and ahead.longest_output < longest:
            ahead.longest_output, ahead = longest, ahead.leader


def _find_group(row: OrderedRow, common: set[OrderedRow]) -> PrefixGroup:
    """Set and return the prefix group of a row; a prefix in `common` makes no group."""
    if row.group is None:
        leader = row.leader
        row.group = PrefixGroup(row) if leader is None or row in common else _find_group(leader, common)
    return row.group
