"""Orders rows so that shared prompt prefixes are still cached when needed, and long outputs come early.

If two rows begin with a long common prefix, one of them, the leader, is sent first, and its *followers*
later. A tree of the prompts' prefixes gives the leader of each row. The reuse distance is how many prefill
tokens are sent between a leader and its followers. Nothing here does I/O.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import msgspec

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.types import Completion, Outcome, Request
from batchrunner.dispatch.queue import PendingRow, PrefixGroup, RowSource
from batchrunner.input.prompt_bytes import RequestDigests, common_length, is_repeatable, prompt_bytes

LEAST_SHARED_BYTES = 256
"""Minimum length, in bytes, of a shared prefix for which rows are reordered: about 64 tokens."""
LEAST_NODE_BYTES = 64
"""A node of the prefix tree has a prefix at least this many bytes longer than its parent's. Prompts may share
a few more bytes by chance."""


class TreePlace(NamedTuple):
    """The leader of a row, and the prefix that row and leader share."""

    leader: int
    """Index of the leader, which is sent before the row."""
    shared_bytes: int
    """Length of the shared prefix in bytes."""
    group_rows: int
    """Number of rows that begin with the shared prefix."""


class _Branch(NamedTuple):
    """Rows whose prompts begin with a common prefix."""

    leader: int
    """Index of the row that is sent first."""
    rows: int
    """Number of rows, including the leader."""


def find_leaders(prefixes: Sequence[bytes], sent: int = 0) -> dict[int, TreePlace]:
    """Find rows with common prefixes; return the leader of each such row, by the row's index.

    The leader is the row that is sent first. The first `sent` prefixes belong to rows that were already sent.
    """
    # In sorted order, rows with a common prefix are neighbours. So each row is compared only with the next
    # one.
    order = sorted(range(len(prefixes)), key=prefixes.__getitem__)
    shared_with_next = [_shared_bytes(prefixes[first], prefixes[second]) for first, second in pairwise(order)]
    if not any(shared_with_next):
        return {}
    tree = _Tree(prefixes, sent)
    for index, shared_bytes in zip(order, [*shared_with_next, 0], strict=True):
        tree.add(index, shared_bytes)
    return tree.places


def _shared_bytes(first: bytes, second: bytes) -> int:
    """Return the length of the common prefix of two prompts in bytes; 0 if it is too short to matter."""
    if first[:LEAST_SHARED_BYTES] != second[:LEAST_SHARED_BYTES]:  # Most pairs of prompts differ early.
        return 0
    shared = common_length(first, second)
    return shared if shared >= LEAST_SHARED_BYTES else 0


class _Tree:
    """A prefix tree of prompts, to which rows are added in sorted order.

    A node stands for a prefix, and its depth is the prefix length in bytes. Only nodes on the path to the
    newest row are open for more rows. All other nodes are closed, because no later row in sorted order begins
    with their prefixes.
    """

    def __init__(self, prefixes: Sequence[bytes], sent: int) -> None:
        self._prefixes = prefixes
        self._sent = sent
        # Nodes from the root to the current row, each as its depth in bytes and the branches below it.
        self._open: list[tuple[int, list[_Branch]]] = [(0, [])]
        self.places: dict[int, TreePlace] = {}
        """Leader and shared prefix of each row that has a leader, by the row's index."""

    def add(self, index: int, depth: int) -> None:
        """Add the next row in sorted order. It shares `depth` bytes with the row after it."""
        branches = [_Branch(index, 1)]
        # Close the nodes whose prefixes the next row does not share.
        while self._open[-1][0] > depth:
            node_depth, node_branches = self._open.pop()
            branches = [*node_branches, *branches]
            # If the prefix is hardly longer than the parent's, the node gets no leader of its own.
            if node_depth - max(depth, self._open[-1][0]) >= LEAST_NODE_BYTES:
                branches = [self._close(node_depth, branches)]
        # Put the row below the node for the prefix that it shares with the next row.
        if self._open[-1][0] < depth:
            self._open.append((depth, []))
        self._open[-1][1].extend(branches)

    def _close(self, depth: int, branches: list[_Branch]) -> _Branch:
        """Choose the leader of a node, and let the leaders of its branches follow it."""
        leader = max(branches, key=self._rank).leader
        rows = sum(branch.rows for branch in branches)
        for branch in branches:
            if branch.leader != leader:
                self.places[branch.leader] = TreePlace(leader, shared_bytes=depth, group_rows=rows)
        return _Branch(leader, rows)

    def _rank(self, branch: _Branch) -> tuple[bool, int, int]:
        """Return the sort key of a branch's leader; the largest key leads the merged branch.

        A row that was already sent wins, then the leader of the most rows, then the longest prompt.
        """
        is_sent = branch.leader < self._sent  # sent rows come first in the list of prefixes
        return is_sent, branch.rows, len(self._prefixes[branch.leader])


