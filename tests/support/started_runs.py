"""Runs of which some rows are done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import batchrunner
from tests.conftest import (
    job_of,
    results_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent


def rows_in(job: dict[str, Any]) -> list[int]:
    return [row["row"] for row in results_of(job)]


def rows_sent(server: FakeSGLang) -> list[int]:
    return sorted(int(sent.prompt.split()[1]) for sent in server.sent)


def held_from(row: int) -> Callable[[Sent], Behaviour]:
    return lambda sent: "hold" if int(sent.prompt.split()[1]) >= row else "answer"


def some_done(directory: Path, server: FakeSGLang, **changes: Any) -> dict[str, Any]:
    """Do the first 4 of 10 rows of a job; return the whole job."""
    job = job_of(directory, server, **changes)
    batchrunner.run(job, overrides=["input.limit=4"])
    server.forget()
    return job
