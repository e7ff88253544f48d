"""What has columns, as far as prompts are made of them."""

from typing import Protocol

import pyarrow as pa


class ColumnSource(Protocol):
    """What has columns: a data set, or the rows of a program."""

    @property
    def schema(self) -> pa.Schema:
        """All columns."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Columns that say why a record cannot be read."""

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column; raises InputError, naming `where`, if it cannot be used."""

    def directory_of(self, row: int) -> str | None:
        """Return the directory of the file that has the row with this ordinal; None where there is none."""
