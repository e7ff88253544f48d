"""How far a row goes ahead of those that need its beginning, corrected by what the cache really holds.

Too near, and they are admitted with it in one prefill pass and compute the beginning again; too far, and the
beginning is evicted before they come. The distance is counted in tokens of prefill, the row's own in its last
pass among them: then they cannot be in one pass, whatever the lengths. Measured in virtual time
(`benchmarks/order_simulated.py`) it wastes less than any number of groups or share of the KV pool does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchrunner.core.types import Completion, EngineInfo
    from batchrunner.dispatch.pending_row import PendingRow

PASS_TOKENS = 8192
"""A prefill pass of an engine that does not say (SGLang's chunked prefill on GPUs of 80 GB)."""
PASSES, PASSES_OF_SEVERAL = 1.1, 2.0
"""Of the first distance: more than one pass, since the tokens of a text are estimated; of several schedulers
each gets its part of the rows in no even turn."""
POOL_SHARE, MOST_POOL_SHARE = 0.2, 0.4
"""Of the KV pool that beginnings may take which wait for their followers: at first, and at most."""
LEAST_PASSES = 1 / 8
MOST_BYTES_A_TOKEN = 6
LOOK_ROWS = 32
"""Followers between two corrections."""
NEARER, WIDER = 0.7, 1.5
MISSES = 0.1
"""More than this share of them without their beginning in the cache makes a correction."""
LEAST_EXPECTED_TOKENS = 64
"""Followers that share less are not counted."""


@dataclass(frozen=True, slots=True)
class DistanceChange:
    """Why the distance was changed."""

    old: int
    new: int
    reason: str


class ReuseDistance:
    """The distance, in tokens over all schedulers."""

    def __init__(self, info: EngineInfo, schedulers: int) -> None:
        """`schedulers` share the rows, and the engine's KV pool."""
        pass_tokens = info.prefill_tokens or PASS_TOKENS
        pool = info.max_total_tokens / schedulers if info.max_total_tokens else pass_tokens / POOL_SHARE
        self._scale = schedulers
        self._pass_tokens = pass_tokens
        self._sees = schedulers <= len(info.routes)
        self._least = LEAST_PASSES * pass_tokens
        self._most = max(MOST_POOL_SHARE * pool, self._least)
        self._apart = pass_tokens * (PASSES if schedulers == 1 else PASSES_OF_SEVERAL)
        self._tokens = max(self._least, min(self._apart, POOL_SHARE * pool))
        self._bytes, self._bytes_tokens = 0, 0
        self._followers, self._missed, self._gone = 0, 0, 0
        self._share_before = 0.0
        self._clock, self._since = 0.0, 0.0  # tokens of prefill that have gone, and had at the last change
        self._factor = WIDER
        self._expected_tokens, self._found_tokens = 0.0, 0.0

    @property
    def tokens(self) -> int:
        """Tokens of prefill between a row and its followers."""
        return round(self._tokens * self._scale)

    def goes(self, work: PendingRow) -> None:
        """Take note of a row that goes now."""
        work.new_tokens = (work.size - work.shared) / self.bytes_a_token
        self._clock += work.new_tokens
        work.clock = self._clock

    def is_ahead(self, work: PendingRow) -> bool:
        """Tell whether a row that has gone is far enough ahead of its followers."""
        own = work.new_tokens % self._pass_tokens
        return self._clock - work.clock >= (self._tokens - own) * self._scale

    @property
    def bytes_a_token(self) -> float:
        """Of the prompts so far; before there is one, many: rather too far apart than too near."""
        return self._bytes / self._bytes_tokens if self._bytes_tokens else MOST_BYTES_A_TOKEN

    def saw(self, work: PendingRow, completion: Completion) -> DistanceChange | None:
        """Take note of an answer; return the correction that it brought."""
        if not completion.prompt_tokens or not work.size:
            return None
        self._bytes += work.size
        self._bytes_tokens += completion.prompt_tokens
        expected = work.shared * completion.prompt_tokens / work.size
        parent, cached = work.parent, completion.cached_tokens
        if parent is None or cached is None or expected < LEAST_EXPECTED_TOKENS:
            return None
        self._expected_tokens += expected
        self._found_tokens += min(expected, cached)
        if not self._sees or parent.route != work.route or work.clock < self._since:
            return None  # its beginning may be elsewhere, or it went with another distance
        self._followers += 1
        if cached < expected / 2:
            self._missed += 1
            self._gone += parent.computed_at < work.sent_at
        return self._correct() if self._followers >= LOOK_ROWS else None

    def as_dict(self) -> dict[str, int]:
        """Return what followers should have found in the cache, and what they found, in tokens."""
        return {
            "expected_tokens": round(self._expected_tokens),
            "found_tokens": round(self._found_tokens),
            "lead_tokens": self.tokens,
        }

    def _correct(self) -> DistanceChange | None:
        """Change the distance where too many followers did not find their beginning.

        It was evicted where it had been computed when they were sent, or where they were more than a pass
        behind; else nobody knows, and what made it worse is undone.
        """
        rows, missed, gone, old = self._followers, self._missed, self._gone, self.tokens
        self._followers = self._missed = self._gone = 0
        share, before = missed / rows, self._share_before
        self._share_before = share
        if share <= MISSES:
            return None
        if 2 * gone > missed or self._tokens >= self._apart:
            self._factor = NEARER
        elif share > before > MISSES:
            self._factor = NEARER if self._factor == WIDER else WIDER
        self._tokens = max(self._least, min(self._most, self._tokens * self._factor))
        self._since = self._clock
        why = f"{missed} of {rows} followers did not find their beginning in the cache"
        return DistanceChange(old, self.tokens, why) if self.tokens != old else None