class OrderedRow(PendingRow, eq=False):
    """A pending row, and its place in the order of sending.

    A row with the same first bytes as an earlier row *follows* it. The engine computes the shared prefix for
    the earlier row (the `leader`), and finds it in the prefix cache for the follower.
    """

    prefix: bytes = b""
    """The prompt as bytes (`input.prompt_bytes`); dropped once no later row is compared with it."""
    template: int = 0
    """CRC-32 of the prompt's first 256 bytes: rows with the same template or system prompt share it."""
    leader: OrderedRow | None = None
    """The row that shares a prefix with this row, and is sent before it; None if there is none."""
    shared_bytes: int = 0
    followers: list[OrderedRow] = msgspec.field(default_factory=list)
    """Rows that share a prefix with this row and come after it. Empty once they are held back."""
    new_tokens: float = 0.0
    """Estimated prompt tokens to compute if the prefix shared with the leader is cached."""
    sent_clock: float = 0.0
    """Total of `new_tokens` over all rows sent so far, including this one. It serves as a clock."""
    used_clock: float = 0.0
    """Prefill tokens sent in all when this row, or one of its followers, was last sent."""
    longest_output: float = 0.0
    """The largest expected number of output tokens among the row and its followers; 0 if the order ignores
    lengths."""


PASS_TOKENS = 8192
"""Assumed tokens of a prefill pass if the engine does not report them: SGLang's prefill chunk on GPUs of 80
GB."""
PASSES = 1.1
"""Initial distance between rows with a common prefix, in prefill passes. It is above 1, because token counts
are estimated."""
POOL_SHARE = 0.15
"""Maximum initial distance between rows with a common prefix, as a fraction of the KV pool."""
MOST_POOL_SHARE = 0.3
"""Maximum distance between rows with a common prefix, as a fraction of the KV pool. A prefix last used within
this distance counts as still cached."""
LEAST_PASSES = 1 / 8
"""Minimum distance between rows with a common prefix, in prefill passes."""
MOST_BYTES_A_TOKEN = 6
"""Assumed bytes per prompt token before the first answer. The value is rather high, which makes the distance
between rows with a common prefix rather long. Too short a distance would cost more."""
FOLLOWERS_A_CHECK = 32
"""The reuse distance is checked each time this many followers (rows with a cached prefix) are answered."""
NEARER = 0.7
"""Factor by which a correction shortens the reuse distance."""
WIDER = 1.5
"""Factor by which a correction lengthens the reuse distance."""
MISS_SHARE = 0.1
"""The reuse distance is corrected if more than this fraction of followers miss the prefix cache."""
LEAST_EXPECTED_TOKENS = 64
"""Followers with a shorter shared prefix, in tokens, do not count in a check of the reuse distance."""


@dataclass(frozen=True, slots=True)
class DistanceChange:
    """A correction of the reuse distance: old and new number of tokens, and the reason."""

    old: int
    new: int
    reason: str


