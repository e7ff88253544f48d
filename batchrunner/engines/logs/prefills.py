"""Sums over the prefill passes of a log, and what limits a pass. Pure."""

from dataclasses import dataclass, field
from typing import NamedTuple

from batchrunner.engines.logs.records import LoggedBatch

WHOLE = 0.9
"""Fraction of its limit in tokens from which a prefill pass counts as full."""
FEW = 2
"""Most prompts in a full pass that counts as filled by long prompts."""


class PassLimits(NamedTuple):
    """Most of what a prefill pass takes; 0 where that is not limited, or not known."""

    chunk: int = 0
    """`chunked_prefill_size` in tokens; below 0 prompts are not cut."""
    tokens: int = 0
    """`max_prefill_tokens`."""
    requests: int = 0
    """`prefill_max_requests`."""

    def is_full(self, batch: LoggedBatch) -> bool:
        """Tell whether a pass took all that it may."""
        return self.fills_chunk(batch) or (
            (0 < self.tokens < self.chunk and batch.new_tokens >= WHOLE * self.tokens)
            or 0 < self.requests <= batch.new_seqs
        )

    def fills_chunk(self, batch: LoggedBatch) -> bool:
        """Tell whether a pass took a whole chunk."""
        return 0 < WHOLE * self.chunk <= batch.new_tokens


@dataclass(slots=True)
class Prefills:
    """Sums over the prefill passes of all schedulers."""

    passes: int = 0
    prompts: int = 0
    new_tokens: int = 0
    """Prompt tokens computed."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    retracted_tokens: int = 0
    """Tokens computed and then lost to a retraction."""
    filled: int = 0
    """Passes that took a whole chunk, or all that another limit allows."""
    filled_waiting: int = 0
    """Such passes after which requests still waited."""
    few_long: int = 0
    """Passes that one or two prompts filled."""
    streaks: int = 0
    """Runs of such passes: a long prompt takes several in succession, all but the first of them alone."""
    long_tokens: int = 0
    """Tokens of all of these passes."""
    _in_streak: set[str] = field(default_factory=set)
    """Schedulers whose last pass was one of them."""

    def add(self, batch: LoggedBatch, limits: PassLimits, scheduler: str) -> None:
        """Count one pass."""
        self.passes += 1
        self.prompts += batch.new_seqs
        self.new_tokens += batch.new_tokens
        self.cached_tokens += batch.cached_tokens
        full = limits.is_full(batch)
        few = limits.fills_chunk(batch) and batch.new_seqs <= FEW
        self.filled += full
        self.filled_waiting += full and batch.queue > 0
        self.few_long += few
        self.streaks += few and not (batch.new_seqs == 1 and scheduler in self._in_streak)
        self.long_tokens += batch.new_tokens if few else 0
        (self._in_streak.add if few else self._in_streak.discard)(scheduler)

    def decoded(self, scheduler: str) -> None:
        """End a scheduler's streak: it decoded between two prefill passes."""
        self._in_streak.discard(scheduler)

    @property
    def cached_share(self) -> float:
        """Fraction of prompt tokens that were in the cache."""
        return self.cached_tokens / max(1, self.cached_tokens + self.new_tokens)

    @property
    def mean_streak(self) -> float:
        """Mean tokens of a streak of passes that one or two prompts filled."""
        return self.long_tokens / max(1, self.streaks)

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt; each chunk of a long one counts as a prompt."""
        return (self.cached_tokens + self.new_tokens) / max(1, self.prompts)
