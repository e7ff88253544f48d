"""`prompt.fields`: columns of a row as one block of text, which templates show as `{{ fields }}`."""

import json
from collections.abc import Callable, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

from batchrunner.core.errors import InputError, JobError
from batchrunner.input.dataset import ColumnSource
from batchrunner.input.prompt_types import holds_bytes
from batchrunner.job.prompt import FieldsSpec

MakePrompt = Callable[[dict[str, Any]], Any]
"""Makes the prompt of a row; raises RowRefusedError."""
FIELDS = "fields"
"""Name of the block in templates."""
_PLAIN = (str, int, float, Decimal, date, time)
"""Types of values that stand in a block as Python writes them; others stand there as JSON."""


class FieldsBlock:
    """Makes the block of a row: a line `name: value` for each column, in the order of `columns`."""

    def __init__(self, spec: FieldsSpec, dataset: ColumnSource) -> None:
        """Check the columns; raises InputError for a missing one, or one of bytes, JobError for a clash."""
        if FIELDS in dataset.schema.names:
            raise JobError(
                f"prompt.fields: the input has a column {FIELDS!r}, which templates could not tell from it",
                hint="give that column another name in the input",
            )
        for name in spec.columns:
            kind = dataset.field(name, where="prompt.fields").type
            if holds_bytes(kind):
                raise InputError(f"prompt.fields: column {name!r} holds bytes ({kind}), which are no text")
        self.columns = spec.columns

    def text(self, row: Mapping[str, Any]) -> str:
        """Return the block of a row."""
        return "\n".join(field_line(name, row[name]) for name in self.columns)


class PromptWithFields:
    """Makes prompts by templates that show the block."""

    def __init__(self, block: FieldsBlock, make: MakePrompt) -> None:
        self._block = block
        self._make = make

    def prompt(self, row: Mapping[str, Any]) -> Any:
        """Return the prompt of a row; raises RowRefusedError as the templates do."""
        return self._make({**row, FIELDS: self._block.text(row)})


def names_made(block: FieldsBlock | None) -> list[str]:
    """Return the names that templates have beside those of columns."""
    return [FIELDS] if block else []


def with_block(
    block: FieldsBlock | None, make: MakePrompt, columns: list[str]
) -> tuple[MakePrompt, list[str]]:
    """Return what makes prompts whose templates read these `columns`, and the input's columns for it.

    Raises JobError where there is a block that no template shows.
    """
    if block is None:
        return make, columns
    if FIELDS not in columns:
        raise not_shown("user")
    return PromptWithFields(block, make).prompt, sorted({*columns, *block.columns} - {FIELDS})


def not_shown(where: str) -> JobError:
    """Return the error of fields that no template shows; `where` is the part of the prompt for them."""
    return JobError(
        "prompt.fields: no template shows them", hint=f"write {{{{ fields }}}} into prompt.{where}"
    )


def field_line(name: str, value: Any) -> str:
    """Return the line of a field; a null is `null`, and a list or a struct is JSON."""
    return f"{name}: {_written(value)}"


def _written(value: Any) -> str:
    if isinstance(value, _PLAIN) and not isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)
