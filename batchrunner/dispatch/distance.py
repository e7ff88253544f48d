"""The reuse distance: how far a row goes ahead of the rows that share its prefix. Pure.

If it is too short, followers are admitted in the same prefill pass as their leader and compute the prefix
again; if it is too long, the prefix is evicted before they come. The distance is counted in prefill tokens,
those of the leader's own last pass included: then the two cannot share a pass, whatever their lengths. In
virtual time (`benchmarks/order_simulated.py`) this wastes less than a distance in groups or in a share of
the KV pool. It is corrected by the cached tokens that the answers report.
"""

from dataclasses import dataclass

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.types import Completion
from batchrunner.dispatch.pending_row import PendingRow

PASS_TOKENS = 8192
"""Prefill tokens of one pass, for an engine that does not say: SGLang's chunk on GPUs of 80 GB."""
PASSES, PASSES_OF_SEVERAL = 1.1, 2.0
"""Initial reuse distance in prefill passes: above 1 because token counts are estimated, 2 with several
schedulers because rows are spread over them unevenly."""
POOL_SHARE, MOST_POOL_SHARE = 0.2, 0.4
"""Largest initial and largest later distance, as a share of the KV pool."""
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
        self._first = pass_tokens * (PASSES if schedulers == 1 else PASSES_OF_SEVERAL)
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

    def mark_sent(self, row: PendingRow) -> None:
        """Advance the clock by the prompt tokens of a row that goes to the dispatch queue now."""
        row.new_tokens = (row.prompt_bytes - row.shared_bytes) / self.bytes_a_token
        self._clock += row.new_tokens
        row.sent_clock = self._clock

    def is_reached(self, leader: PendingRow) -> bool:
        """Tell whether a sent row is far enough ahead of its followers."""
        own = leader.new_tokens % self._pass_tokens
        return self._clock - leader.sent_clock >= (self._tokens - own) * self._schedulers

    def record(self, row: PendingRow, completion: Completion) -> DistanceChange | None:
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
        """Return what report.json has under `sharing`: shared prompt tokens, those cached, the distance."""
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
