"""All errors that batchrunner raises.

There are two kinds. A `BatchrunError` ends a run or keeps it from beginning, and carries the exit code of the
command. A `RequestError` concerns one try of one row and never ends a run: `dispatch` decides what follows.
Their texts hold no secret: see `hidden`.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, ClassVar

SECRETS = set[str]()
"""Keys of engines that this process knows."""
SHORTEST_SECRET = 8
"""Characters: a shorter key, such as EMPTY or test, keeps nobody out, and may be a word of a message."""
_USER_OF_URL = re.compile(r"(?<=got ')[^'\s]+:[^'\s]+@|(?<=://)[^/\s]+@")


def hidden(text: str) -> str:
    """Return a text with `***` in place of keys of engines, and of users and passwords in URLs."""
    for secret in SECRETS:
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return _USER_OF_URL.sub("***@", text)


def install_command(extra: str) -> str:
    """Return how to install an extra of this package, which is on no package index."""
    return f"in a clone of batchrunner: pip install -c constraints.txt '.[{extra}]'"


EXIT_DONE, EXIT_STOPPED, EXIT_WRONG, EXIT_FAILED_ROWS = 0, 1, 2, 3
EXIT_INTERRUPTED, EXIT_TIME_UP, EXIT_TERMINATED = 130, 138, 143
EXIT_MEANINGS = {
    EXIT_DONE: "All rows are done.",
    EXIT_STOPPED: "The run could not go on (engine lost, input gone, disk full, deadline).",
    EXIT_WRONG: "The job, its input or the command is wrong; a line for each fault says what. Nothing "
    "was sent.",
    EXIT_FAILED_ROWS: "Done, but more rows failed than `limits.max_failed_rows`. "
    "After `check`: no row can be sent.",
    EXIT_INTERRUPTED: "Ctrl-C (SIGINT). Rows in flight end first; a second one stops at once.",
    EXIT_TIME_UP: "SIGUSR1: a time limit is near. Rows in flight have `limits.drain` to end.",
    EXIT_TERMINATED: "SIGTERM. Rows in flight have 15 s to end.",
}
"""Meanings of the exit codes of `batchrun`; those above 128 are 128 + the signal."""


class BatchrunError(Exception):
    """Base class of all errors that end a run; its text is one line for the user, or one for each fault."""

    exit_code = 1
    advice: ClassVar[str] = "run the same command again: it resumes"
    """What to do about an error of this class that has no hint of its own; printed with `--json` only."""
    report: Any = None
    """Report of the rows done until then; None where the run had not begun."""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        """`hint` is what to do, or what the user may have meant; the text has it where `message` has not."""
        message = hidden(message)
        super().__init__(message if hint is None or hint in message else f"{message}: {hint}")
        self.message = message
        self.hint = hint or self.advice
        self.faults: list[str] = []
        """The lines of the text where it has several; none where it is one line."""


def interrupted() -> BatchrunError:
    """Return the error of a command that Ctrl-C ended, where no run ends in its own way."""
    error = BatchrunError("interrupted")
    error.exit_code = EXIT_INTERRUPTED
    return error


class JobError(BatchrunError):
    """The job is wrong: it has an unknown key, a wrong type or a bad value."""

    exit_code = 2
    advice = "correct it: `batchrun schema` has all keys of a job, `batchrun COMMAND --help` all options"


class InputError(BatchrunError):
    """The input is missing, unreadable, not of its format, or lacks a column that the job uses."""

    exit_code = 2
    advice = "correct the file, or what names it; `batchrun check JOB` tries that and sends nothing"


class Faults:
    """The errors of a job's parts, so that a start names all of them and not only the first."""

    def __init__(self) -> None:
        """None was found yet."""
        self._errors: list[JobError | InputError] = []

    def add(self, error: JobError | InputError) -> None:
        """Keep an error until `raise_all`."""
        self._errors.append(error)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the JobError or InputError of the block until `raise_all`."""
        try:
            yield
        except (JobError, InputError) as error:
            self.add(error)

    def raise_all(self) -> None:
        """Raise what was collected, if anything: one error as it is, several as one with a line for each."""
        if len(self._errors) > 1:
            faults = dict.fromkeys(
                fault for error in self._errors for fault in (error.faults or [str(error)])
            )
            together = type(self._errors[0])("\n".join(faults))
            together.faults = [*faults]
            raise together
        for error in self._errors:
            raise error from None


class OutputError(BatchrunError):
    """The output path cannot hold results: it is a file, not writable, or on a full disk."""

    exit_code = 2
    advice = "give a path that can be written, or that of a run where one is read"


class TaskHeldError(OutputError):
    """Another running process holds the lock of this task."""

    advice = "wait for its end, or take another output.path"


class NoResultYetError(BatchrunError):
    """No row of a run is durable yet."""


class ResumeError(BatchrunError):
    """The output path holds another run: its input, prompt, sampling or model differs from this job's."""

    exit_code = 2
    advice = "take another output.path, or put back what belongs to this run"


