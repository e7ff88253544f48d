"""How long an output will be: what the job allows, and what rows that begin alike have had."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from batchrunner.work import Work

KIND_BYTES = 256
"""Rows are of one kind where their prompts begin with the same bytes: a template, a system prompt."""
MOST_KINDS = 1024
LEAST_ROWS = 8
"""Below, a kind's average says little."""
NO_LIMIT = 1 << 30


class Lengths:
    """A running average of the output tokens of each kind of rows."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int]] = {}  # rows and tokens

    def saw(self, work: Work, tokens: int) -> None:
        """Take note of an output."""
        kind = _kind(work)
        rows, sum_ = self._sums.get(kind, (0, 0))
        if rows or len(self._sums) < MOST_KINDS:
            self._sums[kind] = rows + 1, sum_ + tokens

    def expected(self, work: Work) -> float:
        """Return the tokens that a row's output will have; what is not known is the same for all."""
        most = work.request.sampling.get("max_new_tokens") or NO_LIMIT
        if work.request.sampling.get("ignore_eos"):
            return float(most)
        rows, tokens = self._sums.get(_kind(work), (0, 0))
        return min(most, tokens / rows) if rows >= LEAST_ROWS else float(most)


def _kind(work: Work) -> int:
    return crc32(work.prefix[:KIND_BYTES])
