"""Counts of finished rows in bounded memory: how they ended, why some failed, what rejected answers cost.

The metadata of a part, and of a table of a journal, has the counts of its rejected answers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from batchrunner.core.types import LEFT_OUT, Outcome
from batchrunner.job.output import CUT, OF_TEXTS, SAMPLE
from batchrunner.output.arrow_arrays import arrow_scalar
from batchrunner.output.columns import has_texts, is_exploded

COUNTED_COLUMNS = [
    *("row", "error", "attempts", "finish_reason"),
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
]
"""Columns of every part that RowCounts.add_table reads."""
UNKNOWN = "unknown"
"""The finish reason of an answer that has none."""
MOST_GROUPS = 50
"""Failure groups that are kept; further ones are counted as OTHER."""
OTHER = "other reasons"
ASKED_AGAIN = "asked_again"
"""Name under which an answer brings an AskedAgain; no column of a result."""
Counts = TypeVar("Counts", "RowCounts", "CheckCounts")
_NONE = arrow_scalar(0, pa.int64())
_DIGITS = re.compile(r"\d+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_CHECKS = b"batchrunner_checks"
"""Key of the metadata with a table's CheckCountsOfRows."""


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

    def add(self, outcome: Outcome) -> None:
        """Count the end of a row, if its answers were checked and one was not good at once."""
        completion = outcome.completion
        asked = completion.columns.get(ASKED_AGAIN) if completion is not None else None
        if completion is None or not asked:
            return
        found: AskedAgain = asked[0]
        self.rows_asked_again += found.asks > 1
        self.asked_again += found.asks - 1
        self.rows_mended += found.is_good is True and found.asks > 1
        self.rows_failed += found.is_good is False
        self.prompt_tokens += (found.asks - 1) * (completion.prompt_tokens or 0)
        for rejected in found.rejected:
            self.output_tokens += rejected.output_tokens
            self.causes.add(outcome.ref.row, rejected.complaint)

    def __add__(self, other: CheckCounts) -> CheckCounts:
        """Return both together."""
        return _sum(self, other)

    @property
    def is_empty(self) -> bool:
        """Whether no answer was rejected."""
        return not (self.asked_again or self.rows_failed)

    def as_dict(self) -> dict[str, Any]:
        """Return report.json's `checks`; empty where no answer was rejected."""
        return {} if self.is_empty else {**msgspec.to_builtins(self), "causes": self.causes.summary()}


class CheckCountsOfRows(NamedTuple):
    """The counts of rejected answers of the rows of a table."""

    ok: CheckCounts
    """Those of rows that succeeded."""
    failed: CheckCounts


NO_CHECKS = CheckCountsOfRows(CheckCounts(), CheckCounts())


def count_checks(outcomes: Iterable[Outcome]) -> CheckCountsOfRows:
    """Return the counts of outcomes."""
    counts = CheckCountsOfRows(CheckCounts(), CheckCounts())
    for outcome in outcomes:
        if outcome.attempts:  # else it has the answer of an equal row
            (counts.ok if outcome.error is None else counts.failed).add(outcome)
    return counts


def checks_in(schema: pa.Schema) -> CheckCountsOfRows:
    """Return the counts in the metadata of a table."""
    content = (schema.metadata or {}).get(_CHECKS)
    return NO_CHECKS if content is None else msgspec.json.decode(content, type=CheckCountsOfRows)


def sum_of_checks(counts: Sequence[CheckCountsOfRows]) -> CheckCountsOfRows:
    """Return the counts of several tables together."""
    return CheckCountsOfRows(*(sum(each, start=CheckCounts()) for each in zip(*counts, strict=True)))


def with_checks(table: pa.Table, counts: CheckCountsOfRows) -> pa.Table:
    """Return a table with these counts in its metadata, where there are any, in place of others."""
    metadata = {**(table.schema.metadata or {})}
    metadata.pop(_CHECKS, None)
    if not (counts.ok.is_empty and counts.failed.is_empty):
        metadata[_CHECKS] = msgspec.json.encode(counts)
    return table.replace_schema_metadata(metadata)


