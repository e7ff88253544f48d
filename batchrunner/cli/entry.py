"""The program `batchrun`: reads the command line, runs one command, and ends with its exit code."""

import difflib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Typer
from typer.core import TyperGroup

from batchrunner.cli.commands import (
    EXIT_CODES,
    advise,
    batch,
    check,
    engine,
    estimate,
    init,
    merge,
    ray,
    report,
    run,
    schema,
    serve,
    slurm,
    status,
    tune,
)
from batchrunner.core.console import (
    lost_output,
    open_standard_streams,
    show,
    tell,
    tell_failure,
    unforeseen,
    version_line,
    wants_json,
)
from batchrunner.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    EXIT_TIME_UP,
    BatchrunError,
    JobError,
    interrupted,
)
from batchrunner.core.processes import SignalWatch, ignore_signal
from batchrunner.core.timing import TIMING

HELP_OPTIONS = ("-h", "--help")
_OPTIONS_OF_BATCHRUN = {*HELP_OPTIONS, "--version"}
"""Options of `batchrun` that need no command."""
_FLAGS = {"--json", "--quiet", "-q", "--verbose", "-v"}
"""Options of `run` that take no value. A word after another option may be the value of that option."""
_UsageError: Any = typer.BadParameter.__base__
"""Base class of usage errors, for which typer has no public name."""


