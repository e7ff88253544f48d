"""The command `batchrun`, of all its commands.

The files of the commands have annotations that are no texts: typer would evaluate each of them four times,
which costs every start of the command 10 ms.
"""

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

from batchrunner.cli.jobs import check, estimate, init, schema, tune
from batchrunner.cli.options import EXIT_CODES
from batchrunner.cli.results import advise, merge, report, status
from batchrunner.cli.running import batch, engine, ray, run, serve, slurm
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
from batchrunner.core.processes import SignalWatch, listened_to
from batchrunner.core.timing import TIMING

HELP_OPTIONS = ("-h", "--help")
_ALONE = {*HELP_OPTIONS, "--version"}
_FLAGS = {"--json", "--quiet", "-q", "--verbose", "-v"}
"""Options that may stand before the first word and take no value."""
_UsageError: Any = typer.BadParameter.__base__
"""Base class of errors in the arguments; typer has no public name for it."""


class CommandGroup(TyperGroup):
    """`batchrun JOB.yaml` is `batchrun run JOB.yaml`; a BatchrunError is one line and its exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` before a job file; raises JobError for a word that looks like a misspelt command."""
        args = args or ["--help"]
        place = next((i for i, arg in enumerate(args) if arg == "-" or not arg.startswith("-")), None)
        if place is not None and args[place] not in self.commands and args[0] not in _ALONE:
            if _FLAGS.issuperset(args[:place]):
                self._refuse_misspelt(args[place])
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raises BatchrunError for an interrupt that the command did not handle itself."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise interrupted() from None

    def main(self, *given: Any, **options: Any) -> Any:
        """Run the command of `args` (default: `sys.argv`) and exit with its code, or return the code.

        It is returned where `standalone_mode` is false. With `--json` among the arguments an error is also an
        object on standard output.
        """
        options = {**dict(zip(("args", "prog_name"), given, strict=False)), **options}
        args = options.pop("args", None)
        words = list(sys.argv[1:] if args is None else args)
        alone = options.get("standalone_mode", True)
        as_json = wants_json(words)
        try:
            ended = super().main(words, **{**options, "standalone_mode": False})
            code = ended if isinstance(ended, int) else 0
        except BatchrunError as error:
            code = tell_failure(error, as_json=as_json)
        except _UsageError as error:
            command = error.ctx.command_path if error.ctx else "batchrun"
            hint = f"{command} --help describes the arguments"
            wrong = JobError(error.format_message().rstrip("."), hint=hint)
            code = tell_failure(wrong, as_json=as_json, of=error)
        except typer.Abort as ended:  # what typer makes of an EOFError, which no command foresees
            raise (ended.__cause__ or ended) from None
        if alone:
            sys.exit(code)
        return code

    def _refuse_misspelt(self, word: str) -> None:
        """Raise JobError where a word is no file and looks like the name of a command."""
        near = difflib.get_close_matches(word.lower(), self.commands, n=1)
        # os.path takes names that are too long, and has no errors
        if near and not Path(word).suffix and not os.path.exists(word):  # noqa: PTH110
            raise JobError(f"{word}: no such command or job file", hint=f"did you mean {near[0]!r}?")


class Interrupts:
    """Ends the process of a command that a Ctrl-C does not end: after a while, or at once by a second one."""

    _came = 0

    def came(self, number: signal.Signals) -> None:
        """Take a signal; see `SignalWatch`. A run takes its own."""
        taken = signal.getsignal(number) in {signal.SIG_IGN, signal.SIG_DFL, listened_to}
        if number != signal.SIGINT or taken:
            return
        self._came += 1
        if self._came > 1:
            _end_process()
        timer = threading.Timer(TIMING.stop_at_once, _end_process)
        timer.daemon = True
        timer.start()


def _end_process() -> None:
    """End the process, whatever its threads do; every file becomes visible whole."""
    os._exit(tell_failure(interrupted(), as_json=wants_json(sys.argv[1:])))


_BY_SIGNAL = {EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_TIME_UP}
"""Exit codes after which nothing is waited for."""


class _NoPandas:
    """Hides pandas, which pyarrow would import for its first list that becomes a column: 1 s and 47 MB.

    Ray Data cannot do without it.
    """

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Find nothing; raises ImportError for pandas, unless Ray is loaded."""
        if name == "pandas" and "ray" not in sys.modules:
            raise ImportError


def start(app: Typer) -> NoReturn:
    """Run the command of `sys.argv` and end the process with its exit code, whatever happens."""
    sys.meta_path.insert(0, _NoPandas)
    open_standard_streams()
    with SignalWatch(Interrupts().came):
        code = _run(app)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # from now on a Ctrl-C has nothing to interrupt
    if lost := lost_output():
        tell(f"batchrun: standard output: cannot be written: {lost}")
        code = code or EXIT_STOPPED
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    if code in _BY_SIGNAL or (code and any(not thread.daemon for thread in others)):
        os._exit(code)  # a thread that still works is not waited for, nor is Python's own end
    sys.exit(code)


def _run(app: Typer) -> int:
    """Run the command of `sys.argv`; return its exit code, whatever happens."""
    try:
        app()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:  # before a command began, or after it
        return tell_failure(interrupted(), as_json=wants_json(sys.argv[1:]))
    except Exception as failure:  # noqa: BLE001 - nobody foresaw it
        return tell_failure(unforeseen(failure), as_json=wants_json(sys.argv[1:]), of=failure)
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


def _show_version(wanted: bool) -> None:
    if wanted:
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
for _each in _COMMANDS:
    app.command(epilog=EXIT_CODES if _each in {run, batch, estimate, tune, ray} else None)(_each)


def main() -> None:
    """Entry point of `batchrun`."""
    start(app)
