"""How many answers were rejected, why, and what that cost; the metadata of parts has the counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from batchrunner.core.types import Outcome
from batchrunner.output.failures import Failures

ASKED_AGAIN = "asked_again"
"""Name under which an answer brings an AskedAgain; no column of a result."""
_KEY = b"batchrunner_checks"
"""Key of the metadata of a part, and of a table of a journal: the counts of its rows, as JSON."""
_OK, _FAILED = "ok", "failed"


class Rejected(NamedTuple):
    """An answer that was not good."""

    complaint: str
    output_tokens: int


class AskedAgain(NamedTuple):
    """How often a row was asked, and what became of its answers."""

    asks: int
    """Times that it was asked, without tries that had no answer."""
    continued: int
    """Those of them that asked for the rest of an answer that was cut."""
    rejected: tuple[Rejected, ...]
    is_good: bool | None
    """Whether the last answer is good; None where the row ended without a further one."""


@dataclass(slots=True)
class CheckCounts:
    """Counts over rows that ended."""

    rows_asked_again: int = 0
    asked_again: int = 0
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

    def add(self, outcome: Outcome) -> None:
        """Count the end of a row, if its answers were checked and one was not good at once."""
        completion = outcome.completion
        asked = completion.columns.get(ASKED_AGAIN) if completion is not None else None
        if completion is None or not asked:
            return
        found: AskedAgain = asked[0]
        self.rows_asked_again += found.asks > 1
        self.asked_again += found.asks - 1
        self.continued += found.continued
        self.rows_mended += found.is_good is True and found.asks > 1
        self.rows_failed += found.is_good is False
        self.prompt_tokens += (found.asks - 1) * (completion.prompt_tokens or 0)
        for rejected in found.rejected:
            self.output_tokens += rejected.output_tokens
            self.causes.add(outcome.ref.row, rejected.complaint)

    def __add__(self, other: CheckCounts) -> CheckCounts:
        """Return both together."""
        return CheckCounts(
            *(getattr(self, count.name) + getattr(other, count.name) for count in fields(self))
        )

    @property
    def is_empty(self) -> bool:
        """Whether no answer was rejected or continued."""
        return not (self.asked_again or self.rows_failed)

    def as_dict(self) -> dict[str, Any]:
        """Return report.json's `checks`; empty where no answer was rejected."""
        return {} if self.is_empty else {**self._numbers(), "causes": self.causes.summary()}

    def stored(self) -> dict[str, Any]:
        """Return the counts as the metadata of a part has them."""
        return {**self._numbers(), "causes": self.causes.stored()}

    @classmethod
    def of_stored(cls, found: Mapping[str, Any]) -> CheckCounts:
        """Return the counts that `stored` returned."""
        return cls(**{**found, "causes": Failures.of_stored(found["causes"])})

    def _numbers(self) -> dict[str, Any]:
        return {count.name: getattr(self, count.name) for count in fields(self) if count.name != "causes"}


def with_checks(table: pa.Table, outcomes: Iterable[Outcome]) -> pa.Table:
    """Return the table of outcomes with their counts in its metadata, where there are any."""
    ok, failed = CheckCounts(), CheckCounts()
    for outcome in outcomes:
        if outcome.attempts:  # else it has the answer of an equal row
            (ok if outcome.error is None else failed).add(outcome)
    return _with_counts(table, ok, failed)


def with_checks_of(table: pa.Table, tables: Sequence[pa.Table]) -> pa.Table:
    """Return a table of the rows of several ones, with the counts of all of them in its metadata."""
    if not any(_KEY in (each.schema.metadata or {}) for each in tables):
        return table
    ok, failed = CheckCounts(), CheckCounts()
    for each in tables:
        more_ok, more_failed = _counts_in(each.schema)
        ok, failed = ok + more_ok, failed + more_failed
    return _with_counts(table, ok, failed)


def without_checks(table: pa.Table) -> pa.Table:
    """Return a table without counts in its metadata."""
    return _with_counts(table, CheckCounts(), CheckCounts())


def with_checks_of_ok(table: pa.Table) -> pa.Table:
    """Return a table that its failed rows were taken from, without their counts."""
    return _with_counts(table, _counts_in(table.schema)[0], CheckCounts())


def checks_in(schema: pa.Schema, *, without_failed: bool) -> CheckCounts:
    """Return the counts of the rows of a table; `without_failed` leaves those of failed rows out."""
    ok, failed = _counts_in(schema)
    return ok if without_failed else ok + failed


def _with_counts(table: pa.Table, ok: CheckCounts, failed: CheckCounts) -> pa.Table:
    metadata = {**(table.schema.metadata or {})}
    known = metadata.pop(_KEY, None)
    if not (ok.is_empty and failed.is_empty):
        metadata[_KEY] = orjson.dumps({_OK: ok.stored(), _FAILED: failed.stored()})
    elif known is None:
        return table
    return table.replace_schema_metadata(metadata)


def _counts_in(schema: pa.Schema) -> tuple[CheckCounts, CheckCounts]:
    """Return the counts of the rows that succeeded, and of those that failed."""
    content = (schema.metadata or {}).get(_KEY)
    if content is None:
        return CheckCounts(), CheckCounts()
    found = orjson.loads(content)
    return CheckCounts.of_stored(found[_OK]), CheckCounts.of_stored(found[_FAILED])