class InputChangedError(ResumeError):
    """An input file was replaced or written to during the run: its results would be of two inputs."""


class EngineStartError(BatchrunError):
    """The engine cannot be started or reached, or it is not SGLang."""

    exit_code = 2
    advice = "correct `engine` in the job, or start its server; docs/troubleshooting.md explains the message"


class EngineAwayError(EngineStartError):
    """A server that should run already does not answer, or not as an engine: it may come later."""


class CannotTokenizeError(EngineStartError):
    """Prompts cannot be tokenized in this process, or its tokens would differ from the engine's."""

    advice = "leave out `tokenize: client`: the server then does it"


class EngineLostError(BatchrunError):
    """The engine died or stayed unreachable during a run; the run can be resumed."""

    advice = "see that the engine runs, its log tells of its end; run the same command again: it resumes"


class AnotherModelError(BatchrunError):
    """A server serves another model than when the run began; the run can be resumed with the first one."""

    advice = "start the run's model there and run the same command again, or take another output.path"


class InputLostError(BatchrunError):
    """The input became unreadable during a run (a file was moved, for example); the run can be resumed."""

    advice = "put the input back and run the same command again: it resumes"


class HookLostError(BatchrunError):
    """A Python function of the job can be loaded no more during a run; the run can be resumed."""

    advice = "put its file back as it was, and run the same command again: it resumes"


class StorageError(BatchrunError):
    """Results could not be written during a run (a full disk, for example); the run can be resumed."""

    advice = "make room and run the same command again: it resumes"


class TaskLockLostError(StorageError):
    """Another process took over the lock of this task, so this process may not write results any more."""

    advice = "let the other process go on; `batchrun status RUN` shows it"


class StoreAwayError(StorageError):
    """An object store did not answer, or not for now, before the first row was sent; it may come back."""

    advice = "run the same command again when the store takes requests"


class StoreRequestError(OSError):
    """A request to an object store failed; its text says why in a few words."""

    is_away = False
    """Whether the store did not answer, or not for now: the same request may succeed later."""

    def __str__(self) -> str:
        """Return the reason alone."""
        return str(self.strerror)


def or_away(error: BatchrunError, failure: BaseException) -> BatchrunError:
    """Return an error, as a StoreAwayError where the store that caused it may come back."""
    return StoreAwayError(error.message) if getattr(failure, "is_away", False) else error


class RequestError(Exception):
    """One try of one row failed; the message becomes the row's `error` if there is no further try."""

    body: bytes | None = None
    """Body of the answer by which the server refused the row; None where there is none."""

    def __init__(self, message: str) -> None:
        """Take the message."""
        super().__init__(hidden(message))


class RowRefusedError(RequestError):
    """The row itself is at fault (too long, bad schema, template error); it is not sent again."""


class AttemptFailedError(RequestError):
    """The try failed, possibly because of the row (status 500, aborted, empty); repeated a few times."""


class GivenBackError(RequestError):
    """We took the row from the engine ourselves, for its users; it is sent again later."""

    tokens = 0
    """Output tokens that it had, which are lost."""


class EngineBusyError(RequestError):
    """The engine refused the row for now (429, 502 to 504, no connection): see `dispatch.attempt`."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        """`retry_after_s` is the pause that the server asked for, in seconds."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDownError(EngineBusyError):
    """The engine, or the replica behind a gateway, accepts no connection: it is down or still starting."""


class EngineDiedError(EngineDownError):
    """The engine died while it was working on the row, possibly because of it."""


class BundleRefusedError(RequestError):
    """The engine did not take several rows in one request; they are sent in halves, until one is alone."""


class NoAnswerError(AttemptFailedError):
    """No answer came within `limits.request_timeout`."""
