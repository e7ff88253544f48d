"""What the command prints: results on standard output, everything else on standard error."""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from batchrunner.core.errors import BatchrunError

DETAIL = {"detail": True}
"""`extra` of a log line that a terminal shows with `--verbose` only."""


def is_no_detail(record: logging.LogRecord) -> bool:
    """Tell whether a log line is for everybody."""
    return not getattr(record, "detail", False)


def wants_json(words: Sequence[str]) -> bool:
    """Tell whether `--json` is among the arguments of the command; behind `--` it would be a name."""
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def tell(text: str) -> None:
    """Print to standard error, see `StandardStream`: a failure to print changes no exit code."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def show(found: Sequence[str] | Mapping[str, Any]) -> None:
    """Print a result to standard output: lines, or an object as JSON."""
    if isinstance(found, Mapping):
        found = [json.dumps(found, indent=2, ensure_ascii=False, default=str)]
    print("\n".join(found))  # noqa: T201


def tell_failure(failure: BatchrunError, *, as_json: bool, of: BaseException | None = None) -> int:
    """Print an error as its line, and as JSON where that is wanted; return the exit code.

    JSON also has the report of the rows done until then. Its `type` is the class of `of`, where given.
    """
    if as_json:
        report = failure.report.as_dict() if failure.report else {}
        show({**report, **as_object(of or failure, failure.message, failure.hint, failure.exit_code)})
    tell(f"batchrun: {failure}")
    return failure.exit_code


def as_object(failure: BaseException, message: str, hint: str, exit_code: int) -> dict[str, Any]:
    """Return an error as `--json` prints it."""
    error = {"type": type(failure).__name__, "message": message, "hint": hint}
    return {"error": error, "exit_code": exit_code}
