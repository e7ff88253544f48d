"""Counts of finished rows in bounded memory: how they ended, why some failed, what rejected answers cost.

The metadata of a part, and of a table of a journal, has the counts of its rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from batchrunner.core.types import LEFT_OUT, Completion, Outcome
from batchrunner.job.output import CUT

NOT_REPORTED = "not reported"
"""Stands for the finish reason of an answer whose server reports none."""
NO_REQUEST = "no request"
"""Stands for the finish reason of a rollout that asked nothing."""
MOST_GROUPS = 50
"""Failure groups that are kept; further ones are counted as OTHER."""
OTHER = "other reasons"
ASKED_AGAIN = "asked_again"
"""Name under which an answer brings an AskedAgain; no column of a result."""
Counts = TypeVar("Counts", "RowCounts", "CheckCounts")
_DIGITS = re.compile(r"\d+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_COUNTS = b"batchrunner_counts"
"""Key of the metadata with a table's TableCounts."""


def _sum(one: Counts, other: Counts) -> Counts:
    return type(one)(*(getattr(one, each.name) + getattr(other, each.name) for each in fields(one)))


@dataclass(slots=True)
class Failures:
    """Failed rows grouped by reason: messages that differ only in numbers and quoted words are one group."""

    rows: dict[str, int] = field(default_factory=dict)
    examples: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The first row of each group, with its own message."""

    def add(self, row: int, error: str) -> None:
        """Count one failed row."""
        error = error.encode("utf-8", "replace").decode()  # an answer may have half a surrogate pair
        self._count(_DIGITS.sub("N", _QUOTED.sub("'…'", error)), 1, (row, error))

    def _count(self, group: str, count: int, example: tuple[int, str]) -> None:
        if group not in self.rows and len(self.rows) >= MOST_GROUPS:
            group = OTHER
        self.rows[group] = self.rows.get(group, 0) + count
        self.examples.setdefault(group, example)

    def __add__(self, other: Failures) -> Failures:
        """Return both together."""
        both = Failures()
        for each in (self, other):
            for group, count in each.rows.items():
                both._count(group, count, each.examples[group])
        return both

    def summary(self) -> list[dict[str, object]]:
        """Return the groups, largest first, as report.json has them."""
        return [
            {"rows": self.rows[group], "example_row": row, "example": example}
            for group, (row, example) in sorted(self.examples.items(), key=lambda each: -self.rows[each[0]])
        ]


class Rejected(NamedTuple):
    """An answer that was not good."""

    complaint: str
    output_tokens: int


class AskedAgain(NamedTuple):
    """How often a row was asked, and what became of its answers."""

    asks: int
    """Times that it was asked, without tries that had no answer."""
    rejected: tuple[Rejected, ...]
    is_good: bool | None
    """Whether the last answer is good; None where the row ended without a further one."""
    prompt_tokens: int
    """Those of the last answer."""


@dataclass(slots=True)
class CheckCounts:
    """Counts of rejected answers over rows that ended."""

    rows_asked_again: int = 0
    asked_again: int = 0
    """Further asks."""
    rows_mended: int = 0
    """Rows that were asked again and then had a good answer."""
    rows_failed: int = 0
    """Rows that failed with their last answer."""
    output_tokens: int = 0
    """Tokens of the answers that were rejected."""
    prompt_tokens: int = 0
    """Tokens of the prompts of the further asks, those in the engine's cache included."""
    causes: Failures = field(default_factory=Failures)

    def add(self, outcome: Outcome) -> int:
        """Count the end of a row, if its answers were checked and one was not good at once.

        Return the output tokens of its rejected answers, without those that it keeps.
        """
        lost = 0
        columns = outcome.completion.columns if outcome.completion is not None else {}
        for asks, rejected, is_good, prompt_tokens in columns.get(ASKED_AGAIN, ()):  # of each turn
            self.rows_asked_again += asks > 1
            self.asked_again += asks - 1
            self.rows_mended += is_good is True and asks > 1
            self.rows_failed += is_good is False
            self.prompt_tokens += (asks - 1) * prompt_tokens
            for complaint, tokens in rejected:
                self.causes.add(outcome.ref.row, complaint)
                self.output_tokens += tokens
            lost += sum(tokens for _, tokens in (rejected if is_good else rejected[:-1]))
        return lost

    def __add__(self, other: CheckCounts) -> CheckCounts:
        """Return both together."""
        return _sum(self, other)

    def as_dict(self) -> dict[str, Any]:
        """Return report.json's `checks`; empty where no answer was rejected."""
        if not (self.asked_again or self.rows_failed):
            return {}
        return {**msgspec.to_builtins(self), "causes": self.causes.summary()}


