"""Counts of finished rows, in bounded memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

import pyarrow as pa
import pyarrow.compute as pc

from batchrunner.core.types import LEFT_OUT, Outcome
from batchrunner.job.output import CUT, OF_TEXTS, SAMPLE
from batchrunner.output.arrow_arrays import arrow_scalar
from batchrunner.output.check_counts import CheckCounts
from batchrunner.output.columns import has_texts, is_exploded
from batchrunner.output.failures import MOST_GROUPS, OTHER, Failures

COUNTED_COLUMNS = [
    *("row", "error", "attempts", "finish_reason"),
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
]
"""Columns of every part that RowCounts.add_table reads."""
_NONE = arrow_scalar(0, pa.int64())
UNKNOWN = "unknown"
"""The finish reason of an answer that has none."""


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
        self.retries += (pc.sum(sent.column("attempts")).as_py() or 0) - sent.num_rows
        self.prompt_tokens += pc.sum(sent.column("prompt_tokens")).as_py() or 0
        self.cached_tokens += pc.sum(sent.column("cached_tokens")).as_py() or 0
        self.duplicates += pc.sum(pc.equal(ok.column("attempts"), _NONE)).as_py() or 0
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
        self.output_tokens += pc.sum(each_sample(sent_samples.column("completion_tokens"))).as_py() or 0
        for found in pc.value_counts(each_sample(ok_samples.column("finish_reason"))).to_pylist():
            is_left_out = found["values"] == LEFT_OUT  # such a row has no samples
            self._count_reason(found["values"] or UNKNOWN, left_out if is_left_out else found["counts"])

    def _count_reason(self, reason: str, count: int) -> None:
        """Count a finish reason; a server that makes up ever new ones does not fill the memory."""
        if reason not in self.finish_reasons and len(self.finish_reasons) >= MOST_GROUPS:
            reason = OTHER
        self.finish_reasons[reason] += count

    def include(self, other: RowCounts) -> None:
        """Add the counts of other rows."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


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
    column, wanted = rows.column("finish_reason"), arrow_scalar(reason, pa.string())
    if SAMPLE in rows.column_names:
        return pc.count_distinct(rows.filter(pc.equal(column, wanted)).column("row")).as_py() or 0
    if not pa.types.is_list(column.type):
        return pc.sum(pc.equal(column, wanted)).as_py() or 0
    found = pc.equal(pc.list_flatten(column), wanted)
    return len(pc.unique(pc.filter(pc.list_parent_indices(column), found)))


def each_sample(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a result's column with a value for each sample: lists of several samples are flattened."""
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column
