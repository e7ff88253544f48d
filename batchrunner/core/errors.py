"""All errors that batchrunner raises.

There are two kinds. A `BatchrunError` ends a run or keeps it from beginning, and carries the exit code of the
command. A `RequestError` concerns one try of one row and never ends a run: `backoff` decides what follows.
"""

from typing import Any


class BatchrunError(Exception):
    """Base class of all errors that end a run; the message is one line for the user."""

    exit_code = 1
    report: Any = None
    """Report of the rows done until then; None where the run had not begun."""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        """`hint` is what the user may do or may have meant, where it can be told apart from the message."""
        super().__init__(message if hint is None else f"{message}; {hint}")
        self.message = message
        self.hint = hint


class JobError(BatchrunError):
    """The job is wrong: it has an unknown key, a wrong type or a bad value."""

    exit_code = 2


class InputError(BatchrunError):
    """The input is missing, unreadable, not of its format, or lacks a column that the job uses."""

    exit_code = 2


class OutputError(BatchrunError):
    """The output path cannot hold results: it is a file, not writable, or on a full disk."""

    exit_code = 2


class TaskHeldError(OutputError):
    """Another running process holds the lock of this task."""


class ResumeError(BatchrunError):
    """The output path holds another run: its input, prompt, sampling or model differs from this job's."""

    exit_code = 2


class InputChangedError(ResumeError):
    """An input file was replaced or written to during the run: its results would be of two inputs."""


class EngineStartError(BatchrunError):
    """The engine cannot be started or reached, or it is not SGLang."""

    exit_code = 2


class CannotTokenizeError(EngineStartError):
    """Prompts cannot be tokenized in this process, or its tokens would differ from the engine's."""


class SubmitError(BatchrunError):
    """Slurm is not installed, or refused the job."""

    exit_code = 2


class EngineLostError(BatchrunError):
    """The engine died or stayed unreachable during a run; the run can be resumed."""


class AnotherModelError(BatchrunError):
    """A server serves another model than when the run began; the run can be resumed with the first one."""


class InputLostError(BatchrunError):
    """The input became unreadable during a run (a file was moved, for example); the run can be resumed."""


class StorageError(BatchrunError):
    """Results could not be written during a run (a full disk, for example); the run can be resumed."""


class TaskLockLostError(StorageError):
    """Another process took over the lock of this task, so this process may not write results any more."""


class RequestError(Exception):
    """One try of one row failed; the message becomes the row's `error` if there is no further try."""


class RowRefusedError(RequestError):
    """The row itself is at fault (too long, bad schema, template error); it is not sent again."""


class AttemptFailedError(RequestError):
    """The try failed, possibly because of the row (status 500, aborted, empty); repeated a few times."""


class EngineBusyError(RequestError):
    """The engine refused the row for now (status 429 or 503, no connection); it is repeated without limit."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        """`retry_after_s` is the pause that the server asked for, in seconds."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDownError(EngineBusyError):
    """The engine, or the replica behind a gateway, accepts no connection: it is down or still starting."""


class EngineDiedError(EngineDownError):
    """The engine died while it was working on the row, possibly because of it."""


class BundleRefusedError(RequestError):
    """The engine did not take several rows in one request; each of them is asked for alone."""


class NoAnswerError(AttemptFailedError):
    """No answer came within `limits.request_timeout`."""