@dataclass(slots=True)
class RowCounts:
    """Counts over finished rows."""

    ok: int = 0
    failed: int = 0
    cut: int = 0
    """Rows with an answer, of which an output was cut at `max_new_tokens`."""
    output_tokens: int = 0
    """Tokens that the engine computed, rejected ones too; rows with a duplicate's answer add none, here
    and below."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    duplicates: int = 0
    """Rows that have the answer of an equal row; they were not sent."""
    reused: int = 0
    """Rows that have the answer of an equal request of another run; they add no tokens."""
    left_out: int = 0
    """Rows that `prompt.python` left out; they count as `ok`."""
    retries: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    failures: Failures = field(default_factory=Failures)
    checks: CheckCounts = field(default_factory=CheckCounts)
    """Answers that were not good."""

    @property
    def done(self) -> int:
        """Rows that came to an end."""
        return self.ok + self.failed

    @property
    def own(self) -> int:
        """Rows that came to an end by an answer of this run."""
        return self.done - self.reused

    def add(self, outcome: Outcome) -> None:
        """Count the end of one row."""
        ref, completion, error, _, attempts = outcome
        if attempts > 1:
            self.retries += attempts - 1
        if error is not None:
            self.failed += 1
            self.failures.add(ref.row, error)
        else:
            self.ok += 1
            reasons = _finish_reasons(completion)
            for reason in reasons:
                is_new = reason not in self.finish_reasons
                # a server that makes up ever new reasons does not fill the memory
                group = OTHER if is_new and len(self.finish_reasons) >= MOST_GROUPS else reason
                self.finish_reasons[group] += 1
            if completion is None:
                self.left_out += 1
            elif attempts == 0:
                self.duplicates += 1
            if CUT in reasons:
                self.cut += 1
        if completion is None or attempts == 0:
            return
        self.output_tokens += completion.output_tokens
        self.prompt_tokens += completion.prompt_tokens or 0
        self.cached_tokens += completion.cached_tokens or 0
        if attempts > 1 or error is not None:  # else no answer was rejected
            self.output_tokens += self.checks.add(outcome)

    def __add__(self, other: RowCounts) -> RowCounts:
        """Return the counts of both together."""
        return _sum(self, other)


def _finish_reasons(completion: Completion | None) -> Sequence[str]:
    """Return why each output of a row ended, or why the row has none."""
    if completion is None:
        return (LEFT_OUT,)
    missing = NO_REQUEST if None in completion.texts else NOT_REPORTED
    return [reason or missing for reason in completion.finish_reasons]


class TableCounts(NamedTuple):
    """The counts of the rows of a part, or of a table of a journal; its metadata has them."""

    ok: RowCounts
    """Those of rows that succeeded."""
    failed: RowCounts


# A module makes its decoders: msgspec inspects a type at its first use, and crashes where two threads do so.
_read_counts = msgspec.json.Decoder(TableCounts, dec_hook=lambda kind, value: kind(value))


def count(outcomes: Iterable[Outcome]) -> TableCounts:
    """Return the counts of outcomes."""
    counts = TableCounts(RowCounts(), RowCounts())
    for outcome in outcomes:
        (counts.ok if outcome.error is None else counts.failed).add(outcome)
    return counts


def counts_in(schema: pa.Schema) -> TableCounts:
    """Return the counts in the metadata of a table; all 0 where it has none."""
    content = (schema.metadata or {}).get(_COUNTS)
    if content is None:
        return TableCounts(RowCounts(), RowCounts())
    return _read_counts.decode(content)


def sum_of(counts: Sequence[TableCounts]) -> TableCounts:
    """Return the counts of several tables together."""
    return TableCounts(*(sum(each, start=RowCounts()) for each in zip(*counts, strict=True)))


def with_counts(table: pa.Table, counts: TableCounts | None) -> pa.Table:
    """Return a table with these counts in its metadata, or none, in place of others."""
    metadata = {**(table.schema.metadata or {})}
    metadata.pop(_COUNTS, None)
    if counts is not None:
        metadata[_COUNTS] = msgspec.json.encode(counts)
    return table.replace_schema_metadata(metadata)
