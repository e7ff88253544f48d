"""The texts of a row that go with its prompt one by one: its choices."""

from collections.abc import Sequence
from typing import Any

from batchrunner.core.errors import InputError, RowRefusedError
from batchrunner.input.column_source import ColumnSource
from batchrunner.input.prompt_types import is_list, is_text
from batchrunner.input.row_values import Row
from batchrunner.job.prompt import PromptSpec


class ItemSource:
    """Takes the items of each row from the job, or from a column with a list."""

    def __init__(self, prompt: PromptSpec, dataset: ColumnSource) -> None:
        """Raise InputError for a missing column, or one of a wrong type."""
        given = prompt.choices
        self._fixed = tuple(given) if isinstance(given, list) else ()
        self._column = given if isinstance(given, str) else None
        self.columns: Sequence[str] = ()
        """Columns that it reads."""
        if self._column is not None:
            kind = dataset.field(self._column, where="prompt.choices").type
            if not (is_list(kind) and is_text(kind.value_type)):
                raise InputError(
                    f"prompt.choices: column {self._column!r} must be a list of strings (got {kind})"
                )
            self.columns = (self._column,)

    def of(self, row: Row) -> tuple[str, ...]:
        """Return the items of a row; raises RowRefusedError where they are none."""
        if self._column is None:
            return self._fixed
        return _checked(row[self._column], f"prompt.choices: column {self._column!r}")


def _checked(found: Any, where: str) -> tuple[str, ...]:
    """Return the items in a column; raises RowRefusedError for none, a null, an empty or an equal one."""
    if found is None:
        raise RowRefusedError(f"{where} is null")
    if not found:
        raise RowRefusedError(f"{where} is an empty list")
    for place, item in enumerate(found):
        if not item:
            raise RowRefusedError(f"{where}: item {place} is {'null' if item is None else 'empty'}")
    if len(set(found)) < len(found):
        raise RowRefusedError(f"{where}: two items are equal")
    return tuple(found)
