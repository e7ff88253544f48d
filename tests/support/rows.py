"""What a run has on disk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.conftest import (
    batchrun,
    results_of,
)

if TYPE_CHECKING:
    from pathlib import Path


def rows_once(job: dict[str, Any], rows: int) -> None:
    """Every row of the input is there, once, and went well."""
    results = results_of(job)
    assert [row["row"] for row in results] == list(range(rows))
    assert {row["error"] for row in results} <= {None}


def status_of(run: Path) -> dict[str, Any]:
    result = batchrun("status", run, "--json")
    found: dict[str, Any] = json.loads(result.stdout) if result.exit_code == 0 else {}
    return found