class ReuseDistance:
    """How many prefill tokens are sent between a leader and its followers, the rows that share its prefix."""

    def __init__(self, info: EngineInfo, schedulers: int) -> None:
        """`schedulers` is the number of schedulers. Each has an equal part of the rows and of the KV pool."""
        pass_tokens = info.prefill_tokens or PASS_TOKENS
        # Tokens in the KV pool of one scheduler. If unknown, the distance is limited to about one pass.
        pool = info.max_total_tokens / schedulers if info.max_total_tokens else pass_tokens / POOL_SHARE
        self._schedulers = schedulers
        self._pass_tokens = pass_tokens
        self._knows_scheduler = schedulers <= len(info.routes)
        """Whether each server has a single scheduler, so that the server of a row tells its prefix cache."""
        self._least = LEAST_PASSES * pass_tokens
        """Minimum of the distance, in prefill tokens of one scheduler."""
        self._most = max(MOST_POOL_SHARE * pool, self._least)
        """Maximum of the distance, in prefill tokens of one scheduler."""
        self._first = pass_tokens * PASSES
        """Initial distance in tokens of one scheduler, unless the pool is too small for it."""
        self._tokens = max(self._least, min(self._first, POOL_SHARE * pool))
        """The present distance, in prefill tokens of one scheduler."""
        self._bytes, self._bytes_tokens = 0, 0
        """Bytes and tokens of the answered prompts."""
        self._followers, self._missed, self._evicted = 0, 0, 0
        """Followers since the last check: all, those that missed the cache, those whose prefix was evicted.
        """
        self._last_miss_share, self._mean_miss_share = 0.0, 0.0
        """Fraction of rows that did not find their leader's prefix in the cache: in the last check, and as a
        running mean."""
        self._clock = 0.0
        self._changed_at = 0.0
        """Prefill tokens that were sent before the last correction."""
        self._factor = WIDER
        """Factor of the last correction."""
        self._expected_tokens, self._found_tokens = 0.0, 0.0
        """Tokens of shared prefixes, and how many of them the prefix cache held."""

    @property
    def tokens(self) -> int:
        """The distance in prefill tokens, over all schedulers."""
        return round(self._tokens * self._schedulers)

    @property
    def has_room(self) -> bool:
        """Whether the KV pool can keep a prefix for three times the reuse distance."""
        return 3 * self._tokens <= self._most

    @property
    def bytes_a_token(self) -> float:
        """Mean number of bytes per prompt token, over the answers so far."""
        return self._bytes / self._bytes_tokens if self._bytes_tokens else MOST_BYTES_A_TOKEN

    def mark_sent(self, row: OrderedRow) -> None:
        """Count the prompt tokens of a row that is sent now."""
        row.new_tokens = (row.prompt_bytes - row.shared_bytes) / self.bytes_a_token
        self._clock += row.new_tokens
        row.sent_clock = row.used_clock = self._clock
        if row.leader is not None:  # the row uses the leader's prefix, so it stays cached longer
            row.leader.used_clock = self._clock

    def is_reached(self, leader: OrderedRow) -> bool:
        """Tell whether the rows that share a leader's prefix may be sent.

        They may once enough prefill tokens, the reuse distance, were sent after the leader.
        """
        # The leader's own tokens in its last prefill pass count too: they help to fill that pass. No follower
        # may be in it.
        in_pass = leader.new_tokens % self._pass_tokens
        return self._clock - leader.sent_clock >= (self._tokens - in_pass) * self._schedulers

    def keeps(self, clock: float, more_bytes: int = 0) -> bool:
        """Tell whether a prefix is still in the prefix cache.

        `clock` is the number of prefill tokens that were sent before the prefix was last used. `more_bytes`
        of prompts will be sent before it is used again.
        """
        ahead = self._clock - clock + more_bytes / self.bytes_a_token
        return ahead <= self._most * self._schedulers

    def is_first_pass(self, row: OrderedRow) -> bool:
        """Tell whether a row may be in the first prefill pass of an empty engine."""
        return row.sent_clock <= self._first * self._schedulers

    def record(self, row: OrderedRow, completion: Completion) -> DistanceChange | None:
        """Record how many prompt tokens of a row were cached; return the change of the distance, or None."""
        if not completion.prompt_tokens or not row.prompt_bytes:
            return None
        self._bytes += row.prompt_bytes
        self._bytes_tokens += completion.prompt_tokens
        leader, cached_tokens = row.leader, completion.cached_tokens
        if leader is None or cached_tokens is None:
            return None
        # Length in tokens of the prefix that the row shares with its leader.
        shared_tokens = row.shared_bytes * completion.prompt_tokens / row.prompt_bytes
        if shared_tokens < LEAST_EXPECTED_TOKENS:
            return None
        self._expected_tokens += shared_tokens
        self._found_tokens += min(shared_tokens, cached_tokens)
        if not self._knows_scheduler or leader.route != row.route or row.sent_clock < self._changed_at:
            # Such a row proves nothing. Its prefix may be in another scheduler's cache, or it was sent before
            # the last correction.
            return None
        self._followers += 1
        # A few cached tokens, such as a common system prompt, are not a hit.
        if cached_tokens < shared_tokens / 2:
            self._missed += 1
            # The prefix was computed before the row was sent, and was missing later. So it was evicted.
            self._evicted += leader.prefix_ready_at < row.sent_at
        return self._correct() if self._followers >= FOLLOWERS_A_CHECK else None

    def as_dict(self) -> dict[str, int]:
        """Return report.json's `sharing`: shared prompt tokens, cached tokens of them, and the distance."""
        return {
            "expected_tokens": round(self._expected_tokens),
            "found_tokens": round(self._found_tokens),
            "lead_tokens": self.tokens,
        }

    def _correct(self) -> DistanceChange | None:
        """Change the distance if too many rows did not find their leader's prefix in the cache.

        The misses must be too frequent both in the last check and in a running mean, because a single check
        may be chance.

        The distance shrinks if the missing prefixes were evicted. This is certain if they had been computed
        before their followers were sent, or if the distance is longer than one prefill pass. Otherwise the
        reason is unknown. Then the last kind of change is repeated, or reversed if misses have become more
        frequent.
        """
        followers, missed, evicted = self._followers, self._missed, self._evicted
        self._followers = self._missed = self._evicted = 0
        miss_share, last_miss_share = missed / followers, self._last_miss_share
        self._last_miss_share = miss_share
        self._mean_miss_share += (miss_share - self._mean_miss_share) / 2
        if min(miss_share, self._mean_miss_share) <= MISS_SHARE:
            return None
        if 2 * evicted > missed or self._tokens >= self._first:
            self._factor = NEARER
        elif miss_share > last_miss_share > MISS_SHARE:
            # Misses became more frequent after the last correction, so reverse its direction.
            self._factor = NEARER if self._factor == WIDER else WIDER
        old = self.tokens
        self._tokens = max(self._least, min(self._most, self._tokens * self._factor))
        self._changed_at, self._mean_miss_share = self._clock, 0.0
        if self.tokens == old:
            return None
        reason = f"{missed} of {followers} followers did not find their prefix in the cache"
        return DistanceChange(old=old, new=self.tokens, reason=reason)


