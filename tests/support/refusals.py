"""Refusals of the command: one line each, with exit code 2."""

import os
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import batchrun

AS_ROOT = os.geteuid() == 0


def refusal(job: dict[str, Any] | str, directory: Path, *arguments: str) -> str:
    """Run the command on a job that is wrong; return its one line without the command's name."""
    file = directory / "job.yaml"
    file.write_text(job if isinstance(job, str) else yaml.safe_dump(job))
    before = everything_in(directory)
    result = batchrun(file, *arguments)
    assert result.exit_code == 2, (result.stderr, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("batchrun: ")
    assert everything_in(directory) == before
    return line.removeprefix("batchrun: ")


def everything_in(directory: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


def told(message: str, *parts: object) -> None:
    """Check that a message names all of these."""
    for part in parts:
        assert str(part) in message
