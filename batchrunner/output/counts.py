"""Counts of finished rows in bounded memory: how they ended, why some failed, what rejected answers cost.

Each part, and each table of a journal, has the counts of its rows in its metadata.
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
"""Finish reason of an answer whose server reports none."""
NO_REQUEST = "no request"
"""Finish reason of a rollout that sent no request."""
MOST_GROUPS = 50
"""Maximum number of groups of failures, and of finish reasons. Further ones are counted as OTHER."""
OTHER = "other reasons"
ASKED_AGAIN = "asked_again"
"""Key in `Completion.columns` for the AskedAgain records. It is not a result column."""
Counts = TypeVar("Counts", "RowCounts", "CheckCounts")
_DIGITS = re.compile(r"\d+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_COUNTS = b"batchrunner_counts"
"""Key in a table's metadata for its TableCounts."""


def _sum(a: Counts, b: Counts) -> Counts:
    return type(a)(*(getattr(a, field.name) + getattr(b, field.name) for field in fields(a)))


@dataclass(slots=True)
class Failures:
    """Failed rows by reason. Messages that differ only in numbers and quoted words form one group."""

    rows: dict[str, int] = field(default_factory=dict)
    """Number of rows of each group."""
    examples: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The first row of each group, with its message."""

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
        """Return the failures of both."""
        total = Failures()
        for failures in (self, other):
            for group, count in failures.rows.items():
                total._count(group, count, failures.examples[group])
        return total

    def summary(self) -> list[dict[str, object]]:
        """Return the groups for report.json, the largest first."""
        return [
            {"rows": self.rows[group], "example_row": row, "example": example}
            for group, (row, example) in sorted(self.examples.items(), key=lambda item: -self.rows[item[0]])
        ]


class Rejected(NamedTuple):
    """An answer that failed the job's checks."""

    complaint: str
    output_tokens: int


class AskedAgain(NamedTuple):
    """The answers to a request whose first answer was rejected."""

    asks: int
    """Number of answers, rejected ones included."""
    rejected: tuple[Rejected, ...]
    is_good: bool | None
    """Whether the last answer is good; None if the row ended before the next answer came."""
    prompt_tokens: int
    """Prompt tokens of the last answer."""


@dataclass(slots=True)
class CheckCounts:
    """Counts of rejected answers over finished rows."""

    rows_asked_again: int = 0
    """Rows that were sent again after a rejected answer."""
    asked_again: int = 0
    """Repeated requests."""
    rows_mended: int = 0
    """Rows with a good answer after a rejected one."""
    rows_failed: int = 0
    """Rows whose last answer was rejected too."""
    output_tokens: int = 0
    """Tokens of the rejected answers."""
    prompt_tokens: int = 0
    """Prompt tokens of the repeated requests, prefix cache hits included."""
    causes: Failures = field(default_factory=Failures)

    def add(self, outcome: Outcome) -> int:
        """Count the rejected answers of a finished row.

        Return the output tokens of the rejected answers that the row's result does not contain.
        """
        discarded_tokens = 0
        columns = outcome.completion.columns if outcome.completion is not None else {}
        for asks, rejected, is_good, prompt_tokens in columns.get(ASKED_AGAIN, ()):  # one for each turn
            self.rows_asked_again += asks > 1
            self.asked_again += asks - 1
            self.rows_mended += is_good is True and asks > 1
            self.rows_failed += is_good is False
            self.prompt_tokens += (asks - 1) * prompt_tokens
            for complaint, tokens in rejected:
                self.causes.add(outcome.ref.row, complaint)
                self.output_tokens += tokens
            # the result of a failed row is its last rejected answer
            discarded_tokens += sum(tokens for _, tokens in (rejected if is_good else rejected[:-1]))
        return discarded_tokens

    def __add__(self, other: CheckCounts) -> CheckCounts:
        """Return the sum of both counts."""
        return _sum(self, other)

    def as_dict(self) -> dict[str, Any]:
        """Return `checks` of report.json; empty if no answer was rejected."""
        if not (self.asked_again or self.rows_failed):
            return {}
        return {**msgspec.to_builtins(self), "causes": self.causes.summary()}


@dataclass(slots=True)
class RowCounts:
    """Counts over finished rows."""

    ok: int = 0
    failed: int = 0
    cut: int = 0
    """Rows of `ok` with an output that was truncated at `max_new_tokens`."""
    output_tokens: int = 0
    """Tokens that the engine generated, rejected answers included. Duplicates add no tokens, neither here nor
    to the next two counts."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    duplicates: int = 0
    """Rows that were not sent because they have the answer of an equal row."""
    reused: int = 0
    """Rows with the answer of an equal request of another run; they add no tokens."""
    left_out: int = 0
    """Rows of `ok` that `prompt.python` left out."""
    retries: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    failures: Failures = field(default_factory=Failures)
    checks: CheckCounts = field(default_factory=CheckCounts)
    """Rejected answers."""

    @property
    def done(self) -> int:
        """Rows with an answer or an error."""
        return self.ok + self.failed

    @property
    def own(self) -> int:
        """Rows of `done`, except those that have an answer of another run."""
        return self.done - self.reused

    def add(self, outcome: Outcome) -> None:
        """Count a finished row."""
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
                # Bound the memory, because a server may invent endless reasons.
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
        if attempts > 1 or error is not None:  # otherwise no answer was rejected
            self.output_tokens += self.checks.add(outcome)

    def __add__(self, other: RowCounts) -> RowCounts:
        """Return the sum of both counts."""
        return _sum(self, other)


def _finish_reasons(completion: Completion | None) -> Sequence[str]:
    """Return the finish reason of each output of a row, or why the row has no output."""
    if completion is None:
        return (LEFT_OUT,)
    missing = NO_REQUEST if None in completion.texts else NOT_REPORTED
    return [reason or missing for reason in completion.finish_reasons]


class TableCounts(NamedTuple):
    """The counts in the metadata of a part or of a journal's table."""

    ok: RowCounts
    """Counts of the rows that succeeded."""
    failed: RowCounts
    """Counts of the rows that failed."""


# Made once, at import: msgspec inspects a type at its first use, and crashes if two threads do so at once.
_read_counts = msgspec.json.Decoder(TableCounts, dec_hook=lambda kind, value: kind(value))


def count(outcomes: Iterable[Outcome]) -> TableCounts:
    """Return the counts of outcomes."""
    counts = TableCounts(RowCounts(), RowCounts())
    for outcome in outcomes:
        (counts.ok if outcome.error is None else counts.failed).add(outcome)
    return counts


def counts_in(schema: pa.Schema) -> TableCounts:
    """Return the counts in the metadata of a table; all 0 if it has none."""
    content = (schema.metadata or {}).get(_COUNTS)
    if content is None:
        return TableCounts(RowCounts(), RowCounts())
    return _read_counts.decode(content)


def sum_of(counts: Sequence[TableCounts]) -> TableCounts:
    """Return the sum of the counts of several tables."""
    ok, failed = zip(*counts, strict=True)
    return TableCounts(sum(ok, start=RowCounts()), sum(failed, start=RowCounts()))


def with_counts(table: pa.Table, counts: TableCounts | None) -> pa.Table:
    """Return a table with these counts in its metadata in place of its own; with None it has no counts."""
    metadata = {**(table.schema.metadata or {})}
    metadata.pop(_COUNTS, None)
    if counts is not None:
        metadata[_COUNTS] = msgspec.json.encode(counts)
    return table.replace_schema_metadata(metadata)
