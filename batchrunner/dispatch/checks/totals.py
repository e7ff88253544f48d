"""How many answers were rejected, why, and what that cost."""

from dataclasses import dataclass, field
from typing import Any

from batchrunner.core.types import Completion
from batchrunner.output.counts import Failures


@dataclass(slots=True)
class CheckTotals:
    """Counts of this attempt."""

    rows: int = 0
    """Rows that were asked again."""
    asks: int = 0
    """Further asks, continuations included."""
    continued: int = 0
    """Asks for the rest of an answer that was cut."""
    rows_mended: int = 0
    """Rows that were asked again and then had a good answer."""
    rows_failed: int = 0
    """Rows that failed with their last answer."""
    output_tokens: int = 0
    """Tokens of the answers that were rejected."""
    prompt_tokens: int = 0
    """Tokens of the prompts of the further asks, those in the engine's cache included."""
    causes: Failures = field(default_factory=Failures)

    def reject(self, row: int, answer: Completion, complaint: str) -> None:
        """Count an answer that was rejected."""
        self.output_tokens += answer.output_tokens
        self.causes.add(row, complaint)

    def again(self, *, is_first: bool, continues: bool) -> None:
        """Count a further ask of a row."""
        self.rows += is_first
        self.asks += 1
        self.continued += continues

    def ended(self, answer: Completion, *, asks: int, good: bool) -> None:
        """Count the end of a row that was asked so many times."""
        self.rows_mended += good and asks > 1
        self.rows_failed += not good
        self.prompt_tokens += (asks - 1) * (answer.prompt_tokens or 0)

    def as_dict(self) -> dict[str, Any]:
        """Return report.json's `checks`; empty where no answer was rejected."""
        if not (self.asks or self.rows_failed):
            return {}
        return {
            "rows_asked_again": self.rows,
            "asked_again": self.asks,
            "continued": self.continued,
            "rows_mended": self.rows_mended,
            "rows_failed": self.rows_failed,
            "output_tokens": self.output_tokens,
            "prompt_tokens": self.prompt_tokens,
            "causes": self.causes.summary(),
        }