@dataclass(slots=True)
class RowCounts:
    """Counts over finished rows: of outcomes one by one, or of tables of a part."""

    ok: int = 0
    failed: int = 0
    cut: int = 0
    """Rows with an answer, of which an output was cut at `max_new_tokens`."""
    output_tokens: int = 0
    """Tokens that the engine computed; rows with a duplicate's answer add none, here and below."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    duplicates: int = 0
    """Rows that have the answer of an equal row; they were not sent."""
    left_out: int = 0
    """Rows that `prompt.python` left out; they count as `ok`."""
    retries: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    failures: Failures = field(default_factory=Failures)
    checks: CheckCounts = field(default_factory=CheckCounts)
    """Answers that were not good; of a table, they stand in its metadata (`checks_in`)."""

    @property
    def done(self) -> int:
        """Rows that came to an end."""
        return self.ok + self.failed

    def add(self, outcome: Outcome) -> None:
        """Count the end of one row."""
        if outcome.attempts > 1:
            self.retries += outcome.attempts - 1
        completion = outcome.completion
        if outcome.error is not None:
            self.failed += 1
            self.failures.add(outcome.ref.row, outcome.error)
        elif completion is None:
            self.ok += 1
            self.left_out += 1
            self._count_reason(LEFT_OUT, 1)
        else:
            self.ok += 1
            self.cut += CUT in completion.finish_reasons
            for reason in completion.finish_reasons:
                self._count_reason(reason or UNKNOWN, 1)
            self.duplicates += outcome.attempts == 0
        if completion is None or outcome.attempts == 0:
            return
        self.output_tokens += completion.output_tokens
        self.prompt_tokens += completion.prompt_tokens or 0
        self.cached_tokens += completion.cached_tokens or 0
        if outcome.attempts > 1 or outcome.error is not None:  # else no answer was rejected
            self.checks.add(outcome)

    def add_table(self, rows: pa.Table) -> None:
        """Count the rows of a table that has the columns of `counted_columns`."""
        samples, rows = rows, _first_samples(rows)
        failed = rows.filter(pc.is_valid(rows.column("error")))
        for row, error in zip(
            failed.column("row").to_pylist(), failed.column("error").to_pylist(), strict=True
        ):
            self.failures.add(row, error)
        ok = rows.filter(pc.is_null(rows.column("error")))
        sent = rows.filter(pc.greater(rows.column("attempts"), _NONE))
        self.failed += failed.num_rows
        self.ok += ok.num_rows
        self.retries += _total(sent.column("attempts")) - sent.num_rows
        self.prompt_tokens += _total(sent.column("prompt_tokens"))
        self.cached_tokens += _total(sent.column("cached_tokens"))
        self.duplicates += _total(pc.equal(ok.column("attempts"), _NONE))
        if "completion_tokens" in rows.column_names:
            self._add_texts(samples)

    def _add_texts(self, samples: pa.Table) -> None:
        """Count the texts of a table with a row for each sample."""
        ok_samples = samples.filter(pc.is_null(samples.column("error")))
        self.cut += _rows_with(CUT, ok_samples)
        left_out = _rows_with(LEFT_OUT, ok_samples)
        self.left_out += left_out
        self.duplicates -= left_out
        sent_samples = samples.filter(pc.greater(samples.column("attempts"), _NONE))
        self.output_tokens += _total(each_sample(sent_samples.column("completion_tokens")))
        for found in pc.value_counts(each_sample(ok_samples.column("finish_reason"))).to_pylist():
            is_left_out = found["values"] == LEFT_OUT  # such a row has no samples
            self._count_reason(found["values"] or UNKNOWN, left_out if is_left_out else found["counts"])

    def _count_reason(self, reason: str, count: int) -> None:
        """Count a finish reason; a server that makes up ever new ones does not fill the memory."""
        if reason not in self.finish_reasons and len(self.finish_reasons) >= MOST_GROUPS:
            reason = OTHER
        self.finish_reasons[reason] += count

    def __add__(self, other: RowCounts) -> RowCounts:
        """Return the counts of both together."""
        return _sum(self, other)


def counted_columns(schema: pa.Schema) -> list[str]:
    """Return the columns of a part that RowCounts.add_table reads; some tasks have no texts to count."""
    columns = [name for name in COUNTED_COLUMNS if name not in OF_TEXTS or has_texts(schema)]
    return [*columns, SAMPLE] if is_exploded(schema) else columns


def _first_samples(rows: pa.Table) -> pa.Table:
    """Return the rows without those of further samples."""
    if SAMPLE not in rows.column_names:
        return rows
    return rows.filter(pc.equal(pc.coalesce(rows.column(SAMPLE), _NONE), _NONE))


def _rows_with(reason: str, rows: pa.Table) -> int:
    """Return how many rows have a finish reason, those of several samples once."""
    ordinals, reasons = rows.column("row"), rows.column("finish_reason").combine_chunks()
    if pa.types.is_list(reasons.type):
        ordinals, reasons = ordinals.take(pc.list_parent_indices(reasons)), pc.list_flatten(reasons)
    found = pc.equal(reasons, arrow_scalar(reason, pa.string()))
    return pc.count_distinct(ordinals.filter(found)).as_py() or 0


def _total(column: pa.ChunkedArray) -> int:
    return pc.sum(column).as_py() or 0


def each_sample(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a result's column with a value for each sample: lists of several samples are flattened."""
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column