MOST_HELD_ROWS = 1024
"""Maximum number of rows that are held back until their leader's prefix is cached."""
MOST_HELD_BYTES = 32 << 20
"""Maximum total prompt size, in bytes, of rows that are held back until their leader's prefix is cached."""
BEHIND = 1 << 60
"""Sort key of rows that lead other rows. It puts them behind all rows that lead none."""


HeldFollower: TypeAlias = "tuple[float, int, int, OrderedRow]"
"""A row that is held back until its leader's prefix is cached: the leader's `sent_clock`; a serial number, so
that a heap never compares rows; the rank among rows that may be sent (the lowest first); and the row."""
DueFollower: TypeAlias = "tuple[int, int, OrderedRow]"
"""A row that may be sent now, because its leader's prefix is cached: its rank (the lowest goes first); a
serial number, so that a heap never compares rows; and the row."""


class FollowerRelease:
    """Holds back rows until their shared prefix is cached.

    Leaders, which compute a prefix first, go in order. A follower goes once enough prefill tokens were sent
    after its leader.
    """

    def __init__(self, distance: ReuseDistance | None) -> None:
        """Without a `distance`, all rows are sent in the order in which they are added."""
        self._distance = distance
        self._leaders: deque[OrderedRow] = deque()
        self._leaders_bytes = 0
        self._held: list[HeldFollower] = []
        """Heap of the rows that wait until their leader's prefix is cached."""
        self._held_bytes = 0
        self._due: list[DueFollower] = []
        """Heap of the rows that may be sent now, because their leader's prefix is cached."""
        self._serial = count()

    def __len__(self) -> int:
        """Return the number of rows that were not sent yet."""
        return len(self._leaders) + len(self._held) + len(self._due)

    def add(self, leaders: Iterable[OrderedRow]) -> None:
        """Add rows that share no earlier row's prefix; taking one of them also adds its followers."""
        for row in leaders:
            self._leaders.append(row)
            self._leaders_bytes += row.prompt_bytes

    def hold_followers(self, leader: OrderedRow) -> None:
        """Hold back the rows that share the prefix of a row that was just sent.

        If too many rows are held back, some go early: first those that lead other rows, then those with a
        long prefix.
        """
        if not leader.followers:
            return
        # Followers that must be sent early go in this order. Those that wait until their prefix is cached go
        # by `rank`.
        leader.followers.sort(key=lambda row: (not row.followers, -row.shared_bytes, -row.longest_output))
        for turn, row in enumerate(leader.followers):
            # The turn as the rank lets followers of different leaders alternate. A follower that leads other
            # rows goes behind all of these.
            rank = BEHIND - row.shared_bytes if row.followers else turn
            heapq.heappush(self._held, (leader.sent_clock, next(self._serial), rank, row))
            self._held_bytes += row.memory_bytes
        leader.followers = []

    def take(self, *, last: bool) -> OrderedRow | None:
        """Take the next row; None if all rows should wait. With `last` no more rows come, so none waits.

        Of the rows whose shared prefix is cached, those that lead no other row go first, one of each leader
        in turn. So each prefix is used again before it is evicted. Then rows that lead others go, the one
        with the longest shared prefix first.

        If the next leader is so long that it would evict a prefix before its use, the rows with that prefix
        go early.
        """
        if self._held:
            self._move_to_due()
        must_release = self._held and not self._due and self._would_evict()
        # A leader goes if no follower may. Near the end of the input, leaders go before followers.
        leader_is_next = not must_release and (not self._due or (last and self._is_near_end()))
        if self._leaders and leader_is_next:
            row = self._leaders.popleft()
            self._leaders_bytes -= row.prompt_bytes
        elif self._due:
            row = heapq.heappop(self._due)[-1]
        elif self._held and (last or must_release or self._holds_most()):
            # The row is sent early: its shared prefix may not be cached yet.
            row = self._release_held()[-1]
        else:
            return None
        if self._distance is not None:
            self._distance.mark_sent(row)
            self.hold_followers(row)
        return row

    def _holds_most(self) -> bool:
        """Tell whether so many rows are held back that one must be sent early."""
        return len(self._held) > MOST_HELD_ROWS or self._held_bytes > MOST_HELD_BYTES

    def _release_held(self) -> DueFollower:
        """Remove and return the held row whose leader was sent first."""
        _, serial, rank, row = heapq.heappop(self._held)
        self._held_bytes -= row.memory_bytes
        return rank, serial, row

    def _would_evict(self) -> bool:
        """Tell whether the next leader's prompt would evict a prefix that a held row still needs."""
        if self._distance is None or not self._leaders:
            return False
        oldest_clock = self._held[0][0]
        return not self._distance.keeps(oldest_clock, self._leaders[0].prompt_bytes)

    def _is_near_end(self) -> bool:
        """Tell whether the last leaders of the input should go before the rows that may be sent now.

        If they went later, no rows would be left to send between them and their own followers. The result is
        false if the waiting followers would lose their prefixes from the cache meanwhile.
        """
        if self._distance is None or not self._distance.has_room:
            return False
        return self._leaders_bytes / self._distance.bytes_a_token <= 2 * self._distance.tokens

    def _move_to_due(self) -> None:
        """Move held rows that may be sent now to `_due`.

        A row may be sent once enough prefill tokens (the reuse distance) were sent after its leader. Without
        a reuse distance, no row is held.
        """
        while self._held and self._distance is not None:
            # `_held` is a heap. Its first row has the leader that was sent first.
            first_row = self._held[0][-1]
            leader = first_row.leader
            assert leader is not None
            if not self._distance.is_reached(leader):
                return
            heapq.heappush(self._due, self._release_held())


