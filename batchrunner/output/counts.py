"""Counts of finished rows, in limited memory: finish reasons, failures, and tokens of rejected answers.

The metadata of each part file (a Parquet file of results) has the counts of its rows. So has the metadata of
each table in a journal, which holds rows that are in no part file yet.
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
"""Finish reason of an answer if the server reports none."""
NO_REQUEST = "no request"
"""Finish reason of a multi-turn rollout that sent no request."""
MOST_GROUPS = 50
"""Maximum number of groups of similar failures, and of finish reasons, that are counted separately.

All others are counted as OTHER.
"""
OTHER = "other reasons"
ASKED_AGAIN = "asked_again"
"""Key in `Completion.columns` for requests that were sent again after a rejected answer (AskedAgain).

It is not a result column.
"""
Counts = TypeVar("Counts", "RowCounts", "CheckCounts")
_DIGITS = re.compile(r"\d+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_COUNTS = b"batchrunner_counts"
"""Metadata key in a table of results for the counts of its rows (TableCounts)."""


def _sum(a: Counts, b: Counts) -> Counts:
    return type(a)(*(getattr(a, field.name) + getattr(b, field.name) for field in fields(a)))


@dataclass(slots=True)
class Failures:
    """Failed rows by reason. Messages that differ only in numbers and quoted words form one group."""

    rows: dict[str, int] = field(default_factory=dict)
    """Number of failed rows in each group of similar messages."""
    examples: dict[str, tuple[int, str]] = field(default_factory=dict)
    """First failed row of each group: its number in the input, and its message."""

    def add(self, row: int, error: str) -> None:
        """Count one failed row."""
        # The error may quote half a surrogate pair from an answer, which JSON files cannot hold.
        error = error.encode("utf-8", "replace").decode()
        self._count(_DIGITS.sub("N", _QUOTED.sub("'…'", error)), 1, (row, error))

    def _count(self, group: str, count: int, example: tuple[int, str]) -> None:
        """Add `count` rows to a group, or to OTHER if there are too many groups."""
        if group not in self.rows and len(self.rows) >= MOST_GROUPS:
            group = OTHER
        self.rows[group] = self.rows.get(group, 0) + count
        self.examples.setdefault(group, example)

    def __add__(self, other: Failures) -> Failures:
        """Return the sum of both operands, group by group."""
        total = Failures()
        for failures in (self, other):
            for group, count in failures.rows.items():
                total._count(group, count, failures.examples[group])
        return total

    def summary(self) -> list[dict[str, object]]:
        """Return the groups for report.json, the largest first."""
        summary: list[dict[str, object]] = []
        for group in sorted(self.examples, key=lambda group: -self.rows[group]):
            row, example = self.examples[group]
            summary.append({"rows": self.rows[group], "example_row": row, "example": example})
        return summary


class Rejected(NamedTuple):
    """An answer that failed the job's checks."""

    complaint: str
    output_tokens: int


class AskedAgain(NamedTuple):
    """The answers to a request whose first answer was rejected."""

    asks: int
    """Number of answers, including the rejected ones."""
    rejected: tuple[Rejected, ...]
    is_good: bool | None
    """Whether the last answer is good; None if the row ended before that answer came."""
    prompt_tokens: int
    """Prompt tokens of the last answer."""


