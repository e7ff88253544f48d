"""The tools of a chat: those of the job, or of a column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from batchrunner.core.errors import InputError, RowRefusedError
from batchrunner.core.types import Tools
from batchrunner.input.dataset import ColumnSource
from batchrunner.input.prompt_types import is_list, is_text
from batchrunner.job.prompt import PromptSpec, tool_problem
from batchrunner.job.sampling import SamplingSpec


class RowTools:
    """Tells which tools the model may call in the chat of a row."""

    def __init__(self, prompt: PromptSpec, sampling: SamplingSpec, dataset: ColumnSource) -> None:
        """Take the job's; raises InputError for a missing column, or one of a wrong type."""
        given = prompt.tools
        choice = sampling.tool_choice
        self._choice = choice if choice is None or isinstance(choice, str) else choice.model_dump()
        self._column = given if isinstance(given, str) else None
        self._of_all = Tools(given if isinstance(given, list) else None, self._choice)
        if self._column is not None:
            kind = dataset.field(self._column, where="prompt.tools").type
            if not (is_text(kind) or is_list(kind)):
                raise InputError(
                    f"prompt.tools: column {self._column!r} must hold lists of tools, or JSON texts of such "
                    f"lists (got {kind})"
                )

    @property
    def columns(self) -> list[str]:
        """The input columns that are read."""
        return [] if self._column is None else [self._column]

    def of(self, row: Mapping[str, Any]) -> Tools | None:
        """Return the tools of a row, None where it has none; raises RowRefusedError where they are none."""
        if self._column is None:
            return self._of_all
        value = row[self._column]
        if isinstance(value, str):
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError as failure:
                raise self._refused(f"not JSON: {failure.msg} (character {failure.pos + 1})") from None
        else:
            value = _without_nulls(value)
        if value is None or value == []:
            return None
        problem = tool_problem(value)
        if problem is not None:
            raise self._refused(problem)
        return Tools(value, self._choice, by_row=True)

    def _refused(self, why: str) -> RowRefusedError:
        return RowRefusedError(f"prompt.tools: column {self._column!r}: {why}")


def _without_nulls(value: Any) -> Any:
    """Return a value of Arrow without nulls in it: its structs have the fields of all rows."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