MOST_TEMPLATES = 1024
"""Maximum number of prompt templates whose mean output lengths are kept."""
FEWEST_ROWS = 8
"""A mean output length is used once it covers at least this many rows."""


class OutputLengths:
    """Mean number of output tokens for each prompt template (the beginning that many prompts share)."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int]] = {}  # by template: rows, output tokens

    def record(self, row: OrderedRow, tokens: int) -> None:
        """Record how many output tokens an answered row has."""
        rows, sum_ = self._sums.get(row.template, (0, 0))
        if rows or len(self._sums) < MOST_TEMPLATES:
            self._sums[row.template] = rows + 1, sum_ + tokens

    def expected(self, row: OrderedRow) -> float:
        """Return the expected number of output tokens of a row.

        This is the mean over the answered rows whose prompts begin alike. If there are too few of them, or if
        the output cannot end early, it is `max_new_tokens`.
        """
        limit: int = row.request.sampling["max_new_tokens"]
        answered_rows, output_tokens = self._sums.get(row.template, (0, 0))
        if row.request.sampling.get("ignore_eos") or answered_rows < FEWEST_ROWS:
            return float(limit)
        return min(limit, output_tokens / answered_rows)


WINDOW_ROWS = 2048
"""Number of rows that are read before they are ordered together."""
WINDOW_BYTES = 32 << 20
"""Rows are ordered once the rows that were read have this many bytes of prompts and images."""
LAST_ROWS = 8192
"""Number of rows at the end of the input that are ordered together. Long outputs go first, so that the run
does not end with them."""
SHARED_ROWS = 512
"""Number of rows that are ordered together if several workers share the run. It is small, because other
workers cannot take these rows."""
PIECE_ROWS = 256
"""Maximum number of rows in a piece. A piece is handed on for tokenization as a whole."""
PIECE_BYTES = 64 << 20
"""Approximate maximum memory of a piece, in bytes, with its token ids and files. A piece is the rows that are
handed on for tokenization together."""
IDS_BYTES = 16
"""Memory for token ids, in bytes per byte of a prompt."""
TEMPLATE_BYTES = 256
"""Rows whose prompts begin with the same number of bytes count as rows of one prompt template."""
SENT_ROWS = 32
"""Maximum number of sent rows that are kept, because rows read later may share their prefixes."""
SENT_BYTES = 8 << 20
"""Maximum total prompt size, in bytes, of sent rows that are kept for comparison with later rows."""
COMMON_SHARE = 0.25
"""Rows with a common prefix go to one replica if they are at most this fraction of a replica's rows. If there
are more, every replica computes the prefix."""


class PrimeTask(NamedTuple):
    """A prompt prefix that is computed (primed) before any row is sent: the prompt of `row`.

    An empty engine admits many rows in its first prefill pass, and would compute the prefix for each of them.
    So priming saves up to one pass per start, which matters for short runs. In virtual time (an 8B model),
    500 few-shot rows compute 20,534 prompt tokens with priming and 27,733 without. 200 rows with nested
    prefixes compute 7,877 tokens in several rounds, 14,877 in a single round, and 17,867 without priming.
    """

    row: OrderedRow
    round: int
    """Number of the round, from 0. A prefix that extends another primed prefix belongs to a later round."""
    on_every_replica: bool
    """Whether every replica computes the prefix, and not only the replica that gets the row."""


class Reorderer:
    """Puts rows into the order of sending, a window of rows at a time."""

    def __init__(
        self,
        distance: ReuseDistance | None,
        lengths: OutputLengths | None,
        *,
        dedupe: bool,
        caches: int = 1,
        longest_prompt_first: bool = False,
    ) -> None:
        """Order rows by common prefixes if `distance` is set, and by output length if `lengths` is set.

        With `longest_prompt_first`, the longest prompts of the window go first, so that rows of similar
        length share a pass. With `dedupe` equal requests are sent once. `caches` is the number of prefix
        caches; each scheduler of the engine has one.
        """
        self._distance = distance
        self._lengths = lengths
        self._dedupe = dedupe
        self._longest_prompt_first = longest_prompt_first
        self.caches = caches
        self._window: list[OrderedRow] = []
        """Rows that were read, and will be ordered together next."""
        self._window_bytes = 0
        self._sent: deque[OrderedRow] = deque(maxlen=SENT_ROWS)
        """The newest sent rows whose prefixes later rows may share."""
        self._release = FollowerRelease(distance)
        self._digests = RequestDigests()
        self._began = False

    @property
    def held(self) -> int:
        """Number of rows that were read and not handed on yet."""
        return len(self._window) + len(self._release)

    def sharing(self) -> dict[str, Any]:
        """Return the field `sharing` of report.json; empty if rows are not ordered by shared prefixes."""
        return self._distance.as_dict() if self._distance is not None else {}

    def record(self, row: PendingRow, completion: Completion) -> DistanceChange | None:
        """Learn the output length and the cached tokens of an answer.

        Return the change of the reuse distance, or None if it stays.
        """
        if not isinstance(row, OrderedRow):  # A request of a rollout is not reordered.
            return None
        if self._lengths is not None:
            self._lengths.record(row, completion.output_tokens)
        return self._distance.record(row, completion) if self._distance is not None else None

    def reorder(self, source: RowSource) -> Iterator[list[OrderedRow | PrimeTask | Outcome]]:
        """Yield a source's rows in the order of sending; its outcomes (rows with errors) come at once."""
        for batch in source.batches():
            outcomes: list[OrderedRow | PrimeTask | Outcome] = []
            for item in batch:
                if isinstance(item, Outcome):
                    outcomes.append(item)
                else:
                    self._add(item)
            if outcomes:
                yield outcomes
            # An empty batch means that the next rows may take a while, so no row waits for them.
            if not batch or self._is_full(source.unread, is_shared=source.is_shared):
                yield from self._ordered(last=not batch)
        yield from self._ordered(last=True)

    def _add(self, request: Request) -> None:
        """Add a row to the window, the rows that will be ordered together next."""
        row = OrderedRow(request)
        prefix = prompt_bytes(request)
        # Needed even without reordering: it limits how far rows are read ahead.
        row.prompt_bytes = len(prefix)
        self._digests.write(request, prefix)
        if self._distance is not None or self._lengths is not None or self._dedupe:
            row.prefix, row.template = prefix, crc32(prefix[:TEMPLATE_BYTES])
        self._window.append(row)
        self._window_bytes += row.memory_bytes

    def _is_full(self, unread: int, *, is_shared: bool) -> bool:
        """Return whether the window has enough rows to be ordered; `unread` rows are still to be read.

        If few rows are unread, the result is false (unless memory is short): they are read first, and ordered
        together with the window. If several workers share the rows (`is_shared`), windows are smaller.
        """
        reorders = (
            self._distance is not None
            or self._lengths is not None
            or self._dedupe
            or self._longest_prompt_first
        )
        if not reorders:
            return True
        limit = WINDOW_ROWS
        if is_shared:
            limit = SHARED_ROWS
        elif unread <= LAST_ROWS and self._lengths is not None:
            limit += LAST_ROWS
        return (len(self._window) >= limit and unread > 0) or self._window_bytes >= WINDOW_BYTES

    def _ordered(self, *, last: bool) -> Iterator[list[OrderedRow | PrimeTask | Outcome]]:
        """Order the rows of the window, and yield them in pieces as they may be sent.

        Once answers have come, the order uses their cached tokens and output lengths.
        """
        window, self._window, self._window_bytes = self._window, [], 0
        if self._dedupe:
            window = self._without_duplicates(window)
        if self._distance is not None:
            self._find_leaders(window)
        if last and self._lengths is not None:
            _find_longest_outputs(window, self._lengths)
        # Only leaders are sorted. Rows that share a leader's prefix are held back until it is cached.
        leaders = [row for row in window if row.leader is None]
        if self._longest_prompt_first:
            leaders.sort(key=lambda row: -row.prompt_bytes)
        else:
            # At the end of the input, rows with the longest outputs go first. Before that,
            # `longest_output` is 0 for all rows, and the sort keeps their order.
            leaders.sort(key=lambda row: -row.longest_output)
        self._release.add(leaders)
        if self._distance is not None:
            # Later rows may share the prefixes of these rows. Only small rows are kept for that, so that
            # SENT_ROWS of them fit into SENT_BYTES.
            self._sent.extend(row for row in leaders if row.memory_bytes <= SENT_BYTES // SENT_ROWS)
        while piece := self._piece(last=last):
            yield piece

    def _piece(self, *, last: bool) -> list[OrderedRow | PrimeTask | Outcome]:
        """Return the next rows to send, after tasks that compute their prefixes; empty if all rows wait."""
        rows: list[OrderedRow] = []
        primes: dict[OrderedRow, PrimeTask] = {}
        size = 0
        while len(rows) < PIECE_ROWS and size < PIECE_BYTES and (row := self._release.take(last=last)):
            rows.append(row)
            size += IDS_BYTES * row.prompt_bytes + sum(file.expected_size for file in row.request.media)
            if not self._began:  # priming helps only at the start, while the prefix caches are empty
                self._prime_leader_of(row, primes)
        self._began = self._began or bool(rows)
        # Later rows are compared only with rows in `_sent`, so all other rows drop their prompts.
        possible_leaders = set(self._sent)
        for row in rows:
            if row not in possible_leaders:
                row.prefix = b""
        return [*primes.values(), *rows]

    def _find_leaders(self, window: list[OrderedRow]) -> None:
        """Find for each row of the window an earlier row with the same prefix (its leader).

        A sent row whose prefix is still cached may lead too.
        """
        sent_rows = [
            row for row in self._sent if self._distance is None or self._distance.keeps(row.used_clock)
        ]
        rows = [*sent_rows, *window]
        places = find_leaders([row.prefix for row in rows], len(sent_rows))
        # Followers are added in input order. Neighbours in sorted order share a little more than the leader's
        # prefix. In one prefill pass, each of them would compute this rest.
        for index, place in sorted(places.items()):
            if index < len(sent_rows):  # a row that was already sent keeps its leader
                continue
            row, leader = rows[index], rows[place.leader]
            row.leader, row.shared_bytes = leader, place.shared_bytes
            leader.followers.append(row)
        # The followers of sent rows are held back now. Those of other rows are held back when that row is
        # sent.
        for leader in sent_rows:
            self._release.hold_followers(leader)
        if self.caches > 1:
            # A prefix that many rows share is computed on every replica.
            limit = max(1, COMMON_SHARE * len(window) / self.caches)
            common = {rows[index] for index, place in places.items() if place.group_rows > limit}
            self._find_groups(window, common)

    def _find_groups(self, window: list[OrderedRow], common: set[OrderedRow]) -> None:
        """Set the prefix group of each row in the window. All rows of a group go to one replica.

        A row in `common` shares its leader's prefix with so many rows that every replica computes it. So the
        row need not go to the leader's replica.
        """
        rows_of = Counter(_find_group(row, common) for row in window)
        for group, rows in rows_of.items():
            first = group.first
            assert isinstance(first, OrderedRow)
            # A row alone in its group may go to any replica. If it was already sent, later rows may still
            # join the group, so the group stays.
            if rows == 1 and first.sent_clock == 0:
                first.group = None
            elif group.home is None:
                group.to_come += rows

    def _without_duplicates(self, window: list[OrderedRow]) -> list[OrderedRow]:
        """Return the rows without duplicates.

        A duplicate is attached to the first row with the same request, whose answer it gets.
        """
        by_digest: dict[bytes, OrderedRow] = {}  # the first row with each request
        originals = []
        for row in window:
            original = row
            if is_repeatable(row.request):
                original = by_digest.setdefault(self._digests.of(row.request, row.prefix), row)
            # Digests may collide, so all fields except the row's reference are compared as well.
            if original is not row and original.request[1:] == row.request[1:]:
                original.duplicates.append(row.request.ref)
            else:
                originals.append(row)
        return originals

    def _prime_leader_of(self, row: OrderedRow, primes: dict[OrderedRow, PrimeTask]) -> None:
        """Add a task to `primes` that computes the prompt of a row's leader before any row is sent.

        This is needed only if both rows would be in the engine's first prefill pass, and compute their common
        prefix twice.
        """
        leader, distance = row.leader, self._distance
        if not leader or not distance or not distance.is_first_pass(row):
            return
        # A request body is sent unchanged, so its output could not be limited to one token.
        if leader.request.kind == "body":
            return
        task = primes.get(leader)
        if task is None:
            # The leader may share a shorter prefix with a leader of its own, which is computed a round
            # earlier.
            round_ = primes[leader.leader].round + 1 if leader.leader in primes else 0
            task = PrimeTask(leader, round_, on_every_replica=self.caches == 1)
        # A row outside the leader's group may go to any replica, so each replica needs the prefix.
        on_every_replica = task.on_every_replica or row.group is None or row.group is not leader.group
        primes[leader] = task._replace(on_every_replica=on_every_replica)


def _find_longest_outputs(window: Iterable[OrderedRow], lengths: OutputLengths) -> None:
    """Estimate output lengths. A row counts as long as the longest of the rows that wait for its prefix."""
    for row in window:
        output = lengths.expected(row)
        ancestor: OrderedRow | None = row
        while ancestor is not None and ancestor.longest_output < output:
            ancestor.longest_output = output
            ancestor = ancestor.leader


def _find_group(row: OrderedRow, common: set[OrderedRow]) -> PrefixGroup:
    """Return the prefix group of a row (rows that go to one replica), and store it in the row.

    The group is that of the row's leader. A row without a leader begins a new group. So does a row in
    `common`, because every replica computes the prefix that it shares with its leader.
    """
    if row.group is None:
        if row.leader is None or row in common:
            row.group = PrefixGroup(row)
        else:
            row.group = _find_group(row.leader, common)
    return row.group
