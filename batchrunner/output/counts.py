"""What became of the rows, in numbers of bounded size."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchrunner.core.types import Outcome

MOST_GROUPS = 50
OTHER = "other reasons"
UNKNOWN = "unknown"
"""The finish reason of an answer that has none."""
_DIGITS = re.compile(r"\d+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


@dataclass(slots=True)
class Failures:
    """Failed rows grouped by reason: messages that differ only in numbers and quoted words are one group."""

    rows: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The first row of each group, with its own message."""

    def add(self, row: int, error: str) -> None:
        """Count one failed row."""
        group = _DIGITS.sub("N", _QUOTED.sub("'…'", error))
        if group not in self.rows and len(self.rows) >= MOST_GROUPS:
            group = OTHER
        self.rows[group] += 1
        self.examples.setdefault(group, (row, error))

    def merged(self, other: Failures) -> Failures:
        """Return both together."""
        both = Failures(self.rows + other.rows, {**other.examples, **self.examples})
        return both if len(both.rows) <= MOST_GROUPS else both._folded()

    def _folded(self) -> Failures:
        kept = dict(self.rows.most_common(MOST_GROUPS))
        rest = self.rows.total() - sum(kept.values())
        first = next(group for group in self.rows if group not in kept)
        examples = {OTHER: self.examples[first], **self.examples}
        groups = Counter({**kept, OTHER: kept.get(OTHER, 0) + rest})
        return Failures(groups, {group: examples[group] for group in groups})

    def summary(self) -> list[dict[str, object]]:
        """Return the groups, largest first, as report.json has them."""
        return [
            {"rows": count, "example_row": self.examples[group][0], "example": self.examples[group][1]}
            for group, count in self.rows.most_common()
        ]


@dataclass(slots=True)
class RowCounts:
    """Counts over the rows that this start finished."""

    ok: int = 0
    failed: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    twins: int = 0
    """Rows that have an equal row's answer: no tokens were computed for them."""
    retries: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    failures: Failures = field(default_factory=Failures)

    @property
    def done(self) -> int:
        """Rows that came to an end."""
        return self.ok + self.failed

    def add(self, outcome: Outcome) -> None:
        """Count one row's end."""
        self.retries += max(outcome.attempts - 1, 0)
        completion = outcome.completion
        if completion is None:
            self.failed += 1
            self.failures.add(outcome.ref.row, outcome.error or "")
            return
        self.ok += 1
        self.finish_reasons.update(reason or UNKNOWN for reason in completion.finish_reasons)
        if outcome.attempts == 0:
            self.twins += 1
            return
        self.output_tokens += sum(tokens or 0 for tokens in completion.completion_tokens)
        self.prompt_tokens += completion.prompt_tokens or 0
        self.cached_tokens += completion.cached_tokens or 0
