"""The texts of a row that go with its prompt one by one: its choices or documents."""

from collections.abc import Sequence
from typing import Any

from batchrunner.core.errors import InputError, RowRefusedError
from batchrunner.input.dataset import ColumnSource, Row
from batchrunner.input.prompt_types import is_list, is_text
from batchrunner.job.prompt import PromptSpec


class ItemSource:
    """Takes the items of each row from the job, or from a column with a list."""

    def __init__(self, prompt: PromptSpec, dataset: ColumnSource) -> None:
        """Raise InputError for a missing column, or one of a wrong type."""
        name = "choices" if prompt.documents is None else "documents"
        given = getattr(prompt, name)
        self._where, self._unlike = f"prompt.{name}", name == "choices"
        self._fixed = tuple(given) if isinstance(given, list) else ()
        self._column = given if isinstance(given, str) else None
        self.columns: Sequence[str] = ()
        """Columns that it reads."""
        if self._column is not None:
            kind = dataset.field(self._column, where=self._where).type
            is_one = is_text(kind) and not self._unlike
            if not is_one and not (is_list(kind) and is_text(kind.value_type)):
                allowed = "a list of strings" if self._unlike else "a string or a list of strings"
                raise InputError(f"{self._where}: column {self._column!r} must be {allowed} (got {kind})")
            self.columns = (self._column,)

    def of(self, row: Row) -> tuple[str, ...]:
        """Return the items of a row; raises RowRefusedError where they are none."""
        if self._column is None:
            return self._fixed
        found = row[self._column]
        if isinstance(found, str):
            found = [found]
        return _checked(found, f"{self._where}: column {self._column!r}", unlike=self._unlike)


def _checked(found: Any, where: str, *, unlike: bool) -> tuple[str, ...]:
    """Return the items in a column; raises RowRefusedError for none, a null or an empty one.

    With `unlike` also for equal ones.
    """
    if found is None:
        raise RowRefusedError(f"{where} is null")
    if not found:
        raise RowRefusedError(f"{where} is an empty list")
    for place, item in enumerate(found):
        if not item:
            raise RowRefusedError(f"{where}: item {place} is {'null' if item is None else 'empty'}")
    if unlike and len(set(found)) < len(found):
        raise RowRefusedError(f"{where}: two items are equal")
    return tuple(found)
