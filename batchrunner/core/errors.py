"""Every error that batchrunner raises, a sentence each.

Two families. `BatchrunError` ends a run (or never lets it start) and carries the exit code of the command.
`RequestError` is about one try of one row and never ends a run: `retry.py` decides what follows.
"""

from __future__ import annotations

from typing import Any


class BatchrunError(Exception):
    """Base of all errors that end a run; the message is one clear line for the user."""

    exit_code = 1
    report: Any = None
    """The Report of what was done until then, where a run had begun."""


class JobError(BatchrunError):
    """The job file is wrong: an unknown key, a wrong type, a bad value."""

    exit_code = 2


class InputError(BatchrunError):
    """The input is wrong: missing, unreadable, not Parquet, or without a column that the job uses."""

    exit_code = 2


class OutputError(BatchrunError):
    """The output path cannot take results: a file, not writable, or on a full disk."""

    exit_code = 2


class HeldError(OutputError):
    """Another process is writing this run, or this task of it."""


class ResumeError(BatchrunError):
    """The output path holds another run: its input, prompt, sampling or model differs."""

    exit_code = 2


class EngineStartError(BatchrunError):
    """The engine cannot start, cannot be reached at the start, or is not SGLang."""

    exit_code = 2


class CannotTokenizeError(EngineStartError):
    """Prompts cannot be made tokens here, or not the tokens that the engine would make of them."""


class SubmitError(BatchrunError):
    """Slurm is not here, or did not take the job."""

    exit_code = 2


class EngineLostError(BatchrunError):
    """The engine died or stayed out of reach in mid-run; the run can be resumed."""


class InputLostError(BatchrunError):
    """The input could not be read any more in mid-run (a file moved away, say); the run can be resumed."""


class StorageError(BatchrunError):
    """Results could not be written in mid-run (a full disk, say); the run can be resumed."""


class RequestError(Exception):
    """One try of one row failed; the message becomes the row's `error` if it is final."""


class RowRefusedError(RequestError):
    """The row itself is at fault (too long, bad schema, template error): final, never sent again."""


class AttemptFailedError(RequestError):
    """A try failed and the row may be why (500, aborted, empty, cut off): tried again a few times."""


class EngineBusyError(RequestError):
    """The engine would not take the row now (429, 503, no connection): no fault of the row, tried again."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        """Keep the server's own wish for a pause, in seconds, where it gave one."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDownError(EngineBusyError):
    """Nobody takes a connection: the engine, or the replica behind a gateway, is down or not up yet."""


class EngineDiedError(EngineDownError):
    """The engine ended while it had the row, which may be why."""


class NoAnswerError(AttemptFailedError):
    """No answer came within the request's time."""
