"""What one admission pass may still take: `PrefillAdder` and `PrefillBudget` of SGLang 0.5.23."""

from __future__ import annotations

import math
from dataclasses import dataclass

PAGE_TOKENS = 1
"""Reserved for each admitted sample beside its tokens: flashinfer's and fa3's default page."""


@dataclass(slots=True)
class Budget:
    """The limits of a pass, less what it admitted."""

    input_tokens: int
    """Left of `--max-prefill-tokens`."""
    chunk_tokens: int | None
    """Left of `--chunked-prefill-size`; None: prompts are never cut."""
    expected_tokens: float
    """Tokens of the pool that running and admitted samples will take beyond what they hold."""

    @property
    def spent(self) -> bool:
        """Whether the pass is as large as it may be, however much of the pool is left."""
        return self.input_tokens <= 0 or (self.chunk_tokens is not None and self.chunk_tokens <= 0)

    def cut(self, tokens: int) -> int:
        """Return how many of these tokens the chunk has room for."""
        return tokens if self.chunk_tokens is None else min(tokens, self.chunk_tokens)

    def cut_next_chunk(self, tokens: int, free_tokens: int) -> int:
        """Return how many tokens of a prompt that was begun are next: it goes on even without room."""
        room_tokens = math.floor(free_tokens - self.expected_tokens)
        assert self.chunk_tokens is not None
        limit = min(self.chunk_tokens, room_tokens) if room_tokens > 0 else self.chunk_tokens
        return min(tokens, limit)

    def charge(self, prefill_tokens: int, new_tokens: int) -> None:
        """Count an admitted sample; one that is cut is charged for its outputs only with its last chunk."""
        self.expected_tokens += prefill_tokens + PAGE_TOKENS + new_tokens
        self.input_tokens -= prefill_tokens
        if self.chunk_tokens is not None:
            self.chunk_tokens -= prefill_tokens
