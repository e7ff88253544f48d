"""All errors that batchrunner raises.

A `BatchrunError` ends a run or prevents its start, and has the exit code of the command. A `RequestError` is
the failure of one attempt at one row. It never ends a run: the row is retried, or gets the error as its
result. Errors contain no secrets, see `hidden`.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, ClassVar

SECRETS = set[str]()
"""API keys of engines that this process uses."""
SHORTEST_SECRET = 8
"""Minimum length in characters of a key that is hidden in messages.

A shorter key, such as EMPTY or test, protects nothing and may be a word of a message.
"""
_USER_OF_URL = re.compile(r"(?<=got ')[^'\s]+:[^'\s]+@|(?<=://)[^/\s]+@")
"""User and password in a URL.

The first alternative matches a URL without `http://` that a message quotes after `got`.
"""


def hidden(text: str) -> str:
    """Replace API keys, and users and passwords in URLs, by `***` in a text."""
    for secret in SECRETS:
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return _USER_OF_URL.sub("***@", text)


def first_line(failure: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if the text is empty.

    Libraries write a stack trace or advice into the lines below it.
    """
    text = str(failure).strip()
    return text.splitlines()[0] if text else type(failure).__name__


def install_command(extra: str) -> str:
    """Return the command that installs an extra in a clone, because no package index has this package."""
    return f"in a clone of batchrunner: pip install -c constraints.txt '.[{extra}]'"


EXIT_DONE, EXIT_STOPPED, EXIT_WRONG, EXIT_FAILED_ROWS = 0, 1, 2, 3
EXIT_INTERRUPTED, EXIT_TIME_UP, EXIT_TERMINATED = 130, 138, 143
EXIT_MEANINGS = {
    EXIT_DONE: "All rows are done.",
    EXIT_STOPPED: "The run could not go on (engine lost, input gone, disk full, deadline).",
    EXIT_WRONG: "The job, its input or the command is wrong; one line for each fault says why. Nothing "
    "was sent.",
    EXIT_FAILED_ROWS: "Done, but more rows failed than `limits.max_failed_rows`. "
    "After `check`: no row can be sent.",
    EXIT_INTERRUPTED: "Ctrl-C (SIGINT). Rows in flight finish first; a second Ctrl-C stops at once.",
    EXIT_TIME_UP: "SIGUSR1: a time limit is near. Rows in flight have `limits.drain` to finish.",
    EXIT_TERMINATED: "SIGTERM. Rows in flight have 15 s to finish.",
}
"""Meanings of the exit codes of `batchrun`. A code above 128 is 128 plus the number of a signal."""


class BatchrunError(Exception):
    """Base class of the errors that end a run. The text is one line, or one line for each fault."""

    exit_code = 1
    advice: ClassVar[str] = "run the same command again: it resumes"
    """Hint for an error of this class that was raised without one; printed only with `--json`."""
    report: Any = None
    """Report of the rows that are done; None if the run had not started."""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        """Create an error. `hint` tells the user what to do, or what they may have meant.

        The hint is added to the text, unless the message contains it.
        """
        message = hidden(message)
        super().__init__(message if hint is None or hint in message else f"{message}: {hint}")
        self.message = message
        self.hint = hint or self.advice
        self.faults: list[str] = []
        """The lines of a text that describes several faults; empty for a single fault."""


def interrupted() -> BatchrunError:
    """Return the error of a command that Ctrl-C ended outside of a run."""
    error = BatchrunError("interrupted")
    error.exit_code = EXIT_INTERRUPTED
    return error


class JobError(BatchrunError):
    """The job is wrong: it has an unknown key, a wrong type or a bad value."""

    exit_code = 2
    advice = "correct it: `batchrun schema` lists the keys of a job, `batchrun COMMAND --help` the options"


class InputError(BatchrunError):
    """The input is missing, unreadable, not in its format, or lacks a column that the job uses."""

    exit_code = 2
    advice = "correct the file or its path; `batchrun check JOB` tests the input and sends nothing"


class Faults:
    """Collects the errors of a job, so that the user sees all of them at once."""

    def __init__(self) -> None:
        """Start without errors."""
        self._errors: list[JobError | InputError] = []

    def add(self, error: JobError | InputError) -> None:
        """Record an error, which `raise_all` raises later."""
        self._errors.append(error)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Record a JobError or InputError of the block, which `raise_all` raises later."""
        try:
            yield
        except (JobError, InputError) as error:
            self.add(error)

    def raise_all(self) -> None:
        """Raise the recorded errors, if any.

        Several errors become one, with a line for each distinct fault and the class of the first.
        """
        if not self._errors:
            return
        if len(self._errors) == 1:
            raise self._errors[0] from None
        faults: list[str] = []
        for error in self._errors:
            faults += error.faults or [str(error)]
        distinct_faults = [*dict.fromkeys(faults)]
        combined = type(self._errors[0])("\n".join(distinct_faults))
        combined.faults = distinct_faults
        raise combined


class OutputError(BatchrunError):
    """The output path cannot hold results: it is a file, not writable, or on a full disk."""

    exit_code = 2
    advice = "give a writable path; a command that reads a run needs the path of a run"


class TaskHeldError(OutputError):
    """Another running process holds the lock of this worker in the run's directory."""

    advice = "wait until that process has ended, or use another output.path"