@dataclass(slots=True)
class CheckCounts:
    """Counts of the rejected answers of finished rows."""

    rows_asked_again: int = 0
    """Number of rows that were sent again after a rejected answer."""
    asked_again: int = 0
    """Number of requests that were sent because an earlier answer was rejected."""
    rows_mended: int = 0
    """Number of rows with a rejected answer whose last answer is good."""
    rows_failed: int = 0
    """Number of rows that failed because their last answer was rejected."""
    output_tokens: int = 0
    """Output tokens of the rejected answers."""
    prompt_tokens: int = 0
    """Prompt tokens of the requests in `asked_again`, prefix cache hits included."""
    causes: Failures = field(default_factory=Failures)

    def add(self, outcome: Outcome) -> int:
        """Count the rejected answers of a finished row.

        Returns the output tokens of those rejected answers that are not in the row's result.
        """
        discarded_tokens = 0
        columns = outcome.completion.columns if outcome.completion is not None else {}
        # A multi-turn rollout has a record for each request whose first answer was rejected. Other rows have
        # at most one.
        for asks, rejected, is_good, prompt_tokens in columns.get(ASKED_AGAIN, ()):
            self.rows_asked_again += asks > 1
            self.asked_again += asks - 1
            self.rows_mended += is_good is True and asks > 1
            self.rows_failed += is_good is False  # None means that the row ended before its last answer came.
            # All requests of a row are assumed to have as many prompt tokens as the last one.
            self.prompt_tokens += (asks - 1) * prompt_tokens
            for complaint, tokens in rejected:
                self.causes.add(outcome.ref.row, complaint)
                self.output_tokens += tokens
            # A failed row keeps its last rejected answer in the result. Only the others are discarded.
            discarded = rejected if is_good else rejected[:-1]
            discarded_tokens += sum(tokens for _, tokens in discarded)
        return discarded_tokens

    def __add__(self, other: CheckCounts) -> CheckCounts:
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
    """Number of successful rows with an output that was truncated at `max_new_tokens`."""
    thinking_cut: int = 0
    """Number of successful rows whose thinking took all of `max_thinking_tokens`."""
    output_tokens: int = 0
    """Tokens that the engine generated, also for rejected answers.

    Rows in `duplicates` and `reused` add none.
    """
    prompt_tokens: int = 0
    """Prompt tokens of the final answers, without those of `duplicates` and `reused`."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    duplicates: int = 0
    """Number of rows that were not sent because they share the answer of an equal row."""
    reused: int = 0
    """Number of rows that were not sent because another run has the answer to an equal request."""
    left_out: int = 0
    """Number of successful rows that `prompt.python` left out, so that they have no answer."""
    retries: int = 0
    """Number of attempts beyond the first one of each row."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    failures: Failures = field(default_factory=Failures)
    checks: CheckCounts = field(default_factory=CheckCounts)
    """Counts of answers that failed the job's checks."""

    @property
    def done(self) -> int:
        """Number of rows with an answer or an error."""
        return self.ok + self.failed

    @property
    def own(self) -> int:
        """Number of rows that this run finished itself: `done` without `reused`."""
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
                # A faulty server may invent endless finish reasons, so their number is limited.
                group = OTHER if is_new and len(self.finish_reasons) >= MOST_GROUPS else reason
                self.finish_reasons[group] += 1
            if completion is None:
                self.left_out += 1
            elif attempts == 0:  # The row was not sent: it shares the answer of an equal row.
                self.duplicates += 1
            if CUT in reasons:
                self.cut += 1
            if completion is not None and completion.thinking_cut:
                self.thinking_cut += 1
        if completion is None or attempts == 0:  # The engine has generated no tokens for this row.
            return
        self.output_tokens += completion.output_tokens
        self.prompt_tokens += completion.prompt_tokens or 0
        self.cached_tokens += completion.cached_tokens or 0
        if attempts > 1 or error is not None:
            # Answers may have been rejected. The engine has generated their tokens too.
            self.output_tokens += self.checks.add(outcome)

    def __add__(self, other: RowCounts) -> RowCounts:
        return _sum(self, other)


def _finish_reasons(completion: Completion | None) -> Sequence[str]:
    """Return the finish reason of each output of a row, or why the row has none."""
    if completion is None:
        return (LEFT_OUT,)
    # A row without an error has a completion without text only if a rollout sent no request.
    missing = NO_REQUEST if None in completion.texts else NOT_REPORTED
    return [reason or missing for reason in completion.finish_reasons]


class TableCounts(NamedTuple):
    """Counts in the metadata of a part file (a Parquet file of results), or of a table in a journal."""

    ok: RowCounts
    failed: RowCounts


# This is created at import. msgspec inspects a type at its first use, and crashes if two threads do so at
# once.
_read_counts = msgspec.json.Decoder(TableCounts, dec_hook=lambda kind, value: kind(value))


def count(outcomes: Iterable[Outcome]) -> TableCounts:
    """Count outcomes, separately for rows that succeeded and rows that failed."""
    counts = TableCounts(RowCounts(), RowCounts())
    for outcome in outcomes:
        (counts.ok if outcome.error is None else counts.failed).add(outcome)
    return counts


def counts_in(schema: pa.Schema) -> TableCounts:
    """Return the counts in a table's metadata; all 0 if it has none."""
    content = (schema.metadata or {}).get(_COUNTS)
    if content is None:
        return TableCounts(RowCounts(), RowCounts())
    return _read_counts.decode(content)


def sum_of(counts: Sequence[TableCounts]) -> TableCounts:
    """Return the sum of the counts of several tables."""
    ok, failed = zip(*counts, strict=True)
    return TableCounts(sum(ok, start=RowCounts()), sum(failed, start=RowCounts()))


def with_counts(table: pa.Table, counts: TableCounts | None) -> pa.Table:
    """Return a table with these counts in its metadata; without counts if `counts` is None."""
    metadata = {**(table.schema.metadata or {})}
    metadata.pop(_COUNTS, None)
    if counts is not None:
        metadata[_COUNTS] = msgspec.json.encode(counts)
    return table.replace_schema_metadata(metadata)
