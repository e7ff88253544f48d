"""A row on its way to the engine: what goes before it, and what it has been through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchrunner.core.types import Request, RowRef


@dataclass(slots=True, eq=False)
class PendingRow:
    """A row that is to be sent."""

    request: Request
    prefix: bytes = b""
    """What its cached beginning is told by (`prefixes`); of a row that was sent it may be gone."""
    size: int = 0
    """Its length in bytes."""
    kind: int = 0
    """Rows of one kind begin with the same bytes: a template, a system prompt."""
    twins: list[RowRef] = field(default_factory=list)
    """Rows that are exactly like it, and get its answer."""

    parent: PendingRow | None = None
    """Goes before it: the engine computes with it the beginning that both share."""
    shared: int = 0
    """Bytes of that beginning."""
    children: list[PendingRow] = field(default_factory=list)
    new_tokens: float = 0.0
    """What the engine has to compute of its prompt, if that beginning is there."""
    clock: float = 0.0
    """All such tokens that had been sent when it had gone."""
    longest: float = 0.0
    """Tokens of the longest output of it and its followers, as far as that is looked at."""
    family: PendingRow | None = None
    """The first of the rows that should be sent where it is; None where any route will do."""
    route: str | None = None
    """Where it was sent."""
    sent_at: float = 0.0
    computed_at: float = float("inf")
    """Since when its beginning is known to be computed."""
    tries: int = 0
    failures: int = 0
    deaths: int = 0
    """Of the engine, while it had this row."""

    @property
    def affinity(self) -> str:
        """Tell a gateway where it should go: with its family; after a failed try anywhere else."""
        if self.tries > 1:
            return f"{self.request.ref.row}.{self.tries}"
        return str((self.family or self).request.ref.row)