class NoResultYetError(BatchrunError):
    """A run has no result on disk yet."""


class ResumeError(BatchrunError):
    """The output path holds another run: its input, prompt, sampling or model differs from this job's."""

    exit_code = 2
    advice = "use another output.path, or restore the job and the input of that run"


class InputChangedError(ResumeError):
    """An input file changed during the run, so its results would mix two inputs."""


class EngineStartError(BatchrunError):
    """The engine cannot be started or reached, or it is not SGLang."""

    exit_code = 2
    advice = "correct `engine` in the job, or start its server; docs/troubleshooting.md explains the message"


class EngineAwayError(EngineStartError):
    """An attached server does not answer yet, or another program answers at its address.

    The server may be ready later.
    """


class CannotTokenizeError(EngineStartError):
    """Prompts cannot be tokenized in this process, or the tokens would differ from the engine's."""

    advice = "remove `tokenize: client`, so that the server tokenizes"


class EngineLostError(BatchrunError):
    """The engine died or stayed unreachable during a run; the run can be resumed."""

    advice = "check the engine and its log, then run the same command again: it resumes"


class AnotherModelError(BatchrunError):
    """A server serves another model than at the start of the run.

    The run can be resumed once it serves the first model again.
    """

    advice = "serve the model of the run again and run the same command, or use another output.path"


class InputLostError(BatchrunError):
    """The input became unreadable during a run (a file was moved, for example); the run can be resumed."""

    advice = "restore the input and run the same command again: it resumes"


class HookLostError(BatchrunError):
    """A Python function of the job can no longer be loaded during a run; the run can be resumed."""

    advice = "restore its file and run the same command again: it resumes"


class StorageError(BatchrunError):
    """Results could not be written or read (a full disk, for example); the run can be resumed."""

    advice = "free disk space and run the same command again: it resumes"


class TaskLockLostError(StorageError):
    """Another process took over this worker's lock, so this process must not write results any more."""

    advice = "let the other process continue; `batchrun status RUN` shows it"


class StoreAwayError(StorageError):
    """An object store was unavailable before the first row was sent; it may come back."""

    advice = "run the same command again when the store is available"


class StoreRequestError(OSError):
    """A request to an object store failed. The text gives the reason in a few words."""

    is_away = False
    """Whether the store is only unavailable for now, so that the request may succeed later."""

    def __str__(self) -> str:
        return str(self.strerror)


def or_away(error: BatchrunError, failure: BaseException) -> BatchrunError:
    """Return `error`; as a StoreAwayError if `failure` means that the store is unreachable for now.

    The StoreAwayError has the message of `error`.
    """
    return StoreAwayError(error.message) if getattr(failure, "is_away", False) else error


_STATUS = re.compile(r"(\d{3}): (.*)", re.DOTALL)
"""Matches the error of a row that a server refused with an HTTP status, see `error_with_status`."""


def error_with_status(status: int, explanation: str) -> str:
    """Return the error text of a row that a server refused with an HTTP status."""
    return f"{status}: {explanation}"


def status_in(error: str) -> tuple[int, str]:
    """Return the HTTP status and the explanation in a row's error; status 0 if no server replied."""
    refusal = _STATUS.fullmatch(error)
    return (int(refusal[1]), refusal[2]) if refusal else (0, error)


class RequestError(Exception):
    """One attempt at one row failed. Unless the row is retried, the message becomes its `error`."""

    body: bytes | None = None
    """Body of the reply that refused the row; None if there was no such reply."""

    def __init__(self, message: str) -> None:
        """Create an error; secrets in the message are hidden."""
        super().__init__(hidden(message))


class RowRefusedError(RequestError):
    """The row itself is at fault (too long, bad schema, template error), so it is not retried."""


class AttemptFailedError(RequestError):
    """The attempt failed, possibly because of the row (status 500, abort, empty answer).

    The row is retried a few times.
    """


class PreemptedError(RequestError):
    """The row was preempted so that the server's other users come first. It is requeued."""

    tokens = 0
    """Number of output tokens of the row so far, which are lost."""


class EngineBusyError(RequestError):
    """The engine refused the row for now (status 429 or 502 to 504, or no connection)."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        """Create an error. `retry_after_s` is the pause in seconds that the server asks for."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDownError(EngineBusyError):
    """The engine, or a replica behind a gateway, accepts no connection: it is down or still starting."""


class UnreachedError(EngineDownError):
    """A gateway has no worker for the row, or cannot reach the worker. So the row cannot be at fault."""


class EngineDiedError(EngineDownError):
    """The engine died while it processed the row, possibly because of the row."""


class BundleRefusedError(RequestError):
    """The engine refused a request with several rows. They are sent again in halves, down to single rows."""


class NoAnswerError(AttemptFailedError):
    """No answer arrived within `limits.request_timeout`."""
