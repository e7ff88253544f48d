"""Errors of rows, grouped by reason, in bounded memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_GROUPS = 50
"""Failure groups that are kept; further ones are counted as OTHER."""
OTHER = "other reasons"
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

    def __add__(self, other: Failures) -> Failures:
        """Return both together."""
        both = Failures(self.rows + other.rows, {**other.examples, **self.examples})
        return both if len(both.rows) <= MOST_GROUPS else both._folded()

    def stored(self) -> list[list[object]]:
        """Return the groups as JSON can hold them: name, rows, and the first row with its message."""
        return [[group, count, *self.examples[group]] for group, count in self.rows.items()]

    @classmethod
    def of_stored(cls, found: Iterable[Sequence[Any]]) -> Failures:
        """Return the groups that `stored` returned."""
        groups = [*found]
        return cls(
            Counter({group: count for group, count, *_ in groups}),
            {group: (row, error) for group, _, row, error in groups},
        )

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
