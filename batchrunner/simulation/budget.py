"""How much one prefill pass may still take in: `PrefillAdder` and `PrefillBudget` of SGLang 0.5.23."""

import math
from dataclasses import dataclass

PAGE_TOKENS = 1
"""Tokens reserved for each admitted sample beside its own: the default page of flashinfer and fa3."""


@dataclass(slots=True)
class PrefillBudget:
    """The limits of a prefill pass, less what it has admitted."""

    input_tokens: int
    """Tokens left of `--max-prefill-tokens`."""
    chunk_tokens: int | None
    """Tokens left of `--chunked-prefill-size`; None: prompts are never cut."""
    expected_tokens: float
    """Tokens of the pool that running and admitted samples are expected to take beyond what they hold."""

    @property
    def spent(self) -> bool:
        """Whether the pass is as large as it may be, whatever is left of the pool."""
        return self.input_tokens <= 0 or (self.chunk_tokens is not None and self.chunk_tokens <= 0)

    def cut(self, tokens: int) -> int:
        """Return how many of these tokens the chunk has room for."""
        return tokens if self.chunk_tokens is None else min(tokens, self.chunk_tokens)

    def cut_next_chunk(self, tokens: int, free_tokens: int) -> int:
        """Return how many tokens of a prompt that was begun come next; it continues even without room."""
        room_tokens = math.floor(free_tokens - self.expected_tokens)
        assert self.chunk_tokens is not None
        limit = min(self.chunk_tokens, room_tokens) if room_tokens > 0 else self.chunk_tokens
        return min(tokens, limit)

    def charge(self, prefill_tokens: int, new_tokens: int) -> None:
        """Count an admitted sample; a prompt in chunks pays for its outputs with the last chunk only."""
        self.expected_tokens += prefill_tokens + PAGE_TOKENS + new_tokens
        self.input_tokens -= prefill_tokens
        if self.chunk_tokens is not None:
            self.chunk_tokens -= prefill_tokens
