"""The job's `check.expression`: a Jinja2 expression over an answer and the row that it is for."""

from collections.abc import Collection, Mapping
from typing import Any

from batchrunner.core.errors import RowRefusedError
from batchrunner.input.templates import Predicate

ANSWER_NAMES = ("output", "parsed", "reasoning", "finish_reason")
"""Names of what is known of an answer; a column of such a name cannot be read."""
WHERE = "check.expression"


class AnswerExpression:
    """A condition of answers; `columns` are those of the row that it reads."""

    def __init__(self, source: str, columns: Collection[str]) -> None:
        """Compile the expression for rows with these columns; raises JobError."""
        self._source = source
        available = [*ANSWER_NAMES, *(name for name in columns if name not in ANSWER_NAMES)]
        self._predicate = Predicate(source, where=WHERE, available=available)
        self.columns = [name for name in self._predicate.columns if name not in ANSWER_NAMES]

    def reads(self, name: str) -> bool:
        """Tell whether the expression reads one of ANSWER_NAMES."""
        return name in self._predicate.columns

    def complaint(self, values: Mapping[str, Any]) -> str | None:
        """Say what is wrong with an answer, in a sentence; None for nothing."""
        try:
            is_good = self._predicate(values)
        except RowRefusedError as failure:
            return f"{WHERE} fails: {str(failure).removeprefix('filter: ')}"
        return None if is_good else f"{WHERE} is not true: {self._source}"