class CommandGroup(TyperGroup):
    """All commands. Inserts `run` before a job file, and turns errors into one line and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `run` before a job file; raises JobError for a word that looks like a misspelt command."""
        args = args or ["--help"]
        # The first word that is not an option is a command or a job file; `-` is a job on standard input.
        is_word = [arg == "-" or not arg.startswith("-") for arg in args]
        if True in is_word and args[0] not in _OPTIONS_OF_BATCHRUN:
            position = is_word.index(True)
            word = args[position]
            if word not in self.commands:
                # A word after an option that takes a value is that value, and not a misspelt command.
                if _FLAGS.issuperset(args[:position]):
                    self._refuse_misspelt(word)
                args = ["run", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a Ctrl-C that the command does not handle becomes a BatchrunError."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise interrupted() from None

    def main(self, *positional: Any, **options: Any) -> Any:
        """Run the command of `args` (default: `sys.argv`) and exit with its exit code.

        With `standalone_mode=False` the exit code is returned instead. With `--json` among the arguments, an
        error is also printed as a JSON object on standard output.
        """
        # Typer's own `main` takes these two parameters by position, too.
        options = {**dict(zip(("args", "prog_name"), positional, strict=False)), **options}
        args = options.pop("args", None)
        words = list(sys.argv[1:] if args is None else args)
        exits = options.pop("standalone_mode", True)
        as_json = wants_json(words)
        try:
            result = super().main(words, **options, standalone_mode=False)
            code = result if isinstance(result, int) else 0
        except BatchrunError as error:
            code = tell_failure(error, as_json=as_json)
        except _UsageError as error:
            command = error.ctx.command_path if error.ctx else "batchrun"
            hint = f"{command} --help describes the arguments"
            usage_error = JobError(error.format_message().rstrip("."), hint=hint)
            code = tell_failure(usage_error, as_json=as_json, cause=error)
        except typer.Abort as abort:
            # typer raises Abort in place of an EOFError, which no command expects.
            raise (abort.__cause__ or abort) from None
        if exits:
            sys.exit(code)
        return code

    def _refuse_misspelt(self, word: str) -> None:
        """Raise JobError for a word that is not a file and resembles the name of a command."""
        matches = difflib.get_close_matches(word.lower(), self.commands, n=1)
        # os.path.exists raises no error for a name that is too long, unlike Path.exists.
        if matches and not Path(word).suffix and not os.path.exists(word):  # noqa: PTH110
            raise JobError(f"{word}: no such command or job file", hint=f"did you mean {matches[0]!r}?")


class Interrupts:
    """Ends a command that ignores a Ctrl-C: after some seconds, or at once after a second Ctrl-C."""

    _count = 0

    def receive(self, number: signal.Signals) -> None:
        """Make sure that a Ctrl-C ends the process: after a while, or at the second Ctrl-C at once."""
        # A run sets `ignore_signal` and handles the signal itself. With SIG_IGN the signal has no effect, and
        # with SIG_DFL it ends the process anyway.
        is_handled_elsewhere = signal.getsignal(number) in {signal.SIG_IGN, signal.SIG_DFL, ignore_signal}
        if number != signal.SIGINT or is_handled_elsewhere:
            return
        self._count += 1
        if self._count > 1:
            _end_process()
        # End the process later if the command has not ended by then.
        timer = threading.Timer(TIMING.stop_at_once, _end_process)
        timer.daemon = True
        timer.start()


def _end_process() -> None:
    """End the process at once. Output files appear only when complete, so none is left half written."""
    os._exit(tell_failure(interrupted(), as_json=wants_json(sys.argv[1:])))


_SIGNAL_CODES = {EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_TIME_UP}
"""Exit codes of a command that a signal stopped. Such a command does not wait for its threads."""


class _NoPandas:
    """Import hook that hides pandas from pyarrow.

    When pyarrow first makes a column from a Python list, it imports pandas, which takes 1 s and 47 MB. Only
    Ray Data needs pandas.
    """

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Raise ImportError for pandas, unless Ray is loaded."""
        if name == "pandas" and "ray" not in sys.modules:
            raise ImportError


def start(app: Typer) -> NoReturn:
    """Run the command of `sys.argv` and end the process with its exit code, whatever happens."""
    # Python asks import hooks in order, so _NoPandas must come before Python's own.
    sys.meta_path.insert(0, _NoPandas)
    open_standard_streams()
    with SignalWatch(Interrupts().receive):
        code = _run(app)
        # The command is over: a Ctrl-C now ends the process at once, instead of raising KeyboardInterrupt
        # during the exit. A SIGINT that is ignored, as under nohup, stays ignored.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    if lost := lost_output():
        tell(f"batchrun: standard output: cannot be written: {lost}")
        code = code or EXIT_STOPPED
    if code in _SIGNAL_CODES or (code and _has_other_threads()):
        # sys.exit would wait for threads, which may hang after an error.
        os._exit(code)
    sys.exit(code)


def _has_other_threads() -> bool:
    """Tell whether the exit of the process would wait for a thread other than the main thread."""
    return any(
        thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()
    )


def _run(app: Typer) -> int:
    """Run the command of `sys.argv` and return its exit code, even after an unexpected error."""
    try:
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    # The user pressed Ctrl-C before the command began, or after its end.
    except KeyboardInterrupt:
        return tell_failure(interrupted(), as_json=wants_json(sys.argv[1:]))
    except Exception as failure:  # noqa: BLE001 - a defect, which the user reports
        return tell_failure(unforeseen(failure), as_json=wants_json(sys.argv[1:]), cause=failure)
    return 0


app = typer.Typer(
    cls=CommandGroup,
    context_settings={"help_option_names": list(HELP_OPTIONS)},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Offline batch inference that keeps an SGLang engine at its highest throughput.\n\n"
    "batchrun JOB.yaml runs a job; run it again to resume. `batchrun init FILE` writes a first job.\n\n"
    "Example: batchrun jobs/summarize.yaml",
    epilog=EXIT_CODES,
)


def _show_version(is_given: bool) -> None:
    if is_given:
        show([version_line()])
        raise typer.Exit


@app.callback()
def _main(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


_COMMANDS: tuple[Callable[..., None], ...] = (
    run, batch, init, check, estimate, tune, engine, serve, slurm, ray, status, merge, report, advise, schema,
)  # fmt: skip
"""The commands, in the order in which `--help` lists them."""
for _command in _COMMANDS:
    _epilog = EXIT_CODES if _command in {run, batch, estimate, tune, ray} else None
    app.command(epilog=_epilog)(_command)


def main() -> None:
    """Entry point of `batchrun`."""
    start(app)
